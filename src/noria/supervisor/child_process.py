"""The supervisor's children, each through all its lives: its process, and what is known of it.

What is to be done is decided in `supervision/`; here it is fed with what happens. Starting them is `supervisor.py`'s.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from noria.observe.logs.log_record import fields
from noria.protocol.messages import EngineState, ExitCause
from noria.supervisor.exit_cause import classify_exit, combine_exits
from noria.supervisor.hang_detector import HangDetector
from noria.supervisor.restart_policy import GiveUp, Restart, RestartPolicy

log = logging.getLogger("noria.supervisor")

ChildKind = Literal["engine", "frontend"]


@dataclass(kw_only=True)
class Child:
    """One engine or front end, through all its lives."""

    kind: ChildKind
    name: str
    task: dict[str, object]  # its argument, as JSON
    restart_policy: RestartPolicy
    num_oom_kills: Callable[[], int]
    pass_fds: tuple[int, ...] = ()
    process: asyncio.subprocess.Process | None = None  # of its present life, or the last
    _was_killed_for_hanging: bool = False
    _num_oom_kills_before: int = 0

    def send_signal(self, signum: signal.Signals) -> None:
        """Signal it, if it lives."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signum)

    def log(self, level: int, event: str, message: str, **extra_fields: object) -> None:
        """A line about it; `words` follow its name, and the event is that of its kind: `engine_ready`."""
        log.log(
            level,
            "%s %s",
            self.name,
            message,
            extra=fields(event=f"{self.kind}_{event}", child=self.name, **extra_fields),
        )

    def started(self, now: float) -> None:
        """It was started."""
        self.restart_policy.started(now)
        self._was_killed_for_hanging = False
        self._num_oom_kills_before = self.num_oom_kills()

    def ended(self, status: int, now: float) -> Restart | GiveUp:
        """It ended with `status`; returns what is to be done."""
        return self.restart_policy.ended(status, now, killed=status < 0 and self._exit_cause(status) == "killed")

    def _exit_cause(self, status: int) -> ExitCause:
        num_oom_kills = self.num_oom_kills() - self._num_oom_kills_before
        return classify_exit(status, hung=self._was_killed_for_hanging, num_oom_kills=num_oom_kills)


@dataclass(kw_only=True)
class EngineChild(Child):
    """An engine: also watched for hanging, and told how its last life ended."""

    address: str
    hang_detector: HangDetector
    incarnation: str | None = None  # as it last told
    previous_exit: ExitCause = "none"
    _is_ready: bool = False
    _ended_incarnation: str | None = None

    def started(self, now: float) -> None:
        """It was started."""
        super().started(now)
        self.hang_detector.started(now)
        self._is_ready = False

    def update_state(self, state: EngineState) -> bool:
        """Take note of what it says of itself; returns whether it is ready. A dead life's last words are passed over."""
        if state.incarnation == self._ended_incarnation:
            return False
        self.incarnation = state.incarnation
        if state.state == "ready":
            self._is_ready = True
            self.restart_policy.ready()
            self.hang_detector.ready()
        return self._is_ready

    def kill_if_hung(self, now: float) -> None:
        """SIGKILL: nothing less ends a thread that waits for a device."""
        reason = self.hang_detector.hang_reason(now)
        if reason is not None:
            self.log(logging.ERROR, "hangs", f"hangs: {reason}; killing it", reason=reason)
            self._was_killed_for_hanging = True
            self.hang_detector.ended()  # once is enough
            self.send_signal(signal.SIGKILL)

    def ended(self, status: int, now: float) -> Restart | GiveUp:
        """It ended with `status`; its next life will be told what that means."""
        exit_cause = self._exit_cause(status)
        self.previous_exit = exit_cause if self._is_ready else combine_exits(self.previous_exit, exit_cause)
        self.task = self.task | {"previous_end": self.previous_exit}
        self.hang_detector.ended()
        self._ended_incarnation = self.incarnation
        return super().ended(status, now)
