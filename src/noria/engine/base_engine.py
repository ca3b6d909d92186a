"""The work of every engine around its loop: take commands from the receiver, pass results and views to the sender."""

import abc
import contextlib
import logging
import math
import queue
import threading
import time
from typing import Any

from opentelemetry.trace import Tracer

from noria.engine.commands import CancelCommand, ChangeModelCommand, Command, SubmitCommand, SubscribeCommand
from noria.engine.live.publisher import LiveViewPublisher
from noria.engine.loop import EngineEvent, RequestEnded, RequestHandedOver, RequestLoop
from noria.engine.monitoring.engine_metrics import EngineMetrics
from noria.engine.monitoring.request_spans import StageSpans
from noria.engine.mounting import ModelMounter
from noria.engine.receiver import RequestReceiver
from noria.engine.runtime import AnyRuntime
from noria.engine.sender import MOVED, ResponseSender
from noria.errors import InvalidField
from noria.observe.logs.log_record import fields
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.messages import EngineLoad, Failed
from noria.protocol.model_spec import ModelKey
from noria.protocol.transport import ClientId, EngineChannel

LOAD_INTERVAL_S = 0.5
"""At most every so many seconds a working engine sends its load."""

# The kernel may give one of two signals at once to another thread than the main one, which then handles it only when it
# wakes: so it sleeps no longer.
_MAX_WAIT_S = 1.0
_READ_TIMEOUT_S = 2.0  # for clients to read what was handed over, of the 5 s that the supervisor gives an engine to end

_log = logging.getLogger("noria.engine")
_ENDS = (RequestEnded, RequestHandedOver)


class BaseEngine(abc.ABC):
    """Runs a loop on the calling thread: takes commands from the receiver, passes results to the sender."""

    _loop: RequestLoop[Any]
    _live_view: LiveViewPublisher[ClientId]

    def __init__(
        self,
        name: str,
        channel: EngineChannel,
        receiver: RequestReceiver,
        runtime: AnyRuntime,
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        self._loaded_models = runtime
        num_slots = runtime.scheduler.num_slots
        spans = StageSpans(tracer, num_slots)
        self._channel, self._receiver, self._sender = channel, receiver, ResponseSender(channel, receiver, spans)
        self._client_by_attempt: dict[str, ClientId] = {}
        self._last_load: tuple[float, EngineLoad | None] = (-math.inf, None)
        self._metrics = EngineMetrics(name, runtime.executor, num_slots, runtime.slots_source)
        self._mounter = ModelMounter(receiver, runtime, lambda *item: self._sender.outbox.put(item), self._uses)
        self._changes: list[ChangeModelCommand] = []  # that wait for the last requests of their models
        self._lock = threading.Lock()  # guards the loop, the views and all that follows from them
        self._wakes_at = math.inf  # when `run` stops to wait for a command, in monotonic seconds

    @abc.abstractmethod
    def _wait_s(self, now: float) -> float | None:
        """Return how long to wait for a command: 0 if there is work to do, None without limit."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Do the work that can be done now."""

    def _uses(self, model: ModelKey) -> bool:
        return self._loop.uses(model)

    def run(self) -> None:
        """Serve until `stop`; then hand over what is left."""
        self._sender.start()
        self._mounter.start()
        while self._process_commands():
            # Here, because subscribers ask for the next view while an iteration runs.
            with self._lock:
                self._publish_views()
            self._advance()
            with self._lock:
                self._change_models()
            self._receiver.end_leases(time.monotonic())
        clients = self._stop_serving()
        self._mounter.stop()
        self._sender.outbox.put(None)
        self._sender.join(timeout=5)
        if clients:
            self._receiver.loads.wait_until_read(clients, EngineLoad(0.0, 0, 0, 0), _READ_TIMEOUT_S)

    def _stop_serving(self) -> set[ClientId]:
        """Hand over what is being prepared, accept what was; return the clients of all requests."""
        self._receiver.start_draining()
        clients = self._receiver.release_preparing()
        with self._lock, contextlib.suppress(queue.Empty):
            while True:
                command = self._receiver.commands.get_nowait()
                if isinstance(command, SubmitCommand):
                    self._submit(command)
        with self._lock:
            return clients.union(self._client_by_attempt.values())

    def _change_models(self) -> None:
        """Make the changes that have no request to wait for."""
        for command in [each for each in self._changes if not self._loop.uses(each.model)]:
            self._changes.remove(command)
            command.change()
            command.done.set_result(None)

    def _publish_views(self) -> None:
        started_s = time.thread_time()  # CPU time, which excludes time when other processes had the core
        if views := self._live_view.views(time.monotonic(), time.time()):
            for view in views:
                self._sender.outbox.put(view)
            self._live_view.record_cost(time.thread_time() - started_s)

    def stop(self) -> None:
        """Make `run` return after the current iteration; safe in a signal handler."""
        self._receiver.commands.put(None)

    def _is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self._loop.scheduler.num_running == self._loop.scheduler.num_waiting == 0

    def _publish_load(self, now: float) -> None:
        """Send the clients the load if it has changed."""
        scheduler, last_load = self._loop.scheduler, self._last_load[1]
        load = EngineLoad(
            scheduler.backlog_s,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_slots,
            self._loaded_models.shape_costs(),
            self._loaded_models.precisions(),
            self._loaded_models.call_choices(),
        )
        if load != last_load:
            self._last_load = now, load
            self._receiver.loads.publish(load)
            self._metrics.on_precisions(load.precisions)
            self._metrics.on_call_choices(load.call_choices)

    def _process_commands(self) -> bool:
        """Process all queued commands; wait for one if there is nothing to do. False once `stop` was called."""
        with self._lock:
            wait_s = self._wait_s(now := time.monotonic())
            timeout_s = _MAX_WAIT_S if wait_s is None else min(wait_s, _MAX_WAIT_S)
            self._wakes_at = now + timeout_s
        waits = timeout_s > 0.0
        while True:
            try:
                command = self._receiver.commands.get(waits, timeout_s)
            except queue.Empty:
                return True
            waits = False
            if command is None:
                return False
            with self._lock:
                self._process(command)

    def _process(self, command: Command) -> None:
        match command:
            case SubmitCommand():
                self._submit(command)
            case CancelCommand(client, attempt_id):
                self._cancel(client, attempt_id)
            case SubscribeCommand(client, view_request):
                self._live_view.subscribe(client, view_request)
            case ChangeModelCommand():
                self._changes.append(command)

    def _submit(self, command: SubmitCommand) -> None:
        attempt_id = command.prepared.request.attempt_id
        if attempt_id in self._client_by_attempt:
            text = f"attempt_id is {attempt_id!r}, which is in use by another request; use another id"
            self._channel.send(command.client, Failed(attempt_id, InvalidField.code, text, "attempt_id"))
            return
        self._client_by_attempt[attempt_id] = command.client
        self._loop.submit(command.prepared, command.arrived, command.resumption)

    def _cancel(self, client: ClientId, attempt_id: str | None) -> None:
        """Cancel a request of `client`, or (None) all of them and its subscription to views."""
        if attempt_id is None:
            self._live_view.unsubscribe(client)
        for cancelled_id in [
            held_id
            for held_id, owner in self._client_by_attempt.items()
            if owner == client and attempt_id in (None, held_id)
        ]:
            self._loop.cancel(cancelled_id)

    def _on_event(self, event: EngineEvent[Any]) -> None:
        attempt_id = event.prepared.request.attempt_id
        self._send(self._client_by_attempt[attempt_id], event)
        self._metrics.on_event(event)
        self._live_view.on_event(event, time.monotonic())
        if isinstance(event, _ENDS):
            del self._client_by_attempt[attempt_id]
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s has ended", attempt_id, extra=_end_log_fields(event))

    def _send(self, client: ClientId, event: EngineEvent[Any]) -> None:
        self._sender.outbox.put((client, event))


def _end_log_fields(ended: RequestEnded[Any] | RequestHandedOver[Any]) -> dict[str, dict[str, object]]:
    request = ended.prepared.request
    return fields(
        event="request_ended",
        request_id=request.request_id,
        attempt_id=request.attempt_id,
        key=request.client or None,
        finish_reason=ended.event.finish_reason.value if isinstance(ended, RequestEnded) else MOVED,
    )
