"""When load has a front end started or stopped, between the bounds of `frontend.processes`. Pure.

The measure is the CPU time that all front ends use together. The event loop of a front end uses one core at most, so
one that uses nearly a whole core delays its clients. Starting is fast and stopping slow, as load often comes back.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.errors import ConfigError, short_repr

MAX_FRONTENDS = 64
SAMPLE_INTERVAL_S = 1.0
WINDOW_S = 5.0  # over which the use of CPU is averaged: a burst of a second starts nothing
# Above this event loops are late: at a use of 0.8, requests wait for as long as four others take (M/M/1).
START_ABOVE_CORES = 0.8
# Below START_ABOVE_CORES by enough that a stop is never the reason for the next start.
STOP_BELOW_CORES = 0.5
STOP_AFTER_S = 60.0
# After a change: a new process uses a core while it imports, and clients need a moment to come to it.
SETTLE_S = 10.0


@dataclass(frozen=True)
class StartFrontend:
    """Start one more. The front ends use `cores` together."""

    cores: float


@dataclass(frozen=True)
class StopFrontend:
    """Stop one; the others suffice. The front ends use `cores` together."""

    cores: float


def process_bounds(processes: int | str, num_cores: int) -> tuple[int, int]:
    """Return the fewest and the most front ends of the setting `frontend.processes`: N, `MIN-MAX` or `auto`.

    `auto` is 1 to half of the cores; engines, clients and the system need the others. Raises ConfigError.
    """
    if processes == "auto":
        return 1, max(1, min(num_cores // 2, MAX_FRONTENDS))
    fewest, _, most = str(processes).partition("-")
    bounds = int(fewest), int(most or fewest)
    if not 1 <= bounds[0] <= bounds[1] <= MAX_FRONTENDS:
        raise ConfigError(
            f"setting frontend.processes is {short_repr(processes)}; allowed are a number from 1 to {MAX_FRONTENDS}, "
            f"the fewest and the most such as '1-4', of which the first is not larger, and 'auto'."
        )
    return bounds


@dataclass
class FrontendScaler:
    """The decisions about the number of front ends, over the run of the server."""

    min_processes: int
    max_processes: int
    _samples: deque[tuple[float, Mapping[int, float]]] = field(default_factory=deque)
    _settled_at: float | None = None  # None: the front ends are changing
    _low_since: float | None = None

    def changing(self) -> None:
        """Record that a front end starts, restarts or stops; nothing is decided until SETTLE_S after the last call."""
        self._samples.clear()
        self._settled_at = self._low_since = None

    def decide(self, cpu_s: Mapping[int, float], now: float) -> StartFrontend | StopFrontend | None:
        """Return what to do, given the CPU seconds of each front end since its start, by process id.

        To be called every SAMPLE_INTERVAL_S while all front ends accept connections. A change of the processes is
        recorded as of `changing`.
        """
        if self._samples and self._samples[-1][1].keys() != cpu_s.keys():
            self.changing()
        if self._settled_at is None:
            self._settled_at = now + SETTLE_S
        if now < self._settled_at:
            return None
        self._samples.append((now, dict(cpu_s)))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        begin, before = self._samples[0]
        if now - begin < WINDOW_S:
            return None
        cores = sum(cpu_s[pid] - before[pid] for pid in cpu_s) / (now - begin)
        return self._decide(cores, len(cpu_s), now)

    def _decide(self, cores: float, num_frontends: int, now: float) -> StartFrontend | StopFrontend | None:
        if cores >= START_ABOVE_CORES * num_frontends and num_frontends < self.max_processes:
            self.changing()
            return StartFrontend(cores)
        if cores > STOP_BELOW_CORES * (num_frontends - 1) or num_frontends <= self.min_processes:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= STOP_AFTER_S:
            self.changing()
            return StopFrontend(cores)
        return None
