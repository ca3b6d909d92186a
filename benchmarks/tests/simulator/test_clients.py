"""Clients in closed loops: their slowdowns by policy, and files of clients."""

import pytest

from noria_bench.simulator.clients import ClientGroup, read_groups, simulate_clients
from noria_bench.simulator.devices import EXAMPLE
from noria_bench.simulator.study import Scenario
from noria_bench.simulator.workload import SimulateError
from noria_bench.simulator.world import Settings

LARGE, INTERACTIVE = ClientGroup("large", images=8, steps=80), ClientGroup("interactive", clients=3)


def measured(policy, *groups, seconds=300.0, **more):
    scenario = Scenario(policy, Settings(EXAMPLE, 1, policy=policy, **more), 1.0)
    return simulate_clients(scenario, groups, seconds, seed=1)


def test_a_client_alone_is_not_slowed_down():
    (result,) = measured("fair", LARGE)
    assert result.slowdown == pytest.approx(1.0)
    assert len(result.latencies_s) > 20


def test_fair_shares_slow_all_clients_down_alike_and_the_order_of_arrival_does_not():
    large, interactive = measured("fair", LARGE, INTERACTIVE)
    assert 1.0 < interactive.slowdown < 4.0 and 1.0 < large.slowdown < 4.0
    assert 1 / 1.5 < interactive.slowdown / large.slowdown < 1.5
    before_large, before = measured("fcfs", LARGE, INTERACTIVE)
    assert before.slowdown > 1.5 * interactive.slowdown and before_large.slowdown < large.slowdown
    total = large.steps_per_s + interactive.steps_per_s
    assert 0.8 < total / (before_large.steps_per_s + before.steps_per_s) < 1.0


def test_a_client_has_as_much_as_its_weight_says():
    heavy = ClientGroup("heavy", images=8, steps=40, weight=3.0)
    results = measured("fair", heavy, ClientGroup("light", images=8, steps=40))
    assert results[0].steps_per_s / results[1].steps_per_s == pytest.approx(3.0, rel=0.1)


def test_a_request_that_is_rejected_is_sent_again_a_second_later():
    (result,) = measured("fair", ClientGroup("many", open=20), seconds=60.0, queue_limit=0)
    assert 12 * 50 < result.num_unserved <= 12 * 60
    assert result.latencies_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"name": "a", "clients": 0}]', "a: clients is 0; it must be from 1 to 1000"),
        ('[{"name": "a", "steps": 0}]', "a: steps is 0"),
        ('[{"name": "a", "weight": 0}]', "weight is 0; it must be from 0.001"),
        ('[{"name": "a", "think_s": -1}]', "think_s is -1"),
        ('[{"name": ""}]', "name is empty"),
        ('[{"name": "a"}, {"name": "a"}]', "no name twice"),
        ("[]", "at least one client"),
        ('[{"nam": "a"}]', "clients are a list such as"),
    ],
)
def test_a_bad_file_of_clients_is_explained(tmp_path, text, message):
    (tmp_path / "clients.json").write_text(text)
    with pytest.raises(SimulateError, match=message):
        read_groups(tmp_path / "clients.json")
