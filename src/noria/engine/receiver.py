"""Takes an engine's messages on the channel's thread: answers clients, prepares requests, passes them to the loop."""

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from opentelemetry.trace import Tracer

from noria.engine.commands import CancelCommand, Command, ReleaseCommand, SubmitCommand, SubscribeCommand
from noria.engine.compile_queue import CompileTask
from noria.engine.load_publisher import LoadPublisher
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.monitoring.request_spans import StageSpans
from noria.engine.monitoring.watchdog import HangWatchdog
from noria.engine.preparer import Prepared, RequestPreparer
from noria.engine.resumption import InvalidStateError, Resumption, read_resumption
from noria.engine.runtime import AnyRuntime, Executor
from noria.errors import EngineUnavailable, RequestCancelled
from noria.observe.logs.log_record import fields
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import (
    Cancel,
    CancelMount,
    EngineState,
    ExitCause,
    Failed,
    HandedOver,
    Hello,
    Leave,
    LoadAck,
    Mount,
    NotHeld,
    Ping,
    Pong,
    Release,
    Resume,
    StateRefused,
    Timings,
    ToEngine,
    Unmount,
    ViewRequest,
)
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import AnyRequest, EngineRequest
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import RequestTimings

_log = logging.getLogger("noria.engine")


@dataclass
class _Lease:
    name: str  # the client's
    lease_s: float
    last_message: float  # monotonic seconds


class RequestReceiver:
    """Answers clients, and fills `commands`, the queue of the loop, with what is prepared; rejects what cannot be."""

    def __init__(
        self,
        channel: EngineChannel,
        models: Sequence[AnyModelSpec],
        device: str,
        *,
        watchdog: HangWatchdog,
        crash_journal: CrashJournal,
        previous_exit: ExitCause = "none",
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        self._spans = StageSpans(tracer)
        self.watchdog, self.crash_journal = watchdog, crash_journal
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        # What clients want of the mounter; None ends it.
        self.changes: queue.SimpleQueue[tuple[ClientId, Mount | Unmount] | None] = queue.SimpleQueue()
        self.wanted_changes: set[tuple[ClientId, str]] = set()  # by change_id; others of `changes` were cancelled
        # When each checkpoint that is or was held got its last request, or was loaded, in monotonic seconds.
        self.checkpoints_used: dict[ModelKey, float] = {}
        self._channel, self._models, self._device = channel, tuple(models), device
        self._replaced: tuple[AnyModelSpec, ...] = ()
        self._previous_exit: ExitCause = previous_exit
        self.incarnation = uuid.uuid4().hex
        self._executor: Executor[Any] | None = None
        self._is_draining = False
        self._clients: dict[str, ClientId] = {}  # by name
        self.loads = LoadPublisher(channel)
        self._leases: dict[ClientId, _Lease] = {}
        self._accepted: list[SubmitCommand] = []  # requests of this turn of the channel
        # Takes them, with the lock held; replaced by an engine that does so on the channel's thread.
        self.on_accepted: Callable[[list[SubmitCommand]], None] = self._enqueue_accepted
        # Cancels the requests of a client, with the lock held; replaced likewise, so that the order is kept.
        self.on_forgotten: Callable[[ClientId], None] = lambda client: self.commands.put(CancelCommand(client, None))
        # protects _models, _replaced, _executor, _clients, _leases, _accepted and _preparer
        self._lock = threading.RLock()
        self._preparer = RequestPreparer(self._lock, watchdog, crash_journal, self._on_prepared, self._record_cancelled)

    def set_ready(self, runtime: AnyRuntime) -> None:
        """Announce to every client that the models are loaded."""
        with self._lock:
            self._executor, self._device = runtime.executor, runtime.device
            self._publish_state()

    def start_draining(self) -> None:
        """Announce to every client that the engine takes no new requests. Those that come all the same are served."""
        with self._lock:
            if not self._is_draining:
                self._is_draining = True
                self._publish_state()

    def release_preparing(self) -> set[ClientId]:
        """Hand over every request that is being prepared, because the engine ends; return their clients."""
        preparing = self._preparer.attempts
        for client, attempt_id in preparing:
            self._release(client, attempt_id)
        return {client for client, _ in preparing}

    def _publish_state(self) -> None:
        for client in self._clients.values():
            self._channel.send(client, self._state())

    @property
    def models(self) -> tuple[AnyModelSpec, ...]:
        """The models that serve new requests."""
        return self._models

    def set_models(self, models: Iterable[AnyModelSpec], replaced: Iterable[AnyModelSpec] = ()) -> None:
        """Serve new requests by these models, and announce it to every client.

        `replaced` are not held, while another version of them is loaded.
        """
        with self._lock:
            self._models, self._replaced = tuple(models), tuple(replaced)
            self._publish_state()

    def wait_until_prepared(self, model: ModelKey) -> None:
        """Wait until every request of a model has been passed to the loop, or has ended."""
        self._preparer.wait_until_prepared(model)

    def start(self) -> None:
        """Receive from now on."""
        self._channel.start(self.receive, self._turn)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Receive within it what has arrived together. A model does not leave meanwhile."""
        with self._lock:
            yield
            self._pass_accepted_on()

    def _pass_accepted_on(self) -> None:
        if self._accepted:
            accepted, self._accepted = self._accepted, []
            self.on_accepted(accepted)

    def _enqueue_accepted(self, accepted: list[SubmitCommand]) -> None:
        for command in accepted:
            self.commands.put(command)

    def receive(self, client: ClientId, message: ToEngine, data: memoryview | None = None) -> None:
        """Answer a message, or pass it on. Takes no longer than a request whose sampler and LoRAs are known."""
        if (lease := self._leases.get(client)) is not None:  # without the lock: the loop may end it meanwhile
            lease.last_message = time.monotonic()
        match message:
            case EngineRequest():  # the first, because nearly all are
                self._submit(client, message, data)
            case Hello(name, lease_s):
                self._register_client(client, name, lease_s)
            case LoadAck():
                self.loads.ack(client)
            case Resume():
                self._resume(client, message, data)
            case Cancel(attempt_id):
                self._cancel(client, attempt_id)
            case Release(attempt_id):
                self._release(client, attempt_id)
            case Leave():
                self.start_draining()
            case ViewRequest():
                self.commands.put(SubscribeCommand(client, message))
            case Mount() | Unmount() | CancelMount():
                self._change_models(client, message)
            case Ping():
                self._pass_accepted_on()  # so that a pong says that the messages before it have been received
                self._channel.send(client, Pong(self.incarnation, self.watchdog.busy_s, self.watchdog.hang_limit_s))

    def _change_models(self, client: ClientId, message: Mount | Unmount | CancelMount) -> None:
        if isinstance(message, CancelMount):
            self.wanted_changes.discard((client, message.change_id))
        else:
            self.wanted_changes.add((client, message.change_id))
            self.changes.put((client, message))

    def _register_client(self, client: ClientId, name: str, lease_s: float | None) -> None:
        """Register a connection under the client's name; requests of its previous connection are cancelled."""
        with self._lock:
            if name in self._clients:
                self._forget_client(self._clients[name])
            self._clients[name] = client
            if lease_s is not None:
                self._leases[client] = _Lease(name, lease_s, time.monotonic())
            self._channel.send(client, self._state())
            self.loads.add(client)

    def _forget_client(self, client: ClientId) -> None:
        """Cancel the requests of a connection that will send nothing more. The caller holds the lock."""
        self._preparer.forget(client)
        self._pass_accepted_on()
        self.on_forgotten(client)
        self.loads.forget(client)
        self._leases.pop(client, None)

    def end_leases(self, now: float) -> None:
        """Forget the clients that have been silent for longer than their leases: their machine may be lost."""
        if not self._leases:
            return
        with self._lock:
            for client, lease in list(self._leases.items()):
                if now - lease.last_message > lease.lease_s:
                    extra = fields(event="client_lost", client=lease.name)
                    _log.warning("%s has been silent for %g s", lease.name, lease.lease_s, extra=extra)
                    del self._clients[lease.name]
                    self._forget_client(client)

    def _state(self) -> EngineState:
        ready = self._executor is not None
        return EngineState(
            self.incarnation,
            "loading" if not ready else "draining" if self._is_draining else "ready",
            self._models if ready else (),
            self._device,
            self._previous_exit,
            self.crash_journal.previous_in_flight,
            self._replaced,
        )

    def _resume(self, client: ClientId, message: Resume, frame: memoryview | None) -> None:
        try:
            resumption, data = read_resumption(message, frame)
        except InvalidStateError as error:
            self._channel.send(client, StateRefused(message.request.attempt_id, str(error)))
        else:
            self._submit(client, message.request, data, resumption)

    def _submit(
        self, client: ClientId, request: AnyRequest, data: memoryview | None, resumption: Resumption | None = None
    ) -> None:
        executor, arrived, spec = self._executor, time.monotonic(), self._find_model(request)
        wanted = ModelKey(request.model, request.model_version)
        if executor is not None and spec is None and resumption is not None:
            self._send_unserved(client, HandedOver(request.attempt_id), arrived)
            return
        if executor is not None and spec is None and wanted in self.checkpoints_used:
            self._channel.send(client, NotHeld(request.attempt_id))
            return
        if executor is None or spec is None:
            missing = (
                "the model is still loading"
                if executor is None
                else (f"this engine does not hold {request.model!r} in version {request.model_version or 'any'}")
            )
            failed = Failed(request.attempt_id, EngineUnavailable.code, missing, retry_after_s=2.0)
            self._refuse(client, request, arrived, failed)
            return
        if wanted in self.checkpoints_used:
            self.checkpoints_used[wanted] = arrived
        if request.model_version != spec.fingerprint:
            request = msgspec.structs.replace(request, model_version=spec.fingerprint)
        if not executor.is_compiled(request):
            self._preparer.enqueue(executor, CompileTask(client, request, data, arrived, resumption))
            return
        prepared = self._preparer.prepare(executor, request, data, resumption)
        if isinstance(prepared, Failed | StateRefused):
            self._refuse(client, request, arrived, prepared)
        else:
            self._accepted.append(SubmitCommand(client, prepared, arrived, resumption))

    def _on_prepared(self, task: CompileTask, prepared: Prepared) -> None:
        if isinstance(prepared, Failed | StateRefused):
            self._refuse(task.connection, task.request, task.arrived, prepared)
        else:
            self.commands.put(SubmitCommand(task.connection, prepared, task.arrived, task.resumption))

    def _record_cancelled(self, task: CompileTask) -> None:
        self._record_span(task.request, task.arrived, RequestCancelled.code)

    def _find_model(self, request: AnyRequest) -> AnyModelSpec | None:
        """Return the request's model in its version, if it is loaded; of several versions, the first."""
        for spec in self._models:
            if spec.matches(request.model, request.model_version):
                return spec
        return None

    def _refuse(self, client: ClientId, request: AnyRequest, arrived: float, reply: Failed | StateRefused) -> None:
        if isinstance(reply, StateRefused):
            self._channel.send(client, reply)
        else:
            self._send_unserved(client, reply, arrived)
            self._record_span(request, arrived, reply.code)

    def _record_span(self, request: AnyRequest, arrived: float, code: str) -> None:
        now = time.monotonic()
        self._spans.record(request, RequestTimings(queue_s=now - arrived), now, code)

    def _cancel(self, client: ClientId, attempt_id: str) -> None:
        failed = Failed(attempt_id, "cancelled", "cancelled by the caller")
        self._take_out(client, failed, CancelCommand(client, attempt_id))

    def _release(self, client: ClientId, attempt_id: str) -> None:
        self._take_out(client, HandedOver(attempt_id), ReleaseCommand(client, attempt_id))

    def _take_out(
        self, client: ClientId, reply: Failed | HandedOver, otherwise: CancelCommand | ReleaseCommand
    ) -> None:
        """Give up a request that is being prepared, with `reply`; pass the command for any other to the loop."""
        with self._lock:
            task = self._preparer.cancel(client, reply.attempt_id)
            if task is None:
                self._pass_accepted_on()
                self.commands.put(otherwise)
                return
        self._send_unserved(client, reply, task.arrived)

    def _send_unserved(self, client: ClientId, reply: Failed | HandedOver, arrived: float) -> None:
        """Answer a request that did not reach the loop; its time since `arrived` counts as queue time."""
        timings = Timings(queue_s=time.monotonic() - arrived)
        self._channel.send(client, msgspec.structs.replace(reply, timings=timings))
