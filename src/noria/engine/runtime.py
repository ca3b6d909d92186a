"""The interface between the engine loop and a model runtime.

A *runtime* carries out the scheduler's plans for one kind of model on one device. It consists of an `Executor`, which
compiles requests and executes iterations, and of the data that it returns. `engine/diffusion` is the runtime for
diffusion models, `engine/multi_model` combines several of them on one device, and `testing/fake_executor` is one
without a device.

The loop decides nothing and computes nothing; a runtime does not know which requests wait, or why a plan is what it is.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from noria.protocol.request import ImageRequest
from noria.scheduling.types import BatchKey, ImageId, IterationPlan, IterationResult


class Pixels(Protocol):
    """A decoded image that may still be in transfer from the device."""

    def rgb(self) -> bytes | memoryview:
        """Height × width × 3 bytes; blocks until the transfer is complete.

        May be called from any thread, and repeatedly: a thumbnail is sent with every view while its image is in a slot.
        """
        ...


@dataclass(frozen=True)
class PreviewPixels:
    """A preview of an image, computed from its model output at `call`."""

    image: ImageId
    call: int
    width_px: int
    height_px: int
    pixels: Pixels


class CompiledRequest(Protocol):
    """A request after the preparation that needs no device."""

    @property
    def request(self) -> ImageRequest:
        """The request as submitted."""
        ...

    @property
    def num_calls(self) -> int:
        """Model calls for each of its images."""
        ...


P = TypeVar("P", bound=CompiledRequest)


class Executor(Protocol[P]):
    """Executes iterations on one device.

    `prepare` may be called from another thread, everything else from the loop's only.
    """

    def prepare(self, request: ImageRequest) -> P:
        """Compile what the request needs; raises `errors.RequestError` if it cannot be generated."""
        ...

    def is_compiled(self, request: ImageRequest) -> bool:
        """Whether `prepare` would return at once because nothing new must be compiled."""
        ...

    def accept(self, prepared: P) -> None:
        """Keep a request that the scheduler has accepted, until `forget`."""
        ...

    def forget(self, request_id: str) -> None:
        """Release a request that has ended; no later plan names it."""
        ...

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Execute one iteration. May return while the device still works. Failures of single images are in the result.

        With `with_thumbnails`, also make a thumbnail of every image that steps, for `thumbnails`.
        """
        ...

    def take_pixels(self, image: ImageId) -> Pixels:
        """The pixels of an image that the last iteration decoded. Each image can be taken once."""
        ...

    def previews(self) -> list[PreviewPixels]:
        """The previews of the last iteration. They are returned once."""
        ...

    def thumbnails(self) -> list[PreviewPixels]:
        """The thumbnails of the last iteration, with sides of at most `THUMBNAIL_MAX_PX`. They are returned once."""
        ...

    def memory_bytes(self) -> int:
        """Device memory that the executor holds."""
        ...


THUMBNAIL_MAX_PX = 64
"""The longest side of a thumbnail: 64 of them are less than a megabyte, sent five times a second."""


def preview_calls(num_calls: int, num_previews: int) -> frozenset[int]:
    """The calls after which an image gets a preview: evenly spread, without the last one, which the image follows."""
    calls = ((number * num_calls) // (num_previews + 1) for number in range(1, num_previews + 1))
    return frozenset(call for call in calls if call < num_calls - 1)


def batch_key_of(request: ImageRequest) -> BatchKey:
    """The batch key of all images of `request`."""
    return BatchKey(request.width_px, request.height_px, request.model)
