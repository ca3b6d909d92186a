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

from noria.channel import EngineChannel, Peer
from noria.engine.executor import Executor
from noria.engine.manifest import Manifest
from noria.engine.spans import StageSpans
from noria.engine.watch import Watch
from noria.errors import EngineUnavailable, InvalidField, RequestCancelled, RequestError
from noria.messages import (
    Cancel,
    EngineState,
    Failed,
    Follow,
    Heard,
    Hello,
    Load,
    Ping,
    Pong,
    PreviousEnd,
    Submit,
    Timings,
)
from noria.observe.lines import fields
from noria.observe.traces import NO_TRACER, Tracer
from noria.request import ImageRequest, request_id_of
from noria.scheduling.plans import Times
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages

_log = logging.getLogger("noria.engine")


@dataclass(frozen=True)
class Arrival:
    """A request with its sampler compiled, and who asked."""

    peer: Peer
    prepared: "PreparedImages"
    arrived: float  # monotonic seconds, when its frame was read


@dataclass(frozen=True)
class Departure:
    """Who has left, and its request; None: all of its requests."""

    peer: Peer
    request_id: str | None


@dataclass(frozen=True)
class Watching:
    """Who wants to see the wheel."""

    peer: Peer
    message: Follow


class Desk(threading.Thread):
    """Answers peers. Requests pass on to the wheel once prepared; what cannot be drawn never gets there.

    A sampler that is new takes up to a second to compile, so that is done aside, one at a time: who needs a known one passes.
    """

    def __init__(
        self,
        channel: EngineChannel,
        models: Sequence[ModelSpec],
        device: str,
        *,
        watch: Watch,
        manifest: Manifest,
        previous_end: PreviousEnd = "none",
        tracer: Tracer = NO_TRACER,
    ) -> None:
        super().__init__(name="desk", daemon=True)
        self._spans = StageSpans(tracer)
        self.watch, self.manifest = watch, manifest
        self.arrivals: queue.SimpleQueue[Arrival | Departure | Watching | None] = queue.SimpleQueue()
        self._channel, self._models, self._device = channel, tuple(models), device
        self._previous_end: PreviousEnd = previous_end
        self.incarnation = uuid.uuid4().hex
        self._executor: Executor[PreparedImages] | None = None
        self._most_images = 0
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._peers: dict[str, Peer] = {}  # by name
        self._load: Load | None = None
        self._telling: dict[Peer, Load] = {}  # what each has been sent and has not said to have read
        self._preparing: dict[tuple[Peer, str], float] = {}  # when they came, monotonic seconds
        self._lock = (
            threading.Lock()
        )  # over what two threads change: the executor, the peers and their loads, who is being prepared

    def open(self, executor: "Executor[PreparedImages]", device: str, most_images: int) -> None:
        """The models are warm: tell every peer. A request for more than `most_images` could never be taken."""
        with self._lock:
            self._executor, self._device, self._most_images = executor, device, most_images
            for peer in self._peers.values():
                self._channel.send(peer, self._state())

    def tell_load(self, load: Load) -> None:
        """Send `load` to every peer, to who has not read the last one as soon as it has: the newest, and none between."""
        with self._lock:
            self._load = load
            for peer in self._peers.values():
                self._tell_load(peer)

    def run(self) -> None:
        """Serve the channel's inbox for as long as the process lives."""
        while True:
            peer, message = self._channel.inbox.get()
            match message:
                case Hello(name):
                    self._greet(peer, name)
                case Heard():
                    self._heard(peer)
                case Submit(request):
                    self._submit(peer, request)
                case Cancel(request_id):
                    self._cancel(peer, request_id)
                case Follow():
                    self.arrivals.put(Watching(peer, message))
                case Ping():
                    self._channel.send(peer, Pong(self.incarnation, self.watch.stuck_s, self.watch.limit_s))

    def _greet(self, peer: Peer, name: str) -> None:
        """A peer's life begins, or its connection's: a life before it waits for nothing any more."""
        with self._lock:
            if name in self._peers:
                before = self._peers[name]
                self._preparing = {each: came for each, came in self._preparing.items() if each[0] != before}
                self.arrivals.put(Departure(before, None))
                self._telling.pop(before, None)
            self._peers[name] = peer
            self._channel.send(peer, self._state())
            self._tell_load(peer)

    def _tell_load(self, peer: Peer) -> None:
        if self._load is not None and peer not in self._telling:
            self._telling[peer] = self._load
            self._channel.send(peer, self._load)

    def _heard(self, peer: Peer) -> None:
        with self._lock:
            if self._telling.pop(peer, self._load) is not self._load:
                self._tell_load(peer)

    def _state(self) -> EngineState:
        ready = self._executor is not None
        return EngineState(
            self.incarnation,
            "ready" if ready else "loading",
            self._models if ready else (),
            self._device,
            self._previous_end,
            self.manifest.before,
        )

    def _submit(self, peer: Peer, request: ImageRequest) -> None:
        executor, arrived = self._executor, time.monotonic()
        if executor is None:
            words = "the model is still loading"
            self._refuse(
                peer, request, arrived, Failed(request.request_id, EngineUnavailable.code, words, retry_after_s=2.0)
            )
            return
        if request.num_images > self._most_images:
            words = f"n is {request.num_images}; this server's slots and queue hold {self._most_images} images at most"
            self._refuse(peer, request, arrived, Failed(request.request_id, InvalidField.code, words, "n"))
            return
        with self._lock:
            self._preparing[peer, request.request_id] = arrived
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
            said = fields(event="request_broke", request_id=request_id_of(request.request_id))
            _log.exception("request %s cannot be prepared", request.request_id, extra=said)
            failed = Failed(request.request_id, "generation_failed", "the request could not be prepared")
        with self._lock:
            if (peer, request.request_id) not in self._preparing:  # cancelled meanwhile, and told so
                self._trace(request, arrived, RequestCancelled.code)
                return
            del self._preparing[peer, request.request_id]
            if prepared is not None:
                self.arrivals.put(Arrival(peer, prepared, arrived))
        if failed is not None:
            self._refuse(peer, request, arrived, failed)

    def _refuse(self, peer: Peer, request: ImageRequest, arrived: float, failed: Failed) -> None:
        self._tell(peer, failed, arrived)
        self._trace(request, arrived, failed.code)

    def _trace(self, request: ImageRequest, arrived: float, code: str) -> None:
        now = time.monotonic()
        self._spans.ended(request, Times(queue_s=now - arrived), now, code)

    def _cancel(self, peer: Peer, request_id: str) -> None:
        with self._lock:
            if (peer, request_id) not in self._preparing:
                self.arrivals.put(Departure(peer, request_id))
                return
            arrived = self._preparing.pop((peer, request_id))
        self._tell(peer, Failed(request_id, "cancelled", "cancelled by the caller"), arrived)

    def _tell(self, peer: Peer, failed: Failed, arrived: float) -> None:
        """A request that came then never got to the wheel."""
        waited = Timings(queue_s=time.monotonic() - arrived)
        self._channel.send(peer, msgspec.structs.replace(failed, timings=waited))
