"""The engine loops: plan, execute, commit, repeat. The scheduler decides, the executor computes.

They are single-threaded. `engine.py` runs one on the main thread of the engine; `noria generate`, the bench and the
tests run one on their own. What happens to requests is passed to a callback on the same thread, which must not block.
`EngineLoop` executes each iteration itself; `batch_loop.py` has one whose batches run in other threads.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from noria.engine.resumption import Resumption
from noria.engine.runtime import Executor, IterationExecutor, PreparedRequest, Preview, RequestT, Result, Thumbnail
from noria.protocol.messages import ImageState
from noria.protocol.model_spec import ModelKey
from noria.scheduling.interface import Scheduler, StepwiseScheduler
from noria.scheduling.types import (
    ItemFinished,
    ItemId,
    IterationPlan,
    IterationResult,
    ReleasedRequest,
    RequestFinished,
    RequestProgress,
    SchedulableRequest,
    SchedulerEvent,
)

_PROGRESS_INTERVAL_S = 0.1  # of streaming requests; each report costs the loop a forecast


@dataclass(frozen=True)
class ProgressChanged(Generic[RequestT]):
    """How far a request is: once when it is accepted, then repeatedly if it streams progress."""

    prepared: RequestT
    progress: RequestProgress


@dataclass(frozen=True)
class PreviewReady(Generic[RequestT]):
    """A preview of an image that is being generated."""

    prepared: RequestT
    preview: Preview


@dataclass(frozen=True)
class ResultReady(Generic[RequestT]):
    """Image `index` of a request is decoded."""

    prepared: RequestT
    index: int
    result: Result


@dataclass(frozen=True)
class RequestEnded(Generic[RequestT]):
    """A request has ended; no event follows."""

    prepared: RequestT
    event: RequestFinished
    predicted_s: float | None = None  # time to its end, predicted at acceptance; None: `ProgressChanged` said it


@dataclass(frozen=True)
class RequestHandedOver(Generic[RequestT]):
    """Another engine goes on with a request; no event follows."""

    prepared: RequestT
    released: ReleasedRequest
    states: tuple[tuple[ImageState, bytes], ...]  # of its images that have begun


EngineEvent = (
    ProgressChanged[RequestT]
    | PreviewReady[RequestT]
    | ResultReady[RequestT]
    | RequestEnded[RequestT]
    | RequestHandedOver[RequestT]
)


@dataclass(frozen=True)
class Iteration:
    """An executed iteration, for metrics and live views."""

    plan: IterationPlan
    outcome: IterationResult
    duration_s: float
    stepped: PreparedRequest | None = None  # one of the requests that stepped, with equal batch keys; None: none did
    num_joined: int = 0  # images that got a slot and kept it, or failed in this iteration
    thumbnails: Sequence[Thumbnail] = ()  # of all images that stepped, if requested


class RequestLoop(Generic[RequestT]):
    """What all loops share: the requests of one scheduler and one executor, and what happens to them."""

    def __init__(
        self,
        scheduler: Scheduler[Any, Any],
        executor: Executor[RequestT],
        on_event: Callable[[EngineEvent[RequestT]], None],
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._on_event = on_event
        self._request_executor = executor
        self._requests: dict[str, RequestT] = {}
        self._streaming: set[str] = set()
        self._predicted_s: dict[str, float] = {}  # of requests whose acceptance is not reported
        self._last_progress_s = -math.inf

    def submit(self, prepared: RequestT, arrived: float | None = None, resumption: Resumption | None = None) -> None:
        """Accept a request, or reject it at once with a `RequestEnded`. Its id must not be in use.

        Its queue time and its deadline count from `arrived`, in seconds of the loop's clock (default: now).
        `resumption` is what it brings from another engine.
        """
        request = prepared.request
        now = self._clock()
        arrived = now if arrived is None else arrived
        assert request.attempt_id and request.attempt_id not in self._requests, request.attempt_id
        self._requests[request.attempt_id] = prepared
        self._request_executor.accept(prepared)
        schedulable = _schedulable(prepared, arrived, resumption)
        self._handle_events(self.scheduler.submit(schedulable, now, arrived))
        if request.attempt_id in self._requests:  # it was not rejected
            self._on_accepted(schedulable, now)

    def _on_accepted(self, schedulable: SchedulableRequest, now: float) -> None:
        """Report the progress of a request that was not rejected."""
        attempt_id = schedulable.attempt_id
        self._report_progress([attempt_id], now)
        if self._requests[attempt_id].request.stream_progress:
            self._streaming.add(attempt_id)

    def cancel(self, attempt_id: str) -> None:
        """End a request; no later plan has it. An unknown id is ignored."""
        self._handle_events(self.scheduler.cancel(attempt_id, self._clock()))

    def hand_over(self, attempt_id: str) -> None:
        """Do nothing: what takes one call is done sooner than moved."""

    def find_request(self, attempt_id: str) -> RequestT:
        """A request that has not ended; raises KeyError for any other id."""
        return self._requests[attempt_id]

    def uses(self, model: ModelKey) -> bool:
        """Whether a request of this model has not ended."""
        return any(prepared.batch_key.model == model for prepared in self._requests.values())

    def _on_item(self, item: ItemId) -> None:
        """Do nothing; called for each item that is finished."""

    def _report_progress(self, attempt_ids: Iterable[str], now: float) -> None:
        for attempt_id, progress in self.scheduler.progress(attempt_ids, now).items():
            self._on_event(ProgressChanged(self._requests[attempt_id], progress))

    def _report_streaming(self, now: float) -> None:
        """Report the progress of the requests that stream it, at most every `_PROGRESS_INTERVAL_S`."""
        if self._streaming and now - self._last_progress_s >= _PROGRESS_INTERVAL_S:
            self._last_progress_s = now
            self._report_progress(self._streaming, now)

    def _handle_events(self, events: list[SchedulerEvent]) -> None:
        for event in events:
            match event:
                case ItemFinished(item):
                    self._on_item(item)
                case RequestFinished():
                    prepared = self._forget(event.attempt_id)
                    self._on_event(RequestEnded(prepared, event, self._predicted_s.pop(event.attempt_id, None)))

    def _forget(self, attempt_id: str) -> RequestT:
        self._request_executor.forget(attempt_id)
        self._streaming.discard(attempt_id)
        return self._requests.pop(attempt_id)


class EngineLoop(RequestLoop[RequestT]):
    """Runs one scheduler of images and one executor, on the calling thread."""

    def __init__(
        self,
        scheduler: StepwiseScheduler,
        executor: IterationExecutor[RequestT],
        on_event: Callable[[EngineEvent[RequestT]], None],
        clock: Callable[[], float],
        on_plan: Callable[[IterationPlan], bool] = lambda _plan: False,
    ) -> None:
        """`on_plan` is called with each plan before it is executed; it returns whether to make thumbnails."""
        super().__init__(scheduler, executor, on_event, clock)
        self._scheduler, self._executor, self._on_plan = scheduler, executor, on_plan

    def run_iteration(self) -> Iteration | None:
        """Execute one iteration; None if there is nothing to do."""
        started = self._clock()
        self._handle_events(self._scheduler.expire(started))
        plan = self._scheduler.plan(started)
        if plan is None:
            return None
        with_thumbnails = self._on_plan(plan)
        stepped = self._requests[plan.steps[0].image.attempt_id] if plan.steps else None
        outcome = self._executor.execute(plan, with_thumbnails=with_thumbnails)
        now = self._clock()
        for preview in self._executor.previews():
            if preview.image.attempt_id in self._requests:
                self._on_event(PreviewReady(self._requests[preview.image.attempt_id], preview))
        self._handle_events(self._scheduler.commit(plan, outcome, now, now - started))
        self._report_streaming(now)
        joined = [
            assignment
            for assignment in plan.joins
            # What did not fit joins again later, unless its request failed because it does not fit even alone.
            if outcome.oom_phase not in ("encodes", "joins") or assignment.image.attempt_id not in self._requests
        ]
        if outcome.oom_phase not in (None, "decodes"):
            stepped = None
        thumbnails = self._executor.thumbnails() if with_thumbnails else []
        return Iteration(plan, outcome, now - started, stepped, len(joined), thumbnails)

    def hand_over(self, attempt_id: str) -> None:
        """Give up a request, for another engine; no later plan has it. An unknown id is ignored."""
        released = self._scheduler.release(attempt_id, self._clock())
        if released is None:
            return
        begun = [each for each in released.images if each.progress.call]
        states = tuple(self._executor.hand_over(each) for each in begun)
        self._on_event(RequestHandedOver(self._forget(attempt_id), released, states))

    def _on_item(self, item: ItemId) -> None:
        result = self._executor.take_result(item)
        self._on_event(ResultReady(self._requests[item.attempt_id], item.index, result))


def _schedulable(prepared: PreparedRequest, arrived: float, resumption: Resumption | None) -> SchedulableRequest:
    """The part of a request that the scheduler uses."""
    request = prepared.request
    deadline = arrived + request.deadline_s if request.deadline_s is not None else None
    expiries = [arrived + request.timeout_s, *([deadline] if deadline is not None else [])]
    return SchedulableRequest(
        attempt_id=request.attempt_id,
        batch_key=prepared.batch_key,
        num_images=prepared.num_images,
        num_calls=prepared.num_calls,
        expires_at=min(expiries) if math.isfinite(min(expiries)) else None,
        deadline=deadline,
        rows=prepared.num_rows,
        priority=request.priority,
        exclusive=request.exclusive,
        num_tokens=prepared.num_tokens,
        call_size=prepared.call_size,
        has_start_image=prepared.has_start_image,
        second_stage_from=prepared.second_stage_from,
        resumed=None if resumption is None else resumption.images,
        waited_s=0.0 if resumption is None else resumption.waited_s,
    )
