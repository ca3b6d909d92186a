"""Reads the images of requests, as start images and those of controls, in threads, at most two at once.

Each takes a core and up to 200 MB.
"""

import base64
import binascii
import functools
import io
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from noria.errors import BodyTooLarge, DeadlineExceeded, InvalidField, UnreadableImage, short_repr
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.engines.results import RawImage
from noria.frontend.services.images.image_writer import pixels_of
from noria.frontend.services.images.request_images import check_num_controls, check_num_references
from noria.images.inpainting import MaskUse, ResizeMode
from noria.images.reference_size import FIELD as REFERENCES
from noria.images.start_image import ImageFiles, MaskRule, RequestImages, StartImage
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ControlField, ImageRequest, ImageRequestBody

NUM_UPLOAD_THREADS = 2
_PIECE_CHARS = 1 << 20  # characters of base64 that are decoded at once, in 2 ms
_STANDARD_ALPHABET, _WHITE_SPACE = bytes.maketrans(b"-_", b"+/"), b" \t\r\n\v\f"
# Escapes, and the characters of base64 for which encoders of URLs write them; it has no others to escape.
_ESCAPES = tuple(
    (escape, plain)
    for upper, plain in ((b"%2B", b"+"), (b"%2F", b"/"), (b"%3D", b"="), (b"%0A", b""), (b"%0D", b""), (b"%20", b""))
    for escape in {upper, upper.lower()}
)
# The start of a longer text, which alone is searched: a URL, or a drive.
_MAX_LOCATION_CHARS = 600
_URL = re.compile(r"(?:blob:)?(?!data:)[a-z][a-z0-9+.-]{0,20}://|[a-z]:[\\/]", re.IGNORECASE)
# A file in base64 has no dots, and so short a one begins with a slash only if it is the start of a JPEG.
_PATH = re.compile(r"(?!/9j/)[./~][^\n]{0,78}|[^\n]{1,500}\.\w{2,5}", re.IGNORECASE)

T = TypeVar("T")

LoadFiles = Callable[[], ImageFiles]
"""Returns the files of a request; is called once, in a thread. Raises RequestError."""


class StartImages:
    """Reads the images of a front end's requests."""

    def __init__(self, max_bytes: int, threads: FairThreads) -> None:
        """`max_bytes` is the most that the images of a request have together, as files."""
        self._max_bytes, self._threads = max_bytes, threads

    async def open(self, client: str, load: LoadFiles) -> RequestImages:
        """Return the images in the files that `load` returns; their pixels are not decoded.

        Raises:
            BodyTooLarge: the files are too large.
            RequestError: what `load` and RequestImages raise.

        """
        return await self._threads.run(client, self._open, load)

    def _open(self, load: LoadFiles) -> RequestImages:
        files = load()
        if files.num_bytes > self._max_bytes:
            raise BodyTooLarge(
                f"the images of the request have {files.num_bytes} bytes; at most {self._max_bytes} are allowed "
                "(frontend.max_image_bytes).",
                field="image"
                if files.image is not None
                else "controls"
                if files.controls
                else REFERENCES
                if files.references
                else "ip_adapter",
            )
        return RequestImages(files)

    async def pixels(
        self, client: str, images: RequestImages, request: ImageRequest, spec: DiffusionModelSpec
    ) -> bytes:
        """Return what `RequestImages.pixels` does for a request. Raises UnreadableImage and InvalidField."""
        payload = request.payload
        ip_adapter_px = 0 if payload.ip_adapter is None else payload.ip_adapter.image_px
        second_px = None if payload.second_pass is None else payload.result_px
        sizes_px = payload.width, payload.height, spec, payload.start_px, ip_adapter_px, second_px
        return await self._threads.run(client, images.pixels, *sizes_px)

    async def paste(
        self, client: str, start: StartImage, image: RawImage, write: Callable[[Sequence[RawImage]], T]
    ) -> T:
        """Return what `write` returns, in the same thread, for the result of `StartImage.paste`, which may be large."""
        return await self._threads.run(client, lambda: write([_paste(start, image)]))


def _paste(start: StartImage, image: RawImage) -> RawImage:
    pasted = start.paste(pixels_of(image))
    rgb = memoryview(pasted.tobytes())
    return msgspec.structs.replace(image, width_px=pasted.width, height_px=pasted.height, rgb=rgb)


def files_of(body: ImageRequestBody) -> LoadFiles | None:
    """Return what decodes the images of `body`; None: it has none.

    Raises:
        InvalidField: a mask has no start image, or a control or an IP-Adapter no image, or there are too many.

    """
    if body.mask is not None and body.image is None:
        raise InvalidField("mask is there without image; send both.", field="mask")
    if not body.images and not body.controls and body.ip_adapter is None:
        return None
    check_num_references(body.reference_images)
    if body.ip_adapter is not None and body.ip_adapter.image is None:
        raise InvalidField("ip_adapter.image is missing; send a PNG, WebP or JPEG file.", field="ip_adapter")
    return functools.partial(
        decode_files,
        body.image,
        body.mask,
        control_images=control_images(body.controls),
        reference_images=body.reference_images,
        ip_adapter_image=None if body.ip_adapter is None else body.ip_adapter.image,
    )


def control_images(controls: Sequence[ControlField]) -> list[str]:
    """Return the images of controls in base64. Raises InvalidField if one is missing, or there are too many."""
    check_num_controls(controls)
    for k, control in enumerate(controls):
        if control.image is None:
            raise InvalidField(f"controls[{k}].image is missing; send a PNG, WebP or JPEG file.", field="controls")
    return [control.image for control in controls if control.image is not None]


def decode_files(
    image: str | None,
    mask: str | None,
    mask_rule: MaskRule = "white",
    *,
    inverts_mask: bool = False,
    control_images: Sequence[str] = (),
    reference_images: Sequence[str] = (),
    ip_adapter_image: str | None = None,
    resize: ResizeMode = "stretch",
    mask_use: MaskUse | None = None,
) -> ImageFiles:
    """Return the files of images in base64, or as data: URLs. Raises UnreadableImage."""
    return ImageFiles(
        None if image is None else decode_file("image", image),
        None if mask is None else decode_file("mask", mask),
        mask_rule,
        inverts_mask,
        tuple(decode_file(f"controls[{k}].image", each) for k, each in enumerate(control_images)),
        tuple(decode_file(f"{REFERENCES}[{k}]", each) for k, each in enumerate(reference_images)),
        None if ip_adapter_image is None else decode_file("ip_adapter.image", ip_adapter_image),
        resize,
        mask_use,
    )


def decode_file(name: str, text: str) -> bytes:
    """Return the file that `text` is in base64, or as a data: URL; `name` is for errors. Raises UnreadableImage."""
    field = re.split(r"[.[]", name)[0]
    start = text[:_MAX_LOCATION_CHARS].strip()
    if _URL.match(start) or (len(text) <= _MAX_LOCATION_CHARS and _PATH.fullmatch(start)):
        raise UnreadableImage(
            f"{name} is {short_repr(text)}, which is not fetched: the server reads neither URLs nor paths. Send the "
            "PNG, WebP or JPEG file itself, in base64.",
            field=field,
        )
    content = text
    if is_data_url := start[:5].lower() == "data:":
        head, comma, content = text.partition(",")
        if not comma or "".join(head.split())[-7:].lower() != ";base64":
            raise UnreadableImage(
                f"{name} is {short_repr(head)}…; allowed is data:image/png;base64, and a file in base64.", field=field
            )
    try:
        return _decode_base64(content, _ESCAPES if is_data_url and "%" in content else ())
    except (binascii.Error, ValueError) as error:
        raise UnreadableImage(
            f"{name} is {short_repr(text)}, which is not base64 ({error}); send a PNG, WebP or JPEG file in base64.",
            field=field,
        ) from error


def _decode_base64(text: str, escapes: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return what `text` is in base64, of either alphabet, with white space and without padding as it may be.

    `escapes` are texts and what they stand for. Raises binascii.Error and ValueError. It is decoded piece by piece,
    between which other threads run: the interpreter's lock is held for all of a call, and for 25 ms if that decodes
    16 MiB.
    """
    decoded, rest = io.BytesIO(), b""
    for start in range(0, len(text), _PIECE_CHARS):
        rest += text[start : start + _PIECE_CHARS].encode("ascii").translate(_STANDARD_ALPHABET, _WHITE_SPACE)
        for escape, plain in escapes if b"%" in rest else ():
            rest = rest.replace(escape, plain)
        whole = rest[:-2] + rest[-2:].partition(b"%")[0] if escapes else rest  # without an escape that is cut
        num_chars = len(whole) // 4 * 4
        if start + _PIECE_CHARS >= len(text):
            rest = rest.rstrip(b"=")
            rest += b"=" * (-len(rest) % 4)
            num_chars = len(rest)
        if num_chars and decoded.tell() % 3:
            raise binascii.Error("Excess data after padding")
        decoded.write(base64.b64decode(rest[:num_chars], validate=True))
        rest = rest[num_chars:]
    return decoded.getvalue()


def with_less_time(request: ImageRequest, seconds: float) -> ImageRequest:
    """Return `request` with a deadline, if it has one, that is earlier by the time that its images, or the opening of
    its model, took so far.

    Raises:
        DeadlineExceeded: nothing is left.

    """
    if request.deadline_s is None:
        return request
    if seconds >= request.deadline_s:
        raise DeadlineExceeded(
            f"the deadline, {round(1000 * request.deadline_s)} ms after the request, passed after {1000 * seconds:.0f} "
            "ms of reading its images, or opening its model. Allow more time.",
            field="deadline_ms",
        )
    return msgspec.structs.replace(request, deadline_s=request.deadline_s - seconds)
