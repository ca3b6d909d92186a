"""A file in which prometheus_client keeps values of a process: how it is laid out, as `prometheus_client.mmap_dict` has it.

An int32 says how many bytes are used, and four are free. Then come entries: a key's length as int32; the key, JSON of metric, series,
labels and help; spaces up to the next multiple of eight bytes; two doubles, value and time. An entry comes after those before, and is
counted as used when it is there.

This is no public interface of prometheus_client; whatever here cannot be is taken for not yet written, and ends what is read of a file.
"""

import os
import pathlib
import struct
from collections.abc import Iterator, Mapping

import msgspec

HEADER_BYTES = 8  # bytes before the first entry

Key = tuple[str, str, dict[str, str], str]  # metric, series, labels, help

_unpack_int32 = struct.Struct("i").unpack_from


def read_used_bytes(path: pathlib.Path) -> bytes:
    """A file's head and entries, without the room behind them; nothing of a file that is just being made. Raises OSError."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return b""
        used_bytes = min(_unpack_int32(header, 0)[0], os.fstat(file.fileno()).st_size)
        return header + file.read(max(used_bytes - HEADER_BYTES, 0))


def iter_entries(content: bytes, offset: int = HEADER_BYTES) -> Iterator[tuple[bytes, int]]:
    """From byte `start` on, each entry's key and where its value is, in bytes; as far as entries can be told."""
    while offset + 4 <= len(content):
        (length,) = _unpack_int32(content, offset)
        value_offset = offset + _value_offset(length)
        if length <= 0 or value_offset + 16 > len(content):
            return
        yield content[offset + 4 : offset + 4 + length], value_offset
        offset = value_offset + 16


def decode_key(key: bytes) -> Key | None:
    """What a key says; None of what is none."""
    try:
        parsed: Key = msgspec.json.decode(key, type=Key)
    except msgspec.DecodeError:
        return None
    return parsed


def serialize_file(values: Mapping[bytes, float]) -> bytes:
    """A whole file, of values by key."""
    parts = [
        struct.pack("i", len(key)) + key.ljust(_value_offset(len(key)) - 4) + struct.pack("dd", value, 0.0)
        for key, value in values.items()
    ]
    return struct.pack("i4x", HEADER_BYTES + sum(map(len, parts))) + b"".join(parts)


def _value_offset(length: int) -> int:
    """Of an entry, before its value. At least one space follows the key."""
    return 4 + length + (8 - (length + 4) % 8)
