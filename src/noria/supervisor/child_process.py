"""A child of the supervisor over all its restarts: its process and its state.

This module reports events to `restart_policy.py`, `hang_detector.py` and `exit_cause.py`, which decide.
`supervisor.py` starts the processes.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from noria.observe.logs.log_record import fields
from noria.protocol.messages import EngineState, ExitCause, NumFrontends, Retire
from noria.protocol.model_spec import ModelSpec
from noria.supervisor.exit_cause import classify_exit, combine_exits
from noria.supervisor.hang_detector import HangDetector
from noria.supervisor.restart_policy import GiveUp, Restart, RestartPolicy

log = logging.getLogger("noria.supervisor")

ChildKind = Literal["engine", "frontend", "registrar"]


@dataclass(kw_only=True)
class Child:
    """One process, over all its restarts."""

    kind: ChildKind
    name: str
    task: dict[str, object]  # its command-line argument, sent as JSON
    restart_policy: RestartPolicy
    num_oom_kills: Callable[[], int]
    pass_fds: tuple[int, ...] = ()
    process: asyncio.subprocess.Process | None = None  # the running one, or the last
    _was_killed_for_hanging: bool = False
    _num_oom_kills_before: int = 0

    def send_signal(self, signum: signal.Signals) -> None:
        """Send `signum` to the process, if it is running."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signum)

    def log(self, level: int, event: str, message: str, **extra_fields: object) -> None:
        """Log `message` after the child's name; the event gets the kind as a prefix: `engine_ready`."""
        log.log(
            level,
            "%s %s",
            self.name,
            message,
            extra=fields(event=f"{self.kind}_{event}", child=self.name, **extra_fields),
        )

    def prepare(self) -> None:
        """Bring the task up to date before the process starts again."""

    def started(self, now: float) -> None:
        """Record that the process was started."""
        self.restart_policy.started(now)
        self._was_killed_for_hanging = False
        self._num_oom_kills_before = self.num_oom_kills()

    def ended(self, status: int, now: float) -> Restart | GiveUp | None:
        """Record that the process ended with `status`; return what to do next. None: nothing, it was to end."""
        return self.restart_policy.ended(status, now, killed=status < 0 and self._exit_cause(status) == "killed")

    def _exit_cause(self, status: int) -> ExitCause:
        num_oom_kills = self.num_oom_kills() - self._num_oom_kills_before
        return classify_exit(status, hung=self._was_killed_for_hanging, num_oom_kills=num_oom_kills)


@dataclass(kw_only=True)
class EngineChild(Child):
    """An engine: it is also monitored for hangs, and its task says how its previous run ended."""

    address: str
    hang_detector: HangDetector
    models_now: Callable[[], Sequence[ModelSpec]]  # what it is to load when it starts again; empty: not known
    incarnation: str | None = None  # from its last EngineState
    previous_exit: ExitCause = "none"
    _is_ready: bool = False
    _ended_incarnation: str | None = None

    def prepare(self) -> None:
        """Let it load what is deployed by now; if that is not known, what it was to load the last time."""
        if models := self.models_now():
            self.task = self.task | {"models": models}

    def started(self, now: float) -> None:
        """Record that the process was started."""
        super().started(now)
        self.hang_detector.started(now)
        self._is_ready = False

    def update_state(self, state: EngineState) -> bool:
        """Apply a state that the engine sent; return whether it has become ready.

        A state of a run that has ended is ignored.
        """
        if state.incarnation == self._ended_incarnation:
            return False
        self.incarnation = state.incarnation
        if state.state != "ready" or self._is_ready:  # ready engines also say when their models change
            return False
        self._is_ready = True
        self.restart_policy.ready()
        self.hang_detector.ready()
        return True

    def kill_if_hung(self, now: float) -> None:
        """Send SIGKILL if it hangs; no other signal ends a thread that is blocked in a device call."""
        reason = self.hang_detector.hang_reason(now)
        if reason is not None:
            self.log(logging.ERROR, "hung", f"hangs: {reason}; killing it", reason=reason)
            self._was_killed_for_hanging = True
            self.hang_detector.ended()  # so that it is killed once
            self.send_signal(signal.SIGKILL)

    def ended(self, status: int, now: float) -> Restart | GiveUp | None:
        """As `Child.ended`; the task of the next run says how this one ended."""
        exit_cause = self._exit_cause(status)
        self.previous_exit = exit_cause if self._is_ready else combine_exits(self.previous_exit, exit_cause)
        self.task = self.task | {"previous_exit": self.previous_exit}
        self.hang_detector.ended()
        self._ended_incarnation = self.incarnation
        return super().ended(status, now)


@dataclass(kw_only=True)
class FrontendChild(Child):
    """A front end: it says when it accepts connections, and is told of the others and to retire.

    One pair of sockets serves all its runs, so that what a run has not read is read by the next one.
    """

    on_accepting: Callable[[], None] = lambda: None
    is_accepting: bool = False
    is_retired: bool = False  # it ends, and is not restarted
    is_counted: bool = False  # among those that share the clients; managed by `FrontendGroup`
    _sockets: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def __post_init__(self) -> None:
        ours, its = self._sockets
        ours.setblocking(False)
        self.pass_fds = (*self.pass_fds, its.fileno())
        self.task = self.task | {"control_fd": its.fileno()}

    def started(self, now: float) -> None:
        """Record that the process was started."""
        super().started(now)
        asyncio.get_running_loop().add_reader(self._sockets[0], self._on_ready)

    def _on_ready(self) -> None:
        self._sockets[0].recv(4096)
        self.is_accepting = True
        self.on_accepting()

    def tell(self, message: NumFrontends | Retire) -> None:
        """Send it a message."""
        with contextlib.suppress(OSError):  # it has not read for long
            self._sockets[0].send(msgspec.json.encode(message) + b"\n")

    def ended(self, status: int, now: float) -> Restart | GiveUp | None:
        """As `Child.ended`; the next run is a restart."""
        self.is_accepting = False
        self.task = self.task | {"start_reason": "restarted"}
        decision = super().ended(status, now)
        return None if self.is_retired else decision

    def close(self) -> None:
        """Close the sockets, when it has ended for good."""
        asyncio.get_running_loop().remove_reader(self._sockets[0])
        for each in self._sockets:
            each.close()
