"""Ray's view of the replicas, as the autoscaler gets it."""

import pytest

from noria.cluster.autoscaling import BacklogPolicy


class Context:
    """The context that Ray passes: of three replicas, those with a backlog have reported."""

    running_replicas = ("a", "b", "c")
    target_num_replicas, capacity_adjusted_min_replicas, capacity_adjusted_max_replicas = 3, 2, 5
    current_time = 1000.0

    def __init__(self, **backlogs_s):
        self.aggregated_metrics = {"backlog_s": backlogs_s} if backlogs_s else {}


@pytest.mark.parametrize(
    ("backlogs_s", "wanted"),
    [({}, 3), ({"a": 0.0}, 2), ({"a": 12.0}, 4), ({"a": 12.0, "b": 14.0, "c": 4.0}, 3), ({"a": 1e6}, 5)],
)
def test_an_unknown_backlog_counts_as_the_mean_and_rays_bounds_hold(backlogs_s, wanted):
    assert BacklogPolicy(10.0)(Context(**backlogs_s)) == (wanted, {})
