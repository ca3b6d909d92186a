"""Ray's autoscaling policy for engine deployments: as many engines as the backlog needs.

Ray's own policy counts requests; but requests pass no handle here, and one may be a hundred times the work of another.
"""

import dataclasses
import time
from typing import Any

from noria.scheduling.cluster.autoscaler import AutoscalerSettings, BacklogAutoscaler


class BacklogPolicy:
    """Ray calls it some times a second, with the replicas' `record_autoscaling_stats`."""

    def __init__(self, target_backlog_s: float) -> None:
        """`target_backlog_s` is `cluster.target_backlog_s`."""
        self._autoscaler = BacklogAutoscaler(AutoscalerSettings(target_backlog_s=target_backlog_s))

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas within Ray's bounds, and no state.

        A replica's statistics come every ten seconds; until then it is unknown, not idle.
        """
        reported = (ctx.aggregated_metrics or {}).get("backlog_s", {})
        backlogs_s = {str(each): reported.get(each) for each in ctx.running_replicas}
        self._autoscaler.settings = dataclasses.replace(
            self._autoscaler.settings,
            min_replicas=ctx.capacity_adjusted_min_replicas,
            max_replicas=ctx.capacity_adjusted_max_replicas,
        )
        now = time.monotonic() if ctx.current_time is None else ctx.current_time
        return self._autoscaler.decide(backlogs_s, ctx.target_num_replicas, now), {}
