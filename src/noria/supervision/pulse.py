"""Whether an engine hangs: from what it answers to pings, and from its silence.

An engine's desk answers for its other threads (`messages.Pong`), so a device that never returns is told while the process still
talks; silence is left for a process in which no thread runs at all. Loading and warming up are no hang, but have a limit.
"""

from dataclasses import dataclass, field

_FEWEST_UNANSWERED = (
    3  # a supervisor that was stopped itself sent no pings meanwhile, so their number tells what time does not
)


@dataclass
class Pulse:
    """One engine's, through all its lives."""

    hang_timeout_s: float
    start_timeout_s: float
    _began_s: float | None = None  # of its present life; None between two
    _is_ready: bool = False
    _unanswered: list[float] = field(default_factory=list)  # when those pings were sent
    _stuck: str | None = None

    def started(self, now: float) -> None:
        """The engine was started."""
        self._began_s, self._is_ready, self._stuck = now, False, None
        self._unanswered.clear()

    def ready(self) -> None:
        """The engine is ready."""
        self._is_ready = True

    def ended(self) -> None:
        """The engine has ended; nothing is wrong with it until it is started again."""
        self._began_s = None

    def pinged(self, now: float) -> None:
        """A ping was sent, or could not be sent."""
        self._unanswered.append(now)

    def answered(self, stuck_s: float, limit_s: float) -> None:
        """It answered: a thread of it has been busy with one piece of work for `stuck_s` seconds, of at most `limit_s`."""
        self._unanswered.clear()
        self._stuck = f"one turn has taken {stuck_s:.1f} s, of at most {limit_s:.1f} s" if stuck_s > limit_s else None

    def hang(self, now: float) -> str | None:
        """Why the engine is to be killed, or None."""
        if self._began_s is None:
            return None
        if not self._is_ready:
            took_s = now - self._began_s
            return f"it was not ready after {took_s:.1f} s" if took_s > self.start_timeout_s else None
        if self._stuck is not None:
            return self._stuck
        if len(self._unanswered) >= _FEWEST_UNANSWERED and now - self._unanswered[0] > self.hang_timeout_s:
            return f"it has not answered for {now - self._unanswered[0]:.1f} s"
        return None
