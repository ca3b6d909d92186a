"""The interface of a scheduler, which the engine loop and the simulations drive. Its types are in `types.py`."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from noria.protocol.model_spec import ModelKey
from noria.scheduling.types import (
    BatchPlan,
    BatchResult,
    BatchSnapshot,
    IterationPlan,
    IterationResult,
    ReleasedRequest,
    RequestFinished,
    RequestProgress,
    SchedulableRequest,
    SchedulerEvent,
    SchedulerSnapshot,
)

SnapshotT_co = TypeVar("SnapshotT_co", covariant=True)


class Scheduler(Protocol[SnapshotT_co]):
    """Decides what each plan does. Executes nothing: the engine loop and the simulations drive it.

    Every `submit` ends in exactly one `RequestFinished` or `release`. `now` is monotonic seconds. `step/scheduler.py`
    schedules images, `batch/scheduler.py` texts: each has its own plans and results. All calls of this protocol can
    come between any two calls.
    """

    @property
    def num_slots(self) -> int:
        """The largest number of items that can run at once: the slots of images, the rows of all sessions."""

    @property
    def num_waiting(self) -> int:
        """Number of items that wait."""

    @property
    def num_running(self) -> int:
        """Number of items that run."""

    @property
    def backlog_s(self) -> float:
        """Predicted duration of all accepted work if no further request arrives."""

    def oldest_age_s(self, now: float) -> float:
        """Age of the oldest request with an item that waits; 0 if there is none."""

    def submit(self, request: SchedulableRequest, now: float, arrived_at: float | None = None) -> list[RequestFinished]:
        """Accept a request or reject it at once. Its waiting time counts from `arrived_at`, by default from `now`."""

    def cancel(self, attempt_id: str, now: float) -> list[RequestFinished]:
        """End a request; do nothing if it is unknown or has ended."""

    def expire(self, now: float) -> list[RequestFinished]:
        """End every request whose `expires_at` has passed."""

    def progress(self, attempt_ids: Iterable[str], now: float) -> dict[str, RequestProgress]:
        """Return the progress of requests by id, with predictions; requests that have ended are left out."""

    def snapshot(self, now: float, max_waiting: int) -> SnapshotT_co:
        """Return all that runs and the first `max_waiting` waiting requests, with predictions."""

    def forget_model(self, model: ModelKey) -> None:
        """Drop what was learned of a model, of which no request runs or waits."""


class StepwiseScheduler(Scheduler[SchedulerSnapshot], Protocol):
    """A scheduler of images: calls of `plan` and `commit` alternate."""

    def plan(self, now: float) -> IterationPlan | None:
        """Return the next plan, or None if there is nothing to do now."""

    def commit(self, plan: IterationPlan, result: IterationResult, now: float, seconds: float) -> list[SchedulerEvent]:
        """Apply the result of an executed plan, which took `seconds`. Requests cancelled meanwhile are skipped."""

    @property
    def num_evicted(self) -> int:
        """Number of images that wait and have had a slot."""

    def release(self, attempt_id: str, now: float) -> ReleasedRequest | None:
        """Forget a request, for another engine; None if it is unknown or has ended. It has no `RequestFinished`."""


class BatchwiseScheduler(Scheduler[BatchSnapshot], Protocol):
    """A scheduler of texts: each of its sessions can have a plan that is not committed yet."""

    def plan(self, now: float) -> BatchPlan | None:
        """Return the next batch, or None if there is nothing to do now."""

    def commit(self, plan: BatchPlan, result: BatchResult, now: float, seconds: float) -> list[RequestFinished]:
        """Apply the result of an executed plan, which took `seconds`. Requests that have ended are skipped."""

    def next_deadline(self) -> float | None:
        """Return when to call `plan` again, if its last call returned None because a batch waits for company."""
