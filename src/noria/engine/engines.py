"""An engine around its loop: takes commands from the receiver, passes results and views to the sender.

`StepEngine` executes the iterations of one running batch of images on the engine's own thread. The loop of
`BatchEngine`, of texts, has no thread of its own, so that a request changes threads only once: the channel's thread
accepts what has arrived and plans the batch, and the session that executes it commits it, takes the next one and sends
the answers. The engine's own thread does what is due at a time, and what is rare.
"""

import abc
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from opentelemetry.trace import Tracer

from noria.engine.commands import (
    CancelCommand,
    ChangeModelCommand,
    Command,
    ReleaseCommand,
    SubmitCommand,
    SubscribeCommand,
    WakeCommand,
)
from noria.engine.live.batch_publisher import BatchLiveView
from noria.engine.live.publisher import LiveViewPublisher
from noria.engine.live.step_publisher import StepLiveView
from noria.engine.loop import BatchLoop, EngineEvent, RequestEnded, RequestHandedOver, RequestLoop, StepLoop
from noria.engine.monitoring.engine_metrics import EngineMetrics
from noria.engine.monitoring.request_spans import StageSpans
from noria.engine.mounting import ModelMounter
from noria.engine.receiver import RequestReceiver
from noria.engine.runtime import AnyRuntime, BatchRuntime, FinishedBatch, StepRuntime
from noria.engine.sender import MOVED, EndedItem, ResponseSender
from noria.errors import InvalidField
from noria.observe.logs.log_record import fields
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.messages import EngineLoad, Failed
from noria.protocol.model_spec import ModelKey
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import BatchPlan, IterationPlan

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


class StepEngine(BaseEngine):
    """An engine whose loop executes iterations itself."""

    def __init__(
        self,
        name: str,
        channel: EngineChannel,
        receiver: RequestReceiver,
        runtime: StepRuntime[Any],
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        super().__init__(name, channel, receiver, runtime, tracer)
        scheduler = runtime.scheduler
        self._loop: StepLoop[Any] = StepLoop(scheduler, runtime.executor, self._on_event, time.monotonic, self._on_plan)
        self._live_view: StepLiveView[ClientId] = StepLiveView(
            receiver.incarnation, scheduler, self._loop.find_request, time.monotonic(), runtime.slots_source
        )

    def _wait_s(self, now: float) -> float | None:
        return self._live_view.wait_s(now) if self._is_idle() else 0.0

    def _advance(self) -> None:
        if (now := time.monotonic()) - self._last_load[0] >= LOAD_INTERVAL_S:
            # Before the iteration: what arrives during it is not in the load, and clients forget what they have sent
            # before a load.
            self._publish_load(now)
        with self._receiver.watchdog.loop:
            iteration = self._loop.run_iteration()
        if iteration is not None:
            self._metrics.on_iteration(iteration)
            self._live_view.on_iteration(iteration, time.monotonic(), time.time())
        self._metrics.update_occupancy(self._loop.scheduler)
        self._metrics.update_evicted(self._loop.scheduler.num_evicted)
        if self._is_idle():
            self._loaded_models.on_idle()
            self._publish_load(time.monotonic())

    def _process(self, command: Command) -> None:
        if isinstance(command, ReleaseCommand):
            if self._client_by_attempt.get(command.attempt_id) == command.client:
                self._loop.hand_over(command.attempt_id)
        else:
            super()._process(command)

    def _stop_serving(self) -> set[ClientId]:
        clients = super()._stop_serving()
        for attempt_id in list(self._client_by_attempt):
            self._loop.hand_over(attempt_id)
        return clients

    def _on_plan(self, plan: IterationPlan) -> bool:
        images = [assignment.image for assignment in (*plan.joins, *plan.decodes)] + [step.image for step in plan.steps]
        self._receiver.crash_journal.record_iteration({image.attempt_id for image in images})
        return self._live_view.on_plan(plan, time.monotonic())


class BatchEngine(BaseEngine):
    """An engine whose sessions execute batches beside the loop."""

    def __init__(
        self,
        name: str,
        channel: EngineChannel,
        receiver: RequestReceiver,
        runtime: BatchRuntime[Any],
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        super().__init__(name, channel, receiver, runtime, tracer)
        scheduler, self._num_sessions = runtime.scheduler, runtime.num_sessions
        self._loop: BatchLoop[Any] = BatchLoop(
            scheduler, runtime.executor, self._on_event, time.monotonic, self._on_plan, self._on_batch
        )
        self._live_view: BatchLiveView[ClientId] = BatchLiveView(
            receiver.incarnation, scheduler, runtime.num_sessions, self._loop.find_request, time.monotonic()
        )
        self._session_timers = receiver.watchdog.add_sessions(runtime.num_sessions)
        self._in_flight: dict[int, set[str]] = {}  # by session
        self._next_report_s = -math.inf
        self._ended: list[EndedItem] = []  # that are not answered yet
        receiver.on_accepted, receiver.on_forgotten = self._submit_all, self._forget

    def _wait_s(self, now: float) -> float | None:
        report_s = None if self._is_reported() else max(self._next_report_s - now, 0.0)
        waits_s = (self._loop.wait_s(now), self._live_view.wait_s(now), report_s)
        return min([wait_s for wait_s in waits_s if wait_s is not None], default=None)

    def _advance(self) -> None:
        self._change(lambda: None)

    def _submit_all(self, commands: list[SubmitCommand]) -> None:
        """Accept requests; on the channel's thread."""
        self._change(lambda: list(map(self._submit, commands)))

    def _forget(self, client: ClientId) -> None:
        """Cancel the requests of a client; on the thread that finds that it has left."""
        self._change(lambda: self._cancel(client, None))

    def _change(self, change: Callable[[], object]) -> None:
        """Change the loop, on any thread; then start what can start, and answer what has ended."""
        with self._lock:
            change()
            with self._receiver.watchdog.loop:
                self._loop.start_batches()
            if (now := time.monotonic()) >= self._next_report_s:
                self._next_report_s = now + LOAD_INTERVAL_S
                self._metrics.update_occupancy(self._loop.scheduler)
                self._publish_load(now)
            wait_s = self._wait_s(now)
            if wait_s is not None and now + wait_s < self._wakes_at:
                self._wakes_at = now + wait_s
                self._receiver.commands.put(WakeCommand())
            ended, self._ended = self._ended, []
        if ended:
            self._sender.send_ends(ended)

    def _is_reported(self) -> bool:
        """Whether the engine is idle and clients and metrics have it; a busy engine reports at intervals."""
        load = self._last_load[1]
        return load is not None and load.num_running + load.num_waiting == 0 and self._is_idle()

    def _on_plan(self, plan: BatchPlan) -> None:
        self._in_flight[plan.session] = {row.attempt_id for row in plan.rows}
        self._receiver.crash_journal.record_in_flight(set().union(*self._in_flight.values()))
        self._session_timers[plan.session].start()

    def _send(self, client: ClientId, event: EngineEvent[Any]) -> None:
        """Answer together what ends together."""
        if isinstance(event, RequestEnded):
            self._ended.append((client, event))
        else:
            super()._send(client, event)

    def _on_batch(self, batch: FinishedBatch) -> None:
        """Commit a batch; on its session's thread."""
        self._change(lambda: self._commit(batch))

    def _commit(self, batch: FinishedBatch) -> None:
        self._session_timers[batch.plan.session].stop()
        del self._in_flight[batch.plan.session]
        executed = self._loop.finish(batch)
        self._metrics.on_batch(executed, self._num_sessions)
        self._live_view.on_batch(executed, time.monotonic(), time.time())
