"""A clock for tests and simulations; only assignments move it."""

START = 1000.0
"""The first time of a virtual clock, not 0, so that a time and a duration are never the same by chance."""


class VirtualClock:
    """A replacement for `time.monotonic`: call it to read it, assign to `now` to move it."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now
