"""The reference article's scenarios: their proportions, and their requests."""

import pytest

from noria_bench.benches.scenarios import FULL_S, SCENARIOS, request_body, request_number, scaled_traffic


@pytest.mark.parametrize(("seconds", "every_s"), [(FULL_S, 50.0), (90.0, 5.0), (45.0, 2.5)])
def test_a_shorter_run_keeps_the_proportions(seconds, every_s):
    found = scaled_traffic(SCENARIOS["scenario2"], seconds, seed=1)
    assert (found.num_users, found.spawn_interval_s, found.seconds) == (8, every_s, seconds)


def test_user_and_index_determine_a_request_and_numbers_are_unique():
    numbers = [request_number(user, count, 8) for user in range(8) for count in range(50)]
    assert len(set(numbers)) == 400
    assert request_body(17, seed=1) == request_body(17, seed=1)
    assert request_body(17, seed=1)["seed"] != request_body(17, seed=2)["seed"]


def test_no_two_of_2304_requests_have_the_same_prompt():
    bodies = [request_body(k, seed=1) for k in range(2304)]
    assert len({each["prompt"] for each in bodies}) == 2304
    assert all(0 <= each["seed"] <= 1_000_000 and each["inference_steps"] == 20 for each in bodies)
