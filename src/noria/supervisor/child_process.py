"""A child of the supervisor, or of a replica on Ray, over all its restarts: its process and its state.

This module reports events to `restart_policy.py`, `hang_detector.py` and `exit_cause.py`, which decide.
`child_keeper.py` starts the processes.
"""

import asyncio
import contextlib
import logging
import math
import pathlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import zmq

from noria.observe.cgroup import memory_events, num_oom_kills
from noria.observe.logs.log_record import fields
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import (
    EngineLoad,
    EngineState,
    ExitCause,
    Hello,
    LoadAck,
    Ping,
    Pong,
    ToEngine,
)
from noria.protocol.process_signals import STOP_SIGNAL
from noria.protocol.supervisor_link import NumFrontends, Retire
from noria.protocol.tasks import EngineTask, FrontendTask, RegistrarTask
from noria.protocol.transport import Connected, Disconnected, EngineConnection
from noria.supervisor.exit_cause import classify_exit, combine_exits
from noria.supervisor.hang_detector import HangDetector
from noria.supervisor.restart_policy import GiveUp, Restart, RestartPolicy

log = logging.getLogger("noria.supervisor")

ChildKind = Literal["engine", "frontend", "registrar"]
PING_INTERVAL_S = 2.0


@dataclass(kw_only=True)
class Child:
    """A process, over all its restarts."""

    kind: ChildKind
    name: str
    task: EngineTask | FrontendTask | RegistrarTask  # its command-line argument, sent as JSON
    hang_detector: HangDetector
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    pass_fds: tuple[int, ...] = ()
    process: asyncio.subprocess.Process | None = None  # the running one, or the last
    _was_killed_for_hanging: bool = False
    _memory_events: pathlib.Path | None = field(default_factory=memory_events)  # it is in this process's control group
    _num_oom_kills_before: int = 0

    def send_signal(self, signum: signal.Signals) -> None:
        """Send `signum` to the process, if it is running."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signum)

    @property
    def pid(self) -> int | None:
        """The id of its process; None: it does not run."""
        return None if self.process is None or self.process.returncode is not None else self.process.pid

    def order_end(self) -> None:
        """Tell the process to end, if it is running."""
        self.send_signal(STOP_SIGNAL)

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
        self.hang_detector.started(now)
        self._was_killed_for_hanging = False
        self._num_oom_kills_before = num_oom_kills(self._memory_events)

    def ended(self, status: int, now: float) -> Restart | GiveUp | None:
        """Record that the process ended with `status`; return what to do next. None: nothing, it was to end."""
        self.hang_detector.ended()
        return self.restart_policy.ended(status, now, killed=status < 0 and self._exit_cause(status) == "killed")

    def pinged(self, now: float) -> None:
        """Record that a ping is being sent. Send SIGKILL if too many are unanswered, or the engine says that it hangs.

        No other signal ends a thread that is blocked in a device call, or a process that is stopped.
        """
        self.hang_detector.pinged(now)
        reason = self.hang_detector.hang_reason(now)
        if reason is not None:
            self.log(logging.ERROR, "hung", f"hangs: {reason}; killing it", reason=reason)
            self._was_killed_for_hanging = True
            self.hang_detector.ended()  # so that it is killed once
            self.send_signal(signal.SIGKILL)

    def _exit_cause(self, status: int) -> ExitCause:
        num_kills = num_oom_kills(self._memory_events) - self._num_oom_kills_before
        return classify_exit(status, hung=self._was_killed_for_hanging, num_oom_kills=num_kills)


@dataclass(kw_only=True)
class EngineChild(Child):
    """An engine: it reports its state, and its task says how its previous run ended."""

    kind: ChildKind = "engine"
    task: EngineTask
    models_now: Callable[[], Sequence[AnyModelSpec]]  # what it is to load when it starts again; empty: not known
    incarnation: str | None = None  # from its last EngineState
    is_ready: bool = False  # in the current run
    load: EngineLoad | None = None  # as it last reported it, if `monitor` follows it; None: it does not run
    _ended_incarnation: str | None = None
    _connection: EngineConnection | None = None

    def prepare(self) -> None:
        """Let it load what is deployed by now; if that is not known, what it was to load the last time."""
        if models := self.models_now():
            self.task = msgspec.structs.replace(self.task, models=tuple(models))

    def started(self, now: float) -> None:
        """Record that the process was started."""
        super().started(now)
        self.is_ready = False

    def update_state(self, state: EngineState) -> bool:
        """Apply a state that the engine sent; return whether it has become ready.

        A state of a run that has ended is ignored.
        """
        if state.incarnation == self._ended_incarnation:
            return False
        self.incarnation = state.incarnation
        if state.state != "ready" or self.is_ready:  # ready engines also say when their models change
            return False
        self.is_ready = True
        self.restart_policy.ready()
        self.hang_detector.ready()
        return True

    def ended(self, status: int, now: float) -> Restart | GiveUp | None:
        """Record the end as `Child.ended` does; the task of the next run says how this one ended."""
        cause = self._exit_cause(status)
        cause = cause if self.is_ready else combine_exits(self.task.previous_exit, cause)
        self.task = msgspec.structs.replace(self.task, previous_exit=cause)
        self.is_ready, self.load = False, None
        self._ended_incarnation = self.incarnation
        return super().ended(status, now)

    async def monitor(self, on_ready: Callable[[], object], *, follows_load: bool = False) -> None:
        """Follow it over all its restarts, ping it, and kill it if it hangs, until cancelled.

        `on_ready` is called in each run in which it becomes ready. `follows_load`: keep `load` up to date.
        """
        connection = EngineConnection(self.task.address, self.task.secret_key)
        with contextlib.closing(connection), self._connected_by(connection):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ping())
                async for event in connection.events():
                    match event:
                        case Connected():
                            self.tell(Hello("supervisor"))
                        case (EngineState() as state, _) if self.update_state(state):
                            self.log(logging.INFO, "ready", f"is ready on {state.device}", device=state.device)
                            on_ready()
                        case (EngineLoad() as load, _) if follows_load:
                            self.load = load
                            self.tell(LoadAck())
                        case (Pong(incarnation, busy_s, limit_s), _) if incarnation == self.incarnation:
                            self.hang_detector.answered(busy_s, limit_s)
                        case Disconnected():
                            self.log(logging.DEBUG, "connection_lost", "has lost its connection")

    @contextlib.contextmanager
    def _connected_by(self, connection: EngineConnection) -> Iterator[None]:
        self._connection = connection
        try:
            yield
        finally:
            self._connection = None

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(min(PING_INTERVAL_S, self.task.config.hang_timeout_s / 5))
            self.pinged(time.monotonic())
            self.tell(Ping())  # one that cannot be sent counts as unanswered

    def tell(self, message: ToEngine) -> None:
        """Send it a message while it is monitored; nothing is sent if it does not run, or does not read."""
        if self._connection is not None:
            with contextlib.suppress(zmq.Again):
                self._connection.send(message)


def engine_child(task: EngineTask, models_now: Callable[[], Sequence[AnyModelSpec]]) -> EngineChild:
    """Return the engine of `task`."""
    detector = HangDetector(task.config.hang_timeout_s, task.config.start_timeout_s)
    fds = () if task.fd is None else (task.fd,)
    return EngineChild(name=task.name, task=task, hang_detector=detector, models_now=models_now, pass_fds=fds)


@dataclass(kw_only=True)
class ControlledChild(Child):
    """A front end or the registrar: it follows the supervisor's messages (`supervisor_link.py`).

    One pair of sockets serves all its runs, so that what a run has not read is read by the next one.
    """

    kind: ChildKind = "registrar"
    task: FrontendTask | RegistrarTask
    is_accepting: bool = False  # messages, and of a front end also connections
    _sockets: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def __post_init__(self) -> None:
        ours, its = self._sockets
        ours.setblocking(False)
        self.pass_fds = (*self.pass_fds, its.fileno())
        self.task = msgspec.structs.replace(self.task, control_fd=its.fileno())

    def started(self, now: float) -> None:
        """Record that the process was started."""
        super().started(now)
        asyncio.get_running_loop().add_reader(self._sockets[0], self._on_alive)

    def _on_alive(self) -> None:
        self._sockets[0].recv(4096)
        self.hang_detector.answered(0.0, math.inf)
        if not self.is_accepting:
            self.is_accepting = True
            self.hang_detector.ready()
            self.started_accepting()

    def started_accepting(self) -> None:
        """React to `is_accepting`."""

    def ping(self, now: float) -> None:
        """Ask whether it still runs; as `pinged`."""
        self.pinged(now)
        if self.is_accepting:  # else the next run would have to answer all
            self.tell(Ping())

    def tell(self, message: NumFrontends | Retire | Ping) -> None:
        """Send it a message."""
        with contextlib.suppress(OSError):  # it has not read for long
            self._sockets[0].send(msgspec.json.encode(message) + b"\n")

    def ended(self, status: int, now: float) -> Restart | GiveUp | None:
        """Record the end as `Child.ended` does."""
        self.is_accepting = False
        return super().ended(status, now)

    def close(self) -> None:
        """Close the sockets, when it has ended for good."""
        asyncio.get_running_loop().remove_reader(self._sockets[0])
        for each in self._sockets:
            each.close()


@dataclass(kw_only=True)
class FrontendChild(ControlledChild):
    """A front end: it is told of the others and to retire."""

    kind: ChildKind = "frontend"
    task: FrontendTask
    on_accepting: Callable[[], None] = lambda: None
    is_retired: bool = False  # it ends, and is not restarted
    is_counted: bool = False  # among those that share the clients; managed by `FrontendGroup`

    def started_accepting(self) -> None:
        """Tell the group."""
        self.on_accepting()

    def ended(self, status: int, now: float) -> Restart | GiveUp | None:
        """Record the end as `Child.ended` does; the next run is a restart."""
        self.task = msgspec.structs.replace(self.task, start_reason="restarted")
        decision = super().ended(status, now)
        return None if self.is_retired else decision
