"""The layout of the files in which prometheus_client keeps a process's values (`prometheus_client.mmap_dict`).

An int32 is the number of used bytes; four bytes are unused. Then follow entries: the key's length as int32; the key,
JSON of metric, series, labels and help; spaces up to the next multiple of eight bytes; two doubles, value and time.
Entries are appended, and counted as used once they are written.

This is no public interface of prometheus_client. Anything invalid is taken as not yet written and ends the reading of a
file.
"""

import os
import pathlib
import struct
from collections.abc import Iterator, Mapping

import msgspec

HEADER_BYTES = 8

Key = tuple[str, str, dict[str, str], str]  # metric, series, labels, help

_unpack_int32 = struct.Struct("i").unpack_from


def read_used_bytes(path: pathlib.Path) -> bytes:
    """Return a file's header and entries without the unused rest; empty for a file just being created.

    Raises OSError.
    """
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return b""
        used_bytes = min(_unpack_int32(header, 0)[0], os.fstat(file.fileno()).st_size)
        return header + file.read(max(used_bytes - HEADER_BYTES, 0))


def iter_entries(content: bytes, offset: int = HEADER_BYTES) -> Iterator[tuple[bytes, int]]:
    """Yield key and byte offset of the value of each entry, from byte `offset` up to the first invalid entry."""
    while offset + 4 <= len(content):
        (length,) = _unpack_int32(content, offset)
        value_offset = offset + _value_offset(length)
        if length <= 0 or value_offset + 16 > len(content):
            return
        yield content[offset + 4 : offset + 4 + length], value_offset
        offset = value_offset + 16


def decode_key(key: bytes) -> Key | None:
    """Return the parsed key; None if it is invalid."""
    try:
        parsed: Key = msgspec.json.decode(key, type=Key)
    except msgspec.DecodeError:
        return None
    return parsed


def serialize_file(values: Mapping[bytes, float]) -> bytes:
    """Return the content of a file with these values by key."""
    parts = [
        struct.pack("i", len(key)) + key.ljust(_value_offset(len(key)) - 4) + struct.pack("dd", value, 0.0)
        for key, value in values.items()
    ]
    return struct.pack("i4x", HEADER_BYTES + sum(map(len, parts))) + b"".join(parts)


def entry_bytes(key_bytes: int) -> int:
    """Return the size of an entry whose key has `key_bytes`."""
    return _value_offset(key_bytes) + 16


def _value_offset(length: int) -> int:
    """Return the bytes of an entry before its value, for a key of `length` bytes.

    At least one space follows the key.
    """
    return 4 + length + (8 - (length + 4) % 8)
