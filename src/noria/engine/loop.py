"""The wheel: plan, execute, commit, again and again. Nothing is decided here, and nothing is computed.

Synchronous and single-threaded: `process.py` turns it on the device's thread, `noria generate`, the bench and the tests turn it
where they stand. What happens to a request is told to `deliver`, on the same thread, which must not wait.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from noria.engine.runtime import CompiledRequest, Executor, P, Pixels, PreviewPixels
from noria.protocol.request import ImageRequest
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import (
    BatchKey,
    ImageDecoded,
    IterationPlan,
    IterationResult,
    RequestFinished,
    RequestProgress,
    SchedulableRequest,
    SchedulerEvent,
)

_PROGRESS_INTERVAL_S = 0.1  # to watchers: a forecast takes the wheel's time


@dataclass(frozen=True)
class ProgressChanged(Generic[P]):
    """How far a request is: once when it is accepted, and now and then if it is watched."""

    prepared: P
    progress: RequestProgress


@dataclass(frozen=True)
class PreviewReady(Generic[P]):
    """What an image is going to be."""

    prepared: P
    preview: PreviewPixels


@dataclass(frozen=True)
class ImageReady(Generic[P]):
    """Image `index` of a request is decoded."""

    prepared: P
    index: int
    pixels: Pixels


@dataclass(frozen=True)
class RequestClosed(Generic[P]):
    """A request ended; nothing more will come of it."""

    prepared: P
    event: RequestFinished


EngineEvent = ProgressChanged[P] | PreviewReady[P] | ImageReady[P] | RequestClosed[P]


@dataclass(frozen=True)
class Iteration:
    """What one turn was, for metrics and for who watches the wheel."""

    plan: IterationPlan
    outcome: IterationResult
    duration_s: float
    batch_key: BatchKey | None = None  # of the images that did; None where no step was done
    num_joined: int = 0  # images that got a slot, also those that failed in this turn; not who had to give it back
    thumbnails: Sequence[PreviewPixels] = ()  # of all of them, where they were asked for


class EngineLoop(Generic[P]):
    """A scheduler and an executor, and the requests they share."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor[P],
        on_event: Callable[[EngineEvent[P]], None],
        clock: Callable[[], float],
        on_plan: Callable[[IterationPlan], bool] = lambda _plan: False,
    ) -> None:
        """`about_to` is called with each plan before anything of it is done, and says whether the turn has glimpses."""
        self.scheduler = scheduler
        self._executor = executor
        self._on_event = on_event
        self._clock = clock
        self._on_plan = on_plan
        self._requests: dict[str, P] = {}
        self._streaming: set[str] = set()
        self._last_progress_s = -math.inf

    def submit(self, prepared: P, arrived: float | None = None) -> None:
        """Take a request in; it boards at the next turn, or is refused at once.

        Its waiting and its deadline count from when it `arrived`, monotonic seconds; left out, from now. Its id must not be in use.
        """
        request = prepared.request
        now = self._clock()
        arrived = now if arrived is None else arrived
        assert request.request_id not in self._requests, request.request_id
        self._requests[request.request_id] = prepared
        self._executor.accept(prepared)
        self._handle_events(self.scheduler.submit(_schedulable(prepared, arrived), now, arrived))
        if request.request_id in self._requests:  # not refused
            self._report_progress([request.request_id], now)
            if request.stream_progress:
                self._streaming.add(request.request_id)

    def cancel(self, request_id: str) -> None:
        """Forget a request; it is gone from the next turn."""
        self._handle_events(self.scheduler.cancel(request_id, self._clock()))

    def run_iteration(self) -> Iteration | None:
        """Carry out one turn, or return None when there is nothing to do."""
        started = self._clock()
        self._handle_events(self.scheduler.expire(started))
        plan = self.scheduler.plan(started)
        if plan is None:
            return None
        with_thumbnails = self._on_plan(plan)
        batch_key = _batch_key(self._requests[plan.steps[0].image.request_id].request) if plan.steps else None
        outcome = self._executor.execute(plan, with_thumbnails=with_thumbnails)
        now = self._clock()
        for preview in self._executor.previews():
            if preview.image.request_id in self._requests:
                self._on_event(PreviewReady(self._requests[preview.image.request_id], preview))
        self._handle_events(self.scheduler.commit(plan, outcome, now, now - started))
        if self._streaming and now - self._last_progress_s >= _PROGRESS_INTERVAL_S:
            self._last_progress_s = now
            self._report_progress(self._streaming, now)
        joined = [
            assignment
            for assignment in plan.joins
            if outcome.oom_phase != "boards" or assignment.image.request_id not in self._requests  # failed, even alone
        ]
        stepped_key = batch_key if outcome.oom_phase not in ("boards", "steps") else None
        thumbnails = self._executor.thumbnails() if with_thumbnails else []
        return Iteration(plan, outcome, now - started, stepped_key, len(joined), thumbnails)

    def find_request(self, request_id: str) -> ImageRequest:
        """One that has not ended."""
        return self._requests[request_id].request

    def _report_progress(self, request_ids: Iterable[str], now: float) -> None:
        for request_id, progress in self.scheduler.progress(request_ids, now).items():
            self._on_event(ProgressChanged(self._requests[request_id], progress))

    def _handle_events(self, events: list[SchedulerEvent]) -> None:
        for event in events:
            match event:
                case ImageDecoded(image):
                    self._on_event(
                        ImageReady(self._requests[image.request_id], image.index, self._executor.take_pixels(image))
                    )
                case RequestFinished():
                    prepared = self._requests.pop(event.request_id)
                    self._executor.forget(event.request_id)
                    self._streaming.discard(event.request_id)
                    self._on_event(RequestClosed(prepared, event))


def _schedulable(prepared: CompiledRequest, arrived: float) -> SchedulableRequest:
    """What the scheduler may know of a request that arrived then."""
    request = prepared.request
    deadline = arrived + request.deadline_s if request.deadline_s is not None else None
    expiries = [arrived + request.timeout_s, *([deadline] if deadline is not None else [])]
    return SchedulableRequest(
        request_id=request.request_id,
        batch_key=_batch_key(request),
        num_images=request.num_images,
        num_calls=prepared.num_calls,
        expires_at=min(expiries) if math.isfinite(min(expiries)) else None,
        deadline=deadline,
        rows=2 if request.guided else 1,
        priority=request.priority,
        exclusive=request.exclusive,
    )


def _batch_key(request: ImageRequest) -> BatchKey:
    return BatchKey(request.width_px, request.height_px, request.model)
