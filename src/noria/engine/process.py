"""The engine process: `python -m noria.engine.process JSON`, started by the supervisor; JSON is an `EngineTask`.

Its threads communicate by queues. The *transport* reads and writes frames, the *receiver* answers clients, the
*compiler* compiles new samplers, the *loop* (the main thread) drives the device, the *sender* waits for pixels and
sends them, and the *mounter* loads more models. The channel is open while the models are loading.
"""

import abc
import faulthandler
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import setproctitle
from opentelemetry.trace import Tracer

from noria.config import EngineConfig
from noria.engine.batch_loop import BatchLoop
from noria.engine.crash_journal import CrashJournal
from noria.engine.engine_metrics import EngineMetrics
from noria.engine.live.batch_publisher import BatchLiveView
from noria.engine.live.publisher import LiveViewPublisher
from noria.engine.loop import EngineEvent, EngineLoop, RequestEnded, RequestLoop
from noria.engine.mounting import ModelMounter
from noria.engine.priority import add_niceness
from noria.engine.receiver import CancelCommand, ChangeModelCommand, RequestReceiver, SubmitCommand, SubscribeCommand
from noria.engine.request_spans import StageSpans
from noria.engine.runtime import AnyRuntime, BatchRuntime, FinishedBatch, Runtime, load_runtime
from noria.engine.sender import EndedItem, ResponseSender
from noria.engine.watchdog import HangWatchdog
from noria.errors import InvalidField, SetupError
from noria.observe.logs.setup import fields, logging_here
from noria.observe.metrics import declarations
from noria.observe.traces.setup import open_tracer
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import EngineLoad, ExitCause, Failed
from noria.protocol.process_signals import die_with_parent
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import BatchPlan, IterationPlan

_log = logging.getLogger("noria.engine")
_LOAD_INTERVAL_S = 0.5


class EngineTask(msgspec.Struct, frozen=True):
    """The configuration of an engine process; the supervisor passes it on the command line."""

    config: EngineConfig
    models: tuple[AnyModelSpec, ...]  # the default model first
    device: str
    address: str
    name: str
    crash_journal: str  # path of the file that lists the requests in flight; it survives the process
    log_level: str = "info"
    traces_endpoint: str = ""
    parent_pid: int | None = None  # the engine is killed when this process ends
    previous_exit: ExitCause = "none"  # how the previous process of this engine ended
    niceness: int = 0  # added to the process's on a CPU, once the models are loaded


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
        self._metrics = EngineMetrics(name, runtime.executor, num_slots)
        self._mounter = ModelMounter(receiver, runtime, lambda *item: self._sender.outbox.put(item))
        self._changes: list[ChangeModelCommand] = []  # that wait for the last requests of their models

    @abc.abstractmethod
    def _wait_s(self, now: float) -> float | None:
        """Return how long to wait for a command: 0 if there is work to do, None without limit."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Do the work that can be done now."""

    def _on_batch(self, batch: FinishedBatch) -> None:
        """Commit a batch that a session has executed."""
        raise AssertionError(f"no session executed {batch}")

    def run(self) -> None:
        """Serve until `stop`."""
        self._sender.start()
        self._mounter.start()
        while self._process_commands():
            # Here, because subscribers ask for the next view while an iteration runs.
            self._publish_views()
            self._advance()
            self._change_models()
        self._mounter.stop()
        self._sender.outbox.put(None)
        self._sender.join(timeout=5)

    def _change_models(self) -> None:
        """Make the changes that have no request to wait for."""
        for command in [each for each in self._changes if not self._loop.uses(each.model)]:
            self._changes.remove(command)
            command.change()
            command.done.set_result(None)

    def _publish_views(self) -> None:
        """Send the views that are due."""
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
        )
        if load != last_load:
            self._last_load = now, load
            self._receiver.publish_load(load)

    def _process_commands(self) -> bool:
        """Process all queued commands; wait for one if there is nothing to do. False once `stop` was called."""
        timeout_s = self._wait_s(time.monotonic())
        waits = timeout_s is None or timeout_s > 0.0
        while True:
            try:
                command = self._receiver.commands.get(waits, timeout_s)
            except queue.Empty:
                return True
            waits = False
            match command:
                case None:
                    return False
                case SubmitCommand():
                    self._submit(command)
                case CancelCommand(client, attempt_id):
                    self._cancel(client, attempt_id)
                case SubscribeCommand(client, view_request):
                    self._live_view.subscribe(client, view_request)
                case ChangeModelCommand():
                    self._changes.append(command)
                case FinishedBatch():
                    self._on_batch(command)

    def _submit(self, command: SubmitCommand) -> None:
        attempt_id = command.prepared.request.attempt_id
        if attempt_id in self._client_by_attempt:
            text = f"attempt_id is {attempt_id!r}, which is in use by another request; use another id"
            self._channel.send(command.client, Failed(attempt_id, InvalidField.code, text, "attempt_id"))
            return
        self._client_by_attempt[attempt_id] = command.client
        self._loop.submit(command.prepared, command.arrived)

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
        if isinstance(event, RequestEnded):
            del self._client_by_attempt[attempt_id]
            _log.debug("%s has ended", attempt_id, extra=_end_log_fields(event))

    def _send(self, client: ClientId, event: EngineEvent[Any]) -> None:
        self._sender.outbox.put((client, event))


class Engine(BaseEngine):
    """An engine whose loop executes iterations itself."""

    def __init__(
        self,
        name: str,
        channel: EngineChannel,
        receiver: RequestReceiver,
        runtime: Runtime[Any],
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        super().__init__(name, channel, receiver, runtime, tracer)
        scheduler = runtime.scheduler
        self._loop: EngineLoop[Any] = EngineLoop(
            scheduler, runtime.executor, self._on_event, time.monotonic, self._on_plan
        )
        self._live_view = LiveViewPublisher(receiver.incarnation, scheduler, self._loop.find_request, time.monotonic())

    def _wait_s(self, now: float) -> float | None:
        return self._live_view.wait_s(now) if self._is_idle() else 0.0

    def _advance(self) -> None:
        with self._receiver.watchdog.loop:
            iteration = self._loop.run_iteration()
        if iteration is not None:
            self._metrics.on_iteration(iteration)
            self._live_view.on_iteration(iteration, time.monotonic(), time.time())
        self._metrics.update_occupancy(self._loop.scheduler)
        if is_idle := self._is_idle():
            self._loaded_models.on_idle()
        now = time.monotonic()  # at most twice a second, and whenever the engine becomes idle
        if is_idle or now - self._last_load[0] >= _LOAD_INTERVAL_S:
            self._publish_load(now)

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
            scheduler, runtime.executor, self._on_event, time.monotonic, self._on_plan, receiver.commands.put
        )
        self._live_view: BatchLiveView[ClientId] = BatchLiveView(
            receiver.incarnation, scheduler, runtime.num_sessions, self._loop.find_request, time.monotonic()
        )
        self._session_timers = receiver.watchdog.add_sessions(runtime.num_sessions)
        self._in_flight: dict[int, set[str]] = {}  # by session
        self._next_report_s = -math.inf
        self._ended: list[EndedItem] | None = None  # by the batch that is being committed; None: none is

    def _wait_s(self, now: float) -> float | None:
        report_s = None if self._is_reported() else max(self._next_report_s - now, 0.0)
        waits_s = (self._loop.wait_s(now), self._live_view.wait_s(now), report_s)
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _advance(self) -> None:
        with self._receiver.watchdog.loop:
            self._loop.start_batches()
        if (now := time.monotonic()) >= self._next_report_s:
            self._next_report_s = now + _LOAD_INTERVAL_S
            self._metrics.update_occupancy(self._loop.scheduler)
            self._publish_load(now)

    def _is_reported(self) -> bool:
        """Whether clients and metrics know that the engine is idle; while it works, they are told at intervals."""
        load = self._last_load[1]
        return load is not None and load.num_running + load.num_waiting == 0 and self._is_idle()

    def _on_plan(self, plan: BatchPlan) -> None:
        self._in_flight[plan.session] = {row.attempt_id for row in plan.rows}
        self._receiver.crash_journal.record_in_flight(set().union(*self._in_flight.values()))
        self._session_timers[plan.session].start()

    def _send(self, client: ClientId, event: EngineEvent[Any]) -> None:
        """Send the ends of a batch's requests together."""
        if self._ended is not None and isinstance(event, RequestEnded):
            self._ended.append((client, event))
        else:
            super()._send(client, event)

    def _on_batch(self, batch: FinishedBatch) -> None:
        self._session_timers[batch.plan.session].stop()
        del self._in_flight[batch.plan.session]
        ended: list[EndedItem] = []
        self._ended = ended
        executed = self._loop.finish(batch)
        self._ended = None
        if ended:
            self._sender.outbox.put(ended)
        self._metrics.on_batch(executed, self._num_sessions)
        self._live_view.on_batch(executed, time.monotonic(), time.time())


def _end_log_fields(ended: RequestEnded[Any]) -> dict[str, dict[str, object]]:
    request = ended.prepared.request
    return fields(
        event="request_ended",
        request_id=request.request_id,
        attempt_id=request.attempt_id,
        key=request.client or None,
        finish_reason=ended.event.finish_reason.value,
    )


def main(task: EngineTask) -> int:
    """Load and warm up the models, announce it, and run until SIGTERM. Returns the exit status."""
    die_with_parent(signal.SIGKILL, task.parent_pid)
    setproctitle.setproctitle(f"noria engine {task.name}")
    threading.excepthook = _end_process
    declarations.ENGINE_STARTS.labels(task.name, task.previous_exit).inc()
    channel = EngineChannel(task.address)
    watchdog = HangWatchdog(task.config.hang_timeout_s, time.monotonic)
    crash_journal = CrashJournal(task.crash_journal)
    # Front ends decide which requests are sampled.
    tracer, close_tracer = open_tracer(task.traces_endpoint, 1.0, task.name)
    receiver = RequestReceiver(
        channel,
        task.models,
        task.device,
        watchdog=watchdog,
        crash_journal=crash_journal,
        previous_exit=task.previous_exit,
        tracer=tracer,
    )
    receiver.start()
    try:
        runtime = load_runtime(task.models, task.config, task.device)
    except SetupError as error:
        _log.error("%s", error.message)
        return error.exit_status
    if runtime.device == "cpu" and task.niceness:
        add_niceness(task.niceness)
    watchdog.expect_iteration(runtime.longest_iteration_s)
    engine: BaseEngine
    if isinstance(runtime, BatchRuntime):
        engine = BatchEngine(task.name, channel, receiver, runtime, tracer)
    else:
        engine = Engine(task.name, channel, receiver, runtime, tracer)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when an engine stops
    receiver.set_ready(runtime)
    _log.info(
        "%s ready: %s on %s, %s",
        task.name,
        ", ".join(spec.name for spec in task.models),
        runtime.device,
        ", ".join(f"{name} {value}" for name, value in runtime.resolved_settings.items()),
        extra=fields(
            event="models_ready",
            models=[spec.name for spec in task.models],
            device=runtime.device,
            **runtime.resolved_settings,
            previous_exit=task.previous_exit,
        ),
    )
    engine.run()
    runtime.save_costs()
    channel.close()
    close_tracer()
    return 0


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """End the process when a thread fails, because requests would stay unanswered; the supervisor restarts it."""
    name = fault.thread and fault.thread.name
    log_fields = fields(event="thread_failed", thread=name)
    _log.critical("the %s thread failed; the engine ends", name, exc_info=fault.exc_value, extra=log_fields)
    logging.shutdown()  # flush that line, even if the supervisor reads slowly
    os._exit(1)


if __name__ == "__main__":
    task = msgspec.json.decode(sys.argv[1], type=EngineTask)
    faulthandler.enable()  # print the stack when a native library crashes
    with logging_here(task.name, task.log_level):
        status = main(task)
    os._exit(status)  # skips the interpreter's shutdown, which takes two seconds with torch; nothing is left to save
