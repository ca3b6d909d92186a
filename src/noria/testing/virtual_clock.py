"""A clock for tests and simulations; only assignments move it."""


class VirtualClock:
    """A replacement for `time.monotonic`: call it to read it, assign to `now` to move it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds since the clock was made."""
        return self.now
