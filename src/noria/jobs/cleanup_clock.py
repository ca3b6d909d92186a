"""The clock by which jobs grow old: Unix time, except that a jump ahead makes no job older."""

import time
from collections.abc import Callable

_TOLERANCE_S = 60.0  # beyond what NTP corrects by slewing


def _since_boot() -> float:
    """Return seconds that no setting of the clock changes; unlike `time.monotonic` they go on while suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class CleanupClock:
    """Unix time. After a jump ahead it goes on as before for `ttl_s`, until what had ended before is really that old.

    A clock that was set once, wrongly or at last rightly, thus deletes nothing before its time.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float], steady: Callable[[], float] = _since_boot) -> None:
        self._ttl_s, self._clock, self._steady = ttl_s, clock, steady
        self._offset = clock() - steady()
        self._jumped_at: float | None = None  # by the steady clock

    def __call__(self) -> float:
        """Return the time in seconds."""
        steady = self._steady()
        offset = self._clock() - steady
        if offset - self._offset <= _TOLERANCE_S:
            self._offset, self._jumped_at = offset, None
        elif self._jumped_at is None:
            self._jumped_at = steady
        elif steady - self._jumped_at > self._ttl_s:
            self._offset, self._jumped_at = offset, None
        return steady + self._offset
