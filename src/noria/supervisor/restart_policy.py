"""When a child that has ended is restarted, and when it is given up. Pure."""

from dataclasses import dataclass

from noria.errors import ConfigError, ModelError, UnavailableNow

MAX_DELAY_S = 30.0
MAX_START_ATTEMPTS = 3
_REASONS = {
    ConfigError.exit_status: "it rejected its config",
    ModelError.exit_status: "it rejected its model",
    UnavailableNow.exit_status: "what it needs is not there now",
}
"""Why a child that was never ready is given up at once, by exit status."""


@dataclass(frozen=True)
class Restart:
    """Restart the child after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Stop the server, with `exit_status`: a restart would not help."""

    exit_status: int
    reason: str


@dataclass
class RestartPolicy:
    """Decides what to do when a child ends.

    A child that had become ready in that run is restarted at once, others after 0.5 s, doubling to 30 s.

    A child became ready if `ready` was called, or, for a child that does not report readiness, if it ran for
    `assumed_ready_after_s` seconds. A run that ends earlier, including the first, counts towards the delay; the first
    such end is still followed by an immediate restart. A child that was killed from outside is restarted at once, since
    the delays are for faulty children.

    A child is given up only if it was never ready: when its exit status says that its config or model is wrong, or that
    a database is not there, or at its third end. A child that was ready once works in principle; a GPU that fails must
    not stop the other engines.
    """

    assumed_ready_after_s: float | None = None  # None: it reports its readiness
    num_failed_runs: int = 0  # since the last run that became ready, including that run's end
    was_ever_ready: bool = False
    _started_s: float = 0.0
    _is_ready: bool = False  # in the current run

    def started(self, now: float) -> None:
        """Record that the child was started."""
        self._started_s, self._is_ready = now, False

    def ready(self) -> None:
        """Record that the child is ready."""
        self._is_ready = self.was_ever_ready = True

    def was_ready(self, now: float) -> bool:
        """Return whether it has become ready in the current run."""
        return self._is_ready or (
            self.assumed_ready_after_s is not None and now - self._started_s >= self.assumed_ready_after_s
        )

    def ended(self, status: int, now: float, *, killed: bool = False) -> Restart | GiveUp:
        """Record that the child ended with `status` (negative: a signal); return what to do. `killed`: from outside."""
        if killed and self.was_ever_ready:
            return Restart(0.0)
        if status in _REASONS and not self.was_ever_ready:
            return GiveUp(status, _REASONS[status])
        self.num_failed_runs = 1 if self.was_ready(now) else self.num_failed_runs + 1
        if not self.was_ever_ready and self.num_failed_runs >= MAX_START_ATTEMPTS:
            return GiveUp(status if status > 0 else 1, f"it ended {self.num_failed_runs} times before it was ready")
        delay_s = 0.5 * 2.0 ** min(self.num_failed_runs - 2, 16) if self.num_failed_runs > 1 else 0.0
        return Restart(min(delay_s, MAX_DELAY_S))
