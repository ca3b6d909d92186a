"""Mutations that keep an input's format, so that it is not rejected by its first byte."""

import copy
import json
import random
import struct
import zlib

import msgspec

_VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\0",
    "\ud800",
    "é",
    "x" * 1500,
    [],
    {},
    [[]],
    [{"": None}],
)
_KINDS = ("replace", "replace", "replace", "delete", "rename", "copy", "nest")


def mutate_tree(tree, chooser):
    """Change one place of a tree of lists and objects."""
    parents = [each for each in _containers(tree) if each]
    if not parents:
        return chooser.choice(_VALUES)
    parent = chooser.choice(parents)
    key = chooser.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    match chooser.choice(_KINDS):
        case "replace":
            parent[key] = chooser.choice(_VALUES)
        case "delete":
            del parent[key]
        case "rename" if isinstance(parent, dict):
            parent[chooser.choice(("", "x", str(key)[:-1], str(key).upper()))] = parent.pop(key)
        case "copy":
            parent[key] = copy.deepcopy(chooser.choice(list(_containers(tree))))
        case _:
            value = parent[key]
            for _ in range(chooser.choice((1, 3, 40, 400, 990))):
                value = [value]
            parent[key] = value
    return tree


def _containers(tree):
    pending = [tree]
    while pending:
        each = pending.pop()
        if isinstance(each, dict | list):
            yield each
            pending += each.values() if isinstance(each, dict) else each


def json_after(separator, mutate_bytes):
    """A mutator of a head, `separator` and JSON: half of the time the JSON's tree, else bytes."""

    def mutate(data, max_size, seed):
        chooser = random.Random(seed)
        head, found, text = data.partition(separator)
        if found and chooser.random() < 0.5:
            try:
                tree = mutate_tree(json.loads(text), chooser)
                return (head + found + json.dumps(tree).encode())[:max_size]
            except (ValueError, RecursionError):
                pass
        return mutate_bytes(data, max_size)

    return mutate


def message_pack(mutate_bytes):
    """A mutator of a byte and a MessagePack frame."""

    def mutate(data, max_size, seed):
        chooser = random.Random(seed)
        if chooser.random() < 0.5:
            try:
                tree = mutate_tree(msgspec.msgpack.decode(data[1:]), chooser)
                return (data[:1] + msgspec.msgpack.encode(tree))[:max_size]
            except (ValueError, TypeError, OverflowError, RecursionError):
                pass
        return mutate_bytes(data, max_size)

    return mutate


def png_checksums(mutate_bytes):
    """A mutator of files, which repairs the checksums of most PNG files."""

    def mutate(data, max_size, seed):
        mutated = bytearray(mutate_bytes(data, max_size))
        if mutated.startswith(b"\x89PNG") and seed % 8:
            start = 8
            while (end := start + 8 + int.from_bytes(mutated[start : start + 4])) + 4 <= len(mutated):
                struct.pack_into(">I", mutated, end, zlib.crc32(mutated[start + 4 : end]))
                start = end + 4
        return bytes(mutated)

    return mutate
