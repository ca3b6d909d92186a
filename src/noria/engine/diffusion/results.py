"""The results of an image request: its images, previews of them, and thumbnails for live views."""

from dataclasses import dataclass
from typing import Protocol, SupportsFloat

from noria.protocol import messages
from noria.protocol.messages import ImageDone
from noria.protocol.request import ImageRequest
from noria.scheduling.types import ItemId


class Pixels(Protocol):
    """Pixels that may still be in transfer from the device."""

    def rgb(self) -> bytes | memoryview:
        """Height × width × 3 bytes; blocks until the transfer is complete.

        May be called from any thread, and repeatedly: a thumbnail is sent with every view while its image is in a slot.
        """


@dataclass(frozen=True)
class SafetyScore:
    """The answer of a safety classifier, which may be read once the pixels of its image have been."""

    score: SupportsFloat  # the probability of what is refused, 0 to 1
    threshold: float

    @property
    def is_refused(self) -> bool:
        """Whether the image must not leave the engine."""
        return not float(self.score) < self.threshold


@dataclass(frozen=True)
class DecodedImage:
    """Image `index` of a request."""

    request: ImageRequest
    index: int
    pixels: Pixels
    num_cut: int = 0  # tokens of its prompts that the model is not shown
    safety: SafetyScore | None = None  # None: its model has no classifier

    def message(self) -> tuple[ImageDone, bytes | memoryview]:
        """The message to the client, and the pixels beside it; blocks until their transfer is complete.

        Of a refused image there are no pixels.
        """
        payload, rgb = self.request.payload, self.pixels.rgb()
        is_refused = self.safety is not None and self.safety.is_refused
        done = ImageDone(
            self.request.attempt_id,
            self.index,
            payload.seed + self.index,
            *payload.result_px,
            self.num_cut,
            None if self.safety is None else float(self.safety.score),
            is_refused,
        )
        return done, b"" if is_refused else rgb


@dataclass(frozen=True)
class PreviewPixels:
    """A preview or thumbnail of an image, computed from its model output at `call`."""

    image: ItemId
    call: int
    width_px: int
    height_px: int
    pixels: Pixels

    def rgb(self) -> bytes | memoryview:
        """Height × width × 3 bytes; blocks until the transfer is complete."""
        return self.pixels.rgb()

    def message(self) -> tuple[messages.Preview, bytes | memoryview]:
        """The message to the client, and the pixels beside it; blocks until their transfer is complete."""
        preview = messages.Preview(self.image.attempt_id, self.image.index, self.call, self.width_px, self.height_px)
        return preview, self.rgb()
