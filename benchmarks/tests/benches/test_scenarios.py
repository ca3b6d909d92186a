"""The reference article's scenarios: their proportions, and their requests."""

import pytest

from noria.models.catalog import open_model
from noria_bench.benches import run_plans
from noria_bench.benches.scenarios import FULL_S, scaled_traffic


@pytest.mark.parametrize(("seconds", "every_s"), [(FULL_S, 50.0), (90.0, 5.0), (45.0, 2.5)])
def test_a_shorter_run_keeps_the_proportions(seconds, every_s):
    found = scaled_traffic("scenario2", seconds, seed=1)
    assert (found.num_users, found.spawn_interval_s, found.seconds) == (8, every_s, seconds)


def test_a_seed_determines_the_requests_and_no_two_of_2304_have_the_same_prompt():
    spec = open_model("bundled")
    generators = [run_plans.scenario_load_generator("scenario2", 90.0, seed, spec) for seed in (1, 1, 2)]
    first, again, other = ([generator.body(number) for number in range(2304)] for generator in generators)
    assert first == again != other
    assert len({body["prompt"] for body in first}) == 2304
    assert {(body["inference_steps"], body["n"]) for body in first} == {(20, 1)}
