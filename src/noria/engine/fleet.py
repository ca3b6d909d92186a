"""Several models on one device: one executor each, under one wheel that counts their slots together.

A turn steps images of one model only, but whoever boards, and what is decoded, may be of others: the plan is handed to the executors
in its parts. The scheduler does not know; to it a model is a part of the shape class.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from noria.engine.executor import PreviewPixels
from noria.engine.stopwatch import SpentTogether
from noria.request import ImageRequest
from noria.scheduling.plans import ImageId, Outcome, Plan, Seat, Spent, Step

if TYPE_CHECKING:
    from noria.engine.diffusion import DiffusionExecutor, PreparedImages
    from noria.engine.pixels import HostPixels

Place = TypeVar("Place", Seat, Step)


class Fleet:
    """An executor whose requests are drawn by the model that they name."""

    def __init__(self, executors: "Mapping[str, DiffusionExecutor]") -> None:
        """`executors` by their models' names, all on one device and with as many slots."""
        self.executors = executors
        self._of: dict[str, DiffusionExecutor] = {}  # whose a request is

    @property
    def device(self) -> str:
        """As torch names it."""
        return str(next(iter(self.executors.values())).model.device)

    def prepare(self, request: ImageRequest) -> "PreparedImages":
        """Compile what the request needs; raises `errors.RequestError` if it cannot be drawn."""
        return self.executors[request.model].prepare(request)

    def is_prompt(self, request: ImageRequest) -> bool:
        """Whether `prepare` would return at once."""
        return self.executors[request.model].is_prompt(request)

    def accept(self, prepared: "PreparedImages") -> None:
        """Remember a request until `forget`."""
        executor = self._of[prepared.request.request_id] = self.executors[prepared.request.model]
        executor.accept(prepared)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._of.pop(request_id).forget(request_id)

    def execute(self, plan: Plan, *, glimpse: bool = False) -> Outcome:
        """One turn: all who board, then the steps, then the decodes; the first part that does not fit the memory ends it."""
        whole, spent = Outcome(), list[Spent]()
        for executor, part in self._parts(plan):
            done = executor.execute(part, glimpse=glimpse)
            whole = Outcome(
                {**whole.failed, **done.failed},
                done.overflowed,
                timed=whole.timed and done.timed,
                boarding_s=whole.boarding_s + done.boarding_s,
            )
            spent += [done.spent] if done.spent is not None else []
            if done.overflowed is not None:
                break
        return replace(whole, spent=spent[0] if len(spent) == 1 else SpentTogether(tuple(spent)))

    def take(self, image: ImageId) -> "HostPixels":
        """The pixels of an image that the last turn decoded."""
        return self._of[image.request_id].take(image)

    def previews(self) -> list[PreviewPixels]:
        """Those that the last turn made."""
        return [preview for executor in self.executors.values() for preview in executor.previews()]

    def glimpses(self) -> list[PreviewPixels]:
        """Those that the last turn made for who watches the wheel."""
        return [glimpse for executor in self.executors.values() for glimpse in executor.glimpses()]

    def memory_bytes(self) -> int:
        """What the device's memory holds of all models."""
        return next(iter(self.executors.values())).memory_bytes()  # of the process, so of all

    def _parts(self, plan: Plan) -> "list[tuple[DiffusionExecutor, Plan]]":
        """The plan as it is, if it is about one model; else phase by phase, each by executor, so that no phase is left half done."""
        images = [seat.image for seat in (*plan.boards, *plan.decodes)] + [step.image for step in plan.steps]
        here = {id(self._of[image.request_id]) for image in images}
        if len(here) == 1:
            return [(executor, plan) for executor in self.executors.values() if id(executor) in here]
        parts: list[tuple[DiffusionExecutor, Plan]] = []
        for phase in (Plan(plan.boards, (), ()), Plan((), plan.steps, ()), Plan((), (), plan.decodes)):
            for executor in self.executors.values():
                part = self._of_one(executor, phase)
                if part.boards or part.steps or part.decodes:
                    parts.append((executor, part))
        return parts

    def _of_one(self, executor: "DiffusionExecutor", phase: Plan) -> Plan:
        def own(places: tuple[Place, ...]) -> tuple[Place, ...]:
            return tuple(place for place in places if self._of[place.image.request_id] is executor)

        return Plan(own(phase.boards), own(phase.steps), own(phase.decodes))
