"""Image files made to cost time and memory, each as long as an upload may be or shorter."""

import struct
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from noria.images.metadata_chunks import MAX_BYTES

_UPLOAD_BYTES = 16 * 2**20  # the longest upload that a server accepts
_PNG_HEAD = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s", 13, b"IHDR") + bytes(17)
_WEBP_HEAD = b"RIFF\0\0\0\0WEBP"


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _webp_chunk(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def _repeated(head: bytes, chunk: bytes) -> bytes:
    return head + chunk * ((_UPLOAD_BYTES - len(head)) // len(chunk))


def _unpacked_chunk() -> bytes:
    return _png_chunk(b"zTXt", b"parameters\0\0" + zlib.compress(bytes(MAX_BYTES), 9))


def _exif_of_entries(num_bytes: int) -> bytes:
    """EXIF whose 65,535 entries all refer to nearly all of its bytes; the last is A1111's text."""
    ifd = struct.pack("<H", 65_535)
    ifd += b"".join(struct.pack("<HHII", tag, 7, num_bytes - 26, 26) for tag in range(65_535))
    head = b"II*\0" + struct.pack("<IH", 8, 1) + struct.pack("<HHII", 0x8769, 4, 1, 26)
    return (head + bytes(4) + ifd).ljust(num_bytes, b" ")


HOSTILE_FILES: Mapping[str, Callable[[], bytes]] = MappingProxyType(
    {
        "empty JPEG segments": lambda: _repeated(b"\xff\xd8", b"\xff\xe0\0\2"),
        "empty EXIF segments": lambda: _repeated(b"\xff\xd8", b"\xff\xe1\0\x08Exif\0\0"),
        "long EXIF segments": lambda: _repeated(b"\xff\xd8", b"\xff\xe1\xff\xffExif\0\0" + bytes(65_527)),
        "JPEG fill bytes": lambda: _repeated(b"\xff\xd8\xff", b"\xff"),
        "bytes between JPEG segments": lambda: _repeated(b"\xff\xd8\xff\xe0\0\2", b"\0"),
        "empty PNG chunks": lambda: _repeated(_PNG_HEAD, _png_chunk(b"teSt", b"")),
        "PNG texts that unpack to 8 MB": lambda: _repeated(_PNG_HEAD, _unpacked_chunk()),
        "one PNG text": lambda: _PNG_HEAD + _png_chunk(b"iTXt", b"noria\0\0\0\0\0" + bytes(_UPLOAD_BYTES - 100)),
        "empty WebP chunks": lambda: _repeated(_WEBP_HEAD, _webp_chunk(b"TEST", b"")),
        "EXIF entries that share their bytes": lambda: (
            _WEBP_HEAD + _webp_chunk(b"EXIF", _exif_of_entries(MAX_BYTES - 1))
        ),
        "one EXIF": lambda: _WEBP_HEAD + _webp_chunk(b"EXIF", _exif_of_entries(_UPLOAD_BYTES - 100)),
    }
)
"""By name, what makes each."""
