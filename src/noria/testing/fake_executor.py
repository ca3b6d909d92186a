"""An `Executor` without a device or a model: it advances a virtual clock and returns flat images.

It implements the whole protocol of `noria.engine.runtime`, so that the engine loop and the scheduler can be tested and
simulated in milliseconds. It also checks the plans: a step out of order, or in another image's slot, raises
AssertionError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from noria.engine.diffusion.request import BaseImageRequest, preview_calls
from noria.engine.diffusion.results import DecodedImage, PreviewPixels
from noria.engine.resumption import InvalidStateError, StateWithBytes
from noria.protocol.messages import ImageState
from noria.protocol.request import ImageRequest
from noria.sampling.guidance import CLASSIFIER_FREE
from noria.scheduling.types import ItemId, IterationPlan, IterationResult, Phase, ReleasedImage, Step
from noria.testing.virtual_clock import VirtualClock


@dataclass(frozen=True)
class FakePreparedRequest(BaseImageRequest):
    """A request of the fake device, which makes one model call for each step."""

    begun: Mapping[int, int] = field(default_factory=dict)  # the next calls of images that another engine has begun


@dataclass(frozen=True)
class FakePixels:
    """`num_bytes` bytes of one value, which the image's seed determines."""

    seed: int
    num_bytes: int

    def rgb(self) -> bytes:
        """The lowest byte of the seed, repeated."""
        return bytes([self.seed % 256]) * self.num_bytes


class FakeExecutor:
    """A device on virtual time, with one image of one flat colour for each seed."""

    def __init__(
        self,
        clock: VirtualClock,
        iteration_s: Callable[[IterationPlan], float] = lambda plan: 1.0,  # noqa: ARG005
        memory: Mapping[Phase, int] | None = None,
    ) -> None:
        """Each iteration advances `clock` by `iteration_s(plan)`.

        `memory` limits the images of a phase (default: no limit). Images named in `failing`, with an error message
        each, fail in their next iteration.
        """
        self.clock = clock
        self.iteration_s = iteration_s
        self.memory = memory or {}
        self.failing: dict[ItemId, str] = {}
        self._previews: list[PreviewPixels] = []
        self._thumbnails: list[PreviewPixels] = []
        self._accepted: dict[str, FakePreparedRequest] = {}
        self._slots: dict[int, tuple[ItemId, int]] = {}  # by slot: its image, and that image's next call
        self._saved: dict[ItemId, int] = {}  # next calls of images that were evicted

    def prepare(self, request: ImageRequest, data: memoryview | None = None) -> FakePreparedRequest:  # noqa: ARG002
        """Wrap the request; there is nothing to prepare."""
        payload = request.payload
        return FakePreparedRequest(request, CLASSIFIER_FREE.is_active(payload.guidance_scale, payload.negative_prompt))

    def resume(self, prepared: FakePreparedRequest, states: Sequence[StateWithBytes]) -> FakePreparedRequest:
        """Let images begin at later calls. Raises InvalidStateError if there is no such call."""
        if any(not 0 < state.call <= prepared.num_calls for state, _ in states):
            raise InvalidStateError("no such call")
        return replace(prepared, begun={state.index: state.call for state, _ in states})

    def hand_over(self, released: ReleasedImage) -> tuple[ImageState, bytes]:
        """The state of an image: its next call."""
        call, batch_size_sum = released.progress
        held = self._saved[released.image] if released.slot is None else self._slots[released.slot][1]
        assert held == call, released
        return ImageState(released.image.index, call, batch_size_sum), b""

    def is_compiled(self, request: ImageRequest) -> bool:  # noqa: ARG002
        """True."""
        return True

    def accept(self, prepared: FakePreparedRequest) -> None:
        """Keep the request until `forget`."""
        self._accepted[prepared.request.attempt_id] = prepared

    def forget(self, attempt_id: str) -> None:
        """Drop an accepted request."""
        del self._accepted[attempt_id]
        self._saved = {image: call for image, call in self._saved.items() if image.attempt_id != attempt_id}

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Advance the clock and the images; fail those named in `failing`, and stop at a phase that exceeds `memory`.

        Raises AssertionError: a step out of order or in another image's slot, or a decode before the last step.
        """
        self.clock.now += self.iteration_s(plan)
        if len(plan.evictions) > self.memory.get("evictions", len(plan.evictions)):
            return IterationResult(oom_phase="evictions")
        for image, slot, progress in plan.evictions:
            assert slot is not None and self._slots[slot] == (image, progress.call), f"{image} is not in slot {slot}"
            self._saved[image] = progress.call
        if len(plan.encodes) > self.memory.get("encodes", len(plan.encodes)):
            return IterationResult(oom_phase="encodes")
        if len(plan.joins) > self.memory.get("joins", len(plan.joins)):
            return IterationResult(oom_phase="joins")
        for assignment in plan.joins:
            image = assignment.image
            first_call = self._accepted[image.attempt_id].begun.get(image.index, 0)
            self._slots[assignment.slot] = image, self._saved.pop(image, first_call)
        if len(plan.steps) > self.memory.get("steps", len(plan.steps)):
            return IterationResult(oom_phase="steps")
        for step in plan.steps:
            assert self._slots[step.slot] == (step.image, step.call), (
                f"{step} but the slot holds {self._slots[step.slot]}"
            )
            self._slots[step.slot] = (step.image, step.call + 1)
            self._make_previews(step, with_thumbnails=with_thumbnails)
        if len(plan.decodes) > self.memory.get("decodes", len(plan.decodes)):
            return IterationResult(oom_phase="decodes")
        for assignment in plan.decodes:
            held = self._slots[assignment.slot]
            assert held == (assignment.image, self._accepted[assignment.image.attempt_id].num_calls), (
                f"{assignment} but the slot holds {held}"
            )
        planned = {item.image for items in (plan.joins, plan.steps, plan.decodes) for item in items}
        return IterationResult({image: self.failing.pop(image) for image in planned & self.failing.keys()})

    def _make_previews(self, step: Step, *, with_thumbnails: bool) -> None:
        prepared = self._accepted[step.image.attempt_id]
        pixels = FakePixels(prepared.request.payload.seed + step.image.index, 3)
        preview = PreviewPixels(step.image, step.call, 1, 1, pixels)
        if step.call in preview_calls(prepared.num_calls, prepared.request.payload.partial_images):
            self._previews.append(preview)
        if with_thumbnails:
            self._thumbnails.append(preview)

    def previews(self) -> list[PreviewPixels]:
        """The previews made since the last call, of one pixel each."""
        previews, self._previews = self._previews, []
        return previews

    def thumbnails(self) -> list[PreviewPixels]:
        """The thumbnails made since the last call, of one pixel each."""
        thumbnails, self._thumbnails = self._thumbnails, []
        return thumbnails

    def memory_bytes(self) -> int:
        """0."""
        return 0

    def take_result(self, image: ItemId) -> DecodedImage:
        """A flat image of the request's size."""
        request = self._accepted[image.attempt_id].request
        payload = request.payload
        pixels = FakePixels(payload.seed + image.index, 3 * payload.result_px[0] * payload.result_px[1])
        return DecodedImage(request, image.index, pixels)
