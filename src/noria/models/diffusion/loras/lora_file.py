"""Reads a LoRA file for a loaded model, with the names and kinds of all programs that write some.

Safetensors only. The file may be hostile: it is read at once (a file that shrinks while it is mapped into memory would
end the process), and is not trusted in any size, name or number. `lora_names.py` says what a tensor is, and
`lora_kinds.py` what is computed of those of one layer.
"""

import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from noria.errors import ModelError, short_list, short_repr
from noria.models.diffusion.loras.lora_kinds import layers_of
from noria.models.diffusion.loras.lora_layer import LoraLayer, LoraWeights
from noria.models.diffusion.loras.lora_names import LoraNames, Target
from noria.models.diffusion.part_loading import unquantized_dtype
from noria.models.files.weights import file_size_bytes

_MAX_HEADER_BYTES = 2**24  # SDXL's layers take 0.5 MB, kohya's statistics of the training images a few more
_MAX_ALPHA = 1e6  # published ones are up to a few ranks
_MAX_PATTERNS = 2000  # each is compared with each layer
_MAX_TENSORS = 20_000  # all layers of SDXL with alphas are 3,600
_MAX_STRINGS = 5 * _MAX_TENSORS + 10_000  # strings of a header: 5 of each tensor, and kohya's metadata has some hundred
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *_FLOAT8)
_ALPHA_DTYPES = (*_DTYPES, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INSTEAD = "Train a LoRA, LoHa or LoKr in its place, or merge it into a checkpoint"
_REFUSED: Mapping[str, str] = {
    "oft_": f"OFT or BOFT, of kohya, OneTrainer or LyCORIS, which rotates a layer. {_INSTEAD}",
    ".b1.weight": f"GLoRA, of LyCORIS. {_INSTEAD}",
    ".on_input": f"IA3, of LyCORIS. {_INSTEAD}",
    "bundle_emb": "a bundle of a LoRA and an embedding, of Civitai. Save the LoRA's tensors in a file of their own",
}
_MERGING_LAYERS: Mapping[str, tuple[str, ...]] = {
    "ZImageTransformer2DModel": ("all_x_embedder.", "cap_embedder."),
    "QwenImage21Transformer2DModel": ("time_text_embed.", "modulation.", "norm_out."),
}
"""Layers whose calls merge the tokens of all rows, by the class of the denoiser: adapters differ by row."""
_METADATA_KEY = "lora_adapter_metadata"  # the key in diffusers' own files, whose scales are there

_Layer = tuple[str, tuple[Target, ...], str]
"""A layer of a file: its part, the modules that it is, and its name if there are none."""


def read_lora(
    file: pathlib.Path, parts: Mapping[str, torch.nn.Module], dtype: torch.dtype, max_bytes: int
) -> LoraWeights:
    """Return the adapter in `file` for the loaded `parts` of a model, the denoiser first, on the CPU.

    It is in the precision of its layers, `dtype` where these are quantized, and for a text encoder that one's own.

    Raises ModelError: the file or what is read of it is larger than `max_bytes`, or it is damaged, of a kind that is
    not known, or has numbers that are not finite, or its layers are not those of this model. The message names the file
    without its folder.
    """
    tensors, metadata = read_tensors(file, max_bytes)
    layers: dict[str, dict[str, LoraLayer]] = defaultdict(dict)
    num_bytes = 0
    for (part, targets, name), by_matrix in _by_layer(file, tensors, LoraNames(parts)).items():
        if not (changing := _without_zeros(by_matrix)):
            continue
        _check_layer(file, parts, part, targets, name)
        modules = {target: _find_module(file, parts, part, target.module) for target in targets}
        where = f"{file.name}: {part}.{'+'.join(target.module for target in targets)}"
        scale = _Scale(file, metadata, part, targets[0].module, changing.get("alpha"))
        default = dtype if part == next(iter(parts)) else unquantized_dtype(parts[part])
        for module, layer in layers_of(where, changing, modules, scale).items():
            if module in layers[part]:
                raise ModelError(f"{file.name}: has {part}.{module} under two names.")
            cast = _cast(f"{file.name}: {part}.{module}", layer, parts[part].get_submodule(module), default)
            layers[part][module], num_bytes = cast, num_bytes + cast.nbytes
        if num_bytes > max_bytes:
            raise ModelError(f"{file.name}: takes more than {max_bytes} bytes in memory, which are allowed at most.")
    if not layers:
        raise ModelError(f"{file.name}: all of its numbers are zero, so that it changes nothing.")
    return LoraWeights(dict(layers))


def read_tensors(file: pathlib.Path, max_bytes: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of an untrusted file, and diffusers' description of them.

    Raises ModelError: it is damaged, or has too many bytes, tensors or names.
    """
    import safetensors.torch

    try:
        num_bytes = file_size_bytes(file)
        if num_bytes > max_bytes:
            raise ModelError(f"{file.name}: has {num_bytes} bytes; at most {max_bytes} are allowed.")
        with file.open("rb") as opened:
            data = opened.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{file.name}: cannot be read: {error.strerror}.") from error
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(data)):
        raise ModelError(
            f"{file.name}: not a safetensors file, or truncated: its header would have {header_bytes} bytes of "
            f"{len(data)}; at most {_MAX_HEADER_BYTES} are allowed."
        )
    _check_header(file, data[8 : 8 + header_bytes])
    try:
        tensors = safetensors.torch.load(data)
        metadata = json.loads(data[8 : 8 + header_bytes]).get("__metadata__") or {}
        description = json.loads(metadata.get(_METADATA_KEY) or "{}")
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise ModelError(f"{file.name}: not a safetensors file, or damaged: {short_repr(str(error))}.") from error
    if not 0 < len(tensors) <= _MAX_TENSORS:
        raise _wrong_number(file, str(len(tensors)))
    if not isinstance(description, dict):
        raise ModelError(f"{file.name}: its {_METADATA_KEY} is not a JSON object.")
    return tensors, description


def _check_header(file: pathlib.Path, header: bytes) -> None:
    """Raise ModelError if a header may have too many tensors or metadata, which would take seconds to parse.

    Each tensor is an object with two lists and five strings. Texts of the metadata may have these characters, too, but
    not so many.
    """
    num_tensors = min(header.count(b"{"), header.count(b"[") // 2)
    if num_tensors > _MAX_TENSORS:
        raise _wrong_number(file, f"about {num_tensors}")
    num_strings = (header.count(b'"') - header.count(b'\\"')) // 2
    if num_strings > _MAX_STRINGS:
        raise ModelError(
            f"{file.name}: its header has about {num_strings} names and texts; at most {_MAX_STRINGS} are allowed."
        )


def _wrong_number(file: pathlib.Path, got: str) -> ModelError:
    return ModelError(f"{file.name}: has {got} tensors; allowed are 1 to {_MAX_TENSORS}.")


def _by_layer(
    file: pathlib.Path, tensors: Mapping[str, torch.Tensor], names: LoraNames
) -> dict[_Layer, dict[str, torch.Tensor]]:
    """Return the tensors of each layer of a file by what they are.

    Raises ModelError: a name or a number is none of a LoRA's, or two tensors are the same one of a layer.
    """
    found: dict[_Layer, dict[str, torch.Tensor]] = defaultdict(dict)
    adapters: set[str] = set()
    for name, tensor in tensors.items():
        named = names.find(name)
        if named is None:
            raise _unknown_name(file, name, tensors)
        matrices = found[named.part, named.targets, "" if named.targets else named.layer]
        if named.matrix in matrices:
            raise ModelError(f"{file.name}: has {short_repr(name)} under two names.")
        _check_tensor(file, name, named.matrix, tensor)
        matrices[named.matrix] = tensor.half() if tensor.dtype in _FLOAT8 else tensor  # float16 has all of them
        if named.adapter is not None:
            adapters.add(named.adapter)
    if len(adapters) > 1:
        names_of_all = short_list(map(short_repr, sorted(adapters)))
        raise ModelError(f"{file.name}: has several adapters: {names_of_all}. Save one.")
    return found


def _unknown_name(file: pathlib.Path, name: str, names: Iterable[str]) -> ModelError:
    """Return the error of a tensor's name, which says the kind if another of `names` tells."""
    known = next(((each, text) for each in names for marker, text in _REFUSED.items() if marker in each), None)
    if known is not None:
        return ModelError(f"{file.name}: {short_repr(known[0])} is of {known[1]}.")
    return ModelError(
        f"{file.name}: {short_repr(name)} is no name of a LoRA, LoHa, LoKr or DoRA of kohya's, ComfyUI's, "
        "OneTrainer's, LyCORIS' or diffusers' form: such as lora_unet_….lora_down.weight, "
        "diffusion_model.….lora_A.weight or unet.….lora_A.weight."
    )


def _check_tensor(file: pathlib.Path, name: str, matrix: str, tensor: torch.Tensor) -> None:
    """Raise ModelError unless a tensor has finite numbers of a type that files have."""
    if tensor.dtype not in (_ALPHA_DTYPES if matrix == "alpha" else _DTYPES):
        raise ModelError(
            f"{file.name}: {short_repr(name)} has numbers of type {str(tensor.dtype).removeprefix('torch.')}; "
            "allowed are float8, float16, bfloat16, float32 and float64, and integers for alphas."
        )
    if matrix == "alpha":  # checked where it counts: ai-toolkit's for a whole LoKr is infinite
        if tensor.numel() != 1:
            raise ModelError(f"{file.name}: {short_repr(name)} has {tensor.numel()} numbers; an alpha is one.")
    elif not tensor.float().isfinite().all():
        raise ModelError(f"{file.name}: {short_repr(name)} has numbers that are not finite.")


def _without_zeros(by_matrix: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer without those that would only add zeros; nothing is left if all are."""
    vectors = ("up_bias", "diff_b", "diff")
    kept = {name: each for name, each in by_matrix.items() if name not in vectors or each.any()}
    if "up" in kept and kept.keys() <= {"down", "up", "mid", "alpha"} and not kept["up"].any():
        return {}
    return kept if kept.keys() - {"alpha"} or len(kept) == len(by_matrix) else {}


def _check_layer(
    file: pathlib.Path, parts: Mapping[str, torch.nn.Module], part: str, targets: tuple[Target, ...], name: str
) -> None:
    """Raise ModelError if the model has no such layer, or none that adapters can change."""
    if part not in parts:
        raise ModelError(
            f"{file.name}: {short_repr(name)} is of {part}, which no adapter can change here; the parts of this model "
            f"that one can are {', '.join(parts)}. The adapter belongs to another family of models, or is to be saved "
            "or trained without that text encoder."
        )
    if not targets:
        raise _no_layer(file, parts, part, name)


def _no_layer(file: pathlib.Path, parts: Mapping[str, torch.nn.Module], part: str, name: str) -> ModelError:
    return ModelError(
        f"{file.name}: the model has no layer {short_repr(name)} in {part} that an adapter can change: the adapter "
        f"belongs to another family of models. The parts of this one are {', '.join(parts)}."
    )


def _find_module(file: pathlib.Path, parts: Mapping[str, torch.nn.Module], part: str, name: str) -> torch.nn.Module:
    """Return a layer, or a norm. Raises ModelError: it can have no adapter."""
    if name.startswith(_MERGING_LAYERS.get(type(parts[part]).__name__, ())):
        raise ModelError(
            f"{file.name}: {part}.{name} cannot have an adapter, since its calls merge the images of a batch; those of "
            "the layers after it can."
        )
    module = parts[part].get_submodule(name)
    is_convolution = isinstance(module, torch.nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros"
    is_norm = isinstance(module.weight, torch.Tensor) and module.weight.ndim == 1
    if not (isinstance(module, torch.nn.Linear) or is_convolution or is_norm):
        raise _no_layer(file, parts, part, name)
    return module


class _Scale:
    """alpha / rank of one layer: of its own alpha, or as diffusers has described it in the file's metadata."""

    def __init__(
        self, file: pathlib.Path, metadata: Mapping[str, Any], part: str, module: str, alpha: torch.Tensor | None
    ) -> None:
        self._file, self._metadata, self._part, self._module = file, metadata, part, module
        self._alpha = None if alpha is None else float(alpha)

    def __call__(self, rank: int) -> float:
        """Return the scale of matrices of this rank. Raises ModelError: alpha is no number, or too large."""
        alpha = self._described(rank) if self._alpha is None else self._alpha
        if not isinstance(alpha, int | float) or not abs(alpha) < _MAX_ALPHA:  # also true for NaN
            name = f"{self._part}.{self._module}"
            raise ModelError(f"{self._file.name}: the alpha of {name} is {short_repr(alpha)}; a number is expected.")
        stabilized = self._alpha is None and self._metadata.get(f"{self._part}.use_rslora")
        return alpha / (math.sqrt(rank) if stabilized else rank)

    def _described(self, rank: int) -> Any:
        """Return alpha by the metadata.

        A pattern of it is compared as the end of the module's name, and never as the expression that it may be.
        """
        patterns = self._metadata.get(f"{self._part}.alpha_pattern") or {}
        if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
            raise ModelError(
                f"{self._file.name}: its alpha_pattern is no JSON object of at most {_MAX_PATTERNS} entries."
            )
        for pattern, value in patterns.items():
            if f".{self._module}".endswith(f".{pattern.removeprefix('^')}"):
                return value
        return self._metadata.get(f"{self._part}.lora_alpha", rank)


def _cast(where: str, layer: LoraLayer, module: torch.nn.Module, default: torch.dtype) -> LoraLayer:
    """Return the tensors in the layer's precision, or `default` if the layer is quantized; norms stay in float32.

    Raises ModelError: a number is too large for it.
    """
    weight = module.weight
    is_plain = type(weight) is torch.nn.Parameter and weight.is_floating_point() and weight.itemsize > 1
    dtype = weight.dtype if is_plain and isinstance(weight, torch.Tensor) else default
    kept = ("magnitude", "squared_norms")
    cast = {name: (each if name in kept else each.to(dtype)).contiguous() for name, each in layer.tensors.items()}
    if not all(each.isfinite().all() for each in cast.values()):
        raise ModelError(f"{where} has numbers that are too large for {dtype}.")
    return layer.with_tensors(cast)
