"""When a child that has ended starts again, and when that would not help."""

from dataclasses import dataclass

from noria.errors import ConfigError, ModelError

MAX_DELAY_S = 30.0
MAX_START_ATTEMPTS = 3


@dataclass(frozen=True)
class Restart:
    """Start the child again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Starting it again would not help; `exit_status` is the supervisor's own."""

    exit_status: int
    reason: str


@dataclass
class RestartPolicy:
    """What to do when a child ends: start it again at once if it served in the life that ended; else after 0.5 s, doubling to 30 s.

    To have served is to have been `ready`; of a child that does not say so itself, to have lived for `serves_after_s` seconds. A life
    that ends earlier, the first one too, counts towards the delay; the first such end is still answered at once. Who was killed from
    outside is started again at once: delays are for children with a fault, and a kill tells of none.

    Given up: only a child that was never ready, when it says itself that its settings or its model are wrong, or at its third end.
    One that has served is healthy in principle: a GPU that falls off the bus must not stop the other engines.
    """

    assumed_ready_after_s: float | None = None  # None: it says itself when it is ready
    num_failed_runs: int = 0  # since the last life in which it served, that one's end included
    was_ever_ready: bool = False
    _started_s: float = 0.0
    _is_ready: bool = False  # in its present life

    def started(self, now: float) -> None:
        """The child was started."""
        self._started_s, self._is_ready = now, False

    def ready(self) -> None:
        """The child serves."""
        self._is_ready = self.was_ever_ready = True

    def was_ready(self, now: float) -> bool:
        """Whether it has served in its present life."""
        return self._is_ready or (
            self.assumed_ready_after_s is not None and now - self._started_s >= self.assumed_ready_after_s
        )

    def ended(self, status: int, now: float, *, killed: bool = False) -> Restart | GiveUp:
        """The child ended with `status`; negative is a signal. `killed`: by somebody's signal, as far as can be seen."""
        if killed and self.was_ever_ready:
            return Restart(0.0)
        for kind in (ConfigError, ModelError):
            if status == kind.exit_status and not self.was_ever_ready:
                return GiveUp(status, f"it refused its {kind.code}")
        self.num_failed_runs = 1 if self.was_ready(now) else self.num_failed_runs + 1
        if not self.was_ever_ready and self.num_failed_runs >= MAX_START_ATTEMPTS:
            return GiveUp(status if status > 0 else 1, f"it ended {self.num_failed_runs} times before it was ready")
        delay_s = 0.5 * 2.0 ** min(self.num_failed_runs - 2, 16) if self.num_failed_runs > 1 else 0.0
        return Restart(min(delay_s, MAX_DELAY_S))
