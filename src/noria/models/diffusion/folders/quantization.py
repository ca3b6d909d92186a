"""The allowed values of a part's `quantization_config`: torchao and bitsandbytes, with fields that choose no code.

torchao's own reader calls whatever `_type` names in its modules, so every `_type`, field and value is listed here.
"""

import pathlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError
from noria.extras import check_installed
from noria.models.files.weights import read_object

_MAX_MODULES = 1000
Modules = Annotated[tuple[str, ...], Meta(max_length=_MAX_MODULES)]
_Float = Literal["float32", "bfloat16", "float16"]

SERVED = (
    "served are torchao's Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig and Float8WeightOnlyConfig, one "
    "for all layers, and bitsandbytes in 4 bits (nf4, fp4) and 8 bits, of the denoiser and the text encoders, as "
    "save_pretrained writes them"
)


class _Strict(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class _NoFields(_Strict, frozen=True, forbid_unknown_fields=True):
    pass


class _Dimension(_Strict, frozen=True, forbid_unknown_fields=True):
    dim: Literal[-1] = -1


class _Type(Struct, frozen=True, forbid_unknown_fields=True, tag_field="_type"):
    version: int = msgspec.field(name="_version", default=1)


class _PerRow(_Type, frozen=True, forbid_unknown_fields=True, tag="PerRow"):
    data: _Dimension = msgspec.field(name="_data", default=_Dimension())


class _PerTensor(_Type, frozen=True, forbid_unknown_fields=True, tag="PerTensor"):
    data: _NoFields = msgspec.field(name="_data", default=_NoFields())


_Granularity = _PerRow | _PerTensor


class _MappingType(Struct, frozen=True, forbid_unknown_fields=True, tag_field="_type", tag="MappingType"):
    data: Literal["SYMMETRIC", "ASYMMETRIC"] = msgspec.field(name="_data")


class _Dtype(Struct, frozen=True, forbid_unknown_fields=True, tag_field="_type", tag="torch.dtype"):
    data: Literal["float8_e4m3fn"] = msgspec.field(name="_data")


class _Int8WeightOnlyData(_Strict, frozen=True, forbid_unknown_fields=True):
    granularity: _Granularity = _PerRow()
    group_size: None = None
    set_inductor_config: bool = True


class _Int8WeightOnly(_Type, frozen=True, forbid_unknown_fields=True, tag="Int8WeightOnlyConfig"):
    data: _Int8WeightOnlyData = msgspec.field(name="_data", default=_Int8WeightOnlyData())


class _Int8DynamicData(_Strict, frozen=True, forbid_unknown_fields=True):
    granularity: _PerRow = _PerRow()  # scales per tensor would make a row's numbers depend on the others of its call
    act_mapping_type: _MappingType = _MappingType("SYMMETRIC")
    reduce_range: bool = False
    set_inductor_config: bool = True
    weight_only_decode: Literal[False] = False


class _Int8Dynamic(_Type, frozen=True, forbid_unknown_fields=True, tag="Int8DynamicActivationInt8WeightConfig"):
    data: _Int8DynamicData = msgspec.field(name="_data", default=_Int8DynamicData())


class _Float8WeightOnlyData(_Strict, frozen=True, forbid_unknown_fields=True):
    granularity: _Granularity = _PerRow()
    set_inductor_config: bool = True
    weight_dtype: _Dtype = _Dtype("float8_e4m3fn")


class _Float8WeightOnly(_Type, frozen=True, forbid_unknown_fields=True, tag="Float8WeightOnlyConfig"):
    data: _Float8WeightOnlyData = msgspec.field(name="_data", default=_Float8WeightOnlyData())


class _OfAllLayers(_Strict, frozen=True, forbid_unknown_fields=True):
    default: _Int8WeightOnly | _Int8Dynamic | _Float8WeightOnly


class Torchao(Struct, frozen=True, forbid_unknown_fields=True, tag_field="quant_method", tag="torchao"):
    """Weights of torchao."""

    quant_type: _OfAllLayers
    modules_to_not_convert: Modules | None = None
    include_input_output_embeddings: Literal[False] = False
    untie_embedding_weights: Literal[False] = False


class BitsAndBytes(Struct, frozen=True, forbid_unknown_fields=True, tag_field="quant_method", tag="bitsandbytes"):
    """Weights of bitsandbytes."""

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    also_4bit: bool = msgspec.field(name="_load_in_4bit", default=False)  # written by the libraries, and not read
    also_8bit: bool = msgspec.field(name="_load_in_8bit", default=False)
    bnb_4bit_compute_dtype: _Float = "float32"
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Literal["uint8"] = "uint8"
    llm_int8_threshold: Annotated[float, Meta(ge=0)] = 6.0
    llm_int8_skip_modules: Modules | None = None
    llm_int8_enable_fp32_cpu_offload: Literal[False] = False
    llm_int8_has_fp16_weight: Literal[False] = False


Quantization = Torchao | BitsAndBytes


def read_quantization(file: pathlib.Path) -> Quantization | None:
    """Return the `quantization_config` of a part's config.json; None if it has none.

    Raises:
        MissingExtra: its library is not installed.
        ModelError: it is not one of those that are served.
    """
    tree: dict[str, Any] = read_object(file)
    config = tree.get("quantization_config")
    if not config:
        return None
    try:
        found: Quantization = msgspec.convert(config, Quantization)
    except msgspec.ValidationError as error:
        where = str(error).replace("`$", "`quantization_config")
        raise ModelError(f"{file}: quantization_config: {where}; {SERVED}.") from error
    if isinstance(found, BitsAndBytes) and found.load_in_4bit == found.load_in_8bit:
        raise ModelError(f"{file}: quantization_config: neither or both of load_in_4bit and load_in_8bit; {SERVED}.")
    library = "torchao" if isinstance(found, Torchao) else "bitsandbytes"
    check_installed((library,), "quantized", f"the model in {file.parents[1]}")
    return found


def is_float8(quantization: Quantization | None) -> bool:
    """Whether weights are in float8, which multiply only the dtype that they were made from."""
    return isinstance(quantization, Torchao) and isinstance(quantization.quant_type.default, _Float8WeightOnly)
