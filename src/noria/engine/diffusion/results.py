"""The results of an image request: its images, previews of them, and thumbnails for live views."""

from dataclasses import dataclass
from typing import Protocol

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
class DecodedImage:
    """Image `index` of a request."""

    request: ImageRequest
    index: int
    pixels: Pixels
    num_cut: int = 0  # tokens of its prompts that the model is not shown

    def message(self) -> tuple[ImageDone, bytes | memoryview]:
        """The message to the client, and the pixels beside it; blocks until their transfer is complete."""
        payload, rgb = self.request.payload, self.pixels.rgb()
        done = ImageDone(
            self.request.attempt_id,
            self.index,
            payload.seed + self.index,
            *payload.result_px,
            self.num_cut,
        )
        return done, rgb


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
