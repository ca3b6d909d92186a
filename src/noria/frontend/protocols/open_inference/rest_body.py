"""The bodies of inference over REST: JSON, and the extension for binary tensors, which follow the JSON. Pure.

As in Triton, unknown members are ignored: the protocol's clients send some. Null is a member that is left out.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from noria.errors import InvalidField, short_repr
from noria.frontend.http.body import decode
from noria.frontend.protocols.open_inference.inference import TEXT, InferenceRequest, check_tensor_parameters
from noria.frontend.protocols.open_inference.tensors import InputTensor, OutputTensor, invalid_inputs

HEADER = "Inference-Header-Content-Length"
"""The header with the length of the JSON, in bytes, if binary tensors follow it."""


class InferInputBody(Struct, frozen=True):
    """A tensor of a request: its values in `data`, flat or nested, or after the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class InferOutputBody(Struct, frozen=True):
    """A tensor that the response shall have."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequestBody(Struct, frozen=True):
    """The JSON of a request."""

    inputs: list[InferInputBody]
    outputs: list[InferOutputBody] | None = None
    parameters: dict[str, Any] | None = None
    id: str | None = None


class InferOutput(Struct, frozen=True, omit_defaults=True):
    """A tensor of a response: its values in `data`, flat, or after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | UnsetType = UNSET
    data: list[float] | UnsetType = UNSET


class InferResponseBody(Struct, frozen=True):
    """The JSON of a response."""

    model_name: str
    model_version: str
    outputs: list[InferOutput]
    id: str | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A request, and which outputs are wanted in binary form."""

    inference: InferenceRequest
    binary_outputs: frozenset[str] = frozenset()
    binary_by_default: bool = False  # outputs that the request does not name


def parse(raw: bytes, json_length: str | None) -> RestRequest:
    """Return the request in a body; `json_length` is the header for it.

    Raises InvalidField, InvalidBody: the JSON is not as documented, or lengths of binary tensors are wrong.
    """
    if json_length is None:
        return _parse(decode(raw, InferRequestBody), memoryview(b""))
    if not (json_length.isascii() and json_length.isdigit()) or len(json_length) > 9 or int(json_length) > len(raw):
        raise InvalidField(
            f"header {HEADER} is {short_repr(json_length)}; allowed is the length of the JSON, at most that of the "
            f"body, {len(raw)}.",
            field=HEADER,
        )
    if int(json_length) == 0:  # the body is the one element of the one input
        text = InputTensor(TEXT, "BYTES", (1,), [raw])
        return RestRequest(InferenceRequest([text]), binary_by_default=True)
    length = int(json_length)
    return _parse(decode(raw[:length], InferRequestBody), memoryview(raw)[length:])


def _parse(body: InferRequestBody, binary: memoryview) -> RestRequest:
    inputs, at = [], 0
    for each in body.inputs:
        size = _tensor_parameter("input", each, "binary_data_size", int)
        if (size is None) == (each.data is None):
            raise invalid_inputs(
                f"input {short_repr(each.name)} has {'no data' if size is None else 'data and binary_data_size'}; it "
                "needs one of data and binary_data_size."
            )
        data: Any = each.data
        if size is not None:
            if not 0 <= size <= len(binary) - at:
                raise invalid_inputs(
                    f"input {short_repr(each.name)} has binary_data_size {size}; {len(binary) - at} bytes are left of "
                    f"those after the JSON, whose length {HEADER} says."
                )
            data = binary[at : at + size]
            at += size
        inputs.append(InputTensor(each.name, each.datatype, tuple(each.shape), data))
    if at != len(binary):
        raise invalid_inputs(
            f"the body has {len(binary)} bytes after its JSON; its inputs have binary_data_size for {at}."
        )
    parameters, outputs = dict(body.parameters or {}), body.outputs or []
    binary_by_default = parameters.pop("binary_data_output", None) or False
    if not isinstance(binary_by_default, bool):
        raise InvalidField(
            f"parameter binary_data_output is {short_repr(binary_by_default)}; allowed is true or false.",
            field="parameters",
        )
    binary_outputs = []
    for output in outputs:
        wants_binary = _tensor_parameter("output", output, "binary_data", bool)
        if binary_by_default if wants_binary is None else wants_binary:
            binary_outputs.append(output.name)
    names = [output.name for output in outputs]
    request = InferenceRequest(inputs, names, parameters, body.id or "")
    return RestRequest(request, frozenset(binary_outputs), binary_by_default)


def _tensor_parameter(kind: str, tensor: InferInputBody | InferOutputBody, name: str, value_type: type) -> Any:
    """Return the one parameter of a tensor that has a meaning, or None. Raises InvalidField."""
    parameters = tensor.parameters or {}
    check_tensor_parameters(kind, tensor.name, parameters)
    value = parameters.get(name)
    if value is not None and type(value) is not value_type:
        raise InvalidField(
            f"{kind} {short_repr(tensor.name)} has {name} {short_repr(value)}; allowed is "
            f"{'an integer' if value_type is int else 'true or false'}.",
            field=f"{kind}s",
        )
    return value


def serialize(
    request: RestRequest, model: str, version: str, outputs: Sequence[OutputTensor]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if binary tensors follow it."""
    described, binary = [], []
    for output in outputs:
        named = bool(request.inference.outputs)
        is_binary = output.name in request.binary_outputs if named else request.binary_by_default
        shape = list(output.values.shape)
        if is_binary:
            binary.append(output.binary)
            described.append(InferOutput(output.name, output.datatype, shape, {"binary_data_size": len(binary[-1])}))
        else:
            data: list[float] = output.values.ravel().tolist()  # type: ignore[assignment]
            described.append(InferOutput(output.name, output.datatype, shape, data=data))
    body = InferResponseBody(model, version, described, request.inference.id or UNSET)
    content = msgspec.json.encode(body)
    return b"".join([content, *binary]), len(content) if binary else None
