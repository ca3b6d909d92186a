"""Whether a child hangs: decided from its replies to pings, and from missing replies. Pure.

An engine's transport thread reports how long its other threads have been busy (`messages.Pong`), so a device call that
never returns is found while the process still replies. Missing replies mean that no thread of the process runs. Loading
and warm-up are not hangs, but have a limit of their own. Front ends and the registrar reply from their event loop,
which does nothing for long.
"""

from dataclasses import dataclass, field

# A machine or supervisor that was suspended sent no pings meanwhile: elapsed time alone does not show a hang.
_MIN_UNANSWERED_PINGS = 3


@dataclass
class HangDetector:
    """The hang detection of one child, over all its restarts."""

    hang_timeout_s: float
    start_timeout_s: float
    _started_s: float | None = None  # start of the current run; None while there is none
    _is_ready: bool = False
    _unanswered_pings_s: list[float] = field(default_factory=list)  # the times at which they were sent
    _overrun_reason: str | None = None

    def started(self, now: float) -> None:
        """Record that the child was started."""
        self._started_s, self._is_ready, self._overrun_reason = now, False, None
        self._unanswered_pings_s.clear()

    def ready(self) -> None:
        """Record that the child is ready."""
        self._is_ready = True

    def ended(self) -> None:
        """Record that the child has ended; it does not hang until it is started again."""
        self._started_s = None

    def pinged(self, now: float) -> None:
        """Record that a ping was sent, or could not be sent.

        To be called at least five times within `hang_timeout_s`, each time before `hang_reason`.
        """
        if self._unanswered_pings_s and now - self._unanswered_pings_s[-1] > self.hang_timeout_s / 2:
            self._unanswered_pings_s.clear()  # this process was suspended, and maybe the child with it
        self._unanswered_pings_s.append(now)

    def answered(self, busy_s: float, limit_s: float) -> None:
        """Record a reply: a thread has been busy with one operation for `busy_s` seconds.

        More than `limit_s` is a hang.
        """
        self._unanswered_pings_s.clear()
        self._overrun_reason = (
            f"one iteration has taken {busy_s:.1f} s; the limit is {limit_s:.1f} s" if busy_s > limit_s else None
        )

    def hang_reason(self, now: float) -> str | None:
        """Return why the child must be killed, or None if it does not hang."""
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
