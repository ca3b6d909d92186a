"""The engine process: `python -m noria.engine.process JSON`, started by the supervisor; JSON is an `EngineTask`.

Threads, each doing one thing: the *channel* moves frames (`channel.py`), the *desk* answers peers, the *compiler* makes samplers that
are new, the *wheel* (the main thread) drives the device, the *delivery* waits for pixels and sends them. They share queues. The
channel is open from the first moment; the model is loaded behind it.
"""

import faulthandler
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import setproctitle

from noria.channel import EngineChannel, Peer
from noria.config import EngineConfig
from noria.engine.delivery import Delivery
from noria.engine.desk import Arrival, Departure, Desk, Watching
from noria.engine.executor import Executor
from noria.engine.gauges import Gauges
from noria.engine.loading import load_fleet, measured_costs
from noria.engine.loop import Ended, Happening, Wheel
from noria.engine.manifest import Manifest
from noria.engine.showing import Showing
from noria.engine.spans import StageSpans
from noria.engine.watch import Watch
from noria.errors import InvalidField, SetupError
from noria.messages import Failed, Load, PreviousEnd, ShapeCosts
from noria.observe import metrics
from noria.observe.collector import open_tracer
from noria.observe.logs import fields, logging_here
from noria.observe.process import die_with_parent
from noria.observe.traces import NO_TRACER, Tracer
from noria.request import request_id_of
from noria.scheduling.costs import CostModel
from noria.scheduling.plans import Plan
from noria.scheduling.policies import POLICIES
from noria.scheduling.steps import StepScheduler
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages

_log = logging.getLogger("noria.engine")
_BETWEEN_LOADS_S = 0.5


class EngineTask(msgspec.Struct, frozen=True):
    """What the supervisor gives an engine."""

    config: EngineConfig
    models: tuple[ModelSpec, ...]  # the default one first
    device: str
    address: str
    name: str
    manifest: str  # a file that outlives the engine: who is aboard
    log_level: str = "info"
    traces_endpoint: str = ""
    parent_pid: int | None = None  # the engine does not outlive it
    previous_end: PreviousEnd = "none"  # of the life before this one


def shape_costs(costs: CostModel) -> tuple[ShapeCosts, ...]:
    """What a cost model knows, as peers are told of it."""
    return tuple(
        ShapeCosts(
            model=shape.model,
            width_px=shape.width_px,
            height_px=shape.height_px,
            step_s={rows: round(costs.step_s(shape, rows), 6) for rows in sorted(curve.points)},
            decode_s={n: round(costs.decode_s(shape, n), 6) for n in sorted(costs.decodes[shape].points)}
            if shape in costs.decodes
            else {},
            encode_s=round(costs.prompt_s(shape.model), 6),
            most_rows=costs.rows_limit(shape),
        )
        for shape, curve in costs.steps.items()
    )


class Engine:
    """The wheel on the calling thread, fed by a desk, emptied by a delivery."""

    def __init__(
        self,
        name: str,
        channel: EngineChannel,
        desk: Desk,
        executor: "Executor[PreparedImages]",
        scheduler: StepScheduler,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        spans = StageSpans(tracer, scheduler.num_slots)
        self._channel, self._desk, self._delivery = channel, desk, Delivery(channel, desk, spans)
        self._peers: dict[str, Peer] = {}
        self._wheel: Wheel[PreparedImages] = Wheel(scheduler, executor, self._deliver, time.monotonic, self._about_to)
        self._told_load: tuple[float, Load | None] = (-math.inf, None)
        self._gauges = Gauges(name, executor, scheduler.num_slots)
        self._showing: Showing[Peer] = Showing(desk.incarnation, scheduler, self._wheel.request, time.monotonic())

    def run(self) -> None:
        """Turn until `stop`."""
        self._delivery.start()
        while self._take_arrivals():
            self._show()  # after the turn: who was shown the last one has asked for the next while this one lasted
            with self._desk.watch.wheel:
                turn = self._wheel.turn()
            if turn is not None:
                self._gauges.turned(turn)
                self._showing.turned(turn, time.monotonic(), time.time())
            self._gauges.stands(self._wheel.scheduler)
            self._tell_load()
        self._delivery.parcels.put(None)
        self._delivery.join(timeout=5)

    def _show(self) -> None:
        """Answer those who follow, as far as it is due."""
        began = time.thread_time()  # not counting when other processes had the core
        if views := self._showing.views(time.monotonic(), time.time()):
            for view in views:
                self._delivery.parcels.put(view)
            self._showing.took(time.thread_time() - began)

    def stop(self) -> None:
        """Make `run` return after the turn in progress; safe in a signal handler."""
        self._desk.arrivals.put(None)

    def _tell_load(self) -> None:
        """Tell the peers how busy it is: twice a second at most, and once when there is nothing left to do."""
        scheduler, (told_s, told) = self._wheel.scheduler, self._told_load
        idle, now = scheduler.num_seated == scheduler.num_waiting == 0, time.monotonic()
        if now - told_s < _BETWEEN_LOADS_S and not idle:
            return
        if idle:
            scheduler.costs.settle()  # nobody is under way whose batch would change
        load = Load(
            scheduler.drain_s,
            scheduler.num_seated,
            scheduler.num_waiting,
            scheduler.num_slots,
            shape_costs(scheduler.costs),
        )
        if load != told:
            self._told_load = now, load
            self._desk.tell_load(load)

    def _take_arrivals(self) -> bool:
        """Everything that has come in; when the wheel is empty, waits for something, or until there is something to show.

        False once `stop` was called.
        """
        idle = self._wheel.scheduler.num_seated == 0 and self._wheel.scheduler.num_waiting == 0
        patience_s = self._showing.wait_s(time.monotonic()) if idle else None
        while True:
            try:
                arrival = self._desk.arrivals.get(idle, patience_s)
            except queue.Empty:
                return True
            idle = False
            match arrival:
                case None:
                    return False
                case Arrival():
                    self._submit(arrival)
                case Departure(peer, request_id):
                    self._cancel(peer, request_id)
                case Watching(peer, message):
                    self._showing.follow(peer, message)

    def _submit(self, arrival: Arrival) -> None:
        request_id = arrival.prepared.request.request_id
        if request_id in self._peers:
            words = f"request_id is {request_id!r}, which is being drawn; use another"
            self._channel.send(arrival.peer, Failed(request_id, InvalidField.code, words, "request_id"))
            return
        self._peers[request_id] = arrival.peer
        self._wheel.submit(arrival.prepared, arrival.arrived)

    def _cancel(self, peer: Peer, request_id: str | None) -> None:
        """Forget a request of `peer`, or all of them: then nothing is shown to it any more, either."""
        if request_id is None:
            self._showing.leave(peer)
        for leaving in [name for name, owner in self._peers.items() if owner == peer and request_id in (None, name)]:
            self._wheel.cancel(leaving)

    def _about_to(self, plan: Plan) -> bool:
        images = [seat.image for seat in (*plan.boards, *plan.decodes)] + [step.image for step in plan.steps]
        self._desk.manifest.turn({image.request_id for image in images})
        return self._showing.about_to(plan, time.monotonic())

    def _deliver(self, event: "Happening[PreparedImages]") -> None:
        request_id = event.prepared.request.request_id
        self._delivery.parcels.put((self._peers[request_id], event))
        self._gauges.happened(event)
        self._showing.happened(event, time.monotonic())
        if isinstance(event, Ended):
            del self._peers[request_id]
            _log.debug("%s has left the wheel", request_id, extra=_said_of_end(event))


def _said_of_end(ended: "Ended[PreparedImages]") -> dict[str, dict[str, object]]:
    flight, event = ended.prepared.request.request_id, ended.event
    return fields(event="request_left", request_id=request_id_of(flight), flight=flight, end=event.end.value)


def main(task: EngineTask) -> int:
    """Load, warm up, say so, turn. Returns the exit status."""
    die_with_parent(signal.SIGKILL, task.parent_pid)
    setproctitle.setproctitle(f"noria engine {task.name}")
    threading.excepthook = _end_process
    metrics.ENGINE_STARTS.labels(task.name, task.previous_end).inc()
    channel = EngineChannel(task.address)
    watch = Watch(task.config.hang_timeout_s, time.monotonic)
    manifest = Manifest(task.manifest)
    tracer = open_tracer(task.traces_endpoint, 1.0, task.name)  # who asks has decided which requests are traced
    desk = Desk(
        channel,
        task.models,
        task.device,
        watch=watch,
        manifest=manifest,
        previous_end=task.previous_end,
        tracer=tracer,
    )
    desk.start()
    try:
        fleet, config = load_fleet(task.models, task.config, task.device)
        costs, kept = measured_costs(fleet, task.models, config)
        watch.expect(costs.longest_s)
    except SetupError as error:
        _log.error("%s", error.message)
        return error.exit_status
    assert isinstance(config.slots, int)
    scheduler = StepScheduler(
        config.slots,
        config.decode_batch,
        config.queue_limit,
        config.queue_limit_s,
        POLICIES[config.policy],
        costs,
    )
    engine = Engine(task.name, channel, desk, fleet, scheduler, tracer)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when an engine stops
    desk.open(fleet, fleet.device, config.slots + config.queue_limit)
    _log.info(
        "%s ready: %s on %s, %s, %s slots, %s threads",
        task.name,
        ", ".join(spec.name for spec in task.models),
        fleet.device,
        config.dtype,
        config.slots,
        config.threads,
        extra=fields(
            event="models_ready",
            models=[spec.name for spec in task.models],
            device=str(fleet.device),
            dtype=config.dtype,
            slots=config.slots,
            threads=config.threads,
            previous_end=task.previous_end,
        ),
    )
    engine.run()
    for file in kept:
        file.save(costs)
    channel.close()
    tracer.close()
    return 0


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """A thread that ends leaves requests unanswered for ever: the whole engine ends instead, and the supervisor starts another."""
    name = fault.thread and fault.thread.name
    said = fields(event="thread_failed", thread=name)
    _log.critical("the %s thread failed; the engine ends", name, exc_info=fault.exc_value, extra=said)
    logging.shutdown()  # has that line written, though the supervisor may be slow to read
    os._exit(1)


if __name__ == "__main__":
    task = msgspec.json.decode(sys.argv[1], type=EngineTask)
    faulthandler.enable()  # a library's crash tells where it was
    with logging_here(task.name, task.log_level):
        status = main(task)
    os._exit(status)  # taking torch apart takes the interpreter two seconds, and there is nothing left to save
