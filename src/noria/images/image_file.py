"""Reads an image file of a client, PNG, WebP or JPEG, which is untrusted.

Its size is read and limited before any pixel is decoded; `pixel_chunks.py` takes away what pixels do not need. An image
of 16 megapixels takes up to 200 MB while it is decoded and resized.
"""

import contextlib
import io
import re
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from noria.errors import UnreadableImage
from noria.images.metadata_chunks import UnknownFormatError, find_metadata, read_orientation
from noria.images.pixel_chunks import PixelChunks, find_pixels

MAX_PIXELS = 16_000_000
"""Photos of phones have 12 million; models take at most 4 million."""
MAX_SIDE_PX = 16_383
"""The limit of WebP. Resizing a side takes memory and time, and the interpreter's lock, in proportion to it."""
_OTHER_FORMATS = {  # by the start of a file, and of ISO's containers by their brand
    **{b"ftyp" + brand: "HEIC" for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")},
    b"ftypavif": "AVIF",
    b"ftypavis": "AVIF",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\1\0": "ICO",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<": "HTML, XML or SVG",
}
_TURNS = {  # by EXIF's orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_UPRIGHT_TURNS = (
    Image.Transpose.FLIP_LEFT_RIGHT,
    Image.Transpose.FLIP_TOP_BOTTOM,
    Image.Transpose.ROTATE_180,
)
_ERRORS_OF_PILLOW = (OSError, SyntaxError, ValueError, IndexError, EOFError, struct.error, zlib.error)


class ImageFile:
    """A file that is called `name` in errors, of the field that this begins with."""

    def __init__(self, name: str, file: bytes) -> None:
        self.name, self._field = name, re.split(r"[.[]", name)[0]
        with self._readable(file[:16]):
            self._chunks: PixelChunks = find_pixels(file)
        size = self._chunks.width_px, self._chunks.height_px
        if not 0 < size[0] * size[1] <= MAX_PIXELS or max(size) > MAX_SIDE_PX:
            raise UnreadableImage(
                f"{name} has {size[0]} × {size[1]} pixels; at most {MAX_PIXELS // 10**6} megapixels and {MAX_SIDE_PX} "
                "pixels a side are allowed.",
                field=self._field,
            )
        self._turn = _TURNS.get(_orientation(file))
        is_upright = self._turn is None or self._turn in _UPRIGHT_TURNS
        self.size_px = size if is_upright else (size[1], size[0])

    @contextlib.contextmanager
    def decode(self) -> Iterator[Image.Image]:
        """Yield the image, upright, with 8 bits a channel."""
        with self._readable(), Image.open(io.BytesIO(self._chunks.content), formats=[self._chunks.file_format]) as file:
            if file.size != (self._chunks.width_px, self._chunks.height_px):
                raise ValueError("its size is not what its head says")
            file.load()
            if file.mode in ("P", "PA") and file.palette is None:
                raise ValueError("it has no palette")
            image = file if self._turn is None else file.transpose(self._turn)
            yield _with_8_bits(image)

    @contextlib.contextmanager
    def _readable(self, head: bytes = b"") -> Iterator[None]:
        """Raise UnreadableImage in place of the errors of those who read it; `head` is how the file begins."""
        try:
            yield
        except UnknownFormatError as error:
            raise UnreadableImage(
                f"{self.name} is no PNG, WebP or JPEG{_format_of(head)}.", field=self._field
            ) from error
        except _ERRORS_OF_PILLOW as error:
            raise UnreadableImage(f"{self.name} is damaged, or not supported: {error}.", field=self._field) from error


def _format_of(head: bytes) -> str:
    """Return what a file that begins with `head` is instead, if that is known: ": it is HEIC"."""
    known = next((name for start, name in _OTHER_FORMATS.items() if head.startswith(start) or head[4:12] == start), "")
    known = known or ("" if head else "empty")
    return known and f": it is {known}"


def _orientation(file: bytes) -> int:
    """Return EXIF's orientation; 1 (upright) if the file's EXIF cannot be read."""
    try:
        return read_orientation(find_metadata(io.BytesIO(file), ()).exif)
    except (ValueError, struct.error):
        return 1


def _with_8_bits(image: Image.Image) -> Image.Image:
    """Return an image of 16 bits of grey, which Pillow would cut at 255, with 8."""
    if image.mode.startswith("I"):
        return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    return image
