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

FIRST = 8  # bytes before the first entry

Key = tuple[str, str, dict[str, str], str]  # metric, series, labels, help

_length = struct.Struct("i").unpack_from


def written(path: pathlib.Path) -> bytes:
    """A file's head and entries, without the room behind them; nothing of a file that is just being made. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(FIRST)
        if len(head) < FIRST:
            return b""
        used = min(_length(head, 0)[0], os.fstat(file.fileno()).st_size)
        return head + file.read(max(used - FIRST, 0))


def entries(content: bytes, start: int = FIRST) -> Iterator[tuple[bytes, int]]:
    """From byte `start` on, each entry's key and where its value is, in bytes; as far as entries can be told."""
    while start + 4 <= len(content):
        (length,) = _length(content, start)
        place = start + _head_bytes(length)
        if length <= 0 or place + 16 > len(content):
            return
        yield content[start + 4 : start + 4 + length], place
        start = place + 16


def decoded(key: bytes) -> Key | None:
    """What a key says; None of what is none."""
    try:
        found: Key = msgspec.json.decode(key, type=Key)
    except msgspec.DecodeError:
        return None
    return found


def file_of(values: Mapping[bytes, float]) -> bytes:
    """A whole file, of values by key."""
    parts = [
        struct.pack("i", len(key)) + key.ljust(_head_bytes(len(key)) - 4) + struct.pack("dd", value, 0.0)
        for key, value in values.items()
    ]
    return struct.pack("i4x", FIRST + sum(map(len, parts))) + b"".join(parts)


def _head_bytes(length: int) -> int:
    """Of an entry, before its value. At least one space follows the key."""
    return 4 + length + (8 - (length + 4) % 8)
