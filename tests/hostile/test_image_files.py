"""Image files made to cost time and memory: the reader reads little of them, in few pieces."""

import io
import struct
import tracemalloc
import zlib

import pytest

from noria.errors import ImageFileError
from noria.frontend.routes.images.metadata import MAX_BYTES as MAX_UPLOAD_BYTES
from noria.images.metadata_chunks import MAX_BYTES, MAX_CHUNKS
from noria.images.metadata_io import read_metadata

PNG_HEAD = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s", 13, b"IHDR") + bytes(17)
WEBP_HEAD = b"RIFF\0\0\0\0WEBP"


def png_chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def webp_chunk(kind, content):
    return kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


def repeated(head, chunk):
    """A file as long as an upload may be."""
    return head + chunk * ((MAX_UPLOAD_BYTES - len(head)) // len(chunk))


def exif_of_entries(num_bytes):
    """EXIF whose 65,535 entries all refer to nearly all of its bytes; the last is A1111's text."""
    ifd = struct.pack("<H", 65_535)
    ifd += b"".join(struct.pack("<HHII", tag, 7, num_bytes - 26, 26) for tag in range(65_535))
    head = b"II*\0" + struct.pack("<IH", 8, 1) + struct.pack("<HHII", 0x8769, 4, 1, 26)
    return (head + bytes(4) + ifd).ljust(num_bytes, b" ")


HOSTILE = {
    "empty JPEG segments": repeated(b"\xff\xd8", b"\xff\xe0\0\2"),
    "empty EXIF segments": repeated(b"\xff\xd8", b"\xff\xe1\0\x08Exif\0\0"),
    "long EXIF segments": repeated(b"\xff\xd8", b"\xff\xe1\xff\xffExif\0\0" + bytes(65_527)),
    "JPEG fill bytes": repeated(b"\xff\xd8\xff", b"\xff"),
    "bytes between JPEG segments": repeated(b"\xff\xd8\xff\xe0\0\2", b"\0"),
    "empty PNG chunks": repeated(PNG_HEAD, png_chunk(b"teSt", b"")),
    "PNG texts that unpack to 8 MB": repeated(
        PNG_HEAD, png_chunk(b"zTXt", b"parameters\0\0" + zlib.compress(bytes(MAX_BYTES), 9))
    ),
    "one PNG text": PNG_HEAD + png_chunk(b"iTXt", b"noria\0\0\0\0\0" + bytes(MAX_UPLOAD_BYTES - 100)),
    "empty WebP chunks": repeated(WEBP_HEAD, webp_chunk(b"TEST", b"")),
    "EXIF entries that share their bytes": WEBP_HEAD + webp_chunk(b"EXIF", exif_of_entries(MAX_BYTES - 1)),
    "one EXIF": WEBP_HEAD + webp_chunk(b"EXIF", exif_of_entries(MAX_UPLOAD_BYTES - 100)),
}


class CountingFile(io.BytesIO):
    """Counts reads and the bytes read."""

    num_reads = num_bytes = 0

    def read(self, size=-1):
        content = super().read(size)
        self.num_reads, self.num_bytes = self.num_reads + 1, self.num_bytes + len(content)
        return content


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_rejected_after_few_reads_and_little_memory(case):
    file = CountingFile(HOSTILE[case])
    assert len(HOSTILE[case]) <= MAX_UPLOAD_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(ImageFileError):
            read_metadata(file, "the file")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert file.num_reads <= 5 * MAX_CHUNKS
    assert file.num_bytes <= 2 * MAX_BYTES
    assert peak_bytes <= 10 * MAX_BYTES
