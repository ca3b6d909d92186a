"""The shapes that quantized weights stand for, as torchao and bitsandbytes save them. No torch.

torchao saves `a.weight` as `a._weight_qdata` of its shape, with scales, and writes into the file's metadata which of
its classes the libraries make of them; bitsandbytes saves it flat, two numbers a byte, beside its `quant_state`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError, short_repr

_TORCHAO_PART = re.compile(r"(?P<module>.+)\._weight_(?P<what>[a-z_]+)")
_BITSANDBYTES_STATE = re.compile(r"(?P<weight>.+\.weight)\.quant_state\.bitsandbytes__(nf4|fp4)")
_BITSANDBYTES_PART = re.compile(
    r".+(\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)|\.SCB|\.weight_format)"
)
MAX_STATE_BYTES = 4096
"""Of a `quant_state`: a JSON object of some numbers."""

# What a file's metadata may name, and the values that a name may have; None: an object of fields, checked likewise.
_TORCHAO_TYPES: Mapping[str, tuple[str, ...] | None] = {
    "Tensor": None,
    "Int8Tensor": None,
    "Float8Tensor": None,
    "QuantizeTensorToInt8Kwargs": None,
    "PerRow": None,
    "PerTensor": None,
    "MappingType": ("SYMMETRIC", "ASYMMETRIC"),
    "KernelPreference": ("AUTO", "TORCH"),
    "torch.dtype": ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8"),
}


class _QuantState(Struct, frozen=True):
    """Of a tensor in 4 bits, whose numbers share a factor, `absmax`, in blocks."""

    blocksize: Annotated[int, Meta(ge=1)]
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1, max_length=4)]


def is_quant_state(name: str) -> bool:
    """Whether a tensor is the description of a quantized one, whose bytes `logical_shapes` needs."""
    return _BITSANDBYTES_STATE.fullmatch(name) is not None


def logical_shapes(shapes: Mapping[str, tuple[int, ...]], states: Mapping[str, bytes]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors before they were quantized, without those that quantizing adds.

    `states` are the contents of those tensors that `is_quant_state` names.

    Raises ModelError: one of them describes no tensor, or one of another size than that which is there.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if match := _TORCHAO_PART.fullmatch(name):
            if match["what"] == "qdata":
                found[f"{match['module']}.weight"] = shape
        elif not _BITSANDBYTES_PART.fullmatch(name):
            found[name] = shape
    for name, content in states.items():
        match = _BITSANDBYTES_STATE.fullmatch(name)
        assert match is not None
        try:
            state = msgspec.json.decode(content, type=_QuantState)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{short_repr(name)} describes no quantized tensor: {error}.") from error
        weight, num_numbers = match["weight"], math.prod(state.shape)
        for tensor, num_expected in (
            (weight, math.ceil(num_numbers / 2)),
            (f"{weight}.absmax", math.ceil(num_numbers / state.blocksize)),
        ):
            if math.prod(shapes.get(tensor, (0,))) != num_expected:
                raise ModelError(
                    f"{short_repr(tensor)} has the shape {list(shapes.get(tensor, ()))}; of {list(state.shape)} in 4 "
                    f"bits, in blocks of {state.blocksize}, it has {num_expected} numbers."
                )
        found[weight] = state.shape
    return found


def check_metadata(metadata: Sequence[Mapping[str, str]]) -> None:
    """Check that the metadata of a part's safetensors files names only classes and values of torchao that are served.

    Raises ModelError: it names another.
    """
    if not any("tensor_names" in of_file for of_file in metadata):  # by which the libraries recognise torchao's
        return
    for name, text in (item for of_file in metadata for item in of_file.items()):
        try:
            pending = [json.loads(text)]
        except (ValueError, RecursionError):
            continue  # no description of a tensor, such as {"format": "pt"}
        while pending:
            tree = pending.pop()
            if isinstance(tree, dict):
                _check_type(name, tree)
                pending += tree.values()
            elif isinstance(tree, list):
                pending += tree


def _check_type(name: str, tree: Mapping[str, Any]) -> None:
    kind, value = tree.get("_type", "Tensor"), tree.get("_data", {})
    values = _TORCHAO_TYPES.get(kind, ()) if isinstance(kind, str) else ()
    if values is None and isinstance(value, dict):
        return
    if not values or value not in values:
        raise ModelError(
            f"its metadata has {short_repr(tree)} for {short_repr(name)}; the quantized tensors that are served are "
            "torchao's Int8Tensor and Float8Tensor."
        )
