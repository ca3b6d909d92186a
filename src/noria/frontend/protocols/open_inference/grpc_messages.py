"""The messages of the protocol over gRPC, as `open_inference.proto` declares them.

The descriptors are in a pool of their own: a second file of the same names in protobuf's default pool, as a client in
the same process brings it, would be an error. So would be code that `protoc` generates.
"""

import functools
import pathlib
import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

HEALTH_SERVICE = "grpc.health.v1.Health"
"""gRPC's own health check, of which probes of Kubernetes and Envoy call `Check`. On the wire its messages have no
package. https://github.com/grpc/grpc/blob/master/doc/health-checking.md"""

SERVING, NOT_SERVING = 1, 2
"""The values of its `ServingStatus`."""

_PROTO = pathlib.Path(__file__).with_name("open_inference.proto")
_PROTO_FIELD = descriptor_pb2.FieldDescriptorProto
_BLOCK = re.compile(r"(message|oneof|enum) (\w+) \{\}?")
_VALUE = re.compile(r"(\w+) = (\d+);")
_FIELD = re.compile(r"(repeated )?(\w+|map<string, (\w+)>) (\w+) = (\d+);")


def message(name: str) -> Any:
    """Return the class of a message, such as "ModelInferRequest"."""
    return _classes()[f"{PACKAGE}.{name}"]


@functools.cache
def _classes() -> dict[str, Any]:
    pool, file = descriptor_pool.DescriptorPool(), _read(_PROTO.read_text(encoding="utf-8"))
    pool.Add(file)
    classes: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return classes


def _read(text: str) -> Any:
    """Return the descriptor of a file, of whose lines each is a declaration, or begins or ends a block."""
    file = descriptor_pb2.FileDescriptorProto(name=_PROTO.name, package=PACKAGE, syntax="proto3")
    blocks: list[tuple[str, Any]] = [("file", file)]
    for line in map(str.strip, text.splitlines()):
        kind, block = blocks[-1]
        if begin := _BLOCK.fullmatch(line):
            blocks.append((begin[1], _add_block(kind, block, begin[1], begin[2])))
        elif kind == "enum" and (value := _VALUE.fullmatch(line)):
            block.value.add(name=value[1], number=int(value[2]))
        elif kind in ("message", "oneof") and (field := _FIELD.fullmatch(line)):
            _add_field(block, field, is_choice=kind == "oneof")
        if line.endswith("}"):
            blocks.pop()
    return file


def _add_block(kind: str, block: Any, added: str, name: str) -> Any:
    """Add a message, an enum or a oneof to a block of a `kind`; returns what its lines are added to."""
    if added == "oneof":
        block.oneof_decl.add(name=name)
        return block
    if added == "enum":
        return block.enum_type.add(name=name)
    return (block.nested_type if kind == "message" else block.message_type).add(name=name)


def _add_field(block: Any, declared: re.Match[str], *, is_choice: bool) -> None:
    is_repeated, type_name, value_type, name, number = declared.groups()
    if value_type:  # a map: a list of entries, which protobuf's own compiler declares so, too
        type_name, is_repeated = f"{name.title()}Entry", True
        entry = block.nested_type.add(name=type_name)
        entry.options.map_entry = True
        for index, (key, kind) in enumerate((("key", "string"), ("value", value_type)), 1):
            _set_type(entry.field.add(name=key, number=index, label=_PROTO_FIELD.LABEL_OPTIONAL), kind)
    label = _PROTO_FIELD.LABEL_REPEATED if is_repeated else _PROTO_FIELD.LABEL_OPTIONAL
    field = block.field.add(name=name, number=int(number), label=label)
    _set_type(field, type_name)
    if is_choice:
        field.oneof_index = len(block.oneof_decl) - 1


def _set_type(field: Any, name: str) -> None:
    if name[0].isupper():  # a message or an enum, which the pool finds
        field.type_name = name
    else:
        field.type = getattr(_PROTO_FIELD, f"TYPE_{name.upper()}")
