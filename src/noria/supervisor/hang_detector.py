"""Whether an engine hangs: from what it answers to pings, and from its silence.

An engine's desk answers for its other threads (`messages.Pong`), so a device that never returns is told while the process still
talks; silence is left for a process in which no thread runs at all. Loading and warming up are no hang, but have a limit.
"""

from dataclasses import dataclass, field

_MIN_UNANSWERED_PINGS = (
    3  # a supervisor that was stopped itself sent no pings meanwhile, so their number tells what time does not
)


@dataclass
class HangDetector:
    """One engine's, through all its lives."""

    hang_timeout_s: float
    start_timeout_s: float
    _started_s: float | None = None  # of its present life; None between two
    _is_ready: bool = False
    _unanswered_pings_s: list[float] = field(default_factory=list)  # when those pings were sent
    _overrun_reason: str | None = None

    def started(self, now: float) -> None:
        """The engine was started."""
        self._started_s, self._is_ready, self._overrun_reason = now, False, None
        self._unanswered_pings_s.clear()

    def ready(self) -> None:
        """The engine is ready."""
        self._is_ready = True

    def ended(self) -> None:
        """The engine has ended; nothing is wrong with it until it is started again."""
        self._started_s = None

    def pinged(self, now: float) -> None:
        """A ping was sent, or could not be sent."""
        self._unanswered_pings_s.append(now)

    def answered(self, busy_s: float, limit_s: float) -> None:
        """It answered: a thread of it has been busy with one piece of work for `stuck_s` seconds, of at most `limit_s`."""
        self._unanswered_pings_s.clear()
        self._overrun_reason = (
            f"one turn has taken {busy_s:.1f} s, of at most {limit_s:.1f} s" if busy_s > limit_s else None
        )

    def hang_reason(self, now: float) -> str | None:
        """Why the engine is to be killed, or None."""
        if self._started_s is None:
            return None
        if not self._is_ready:
            took_s = now - self._started_s
            return f"it was not ready after {took_s:.1f} s" if took_s > self.start_timeout_s else None
        if self._overrun_reason is not None:
            return self._overrun_reason
        if (
            len(self._unanswered_pings_s) >= _MIN_UNANSWERED_PINGS
            and now - self._unanswered_pings_s[0] > self.hang_timeout_s
        ):
            return f"it has not answered for {now - self._unanswered_pings_s[0]:.1f} s"
        return None
