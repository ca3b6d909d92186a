"""Finds texts and EXIF in PNG, WebP and JPEG files, which may be hostile.

Only the chunks that are wanted are read, and of EXIF only the entries. So a file costs at most `MAX_CHUNKS` small reads
and a few times `MAX_BYTES` of memory. Pillow would keep every segment: 16 MiB of empty ones take 14 s and 600 MB.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

MAX_CHUNKS = 1000
"""PNG files have a few chunks before their pixels, WebP and JPEG files a few dozen; animations one for each frame."""
MAX_BYTES = 8 * 2**20
"""Of a chunk, of all EXIF, and of an unpacked text: the longest text that is read, twice in UTF-32."""

_PNG_SIGNATURE, _JPEG_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_MAX_KEYWORD_BYTES = 79
_EXIF_PREFIX = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_EXIF_IFD = 0x8769
_ORIENTATION = 0x0112
_ASCII, _SHORT, _LONG, _IFD = 2, 3, 4, 13  # types of TIFF 6.0
_BYTES_PER_VALUE = {1: 1, _ASCII: 1, _SHORT: 2, _LONG: 4, 7: 1, _IFD: 4}


class UnknownFormatError(ValueError):
    """The file is no PNG, WebP or JPEG."""


@dataclass(frozen=True)
class MetadataChunks:
    """The metadata that was found in a file."""

    texts: dict[str, str] = field(default_factory=dict)  # texts of a PNG, by keyword; of the wanted keywords only
    exif: bytes = b""


def find_metadata(file: IO[bytes], keywords: tuple[str, ...]) -> MetadataChunks:
    """Return the texts with these keywords and the EXIF of an image file, as far as they precede a PNG's pixels.

    Raises:
        UnknownFormatError: the file is no PNG, WebP or JPEG.
        ValueError, zlib.error: it is damaged, or has too many or too long chunks.
    """
    head = file.read(16)
    if head.startswith(_PNG_SIGNATURE) and head[12:] == b"IHDR":
        return _find_in_png(file, {keyword.encode() for keyword in keywords})
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return MetadataChunks(exif=_find_in_webp(file))
    if head.startswith(_JPEG_SIGNATURE):
        return MetadataChunks(exif=_find_in_jpeg(file))
    raise UnknownFormatError


def _find_in_png(file: IO[bytes], keywords: set[bytes]) -> MetadataChunks:
    texts: dict[bytes, tuple[bytes, int, int]] = {}  # the last of several with one keyword; unpacked below
    exif = b""
    for kind, start, length in _png_chunks(file):
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            keyword = _read(file, start, min(length, _MAX_KEYWORD_BYTES + 1)).partition(b"\0")[0]
            if keyword in keywords:
                texts[keyword] = (kind, start, length)
        elif kind == b"eXIf":
            exif = _read_png_chunk(file, kind, start, length)
    decoded = {
        keyword.decode(): _decode_text(chunk[0], _read_png_chunk(file, *chunk)[len(keyword) + 1 :])
        for keyword, chunk in texts.items()
    }
    return MetadataChunks(decoded, exif)


def _png_chunks(file: IO[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, offset and length of the chunks before the pixels."""
    offset = len(_PNG_SIGNATURE)
    for _ in range(MAX_CHUNKS):
        length, kind = struct.unpack(">I4s", _read(file, offset, 8))
        if kind in (b"IDAT", b"IEND"):
            return
        yield kind, offset + 8, length
        offset += length + 12
    raise _too_many_chunks()


def _read_png_chunk(file: IO[bytes], kind: bytes, start: int, length: int) -> bytes:
    content = _read(file, start, length)
    if _read(file, start + length, 4) != struct.pack(">I", zlib.crc32(kind + content)):
        raise ValueError(f"the checksum of a chunk {kind.decode()} is wrong")
    return content


def _decode_text(kind: bytes, content: bytes) -> str:
    if kind == b"tEXt":
        return content.decode("latin-1")
    if kind == b"zTXt":
        return _unpack(content[1:]).decode("latin-1")
    is_packed = content[:1] != b"\0"
    _language, _translated_keyword, text = content[2:].split(b"\0", 2)
    return (_unpack(text) if is_packed else text).decode()


def _unpack(content: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    unpacked = decompressor.decompress(content, MAX_BYTES)
    if not decompressor.eof:
        raise ValueError(f"a text is truncated, or unpacks to more than {MAX_BYTES} bytes")
    return unpacked


def riff_end(head: bytes) -> int:
    """Return where a RIFF file ends, by its first eight bytes."""
    (length,) = struct.unpack_from("<4xI", head)
    return 8 + int(length)


def _find_in_webp(file: IO[bytes]) -> bytes:
    file.seek(0)
    offset, end = 12, riff_end(file.read(8))
    for _ in range(MAX_CHUNKS):
        file.seek(offset)
        head = file.read(8)
        if len(head) < 8 or offset >= end:
            return b""
        kind, length = struct.unpack("<4sI", head)
        if kind == b"EXIF":
            return _read(file, offset + 8, length)
        offset += 8 + length + length % 2
    raise _too_many_chunks()


def _find_in_jpeg(file: IO[bytes]) -> bytes:
    """Return the content of all EXIF segments before the pixels; an EXIF longer than 64 kB has several."""
    offset, exif = 2, bytearray()
    for _ in range(MAX_CHUNKS):
        first, marker = _read(file, offset, 2)
        if first != 0xFF:
            raise ValueError(f"no segment begins at byte {offset}")
        if marker in (0xDA, 0xD9):  # the pixels, the end
            return bytes(exif)
        if marker == 0xFF:  # a fill byte
            offset += 1
            continue
        (length,) = struct.unpack(">H", _read(file, offset + 2, 2))
        if marker == 0xE1 and length >= 8 and _read(file, offset + 4, len(_EXIF_PREFIX)) == _EXIF_PREFIX:
            exif += _read(file, offset + 10, length - 8)
            if len(exif) > MAX_BYTES:
                raise ValueError(f"its EXIF has more than {MAX_BYTES} bytes")
        offset += 2 + length
    raise _too_many_chunks()


def _too_many_chunks() -> ValueError:
    return ValueError(f"it has more than {MAX_CHUNKS} chunks")


def _read(file: IO[bytes], start: int, length: int) -> bytes:
    if length > MAX_BYTES:
        raise ValueError(f"a chunk has {length} bytes; at most {MAX_BYTES} are read")
    file.seek(start)
    content = file.read(length)
    if len(content) < length:
        raise ValueError("it is truncated")
    return content


def read_exif(exif: bytes, tags: tuple[int, ...]) -> dict[int, bytes | str]:
    """Return the bytes, or the ASCII texts, of these tags of the Exif IFD (EXIF 2.32), as far as there are any.

    Raises ValueError: an entry is outside of `exif`.
    """
    exif = exif.removeprefix(_EXIF_PREFIX)
    order, entries = _read_first_ifd(exif, (_EXIF_IFD,))
    kind, pointer = entries.get(_EXIF_IFD, (0, b""))
    if kind not in (_LONG, _IFD) or len(pointer) != 4:
        return {}
    (exif_ifd,) = struct.unpack(f"{order}I", pointer)
    return {
        tag: content.removesuffix(b"\0").decode("latin-1") if kind == _ASCII else content
        for tag, (kind, content) in _read_entries(exif, order, exif_ifd, tags).items()
        if kind not in (_SHORT, _LONG, _IFD)
    }


def read_exif_texts(exif: bytes, tags: tuple[int, ...]) -> dict[int, str]:
    """Return the ASCII texts with these tags of the first IFD, such as make and software.

    Raises ValueError: an entry is outside of `exif`.
    """
    _, entries = _read_first_ifd(exif.removeprefix(_EXIF_PREFIX), tags)
    return {
        tag: content.removesuffix(b"\0").decode("utf-8", "replace")
        for tag, (kind, content) in entries.items()
        if kind == _ASCII
    }


def read_orientation(exif: bytes) -> int:
    """Return how an image is to be turned before it is shown, 1 (not at all) to 8 as of EXIF 2.32.

    Raises ValueError: an entry is outside of `exif`.
    """
    order, entries = _read_first_ifd(exif.removeprefix(_EXIF_PREFIX), (_ORIENTATION,))
    kind, content = entries.get(_ORIENTATION, (0, b""))
    if kind != _SHORT or len(content) != 2:
        return 1
    (orientation,) = struct.unpack(f"{order}H", content)
    return int(orientation) if 1 <= orientation <= 8 else 1


def _read_first_ifd(exif: bytes, tags: tuple[int, ...]) -> tuple[str, dict[int, tuple[int, bytes]]]:
    """Return the byte order, as `struct` has it, and the entries of the first IFD: none if `exif` has no header."""
    order = _BYTE_ORDERS.get(exif[:4], "<")
    if exif[:4] not in _BYTE_ORDERS or len(exif) < 8:
        return order, {}
    (offset,) = struct.unpack_from(f"{order}I", exif, 4)
    return order, _read_entries(exif, order, offset, tags)


def _read_entries(exif: bytes, order: str, offset: int, tags: tuple[int, ...]) -> dict[int, tuple[int, bytes]]:
    """Return type and content of the entries with these tags of the IFD at `offset`."""
    if offset + 2 > len(exif):
        raise ValueError("its EXIF is truncated")
    (num_entries,) = struct.unpack_from(f"{order}H", exif, offset)
    num_whole = min(num_entries, (len(exif) - offset - 2) // 12)
    found = {}
    for tag, kind, count, inline in struct.iter_unpack(f"{order}HHI4s", exif[offset + 2 : offset + 2 + 12 * num_whole]):
        size_bytes = count * _BYTES_PER_VALUE.get(kind, 0)
        if tag in tags and tag not in found and size_bytes:
            start = struct.unpack(f"{order}I", inline)[0] if size_bytes > 4 else 0
            content = (exif if size_bytes > 4 else inline)[start : start + size_bytes]
            if len(content) < size_bytes:
                raise ValueError("an entry of its EXIF is truncated")
            found[tag] = (kind, content)
    return found
