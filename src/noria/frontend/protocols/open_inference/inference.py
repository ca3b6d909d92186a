"""The meaning of an inference request for a text encoder, and its response; the same over REST and gRPC. Pure.

A request has texts in `TEXT`, or token ids in `input_ids` and `attention_mask`. The result is `embedding`, or `logits`
of the other tasks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from noria.config import FrontendConfig
from noria.errors import InvalidField, did_you_mean, short_repr
from noria.frontend.protocols.open_inference.tensors import (
    InputTensor,
    OutputTensor,
    integers_of,
    invalid_inputs,
    texts_of,
)
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.frontend.services.texts.text_request import InputType, TextRequestSettings, role_of
from noria.models.encoder.tokenizers.tokens import TextInput
from noria.protocol.request import Priority
from noria.protocol.text import EncoderModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEXT = "TEXT"
_IDS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"

# Triton's priorities: 1 is the highest, 0 the model's default.
_PRIORITIES: tuple[Priority | None, ...] = (None, "high", "normal", "low")

PARAMETERS: Mapping[str, str] = {
    "priority": "1 is high, 2 normal, 3 low; 0 is the default",
    "timeout": "microseconds from now in which the result is needed; rejected at once if that is not possible; 0 is "
    "none",
    "dimensions": "cut embeddings to so many numbers",
    "normalize": "whether embeddings have length 1",
    "truncate": "cut texts that are too long, or reject them",
    "prompt_name": "name of the model's prompt to put before each text",
    "input_type": "the side of a search that the texts are on, such as `query`, which chooses the prompt",
}
"""The parameters of a request, and what they mean."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request as it was received; nothing of it is checked."""

    inputs: Sequence[InputTensor]
    outputs: Sequence[str] = ()  # empty: all
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


def input_names(spec: EncoderModelSpec) -> list[str]:
    """Return the inputs of a model: texts, then tensors of tokens."""
    return [TEXT, _IDS, _MASK, *([_TYPES] if _TYPES in spec.inputs else [])]


def output_names(spec: EncoderModelSpec) -> list[str]:
    """Return the outputs of a model."""
    main = "embedding" if spec.task.endswith("embedding") else "logits"
    return [main, "num_tokens"] if spec.task.startswith("token_") else [main]


def text_columns(spec: EncoderModelSpec) -> tuple[int, ...]:
    """Return how many texts a row of `TEXT` may have: 2 is a pair, which the model sees together."""
    return {"reranking": (2,), "classification": (1, 2)}.get(spec.task, (1,))


def as_settings(request: InferenceRequest, spec: EncoderModelSpec, config: FrontendConfig) -> TextRequestSettings:
    """Return what `request` asks of the model. Raises InvalidField."""
    _check_names("output", request.outputs, output_names(spec))
    tensors = {tensor.name: tensor for tensor in request.inputs}
    _check_names("input", [tensor.name for tensor in request.inputs], input_names(spec))
    settings: dict[str, Any] = _parameters(request.parameters, config)
    if TEXT in tensors:
        if len(tensors) > 1:
            raise invalid_inputs(f"inputs has {TEXT} and token tensors; send one or the other.")
        settings["inputs"] = _texts(tensors[TEXT], spec, config.max_texts)
    else:
        for name in (_IDS, _MASK):
            if name not in tensors:
                raise invalid_inputs(f"inputs has no {name}; send {TEXT}, or {_IDS} and {_MASK}.")
        settings |= _tokens(tensors, config.max_texts)
    return TextRequestSettings(model=spec.name, is_dense=True, **settings)


def outputs_of(result: EncodingResult, names: Sequence[str] = ()) -> list[OutputTensor]:
    """Return the tensors of a result, those of `names` in their order; all without names."""
    import numpy as np

    rows = result.arrays()
    main, *others = output_names(result.spec)
    tensors = {main: OutputTensor(main, rows)}
    for name in others:
        lengths = np.array([text.num_tokens for text in result.texts], np.int32)
        tensors = {main: OutputTensor(main, _pad(rows, lengths)), name: OutputTensor(name, lengths)}
    return [tensors[name] for name in names or tensors]


def _pad(rows: "NDArray[np.float32]", lengths: "NDArray[np.int32]") -> "NDArray[np.float32]":
    """Return the rows of all tokens as [texts, tokens of the longest, labels], with zeros after the shorter texts."""
    import numpy as np

    padded = np.zeros((len(lengths), lengths.max(), rows.shape[1]), np.float32)
    padded[np.arange(lengths.max()) < lengths[:, None]] = rows
    return padded


def check_tensor_parameters(kind: str, name: str, parameters: Mapping[str, Any]) -> None:
    """Raise InvalidField if a parameter of an input or output asks for what is not supported. Others are ignored."""
    for key, value in parameters.items():
        if value and (key == "classification" or key.startswith("shared_memory_")):
            raise InvalidField(
                f"{kind} {short_repr(name)} has the parameter {short_repr(key)}; neither shared memory nor the "
                "classification extension are supported.",
                field=f"{kind}s",
            )


def _check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name not in known:
            raise InvalidField(
                f"{kind} {short_repr(name)} is unknown.{did_you_mean(name, known)} The model has {', '.join(known)}.",
                field=f"{kind}s",
            )
        if name in names[:index]:
            raise InvalidField(f"{kind} {name} is there twice.", field=f"{kind}s")


def _texts(tensor: InputTensor, spec: EncoderModelSpec, max_texts: int) -> Sequence[TextInput]:
    num_columns, allowed = ([1, *tensor.shape[1:]][-1] if len(tensor.shape) in (1, 2) else 0), text_columns(spec)
    if num_columns not in allowed:
        shapes = ["[n] or [n, 1]" if columns == 1 else f"[n, {columns}]" for columns in allowed]
        raise invalid_inputs(
            f"input {TEXT} has the shape {short_repr(list(tensor.shape))}; allowed for {spec.name} is "
            f"{' or '.join(shapes)}."
        )
    _check_rows(tensor, max_texts)
    texts = texts_of(tensor)
    return texts if num_columns == 1 else list(zip(texts[::2], texts[1::2], strict=True))


def _check_rows(tensor: InputTensor, max_texts: int) -> None:
    if not 1 <= tensor.shape[0] <= max_texts:
        raise invalid_inputs(
            f"input {tensor.name} has {short_repr(tensor.shape[0])} rows; allowed are 1 to {max_texts} "
            "(frontend.max_texts)."
        )


def _tokens(tensors: Mapping[str, InputTensor], max_texts: int) -> dict[str, Any]:
    """Return the tokens that the mask says are real."""
    shape = tensors[_IDS].shape
    for tensor in tensors.values():
        if len(tensor.shape) != 2 or tensor.shape != shape or tensor.shape[1] < 1:
            raise invalid_inputs(
                f"input {tensor.name} has the shape {short_repr(list(tensor.shape))}; allowed is [texts, tokens of the "
                f"longest], the same for {', '.join(tensors)}."
            )
        _check_rows(tensor, max_texts)
    ids, mask = integers_of(tensors[_IDS]), _bits_of(tensors[_MASK])
    starts, lengths = mask.argmax(1), mask.sum(1, dtype="int64")
    ends = starts + lengths
    for index, (row, start, end) in enumerate(zip(mask, starts, ends, strict=True)):
        if start == end or not row[start:end].all():
            raise invalid_inputs(
                f"row {index} of {_MASK} has {'no 1' if start == end else 'a 0 between its 1s'}; the tokens of a text "
                "follow each other, with padding before or after them."
            )
    spans = list(zip(starts, ends, strict=True))
    found: dict[str, Any] = {
        "token_ids": [row[start:end].tolist() for row, (start, end) in zip(ids, spans, strict=True)]
    }
    if _TYPES in tensors:
        types = _bits_of(tensors[_TYPES])
        found["type_ids"] = [row[start:end].tobytes() for row, (start, end) in zip(types, spans, strict=True)]
    return found


def _bits_of(tensor: InputTensor) -> "NDArray[np.uint8]":
    values = integers_of(tensor)
    if ((values != 0) & (values != 1)).any():
        raise invalid_inputs(f"input {tensor.name} has values other than 0 and 1.")
    return values.astype("uint8")


def _parameters(got: Mapping[str, Any], config: FrontendConfig) -> dict[str, Any]:
    """Return the settings that the parameters of a request say; as in Triton, others are ignored.

    Raises InvalidField.
    """
    settings: dict[str, Any] = {}
    for name, value in got.items():
        match name:
            case _ if value is None:
                pass
            case "priority":
                settings[name] = _PRIORITIES[_integer(name, value, 0, len(_PRIORITIES) - 1)]
            case "timeout":
                timeout_us = _integer(name, value, 0, int(config.request_timeout_s * 1e6))
                settings["deadline_ms"] = math.ceil(timeout_us / 1000) or None
            case "dimensions":
                settings[name] = _integer(name, value, 1, 2**31)
            case "normalize" | "truncate" if isinstance(value, bool):
                settings[name] = value
            case "prompt_name" if isinstance(value, str):
                settings[name] = value
            case "input_type" if value in get_args(InputType):
                settings["role"] = role_of(value, None)
            case "normalize" | "truncate" | "prompt_name" | "input_type":
                of_strings = {"prompt_name": "a string", "input_type": f"one of {', '.join(get_args(InputType))}"}
                allowed = of_strings.get(name, "true or false")
                raise InvalidField(
                    f"parameter {name} is {short_repr(value)}; allowed is {allowed}.", field="parameters"
                )
    return settings


def _integer(name: str, value: Any, least: int, most: int) -> int:
    is_integral = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (isinstance(value, int) or is_integral) or not least <= value <= most:
        raise InvalidField(
            f"parameter {name} is {short_repr(value)}; allowed are integers from {least} to {most}.", field="parameters"
        )
    return int(value)
