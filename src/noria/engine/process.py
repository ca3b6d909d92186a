"""The engine process: `python -m noria.engine.process JSON`, started by the supervisor; JSON is an `EngineTask`.

Threads, each doing one thing: the *channel* moves frames (`channel.py`), the *desk* answers peers, the *compiler* makes samplers that
are new, the *wheel* (the main thread) drives the device, the *delivery* waits for pixels and sends them. They share queues. The
channel is open from the first moment; the model is loaded behind it.
"""

import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import setproctitle

from noria.channel import EngineChannel, Peer
from noria.config import EngineConfig
from noria.engine.executor import Executor
from noria.engine.loading import load_executor, measured_costs
from noria.engine.loop import Ended, Happening, ImageReady, Moved, PreviewReady, Turn, Wheel
from noria.engine.manifest import Manifest
from noria.engine.watch import Watch
from noria.errors import DeadlineUnmeetable, InvalidField, NoriaError, QueueFull, RequestError, SetupError
from noria.messages import (
    Cancel,
    EngineState,
    Failed,
    Finished,
    Hello,
    ImageDone,
    Load,
    Ping,
    Pong,
    Preview,
    PreviousEnd,
    Progress,
    ShapeCosts,
    Submit,
    Timings,
)
from noria.observe import metrics
from noria.observe.process import die_with_parent
from noria.request import ImageRequest
from noria.scheduling.costs import CostModel
from noria.scheduling.plans import End, Plan
from noria.scheduling.policies import POLICIES
from noria.scheduling.steps import StepScheduler
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages

_log = logging.getLogger("noria.engine")
_CODES = {
    End.FAILED: "generation_failed",
    End.CANCELLED: "cancelled",
    End.EXPIRED: "deadline_exceeded",
    End.REFUSED: QueueFull.code,
    End.UNMEETABLE: DeadlineUnmeetable.code,
}


_BETWEEN_LOADS_S = 0.5


class EngineTask(msgspec.Struct, frozen=True):
    """What the supervisor gives an engine."""

    config: EngineConfig
    spec: ModelSpec
    device: str
    address: str
    name: str
    manifest: str  # a file that outlives the engine: who is aboard
    log_level: str = "info"
    parent_pid: int | None = None  # the engine does not outlive it
    previous_end: PreviousEnd = "none"  # of the life before this one


@dataclass(frozen=True)
class _Arrival:
    """A request with its sampler compiled, and who asked."""

    peer: Peer
    prepared: "PreparedImages"
    arrived: float  # monotonic seconds, when its frame was read


@dataclass(frozen=True)
class _Departure:
    peer: Peer
    request_id: str


class Desk(threading.Thread):
    """Answers peers. Requests pass on to the wheel once prepared; what cannot be drawn never gets there.

    A sampler that is new takes up to a second to compile, so that is done aside, one at a time: who needs a known one passes.
    """

    def __init__(
        self,
        channel: EngineChannel,
        spec: ModelSpec,
        device: str,
        *,
        watch: Watch,
        manifest: Manifest,
        previous_end: PreviousEnd = "none",
    ) -> None:
        super().__init__(name="desk", daemon=True)
        self.watch, self.manifest = watch, manifest
        self.arrivals: queue.SimpleQueue[_Arrival | _Departure | None] = queue.SimpleQueue()
        self._channel, self._spec, self._device = channel, spec, device
        self._previous_end: PreviousEnd = previous_end
        self._incarnation = uuid.uuid4().hex
        self._executor: Executor[PreparedImages] | None = None
        self._most_images = 0
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._peers: set[Peer] = set()
        self._preparing: set[tuple[Peer, str]] = set()
        self._lock = threading.Lock()  # over what two threads change: the executor, the peers, who is being prepared

    def open(self, executor: "Executor[PreparedImages]", device: str, most_images: int) -> None:
        """The model is warm: tell every peer. A request for more than `most_images` could never be taken."""
        with self._lock:
            self._executor, self._device, self._most_images = executor, device, most_images
            for peer in self._peers:
                self._channel.send(peer, self._state())

    def tell_all(self, message: Load) -> None:
        """Send `message` to every peer."""
        with self._lock:
            for peer in self._peers:
                self._channel.send(peer, message)

    def run(self) -> None:
        """Serve the channel's inbox for as long as the process lives."""
        while True:
            peer, message = self._channel.inbox.get()
            match message:
                case Hello():
                    with self._lock:
                        self._peers.add(peer)
                        self._channel.send(peer, self._state())
                case Submit(request):
                    self._submit(peer, request)
                case Cancel(request_id):
                    self._cancel(peer, request_id)
                case Ping():
                    self._channel.send(peer, Pong(self._incarnation, self.watch.stuck_s, self.watch.limit_s))

    def _state(self) -> EngineState:
        ready = self._executor is not None
        return EngineState(
            self._incarnation,
            "ready" if ready else "loading",
            (self._spec,) if ready else (),
            self._device,
            self._previous_end,
            self.manifest.before,
        )

    def _submit(self, peer: Peer, request: ImageRequest) -> None:
        executor, arrived = self._executor, time.monotonic()
        if executor is None:
            self._channel.send(
                peer, Failed(request.request_id, "engine_unavailable", "the model is still loading", retry_after_s=2.0)
            )
            return
        if request.num_images > self._most_images:
            words = f"n is {request.num_images}; this server's slots and queue hold {self._most_images} images at most"
            self._channel.send(peer, Failed(request.request_id, InvalidField.code, words, "n"))
            return
        with self._lock:
            self._preparing.add((peer, request.request_id))
        if executor.is_prompt(request):
            self._prepare(executor, peer, request, arrived)
        else:
            self._compiler.submit(self._prepare, executor, peer, request, arrived)

    def _prepare(self, executor: "Executor[PreparedImages]", peer: Peer, request: ImageRequest, arrived: float) -> None:
        failed = prepared = None
        try:
            with self.manifest.preparing(request.request_id):
                prepared = executor.prepare(request)
        except RequestError as error:
            failed = Failed(request.request_id, error.code, error.message, error.field)
        except Exception:
            _log.exception("request %s cannot be prepared", request.request_id)
            failed = Failed(request.request_id, "generation_failed", "the request could not be prepared")
        with self._lock:
            if (peer, request.request_id) not in self._preparing:
                return  # cancelled meanwhile, and told so
            self._preparing.discard((peer, request.request_id))
            if prepared is not None:
                self.arrivals.put(_Arrival(peer, prepared, arrived))
        if failed is not None:
            self._channel.send(peer, failed)

    def _cancel(self, peer: Peer, request_id: str) -> None:
        with self._lock:
            if (peer, request_id) not in self._preparing:
                self.arrivals.put(_Departure(peer, request_id))
                return
            self._preparing.discard((peer, request_id))
        self._channel.send(peer, Failed(request_id, "cancelled", "cancelled by the caller"))


class Delivery(threading.Thread):
    """Sends what the wheel hands over, in order, waiting for the device's copies where need be."""

    def __init__(self, channel: EngineChannel, desk: Desk) -> None:
        super().__init__(name="delivery", daemon=True)
        self._arrivals, self._busy = desk.arrivals, desk.watch.delivery
        self.parcels: queue.SimpleQueue[tuple[Peer, Happening[PreparedImages]] | None] = queue.SimpleQueue()
        self._channel = channel
        self._failed: set[str] = set()  # requests whose failure was told before their end

    def run(self) -> None:
        """Deliver until a None comes."""
        while (parcel := self.parcels.get()) is not None:
            peer, event = parcel
            with self._busy:
                match event:
                    case Moved():
                        self._channel.send(peer, _progress(event))
                    case PreviewReady():
                        self._preview(peer, event)
                    case ImageReady():
                        self._image(peer, event)
                    case Ended():
                        self._end(peer, event)

    def _preview(self, peer: Peer, ready: "PreviewReady[PreparedImages]") -> None:
        shown = ready.preview
        message = Preview(shown.image.request_id, shown.image.index, shown.call, shown.width_px, shown.height_px)
        self._channel.send(peer, message, shown.pixels.rgb())

    def _image(self, peer: Peer, ready: "ImageReady[PreparedImages]") -> None:
        request = ready.prepared.request
        if request.request_id in self._failed:
            return
        try:
            rgb = ready.pixels.rgb()
        except NoriaError as error:
            self._failed.add(request.request_id)
            self._channel.send(peer, Failed(request.request_id, error.code, error.message))
            self._arrivals.put(_Departure(peer, request.request_id))  # its other images need not be drawn
            return
        done = ImageDone(
            request.request_id, ready.index, request.seed + ready.index, request.width_px, request.height_px
        )
        self._channel.send(peer, done, rgb)

    def _end(self, peer: Peer, ended: "Ended[PreparedImages]") -> None:
        event = ended.event
        if event.request_id in self._failed:
            self._failed.discard(event.request_id)
            return
        if event.end is End.FINISHED:
            timings = Timings(event.times.queue_s, event.times.encode_s, event.times.denoise_s, event.times.decode_s)
            self._channel.send(peer, Finished(event.request_id, timings, ended.prepared.num_calls))
        else:
            self._channel.send(
                peer, Failed(event.request_id, _CODES[event.end], event.reason, retry_after_s=event.retry_after_s)
            )


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


def _progress(moved: "Moved[PreparedImages]") -> Progress:
    at = moved.whereabouts
    return Progress(
        request_id=moved.prepared.request.request_id,
        queue_position=at.queue_position,
        call=at.call,
        num_calls=moved.prepared.num_calls,
        start_in_s=at.start_in_s,
        finish_in_s=at.finish_in_s,
    )


class Engine:
    """The wheel on the calling thread, fed by a desk, emptied by a delivery."""

    def __init__(
        self, channel: EngineChannel, desk: Desk, executor: "Executor[PreparedImages]", scheduler: StepScheduler
    ) -> None:
        self._channel, self._desk, self._delivery = channel, desk, Delivery(channel, desk)
        self._peers: dict[str, Peer] = {}
        self._wheel: Wheel[PreparedImages] = Wheel(scheduler, executor, self._deliver, time.monotonic, self._about_to)
        self._told_load: tuple[float, Load | None] = (-math.inf, None)
        metrics.ENGINE_UP.set(1)
        metrics.SLOTS.set(scheduler.num_slots)

    def run(self) -> None:
        """Turn until `stop`."""
        self._delivery.start()
        while self._take_arrivals():
            with self._desk.watch.wheel:
                turn = self._wheel.turn()
            if turn is not None:
                self._measure(turn)
            metrics.SLOTS_USED.set(self._wheel.scheduler.num_seated)
            metrics.QUEUE_DEPTH.set(self._wheel.scheduler.num_waiting)
            self._tell_load()
        self._delivery.parcels.put(None)
        self._delivery.join(timeout=5)

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
            self._desk.tell_all(load)

    def _take_arrivals(self) -> bool:
        """Everything that has come in; waits for something when the wheel is empty. False once `stop` was called."""
        idle = self._wheel.scheduler.num_seated == 0 and self._wheel.scheduler.num_waiting == 0
        while True:
            try:
                arrival = self._desk.arrivals.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            match arrival:
                case None:
                    return False
                case _Arrival():
                    self._submit(arrival)
                case _Departure(peer, request_id):
                    if self._peers.get(request_id) == peer:
                        self._wheel.cancel(request_id)

    def _submit(self, arrival: _Arrival) -> None:
        request_id = arrival.prepared.request.request_id
        if request_id in self._peers:
            words = f"request_id is {request_id!r}, which is being drawn; use another"
            self._channel.send(arrival.peer, Failed(request_id, InvalidField.code, words, "request_id"))
            return
        self._peers[request_id] = arrival.peer
        self._wheel.submit(arrival.prepared, arrival.arrived)

    def _about_to(self, plan: Plan) -> None:
        images = [seat.image for seat in (*plan.boards, *plan.decodes)] + [step.image for step in plan.steps]
        self._desk.manifest.turn({image.request_id for image in images})

    @staticmethod
    def _measure(turn: Turn) -> None:
        metrics.TURNS.inc()
        metrics.ENGINE_BUSY_SECONDS.inc(turn.seconds)
        metrics.JOINS.inc(len(turn.plan.boards))
        metrics.DENOISE_STEPS.inc(len(turn.plan.steps))
        if turn.plan.steps:
            metrics.BATCH_SIZE.observe(len(turn.plan.steps))

    def _deliver(self, event: "Happening[PreparedImages]") -> None:
        request_id = event.prepared.request.request_id
        self._delivery.parcels.put((self._peers[request_id], event))
        if isinstance(event, ImageReady):
            metrics.LEAVES.labels("ok").inc()
        if isinstance(event, Ended):
            del self._peers[request_id]
            if event.event.num_unseated:
                metrics.LEAVES.labels(_CODES[event.event.end]).inc(event.event.num_unseated)


def main(task: EngineTask) -> int:
    """Load, warm up, say so, turn. Returns the exit status."""
    die_with_parent(signal.SIGKILL, task.parent_pid)
    setproctitle.setproctitle(f"noria engine {task.name}")
    threading.excepthook = _end_process
    channel = EngineChannel(task.address)
    watch = Watch(task.config.hang_timeout_s, time.monotonic)
    manifest = Manifest(task.manifest)
    desk = Desk(channel, task.spec, task.device, watch=watch, manifest=manifest, previous_end=task.previous_end)
    desk.start()
    try:
        executor, config = load_executor(task.spec, task.config, task.device)
        costs, kept = measured_costs(executor, task.spec, config)
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
    engine = Engine(channel, desk, executor, scheduler)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when an engine stops
    device = str(executor.model.device)
    desk.open(executor, device, config.slots + config.queue_limit)
    _log.info(
        "%s ready: %s on %s, %s, %s slots, %s threads",
        task.name,
        task.spec.name,
        device,
        config.dtype,
        config.slots,
        config.threads,
    )
    engine.run()
    kept.save(costs)
    channel.close()
    return 0


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """A thread that ends leaves requests unanswered for ever: the whole engine ends instead, and the supervisor starts another."""
    _log.critical("the %s thread failed; the engine ends", fault.thread and fault.thread.name, exc_info=fault.exc_value)
    logging.shutdown()
    os._exit(1)


if __name__ == "__main__":
    task = msgspec.json.decode(sys.argv[1], type=EngineTask)
    logging.basicConfig(level=task.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    status = main(task)
    logging.shutdown()
    os._exit(status)  # taking torch apart takes the interpreter two seconds, and there is nothing left to save
