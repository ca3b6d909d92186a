"""Decides how many replicas there are, by seconds of work and not by the length of queues.

Replicas are added at once, since their start takes long; they are removed when fewer have sufficed for a while.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    """The bounds, and what is aimed at."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_backlog_s: float = 10.0  # backlog of each replica
    scale_down_after_s: float = 300.0  # for which fewer replicas must have sufficed


@dataclass(slots=True)
class BacklogAutoscaler:
    """The decisions over time."""

    settings: AutoscalerSettings
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)  # within `scale_down_after_s`

    def decide(self, backlogs_s: Mapping[str, float | None], num_present: int, now: float) -> int:
        """Return the number of replicas to have, of which `num_present` exist, those that start included.

        `backlogs_s` are those of the replicas that serve; None: it has not reported yet, and counts as the mean of the
        others.
        """
        settings = self.settings
        known = [each for each in backlogs_s.values() if each is not None]
        total_s = sum(known) / len(known) * len(backlogs_s) if known else 0.0
        wanted = math.ceil(total_s / settings.target_backlog_s) if known else num_present
        wanted = min(max(wanted, settings.min_replicas), settings.max_replicas)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - settings.scale_down_after_s:
            self._wanted.popleft()
        if wanted >= num_present:
            return wanted
        most = max(each for _, each in self._wanted)
        return max(most, settings.min_replicas) if most < num_present else num_present
