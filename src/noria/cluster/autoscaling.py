"""How many engines a backlog needs: Ray's autoscaling policy for engine deployments.

Ray's own policy counts requests; but requests pass no handle here, and one may be a hundred times the work of another.
"""

import math
from collections.abc import Mapping
from typing import Any


def num_replicas(backlogs_s: Mapping[Any, float], num_running: int, target_backlog_s: float) -> int:
    """Return how many engines do the work of all in `target_backlog_s` seconds; at least 1.

    `backlogs_s` is the backlog of each running replica that has reported one. One that has not is unknown, not idle:
    it counts as the mean of the others. While none has, there is no reason for a change.
    """
    if not backlogs_s:
        return max(num_running, 1)
    mean_s = sum(backlogs_s.values()) / len(backlogs_s)
    return max(math.ceil(mean_s * max(num_running, len(backlogs_s)) / target_backlog_s), 1)


class BacklogPolicy:
    """Ray calls it some times a second, with the replicas' `record_autoscaling_stats`."""

    def __init__(self, target_backlog_s: float) -> None:
        """`target_backlog_s` is `cluster.target_backlog_s`."""
        self._target_backlog_s = target_backlog_s

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas within the bounds, and no state."""
        backlogs_s = (ctx.aggregated_metrics or {}).get("backlog_s", {})
        wanted = num_replicas(backlogs_s, ctx.current_num_replicas, self._target_backlog_s)
        return min(max(wanted, ctx.capacity_adjusted_min_replicas), ctx.capacity_adjusted_max_replicas), {}
