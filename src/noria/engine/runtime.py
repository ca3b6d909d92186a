"""What carries out a plan: the contract, and a fake one on virtual time for tests, examples and simulation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from noria.protocol.request import ImageRequest
from noria.scheduling.types import ImageId, IterationPlan, IterationResult, Phase, Step


class Pixels(Protocol):
    """A decoded image that may still be on its way from the device."""

    def rgb(self) -> bytes | memoryview:
        """Height × width × 3 bytes; waits for the device if need be.

        From any thread, and as often as it is asked: a slot's picture for every view.
        """
        ...


@dataclass(frozen=True)
class PreviewPixels:
    """What an image is going to be, as its model's output at `call` says."""

    image: ImageId
    call: int
    width_px: int
    height_px: int
    pixels: Pixels


class CompiledRequest(Protocol):
    """A request made ready for the device: all that can be done for it without the device."""

    @property
    def request(self) -> ImageRequest:
        """What was asked for."""
        ...

    @property
    def num_calls(self) -> int:
        """Model calls that each of its images takes."""
        ...


P = TypeVar("P", bound=CompiledRequest)


class Executor(Protocol[P]):
    """One device. `prepare` may be called from another thread; everything else from the wheel's own."""

    def prepare(self, request: ImageRequest) -> P:
        """Compile what the request needs; raises `errors.RequestError` if it cannot be drawn."""
        ...

    def is_compiled(self, request: ImageRequest) -> bool:
        """Whether `prepare` would return at once: nothing new is to be compiled."""
        ...

    def accept(self, prepared: P) -> None:
        """Remember a request that the scheduler has taken in, until `forget`."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended; plans will not name it again."""
        ...

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Carry out one turn. May return while the device still works; never raises for one request's sake.

        With `glimpse`, make a small picture of every image that steps: `glimpses` has them.
        """
        ...

    def take_pixels(self, image: ImageId) -> Pixels:
        """The pixels of an image that the last turn decoded; given out once."""
        ...

    def previews(self) -> list[PreviewPixels]:
        """Those that the last turn made; given out once."""
        ...

    def thumbnails(self) -> list[PreviewPixels]:
        """The pictures of the last turn, for who watches the wheel, at most `GLIMPSE_PX` a side; given out once."""
        ...

    def memory_bytes(self) -> int:
        """What it holds of its device's memory."""
        ...


THUMBNAIL_MAX_PX = 64
"""The longest side of a picture on the wheel: 64 of them are less than a megabyte, five times a second."""


def preview_calls(num_calls: int, num_previews: int) -> frozenset[int]:
    """At which calls an image shows itself: `num_previews` of `num_calls`, evenly spread, never at the last, which shows the image."""
    calls = ((number * num_calls) // (num_previews + 1) for number in range(1, num_previews + 1))
    return frozenset(call for call in calls if call < num_calls - 1)


class VirtualClock:
    """Seconds that pass only when somebody says so. Call it to read it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Monotonic seconds."""
        return self.now


@dataclass(frozen=True)
class FakeCompiledRequest:
    """A request of the fake device: as many calls as steps."""

    request: ImageRequest

    @property
    def num_calls(self) -> int:
        """One call a step."""
        return self.request.num_steps


@dataclass(frozen=True)
class FakePixels:
    """A flat image whose colour is its seed's."""

    seed: int
    num_bytes: int

    def rgb(self) -> bytes:
        """The seed's lowest byte, everywhere."""
        return bytes([self.seed % 256]) * self.num_bytes


class FakeExecutor:
    """A device that takes `turn_s(plan)` of virtual time a turn, and checks that every image is stepped in order and in its slot."""

    def __init__(
        self,
        clock: VirtualClock,
        iteration_s: Callable[[IterationPlan], float] = lambda plan: 1.0,  # noqa: ARG005
        memory: Mapping[Phase, int] | None = None,
    ) -> None:
        """`memory` is how many images fit each part of a turn; what it does not name has room for all."""
        self.clock = clock
        self.iteration_s = iteration_s
        self.memory = memory or {}
        self.failing: dict[ImageId, str] = {}  # images to fail at their next turn
        self._previews: list[PreviewPixels] = []
        self._thumbnails: list[PreviewPixels] = []
        self._accepted: dict[str, FakeCompiledRequest] = {}
        self._slots: dict[int, tuple[ImageId, int]] = {}  # whose image a slot holds, and its next call

    def prepare(self, request: ImageRequest) -> FakeCompiledRequest:
        """Nothing to compile."""
        return FakeCompiledRequest(request)

    def is_compiled(self, request: ImageRequest) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def accept(self, prepared: FakeCompiledRequest) -> None:
        """Remember it."""
        self._accepted[prepared.request.request_id] = prepared

    def forget(self, request_id: str) -> None:
        """Forget it."""
        del self._accepted[request_id]

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Let time pass; fail what `failing` names."""
        self.clock.now += self.iteration_s(plan)
        if len(plan.joins) > self.memory.get("boards", len(plan.joins)):
            return IterationResult(oom_phase="boards")
        for assignment in plan.joins:
            self._slots[assignment.slot] = (assignment.image, 0)
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
            assert held == (assignment.image, self._accepted[assignment.image.request_id].num_calls), (
                f"{assignment} but the slot holds {held}"
            )
        planned = {item.image for items in (plan.joins, plan.steps, plan.decodes) for item in items}
        return IterationResult({image: self.failing.pop(image) for image in planned & self.failing.keys()})

    def _make_previews(self, step: Step, *, with_thumbnails: bool) -> None:
        prepared = self._accepted[step.image.request_id]
        pixels = FakePixels(prepared.request.seed + step.image.index, 3)
        preview = PreviewPixels(step.image, step.call, 1, 1, pixels)
        if step.call in preview_calls(prepared.num_calls, prepared.request.num_previews):
            self._previews.append(preview)
        if with_thumbnails:
            self._thumbnails.append(preview)

    def previews(self) -> list[PreviewPixels]:
        """One pixel each."""
        previews, self._previews = self._previews, []
        return previews

    def thumbnails(self) -> list[PreviewPixels]:
        """One pixel each."""
        thumbnails, self._thumbnails = self._thumbnails, []
        return thumbnails

    def memory_bytes(self) -> int:
        """A fake device has none."""
        return 0

    def take_pixels(self, image: ImageId) -> FakePixels:
        """A flat image of the request's size."""
        request = self._accepted[image.request_id].request
        return FakePixels(request.seed + image.index, request.width_px * request.height_px * 3)
