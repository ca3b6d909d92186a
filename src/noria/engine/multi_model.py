"""Several models on one device: one executor each, behind one scheduler whose slots they share.

An iteration steps images of one model only, but joins and decodes may be of others, so a plan is split among the
executors. The scheduler does not know this; to it the model is a part of the batch key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from noria.engine.resumption import StateWithBytes
from noria.engine.runtime import IterationExecutor, Preview, RequestT, Result, Thumbnail
from noria.protocol.messages import ImageState
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import AnyRequest
from noria.scheduling.types import (
    ItemId,
    IterationPlan,
    IterationResult,
    Phase,
    PhaseTimings,
    ReleasedImage,
    SlotAssignment,
    Step,
)

PlanItemT = TypeVar("PlanItemT", SlotAssignment, Step, ReleasedImage)
_NOTHING = IterationPlan((), (), ())


@dataclass(frozen=True)
class CombinedTimings:
    """The summed phase times of several executors that ran one after the other in one iteration."""

    parts: tuple[PhaseTimings, ...]

    @property
    def is_known(self) -> bool:
        """Whether all parts can be read without waiting for a device."""
        return all(part.is_known for part in self.parts)

    def seconds(self, phase: Phase) -> float:
        """Return the seconds of a phase."""
        return sum(part.seconds(phase) for part in self.parts)


class MultiModelExecutor(Generic[RequestT]):
    """An executor that passes each request to the executor of the model and version that it names."""

    def __init__(self, executors: Mapping[ModelKey, IterationExecutor[RequestT]]) -> None:
        """`executors` by model, in the configuration's order, all on one device and with the same number of slots."""
        self._executors = executors  # replaced, never changed, since other threads read it
        self._executor_by_attempt: dict[str, IterationExecutor[RequestT]] = {}

    def add(self, key: ModelKey, executor: IterationExecutor[RequestT]) -> None:
        """Add a model, on the loop's thread."""
        self._executors = {**self._executors, key: executor}

    def remove(self, key: ModelKey) -> None:
        """Remove a model of which there is no request, on the loop's thread."""
        self._executors = {other: executor for other, executor in self._executors.items() if other != key}

    def prepare(self, request: AnyRequest, data: memoryview | None = None) -> RequestT:
        """Prepare a request; raises `errors.RequestError` if it cannot be served."""
        return self._executor_of(request).prepare(request, data)

    def resume(self, prepared: RequestT, states: Sequence[StateWithBytes]) -> RequestT:
        """Let images of a prepared request begin as another engine has handed them over; raises InvalidStateError."""
        return self._executor_of(prepared.request).resume(prepared, states)

    def hand_over(self, released: ReleasedImage) -> tuple[ImageState, bytes]:
        """The state of an image that has a slot, for another engine."""
        return self._executor_by_attempt[released.image.attempt_id].hand_over(released)

    def is_compiled(self, request: AnyRequest) -> bool:
        """Whether `prepare` would return at once."""
        return self._executor_of(request).is_compiled(request)

    def accept(self, prepared: RequestT) -> None:
        """Keep a request until `forget`."""
        executor = self._executor_of(prepared.request)
        self._executor_by_attempt[prepared.request.attempt_id] = executor
        executor.accept(prepared)

    def forget(self, attempt_id: str) -> None:
        """Release a request that has ended."""
        self._executor_by_attempt.pop(attempt_id).forget(attempt_id)

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Execute one iteration, phase by phase for all models.

        The first phase that does not fit the memory ends it.
        """
        total, timings = IterationResult(), list[PhaseTimings]()
        for executor, sub_plan in self._split(plan):
            result = executor.execute(sub_plan, with_thumbnails=with_thumbnails)
            total = IterationResult(
                {**total.failed, **result.failed},
                result.oom_phase,
                is_timed=total.is_timed and result.is_timed,
                join_s=total.join_s + result.join_s,
            )
            timings += [result.phase_timings] if result.phase_timings is not None else []
            if result.oom_phase is not None:
                break
        if len(timings) > 1:
            return replace(total, phase_timings=CombinedTimings(tuple(timings)))
        return replace(total, phase_timings=timings[0] if timings else None)

    def take_result(self, image: ItemId) -> Result:
        """The result of an image that the last iteration decoded."""
        return self._executor_by_attempt[image.attempt_id].take_result(image)

    def previews(self) -> list[Preview]:
        """The previews of the last iteration, of all models."""
        return [preview for executor in self._executors.values() for preview in executor.previews()]

    def thumbnails(self) -> list[Thumbnail]:
        """The thumbnails of the last iteration, of all models."""
        return [thumbnail for executor in self._executors.values() for thumbnail in executor.thumbnails()]

    def memory_bytes(self) -> int:
        """Device memory of all models together; not known while the only one is replaced."""
        executors = list(self._executors.values())
        return executors[0].memory_bytes() if executors else 0  # each reports the process's

    def _executor_of(self, request: AnyRequest) -> IterationExecutor[RequestT]:
        return self._executors[ModelKey(request.model, request.model_version)]

    def _split(self, plan: IterationPlan) -> list[tuple[IterationExecutor[RequestT], IterationPlan]]:
        """The plan unchanged if one model has all of it, else its phases in order, each split by executor.

        So every model's joins come before any step: a phase that does not fit the memory leaves no later phase partly
        done.
        """
        parts = (plan.evictions, plan.joins, plan.steps, plan.decodes)
        images = [each.image for part in parts for each in part]
        executor_ids = {id(self._executor_by_attempt[image.attempt_id]) for image in images}
        if len(executor_ids) == 1:
            return [(executor, plan) for executor in self._executors.values() if id(executor) in executor_ids]
        sub_plans: list[tuple[IterationExecutor[RequestT], IterationPlan]] = []
        for phase in (
            IterationPlan((), (), (), evictions=plan.evictions),
            IterationPlan((), (), (), plan.encodes),
            IterationPlan(plan.joins, (), (), returns=plan.returns),
            IterationPlan((), plan.steps, ()),
            IterationPlan((), (), plan.decodes),
        ):
            for executor in self._executors.values():
                sub_plan = self._only_of(executor, phase)
                if sub_plan != _NOTHING:
                    sub_plans.append((executor, sub_plan))
        return sub_plans

    def _only_of(self, executor: IterationExecutor[RequestT], phase: IterationPlan) -> IterationPlan:
        def keep_own(items: tuple[PlanItemT, ...]) -> tuple[PlanItemT, ...]:
            return tuple(item for item in items if self._executor_by_attempt[item.image.attempt_id] is executor)

        return IterationPlan(
            keep_own(phase.joins),
            keep_own(phase.steps),
            keep_own(phase.decodes),
            keep_own(phase.encodes),
            keep_own(phase.evictions),
            keep_own(phase.returns),
        )
