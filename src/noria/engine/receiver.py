"""The desk of an engine: answers its peers, and hands on to the wheel what is ready to be drawn."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from noria.engine.crash_journal import CrashJournal
from noria.engine.request_spans import StageSpans
from noria.engine.runtime import Executor
from noria.engine.watchdog import HangWatchdog
from noria.errors import EngineUnavailable, InvalidField, RequestCancelled, RequestError
from noria.observe.logs.log_record import fields
from noria.observe.traces.tracer import NO_TRACER, Tracer
from noria.protocol.messages import (
    Cancel,
    EngineLoad,
    EngineState,
    ExitCause,
    Failed,
    Hello,
    LoadAck,
    Ping,
    Pong,
    Submit,
    Timings,
    ViewRequest,
)
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest, request_id_of
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import RequestTimings

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import CompiledImageRequest

_log = logging.getLogger("noria.engine")


@dataclass(frozen=True)
class SubmitCommand:
    """A request with its sampler compiled, and who asked."""

    client: ClientId
    prepared: "CompiledImageRequest"
    arrived: float  # monotonic seconds, when its frame was read


@dataclass(frozen=True)
class CancelCommand:
    """Who has left, and its request; None: all of its requests."""

    client: ClientId
    request_id: str | None


@dataclass(frozen=True)
class SubscribeCommand:
    """Who wants to see the wheel."""

    client: ClientId
    view_request: ViewRequest


class RequestReceiver(threading.Thread):
    """Answers peers. Requests pass on to the wheel once prepared; what cannot be drawn never gets there.

    A sampler that is new takes up to a second to compile, so that is done aside, one at a time: who needs a known one passes.
    """

    def __init__(
        self,
        channel: EngineChannel,
        models: Sequence[ModelSpec],
        device: str,
        *,
        watchdog: HangWatchdog,
        crash_journal: CrashJournal,
        previous_exit: ExitCause = "none",
        tracer: Tracer = NO_TRACER,
    ) -> None:
        super().__init__(name="desk", daemon=True)
        self._spans = StageSpans(tracer)
        self.watchdog, self.crash_journal = watchdog, crash_journal
        self.commands: queue.SimpleQueue[SubmitCommand | CancelCommand | SubscribeCommand | None] = queue.SimpleQueue()
        self._channel, self._models, self._device = channel, tuple(models), device
        self._previous_exit: ExitCause = previous_exit
        self.incarnation = uuid.uuid4().hex
        self._executor: Executor[CompiledImageRequest] | None = None
        self._max_images = 0
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._clients: dict[str, ClientId] = {}  # by name
        self._load: EngineLoad | None = None
        self._unacked_loads: dict[ClientId, EngineLoad] = {}  # what each has been sent and has not said to have read
        self._preparing: dict[tuple[ClientId, str], float] = {}  # when they came, monotonic seconds
        self._lock = (
            threading.Lock()
        )  # over what two threads change: the executor, the peers and their loads, who is being prepared

    def set_ready(self, executor: "Executor[CompiledImageRequest]", device: str, max_images: int) -> None:
        """The models are warm: tell every peer. A request for more than `most_images` could never be taken."""
        with self._lock:
            self._executor, self._device, self._max_images = executor, device, max_images
            for client in self._clients.values():
                self._channel.send(client, self._state())

    def publish_load(self, load: EngineLoad) -> None:
        """Send `load` to every peer, to who has not read the last one as soon as it has: the newest, and none between."""
        with self._lock:
            self._load = load
            for client in self._clients.values():
                self._send_load(client)

    def run(self) -> None:
        """Serve the channel's inbox for as long as the process lives."""
        while True:
            client, message = self._channel.inbox.get()
            match message:
                case Hello(name):
                    self._register_client(client, name)
                case LoadAck():
                    self._ack_load(client)
                case Submit(request):
                    self._submit(client, request)
                case Cancel(request_id):
                    self._cancel(client, request_id)
                case ViewRequest():
                    self.commands.put(SubscribeCommand(client, message))
                case Ping():
                    self._channel.send(client, Pong(self.incarnation, self.watchdog.busy_s, self.watchdog.hang_limit_s))

    def _register_client(self, client: ClientId, name: str) -> None:
        """A peer's life begins, or its connection's: a life before it waits for nothing any more."""
        with self._lock:
            if name in self._clients:
                previous_client = self._clients[name]
                self._preparing = {
                    key: arrived for key, arrived in self._preparing.items() if key[0] != previous_client
                }
                self.commands.put(CancelCommand(previous_client, None))
                self._unacked_loads.pop(previous_client, None)
            self._clients[name] = client
            self._channel.send(client, self._state())
            self._send_load(client)

    def _send_load(self, client: ClientId) -> None:
        if self._load is not None and client not in self._unacked_loads:
            self._unacked_loads[client] = self._load
            self._channel.send(client, self._load)

    def _ack_load(self, client: ClientId) -> None:
        with self._lock:
            if self._unacked_loads.pop(client, self._load) is not self._load:
                self._send_load(client)

    def _state(self) -> EngineState:
        ready = self._executor is not None
        return EngineState(
            self.incarnation,
            "ready" if ready else "loading",
            self._models if ready else (),
            self._device,
            self._previous_exit,
            self.crash_journal.previous_in_flight,
        )

    def _submit(self, client: ClientId, request: ImageRequest) -> None:
        executor, arrived = self._executor, time.monotonic()
        if executor is None:
            text = "the model is still loading"
            self._reject(
                client, request, arrived, Failed(request.request_id, EngineUnavailable.code, text, retry_after_s=2.0)
            )
            return
        if request.num_images > self._max_images:
            text = f"n is {request.num_images}; this server's slots and queue hold {self._max_images} images at most"
            self._reject(client, request, arrived, Failed(request.request_id, InvalidField.code, text, "n"))
            return
        with self._lock:
            self._preparing[client, request.request_id] = arrived
        if executor.is_compiled(request):
            self._prepare(executor, client, request, arrived)
        else:
            self._compiler.submit(self._prepare, executor, client, request, arrived)

    def _prepare(
        self, executor: "Executor[CompiledImageRequest]", client: ClientId, request: ImageRequest, arrived: float
    ) -> None:
        failed = prepared = None
        try:
            with self.crash_journal.preparing(request.request_id):
                prepared = executor.prepare(request)
        except RequestError as error:
            failed = Failed(request.request_id, error.code, error.message, error.field)
        except Exception:
            log_fields = fields(event="request_broke", request_id=request_id_of(request.request_id))
            _log.exception("request %s cannot be prepared", request.request_id, extra=log_fields)
            failed = Failed(request.request_id, "generation_failed", "the request could not be prepared")
        with self._lock:
            if (client, request.request_id) not in self._preparing:  # cancelled meanwhile, and told so
                self._record_span(request, arrived, RequestCancelled.code)
                return
            del self._preparing[client, request.request_id]
            if prepared is not None:
                self.commands.put(SubmitCommand(client, prepared, arrived))
        if failed is not None:
            self._reject(client, request, arrived, failed)

    def _reject(self, client: ClientId, request: ImageRequest, arrived: float, failed: Failed) -> None:
        self._send_failed(client, failed, arrived)
        self._record_span(request, arrived, failed.code)

    def _record_span(self, request: ImageRequest, arrived: float, code: str) -> None:
        now = time.monotonic()
        self._spans.record(request, RequestTimings(queue_s=now - arrived), now, code)

    def _cancel(self, client: ClientId, request_id: str) -> None:
        with self._lock:
            if (client, request_id) not in self._preparing:
                self.commands.put(CancelCommand(client, request_id))
                return
            arrived = self._preparing.pop((client, request_id))
        self._send_failed(client, Failed(request_id, "cancelled", "cancelled by the caller"), arrived)

    def _send_failed(self, client: ClientId, failed: Failed, arrived: float) -> None:
        """A request that came then never got to the wheel."""
        timings = Timings(queue_s=time.monotonic() - arrived)
        self._channel.send(client, msgspec.structs.replace(failed, timings=timings))
