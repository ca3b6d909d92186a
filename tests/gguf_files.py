"""GGUF files as bytes, written by the format's description, without the library `gguf`."""

import struct
from collections.abc import Mapping

import numpy as np

BLOCK_BYTES = {"F32": (0, 1, 4), "Q8_0": (8, 32, 34), "BF16": (30, 1, 2)}  # type, numbers and bytes of a block


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def field(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def gguf_bytes(tensors: Mapping[str, tuple[tuple[int, ...], str]], fields: tuple[bytes, ...] = ()) -> bytes:
    """Return a file of tensors of zeros: their shapes and types by name."""
    fields = (field("general.architecture", 8, string("tiny")), *fields)
    infos, data = b"", b""
    for name, (shape, type_name) in tensors.items():
        kind, block, block_bytes = BLOCK_BYTES[type_name]
        infos += tensor_info(name, shape, kind, len(data))
        stored = int(np.prod(shape)) // block * block_bytes
        data += bytes(stored + -stored % 32)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + b"".join(fields) + infos
    return head + bytes(-len(head) % 32) + data
