"""How many engines a backlog needs."""

import pytest

from noria.cluster.autoscaling import BacklogPolicy, num_replicas


@pytest.mark.parametrize(
    ("backlogs_s", "num_running", "wanted"),
    [
        ([], 0, 1),
        ([], 3, 3),  # none has reported: no reason for a change
        ([0.0, 0.0], 2, 1),
        ([10.0, 10.0], 2, 2),
        ([10.0, 11.0], 2, 3),
        ([100.0], 1, 10),
        ([30.0, 30.0], 4, 12),  # two are unknown, not idle
        ([60.0, 0.0], 1, 6),  # a replica that stops still has work
    ],
)
def test_as_many_engines_as_do_the_work_in_the_target_time(backlogs_s, num_running, wanted):
    assert num_replicas(dict(enumerate(backlogs_s)), num_running, 10.0) == wanted


class Context:
    """What Ray passes."""

    current_num_replicas, capacity_adjusted_min_replicas, capacity_adjusted_max_replicas = 2, 2, 4

    def __init__(self, *backlogs_s):
        self.aggregated_metrics = {"backlog_s": dict(enumerate(backlogs_s))} if backlogs_s else {}


@pytest.mark.parametrize(("backlogs_s", "wanted"), [((), 2), ((0.0, 0.0), 2), ((15.0, 10.0), 3), ((1e6, 1e6), 4)])
def test_the_policy_stays_within_the_bounds(backlogs_s, wanted):
    assert BacklogPolicy(10.0)(Context(*backlogs_s)) == (wanted, {})
