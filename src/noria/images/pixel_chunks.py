"""Finds the size and the pixels of PNG, WebP and JPEG files, which may be hostile.

Of a PNG and of the head of a JPEG only what the pixels need is passed on, so that a decoder sees no texts and no EXIF:
Pillow reads the EXIF of a JPEG when it opens it, and 64 kB of entries that name one another's bytes take gigabytes.
What stands behind the image's end, as the video of a phone's moving photo, is not passed on and counts for no limit.
Nothing is decoded here.
"""

import re
import struct
from dataclasses import dataclass
from typing import Literal

from noria.images.metadata_chunks import MAX_CHUNKS, UnknownFormatError, riff_end

_MAX_PNG_CHUNKS = 20_000  # encoders write pixels in chunks of 8 KiB and more; Pillow takes 3 µs for an empty one
# Progressive encoders write 10. Each takes as long as the image is large, also if it is empty: 16 MiB have a million.
_MAX_SCANS = 100
_PNG_HEAD = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_PNG_PIXEL_CHUNKS = (b"PLTE", b"tRNS", b"IDAT", b"IEND")
_START_OF_SCAN, _END = 0xDA, 0xD9
_NEXT_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")  # in pixels, which have stuffed zeros and restart markers
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # start of frame: baseline, progressive, …
_JPEG_PIXEL_MARKERS = _SIZE_MARKERS | {0xC4, 0xCC, 0xDB, 0xDD, 0xE0, 0xEE}  # tables, JFIF, Adobe: colours need these


@dataclass(frozen=True)
class PixelChunks:
    """A file without what its pixels do not need."""

    file_format: Literal["PNG", "WEBP", "JPEG"]
    width_px: int
    height_px: int
    content: bytes


def find_pixels(file: bytes) -> PixelChunks:
    """Return the size and the pixels of an image file.

    Raises:
        UnknownFormatError: the file is no PNG, WebP or JPEG.
        ValueError: it is damaged, animated, or has too many chunks.
    """
    try:
        if file.startswith(_PNG_HEAD):
            return _find_in_png(file)
        if file.startswith(b"RIFF") and file[8:12] == b"WEBP":
            return PixelChunks("WEBP", *_webp_size(file), file[: riff_end(file[:8])])
        if file.startswith(b"\xff\xd8\xff"):
            return _find_in_jpeg(file)
    except struct.error as error:
        raise ValueError("it is truncated") from error
    raise UnknownFormatError


def _find_in_png(file: bytes) -> PixelChunks:
    width_px, height_px = struct.unpack_from(">II", file, 16)
    offset = len(_PNG_HEAD) + 17
    kept = [file[:offset]]
    for _ in range(_MAX_PNG_CHUNKS):
        length, kind = struct.unpack_from(">I4s", file, offset)
        end = offset + 12 + length
        if kind == b"acTL":
            raise ValueError("it is animated")
        if kind in _PNG_PIXEL_CHUNKS:
            kept.append(file[offset:end])
        if kind == b"IEND":
            return PixelChunks("PNG", width_px, height_px, b"".join(kept))
        offset = end
    raise ValueError(f"it has more than {_MAX_PNG_CHUNKS} chunks")


def _webp_size(file: bytes) -> tuple[int, int]:
    kind, flags = struct.unpack_from("<4s4xB", file, 12)
    if kind == b"VP8X":
        if flags & 2:
            raise ValueError("it is animated")
        low_width, high_width, low_height, high_height = struct.unpack_from("<HBHB", file, 24)
        return 1 + low_width + (high_width << 16), 1 + low_height + (high_height << 16)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", file, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", file, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("it has no pixels")


def _find_in_jpeg(file: bytes) -> PixelChunks:
    offset, sizes, kept = 2, [], [file[:2]]
    for _ in range(MAX_CHUNKS):
        first, marker, length = struct.unpack_from(">BBH", file, offset)
        if first != 0xFF:
            raise ValueError(f"no segment begins at byte {offset}")
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        end = offset + 2 + length
        if marker == _START_OF_SCAN:
            break
        if marker in _SIZE_MARKERS:
            sizes.append(struct.unpack_from(">HH", file, offset + 5))
        if marker in _JPEG_PIXEL_MARKERS:
            kept.append(file[offset:end])
        offset = end
    else:
        raise ValueError(f"it has more than {MAX_CHUNKS} chunks")
    if len(sizes) != 1:
        raise ValueError("it has no size, or several")
    ((height_px, width_px),) = sizes
    return PixelChunks("JPEG", width_px, height_px, b"".join([*kept, file[offset : _find_jpeg_end(file, offset)]]))


def _find_jpeg_end(file: bytes, offset: int) -> int:
    """Return where the image ends whose first scan begins at `offset`. Raises ValueError: it has too many scans."""
    num_scans = 0
    for _ in range(MAX_CHUNKS):
        if file[offset + 1] == _END:
            return offset + 2
        marker, length = struct.unpack_from(">xBH", file, offset)
        num_scans += marker == _START_OF_SCAN
        if num_scans > _MAX_SCANS:
            raise ValueError(f"it has more than {_MAX_SCANS} scans")
        following = _NEXT_MARKER.search(file, offset + 2 + length)
        if following is None:
            return len(file)  # without an end, which decoders may do without
        offset = following.start()
    raise ValueError(f"it has more than {MAX_CHUNKS} chunks")
