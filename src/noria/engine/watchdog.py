"""How long the engine's threads have been at what they do: what the desk answers when the supervisor asks whether the engine hangs.

Each thread marks its own pieces of work; the desk reads. Reading and writing one attribute is atomic, so there is no lock that a thread
which hangs could hold.
"""

from collections.abc import Callable

_HANG_FACTOR = 10.0  # times the longest piece of work so far: the largest size that may be asked for has 4–16 times the usual pixels


class BusyTimer:
    """One thread's pieces of work: a context manager around each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.longest_s = 0.0
        self._clock = clock
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(self, *_: object) -> None:
        assert self._since is not None
        self.longest_s = max(self.longest_s, self._clock() - self._since)
        self._since = None

    @property
    def busy_s(self) -> float:
        """Seconds since the present piece of work began; 0 when there is none."""
        since = self._since
        return 0.0 if since is None else self._clock() - since


class HangWatchdog:
    """The threads that wait for the device: the wheel, a piece of whose work is a turn, and the delivery, with an image each."""

    def __init__(self, hang_timeout_s: float, clock: Callable[[], float]) -> None:
        self.loop, self.sender = BusyTimer(clock), BusyTimer(clock)
        self._hang_timeout_s = hang_timeout_s

    def expect_iteration(self, iteration_s: float) -> None:
        """A turn may take `turn_s` seconds, as one did while the model warmed up."""
        self.loop.longest_s = max(self.loop.longest_s, iteration_s)

    @property
    def busy_s(self) -> float:
        """Seconds that the busier thread has been at its present piece of work."""
        return max(self.loop.busy_s, self.sender.busy_s)

    @property
    def hang_limit_s(self) -> float:
        """More than this is a hang."""
        return max(self._hang_timeout_s, _HANG_FACTOR * max(self.loop.longest_s, self.sender.longest_s))
