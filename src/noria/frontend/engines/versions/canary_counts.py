"""Counts of the requests of a canary and its control since the last report, by window and arm; and how errors count.

| the request | counts for its arm as |
|---|---|
| was answered | ok |
| was rejected, and would be again: a field, a text too long, an image, a deadline that is too short | rejection |
| failed: the model, the code of an endpoint, the engine, the server's own time limit | error |
| was sent too often (429 of a quota or a queue), missed its client's deadline, or was cancelled | nothing |

What is rejected before a version is chosen has no arm: keys, hosts, routes, bodies that are not JSON. What is rejected
for its form, whatever the model, counts nothing.
"""

from dataclasses import dataclass, field
from typing import Literal

from noria.canary.arm import Arm
from noria.canary.traffic_split import ArmName, key_position
from noria.canary.windows import WindowReport
from noria.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    InvalidField,
    JobsUnavailable,
    NoriaError,
    RequestCancelled,
    RequestError,
    UserCodeBusy,
)
from noria.statistics.distributions import CategoryCounts

_MAX_STICKY_KEYS = 100_000  # sticky keys of one canary
_STICKY_SALT = "noria-sticky"

Outcome = Literal["ok", "error", "rejection", "none"]


def outcome_of(error: NoriaError, *, has_deadline: bool) -> Outcome:
    """Return what an error counts for the version that was chosen; `has_deadline`: the client sent one."""
    if isinstance(error, RequestError):
        return "none" if isinstance(error, InvalidField) and error.is_of_form else "rejection"
    if isinstance(error, DeadlineUnmeetable) and not error.retryable:
        return "rejection"
    if error.http_status == 429 or isinstance(error, RequestCancelled | UserCodeBusy | JobsUnavailable):
        return "none"
    return "none" if has_deadline and isinstance(error, DeadlineExceeded) else "error"


@dataclass(slots=True)
class ArmCounts:
    """Counts of the requests of one arm and window."""

    n: int = 0
    errors: int = 0
    rejections: int = 0
    repeats: int = 0
    latencies: dict[str, list[float]] = field(default_factory=dict)  # seconds of the requests that are ok, by shape
    cells: dict[str, CategoryCounts] = field(default_factory=dict)  # by variable

    def count(self, outcome: Outcome, seconds: float, shape: str) -> None:
        """Count a request."""
        self.n += 1
        self.errors += outcome == "error"
        self.rejections += outcome == "rejection"
        if outcome == "ok":
            self.latencies.setdefault(shape, []).append(seconds)

    def add(self, variable: str, cell: str) -> None:
        """Count a value."""
        self.cells.setdefault(variable, CategoryCounts()).record(cell)

    def as_arm(self) -> Arm:
        """Return the counts in the form that the judge takes."""
        cells = {variable: counts.cells() for variable, counts in self.cells.items()}
        return Arm(self.n, self.errors, self.latencies, cells, self.rejections, self.repeats)


class CanaryCounts:
    """Counts of the requests of one canary and its control since the last report."""

    def __init__(self) -> None:
        self._windows: dict[tuple[int, ArmName], ArmCounts] = {}
        self._keys: set[int] = set()  # hashes of sticky ones with a request that counts, or is to count as it ends

    def of(self, window: int, arm: ArmName) -> ArmCounts:
        """The counts of an arm in a window."""
        return self._windows.setdefault((window, arm), ArmCounts())

    def claim(self, key: str) -> bool:
        """Return whether a request is the first of a sticky key: only those are independent of each other."""
        position = key_position(_STICKY_SALT, key)
        if position in self._keys:
            return False
        if len(self._keys) >= _MAX_STICKY_KEYS:  # hours later a user may count once more
            self._keys.clear()
        self._keys.add(position)
        return True

    def release(self, key: str) -> None:
        """Let the next request of a sticky key be its first: the one that claimed it counts nothing."""
        self._keys.discard(key_position(_STICKY_SALT, key))

    def take(self, canary: int) -> list[WindowReport]:
        """Return what was counted since the last call, as reports of the deployment `canary`."""
        taken, self._windows = self._windows, {}
        reports = []
        for window in {window for window, _ in taken}:
            control, its_canary = (taken.get((window, arm), ArmCounts()).as_arm() for arm in ("control", "canary"))
            reports.append(WindowReport(canary, window, control, its_canary))
        return reports
