"""Detects hangs: measures how long the engine's threads have been busy with their current piece of work.

Each thread marks its own work and the transport reads it, to answer the supervisor's `Ping`. There is no lock that a
hung thread could hold, because reading and writing one attribute is atomic.
"""

from collections.abc import Callable

_HANG_FACTOR = 10.0
"""A hang takes this many times the longest work so far: the largest allowed size has 4 to 16 times the usual pixels."""


class BusyTimer:
    """Times the work of one thread, which enters this context manager for each piece of it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.longest_s = 0.0
        self._clock = clock
        self._since: float | None = None

    def start(self) -> None:
        """Begin a piece of work."""
        self._since = self._clock()

    def stop(self) -> None:
        """End it."""
        assert self._since is not None
        self.longest_s = max(self.longest_s, self._clock() - self._since)
        self._since = None

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def busy_s(self) -> float:
        """Seconds since the current piece of work began; 0 when idle."""
        since = self._since
        return 0.0 if since is None else self._clock() - since


class HangWatchdog:
    """The threads that wait for the device: the loop (a piece of work is an iteration) and the sender (a message).

    The sessions of a loop whose batches run beside it have a timer each (a batch).
    """

    def __init__(self, hang_timeout_s: float, clock: Callable[[], float]) -> None:
        self.loop, self.sender = BusyTimer(clock), BusyTimer(clock)
        self._clock, self._hang_timeout_s = clock, hang_timeout_s
        self._timers: tuple[BusyTimer, ...] = (self.loop, self.sender)
        self._expected_s = 0.0  # not the loop's `longest_s`, which its thread writes

    def add_sessions(self, count: int) -> tuple[BusyTimer, ...]:
        """Return the timers of so many sessions."""
        sessions = tuple(BusyTimer(self._clock) for _ in range(count))
        self._timers += sessions
        return sessions

    def expect_iteration(self, iteration_s: float) -> None:
        """Raise the limit for iterations of `iteration_s` seconds, as a trial took; any thread may call it."""
        self._expected_s = max(self._expected_s, iteration_s)

    @property
    def busy_s(self) -> float:
        """Seconds that the longer-busy thread has spent on its current piece of work."""
        return max(timer.busy_s for timer in self._timers)

    @property
    def hang_limit_s(self) -> float:
        """Seconds of `busy_s` above which the engine counts as hung."""
        return max(
            self._hang_timeout_s, _HANG_FACTOR * max(self._expected_s, *(timer.longest_s for timer in self._timers))
        )
