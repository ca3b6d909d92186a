"""The engine loops: plan, execute, commit, repeat. The scheduler decides, the executor computes.

`StepLoop` executes each iteration of images itself: an engine runs one on its main thread; `noria generate`, the bench
and the tests run one on their own. The batches of `BatchLoop` are executed by sessions side by side, and any thread may
drive it, one at a time. What happens to requests is passed to a callback on the same thread, which must not block.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec

from noria.engine.resumption import Resumption
from noria.engine.runtime import (
    BatchExecutor,
    Executor,
    FinishedBatch,
    IterationExecutor,
    PreparedRequest,
    Preview,
    RequestT,
    Result,
    Thumbnail,
)
from noria.protocol.messages import ImageState
from noria.protocol.model_spec import ModelKey
from noria.scheduling.interface import BatchwiseScheduler, Scheduler, StepwiseScheduler
from noria.scheduling.types import (
    UNTIL_JOINED,
    BatchKey,
    BatchPlan,
    ImageFinished,
    ItemId,
    IterationPlan,
    IterationResult,
    ReleasedRequest,
    RequestFinished,
    RequestProgress,
    SchedulableRequest,
)

Client = tuple[str, str]
"""The name of an API key, and the client whose share of the device is taken."""

_PROGRESS_INTERVAL_S = 0.1  # the time between reports on streaming requests; each report costs the loop a forecast


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


class RequestEnded(msgspec.Struct, Generic[RequestT], frozen=True):
    """A request has ended; no event follows."""

    prepared: RequestT
    event: RequestFinished


@dataclass(frozen=True)
class RequestHandedOver(Generic[RequestT]):
    """Another engine goes on with a request; no event follows."""

    prepared: RequestT
    released: ReleasedRequest
    states: tuple[tuple[ImageState, bytes], ...]  # states of its images that have begun


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
    stepped: BatchKey | None = None  # that of a request that stepped; None: none did
    images_by_client: Mapping[Client, int] = field(default_factory=dict)  # images that stepped
    num_joined: int = 0  # images that got their first slot and kept it, or failed in this iteration
    num_evicted: int = 0  # images that gave their slot to others
    thumbnails: Sequence[Thumbnail] = ()  # thumbnails of all images that stepped, if requested


class ExecutedBatch(msgspec.Struct, Generic[RequestT], frozen=True):
    """A batch after its commit, for metrics and live views."""

    batch: FinishedBatch
    requests: tuple[RequestT | None, ...]  # the request of each row; None: it had ended before the batch did
    tokens_by_client: Mapping[Client, int]  # tokens of requests that had not ended, without padding


def client_of(prepared: PreparedRequest) -> Client:
    """Return whose time of the device a request takes."""
    return prepared.request.client, prepared.request.share_client


class RequestLoop(Generic[RequestT]):
    """The common part of all loops: the requests of one scheduler and one executor, and what happens to them."""

    def __init__(
        self,
        scheduler: Scheduler[Any],
        executor: Executor[RequestT],
        on_event: Callable[[EngineEvent[RequestT]], None],
        clock: Callable[[], float],
    ) -> None:
        self.scheduler, self._executor = scheduler, executor
        self._clock, self._on_event = clock, on_event
        self._requests: dict[str, RequestT] = {}
        self._streaming: set[str] = set()
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
        self._executor.accept(prepared)
        deadline = arrived + request.deadline_s if request.deadline_s is not None else None
        expires_at = min(arrived + request.timeout_s, math.inf if deadline is None else deadline)
        schedulable = prepared.schedulable(expires_at if math.isfinite(expires_at) else None, deadline)
        if resumption is not None:
            schedulable = msgspec.structs.replace(schedulable, resumed=resumption.images, waited_s=resumption.waited_s)
        self._end_requests(self.scheduler.submit(schedulable, now, arrived))
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
        self._end_requests(self.scheduler.cancel(attempt_id, self._clock()))

    def find_request(self, attempt_id: str) -> RequestT:
        """A request that has not ended; raises KeyError for any other id."""
        return self._requests[attempt_id]

    def uses(self, model: ModelKey) -> bool:
        """Whether a request of this model has not ended. May be called by any thread."""
        return any(prepared.batch_key.model == model for prepared in list(self._requests.values()))

    def _report_progress(self, attempt_ids: Iterable[str], now: float) -> None:
        for attempt_id, progress in self.scheduler.progress(attempt_ids, now).items():
            self._on_event(ProgressChanged(self._requests[attempt_id], progress))

    def _report_streaming(self, now: float) -> None:
        """Report the progress of the requests that stream it, at most every `_PROGRESS_INTERVAL_S`."""
        if self._streaming and now - self._last_progress_s >= _PROGRESS_INTERVAL_S:
            self._last_progress_s = now
            self._report_progress(self._streaming, now)

    def _end_requests(self, ends: Iterable[RequestFinished]) -> None:
        for end in ends:
            self._on_event(RequestEnded(self._forget(end.attempt_id), end))

    def _forget(self, attempt_id: str) -> RequestT:
        self._executor.forget(attempt_id)
        self._streaming.discard(attempt_id)
        return self._requests.pop(attempt_id)


class StepLoop(RequestLoop[RequestT]):
    """Runs one scheduler of images and one executor, on the calling thread."""

    scheduler: StepwiseScheduler
    _executor: IterationExecutor[RequestT]

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
        self._on_plan = on_plan

    def run_iteration(self) -> Iteration | None:
        """Execute one iteration; None if there is nothing to do."""
        started = self._clock()
        self._end_requests(self.scheduler.expire(started))
        plan = self.scheduler.plan(started)
        if plan is None:
            return None
        with_thumbnails = self._on_plan(plan)
        first = plan.steps[0] if plan.steps else None
        stepped = first and self._requests[first.image.attempt_id].schedulable(None, None).step_key(first.call)
        images_by_client = Counter([client_of(self._requests[step.image.attempt_id]) for step in plan.steps])
        outcome = self._executor.execute(plan, with_thumbnails=with_thumbnails)
        now = self._clock()
        for preview in self._executor.previews():
            if preview.image.attempt_id in self._requests:
                self._on_event(PreviewReady(self._requests[preview.image.attempt_id], preview))
        for event in self.scheduler.commit(plan, outcome, now, now - started):
            if isinstance(event, ImageFinished):
                self._on_image(event.image)
            else:
                self._end_requests([event])
        self._report_streaming(now)
        joined = [
            assignment
            for assignment in plan.joins
            if assignment not in plan.returns
            # What did not fit joins again later, unless its request failed because it does not fit even alone.
            and (outcome.oom_phase not in UNTIL_JOINED or assignment.image.attempt_id not in self._requests)
        ]
        if outcome.oom_phase not in (None, "decodes"):
            stepped = None
        num_evicted = 0 if outcome.oom_phase == "evictions" else len(plan.evictions)
        thumbnails = self._executor.thumbnails() if with_thumbnails else []
        return Iteration(plan, outcome, now - started, stepped, images_by_client, len(joined), num_evicted, thumbnails)

    def hand_over(self, attempt_id: str) -> None:
        """Give up a request, for another engine; no later plan has it. An unknown id is ignored."""
        released = self.scheduler.release(attempt_id, self._clock())
        if released is None:
            return
        begun = [each for each in released.images if each.progress.call]
        states = tuple(self._executor.hand_over(each) for each in begun)
        self._on_event(RequestHandedOver(self._forget(attempt_id), released, states))

    def _on_image(self, image: ItemId) -> None:
        result = self._executor.take_result(image)
        self._on_event(ResultReady(self._requests[image.attempt_id], image.index, result))


class BatchLoop(RequestLoop[RequestT]):
    """Runs one scheduler of texts and the sessions of one executor."""

    scheduler: BatchwiseScheduler
    _executor: BatchExecutor[RequestT]

    def __init__(
        self,
        scheduler: BatchwiseScheduler,
        executor: BatchExecutor[RequestT],
        on_event: Callable[[EngineEvent[RequestT]], None],
        clock: Callable[[], float],
        on_plan: Callable[[BatchPlan], None],
        on_done: Callable[[FinishedBatch], None],
    ) -> None:
        """`on_plan` is called with each plan before it is executed, `on_done` by any thread when it was."""
        super().__init__(scheduler, executor, on_event, clock)
        self._on_plan, self._on_done = on_plan, on_done
        self._running: dict[int, ModelKey] = {}  # the model of each batch in flight, by session
        self._expiries: list[tuple[float, str]] = []  # a heap; those of requests that have ended leave it at its top

    def start_batches(self) -> None:
        """End the requests whose time has passed, and start every batch that can start now."""
        now = self._clock()
        if self._next_expiry() <= now:
            self._end_requests(self.scheduler.expire(now))
        while (plan := self.scheduler.plan(now)) is not None:
            self._on_plan(plan)
            self._running[plan.session] = plan.batch_key.model
            self._executor.start(plan, self._on_done)
        self._report_streaming(now)

    def finish(self, batch: FinishedBatch) -> ExecutedBatch[RequestT]:
        """Commit a batch that `on_done` was called with."""
        del self._running[batch.plan.session]
        requests = tuple([self._requests.get(row.attempt_id) for row in batch.plan.rows])
        tokens: dict[Client, int] = {}
        for prepared, num_tokens in zip(requests, batch.plan.num_tokens, strict=True):
            if prepared is not None:
                client = client_of(prepared)
                tokens[client] = tokens.get(client, 0) + num_tokens
        self._end_requests(self.scheduler.commit(batch.plan, batch.result, self._clock(), batch.seconds))
        return ExecutedBatch(batch, requests, tokens)

    def uses(self, model: ModelKey) -> bool:
        """Whether a request of this model has not ended, or a batch of it is in flight."""
        return super().uses(model) or model in self._running.values()

    def wait_s(self, now: float) -> float | None:
        """Return for how long `start_batches` has nothing to do unless something else happens; None: for ever."""
        wait_ends_at, due = self.scheduler.next_deadline(), self._next_expiry()
        due = due if wait_ends_at is None else min(due, wait_ends_at)
        return None if due == math.inf else max(due - now, 0.0)

    def _next_expiry(self) -> float:
        while self._expiries and self._expiries[0][1] not in self._requests:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else math.inf

    def _on_accepted(self, schedulable: SchedulableRequest, now: float) -> None:
        """Keep when it expires; report its progress only if it streams it."""
        attempt_id = schedulable.attempt_id
        if schedulable.expires_at is not None:
            heapq.heappush(self._expiries, (schedulable.expires_at, attempt_id))
        if self._requests[attempt_id].request.stream_progress:
            super()._on_accepted(schedulable, now)
