"""Reads the start images of requests in threads, at most two at once: each takes a core and up to 200 MB."""

import base64
import binascii
import functools
from collections.abc import Callable

from noria.errors import BodyTooLarge, InvalidField, UnreadableImage, short_repr
from noria.frontend.access.fair_threads import FairThreads
from noria.images.start_image import ImageFiles, MaskRule, StartImage
from noria.protocol.request import ImageRequestBody

NUM_UPLOAD_THREADS = 2

LoadFiles = Callable[[], ImageFiles]
"""Returns the files of a start image; is called once, in a thread. Raises RequestError."""


class StartImages:
    """Reads the start images of a front end's requests."""

    def __init__(self, max_bytes: int, threads: FairThreads) -> None:
        """`max_bytes` is the most that an image and its mask have together, as files."""
        self._max_bytes, self._threads = max_bytes, threads

    async def open(self, client: str, load: LoadFiles) -> StartImage:
        """Return the image in the files that `load` returns; its pixels are not decoded.

        Raises:
            BodyTooLarge: the files are too large.
            RequestError: what `load` and StartImage raise.

        """
        return await self._threads.run(client, self._open, load)

    def _open(self, load: LoadFiles) -> StartImage:
        files = load()
        num_bytes = len(files.image) + len(files.mask or b"")
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(
                f"image and mask have {num_bytes} bytes; at most {self._max_bytes} are allowed "
                "(frontend.max_image_bytes).",
                field="image",
            )
        return StartImage(files)

    async def pixels(self, client: str, image: StartImage, width_px: int, height_px: int) -> bytes:
        """Return what `StartImage.pixels` does. Raises UnreadableImage and InvalidField."""
        return await self._threads.run(client, image.pixels, width_px, height_px)


def files_of(body: ImageRequestBody) -> LoadFiles | None:
    """Return what decodes the start image of `body`; None: it has none. Raises InvalidField for a mask without one."""
    if body.image is not None:
        return functools.partial(decode_files, body.image, body.mask)
    if body.mask is not None:
        raise InvalidField("mask needs an image, of which it says what is repainted.", field="mask")
    return None


def decode_files(
    image: str, mask: str | None, mask_rule: MaskRule = "white", *, inverts_mask: bool = False
) -> ImageFiles:
    """Return the files of a start image and its mask in base64, or as data: URLs. Raises UnreadableImage."""
    return ImageFiles(_decode("image", image), None if mask is None else _decode("mask", mask), mask_rule, inverts_mask)


def _decode(field: str, text: str) -> bytes:
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise UnreadableImage(
                f"{field} is {short_repr(head)}…; allowed is data:image/png;base64, and a file in base64.", field=field
            )
    try:
        return base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableImage(
            f"{field} is {short_repr(text)}, which is not base64 ({error}); send a PNG, WebP or JPEG file in base64.",
            field=field,
        ) from error
