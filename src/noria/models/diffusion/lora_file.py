"""Reads a LoRA file for a loaded model: kohya's, ComfyUI's and diffusers' names to the model's own layers.

Safetensors only. diffusers' converters change the names, without peft; the checks here come first and last, because
the converters drop what they do not know. The file may be hostile: it is read at once (a file that shrinks while it is
mapped into memory would end the process), and is not trusted in any size, name or number.

Shapes: r the rank of a layer's adapter, in and out the layer's features or channels.
"""

import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from noria.errors import ModelError, short_repr
from noria.models.diffusion.part_loading import unquantized_dtype
from noria.models.weights import file_size_bytes

MAX_RANK = 512
"""Of a layer's adapter. Published files have 4 to 320."""

_MAX_HEADER_BYTES = 2**24  # SDXL's layers take 0.5 MB, kohya's statistics of the training images a few more
_MAX_ALPHA = 1e6  # published ones are up to a few ranks
_MAX_PATTERNS = 2000  # each is compared with each layer
_MAX_TENSORS = 20_000  # all layers of SDXL with alphas are 3,600
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_KOHYA_NAME = re.compile(r"lora_(unet|te|te1|te2)_\w+\.(lora_down\.weight|lora_up\.weight|alpha)", re.ASCII)
_COMFY_NAME = re.compile(r"diffusion_model\.[\w.-]+\.(lora_(down|up|A|B)\.weight|alpha)", re.ASCII)
_BLOCK_NUMBER = re.compile(r"[0-9]{4}")  # beyond those of any model: converters count up to it
_DIFFUSERS_NAME = re.compile(
    r"(unet|transformer|text_encoder|text_encoder_2)\.[\w.-]+[._](lora_[AB]|lora\.(down|up)|lora_linear_layer\.(down|up))\.weight",
    re.ASCII,
)
_BARE_PREFIXES = ("transformer_blocks.", "diffusion_model.transformer_blocks.")
_BARE_NAME = re.compile(
    r"(diffusion_model\.)?transformer_blocks\.[\w.]+\.(lora_(down|up|A|B)\.weight|alpha)", re.ASCII
)  # of other programs for Qwen-Image: diffusers' modules without the part's name
_OTHER_FORMATS: Mapping[str, str] = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "LoCon with a CP decomposition",
    "oft_": "OFT",
    "bundle_emb": "an embedding in a bundle",
    ".diff": "differences of whole weights",
    ".bias": "LoRA with biases",
}
_FLUX_LOADER = "FluxLoraLoaderMixin"
_TRANSFORMER_LOADERS: Mapping[str, str] = {
    "FluxTransformer2DModel": _FLUX_LOADER,
    "ChromaTransformer2DModel": _FLUX_LOADER,
    "Flux2Transformer2DModel": "Flux2LoraLoaderMixin",
    "Krea2Transformer2DModel": "Krea2LoraLoaderMixin",
    "Lumina2Transformer2DModel": "Lumina2LoraLoaderMixin",
    "QwenImageTransformer2DModel": "QwenImageLoraLoaderMixin",
    "SD3Transformer2DModel": "SD3LoraLoaderMixin",
    "SanaTransformer2DModel": "SanaLoraLoaderMixin",
    "ZImageTransformer2DModel": "ZImageLoraLoaderMixin",
}
"""The classes of diffusers that convert the names of files, by the class of the denoiser."""
_MERGING_LAYERS: Mapping[str, tuple[str, ...]] = {
    "ZImageTransformer2DModel": ("all_x_embedder.", "cap_embedder."),
}
"""Layers whose calls merge the tokens of all rows, by the class of the denoiser: adapters differ by row."""
_TEXT_PREFIXES = ("lora_te", "text_encoder")
# Of diffusers' converters, which trust what they read.
_CONVERSION_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
)
_METADATA_KEY = "lora_adapter_metadata"  # of diffusers' own files, whose scales are there


@dataclass(frozen=True, eq=False)
class LoraLayer:
    """What an adapter adds to one linear or convolutional layer."""

    down: torch.Tensor  # [r, in]; of a convolution [r, in, kernel height, kernel width]
    up: torch.Tensor  # [out, r], with the file's scale in it


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """An adapter, on the device and in the precision of its model."""

    layers: Mapping[str, Mapping[str, LoraLayer]]  # by the model's part and the part's module

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.down.nbytes + each.up.nbytes for part in self.layers.values() for each in part.values())

    def to(self, devices: Mapping[str, torch.device]) -> "LoraWeights":
        """Return it with the layers of each part on that part's device."""
        return LoraWeights(
            {
                part: {
                    name: LoraLayer(each.down.to(devices[part]), each.up.to(devices[part]))
                    for name, each in layers.items()
                }
                for part, layers in self.layers.items()
            }
        )


def read_lora(
    file: pathlib.Path, parts: Mapping[str, torch.nn.Module], dtype: torch.dtype, max_bytes: int
) -> LoraWeights:
    """Return the adapter in `file` for the loaded `parts` of a model, the denoiser first, on the CPU.

    It is in `dtype`, and for a text encoder in that one's own.

    Raises:
        ModelError: the file is larger than `max_bytes` or damaged, has another format than LoRA or numbers that are not
            finite, or its layers are not those of this model. The message names the file without its folder.

    """
    tensors, metadata = _read_tensors(file, max_bytes)
    _check_names(file, tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"{file.name}: {short_repr(name)} has numbers of type {str(tensor.dtype).removeprefix('torch.')}; "
                "allowed are float16, bfloat16 and float32."
            )
        if not tensor.isfinite().all():
            raise ModelError(f"{file.name}: {short_repr(name)} has numbers that are not finite.")
    first_name = next(iter(tensors))
    if not _DIFFUSERS_NAME.fullmatch(first_name):
        tensors = _fold_alphas(file, tensors)
    if first_name.startswith(_BARE_PREFIXES):
        tensors = _add_part(file, tensors)
    pairs = _pairs(file, _convert_names(file, tensors, parts))
    layers: dict[str, dict[str, LoraLayer]] = {}
    for (part, name), (down, up) in pairs.items():
        module = _find_module(file, parts, part, name)
        scale = _scale(file, metadata, part, name, down.shape[0] if down.ndim else 0)
        kind = dtype if part == next(iter(parts)) else unquantized_dtype(parts[part])
        layer = _fit(f"{file.name}: {part}.{name}", module, down.to(kind), (up.float() * scale).to(kind))
        if not (layer.down.isfinite().all() and layer.up.isfinite().all()):
            raise ModelError(f"{file.name}: {part}.{name} has numbers that are too large for {kind}.")
        layers.setdefault(part, {})[_module_name(parts[part], name)] = layer
    return LoraWeights(layers)


def _read_tensors(file: pathlib.Path, max_bytes: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors, and diffusers' description of them."""
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
    try:
        tensors = safetensors.torch.load(data)
        metadata = json.loads(data[8 : 8 + header_bytes]).get("__metadata__") or {}
        description = json.loads(metadata.get(_METADATA_KEY) or "{}")
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise ModelError(f"{file.name}: not a safetensors file, or damaged: {short_repr(str(error))}.") from error
    if not 0 < len(tensors) <= _MAX_TENSORS:
        raise ModelError(f"{file.name}: has {len(tensors)} tensors; allowed are 1 to {_MAX_TENSORS}.")
    if not isinstance(description, dict):
        raise ModelError(f"{file.name}: its {_METADATA_KEY} is not a JSON object.")
    return tensors, description


def _check_names(file: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ModelError unless all names are kohya's, or all are ComfyUI's, or all are diffusers'."""
    for name in tensors:
        for marker, kind in _OTHER_FORMATS.items():
            if marker in name:
                raise ModelError(f"{file.name}: {short_repr(name)} is of {kind}, which is not supported; LoRA is.")
    patterns = {"lora_": _KOHYA_NAME, **dict.fromkeys(_BARE_PREFIXES, _BARE_NAME), "diffusion_model.": _COMFY_NAME}
    first = next(iter(tensors))
    pattern = next((each for prefix, each in patterns.items() if first.startswith(prefix)), _DIFFUSERS_NAME)
    for name in tensors:
        if not pattern.fullmatch(name) or _BLOCK_NUMBER.search(name):
            raise ModelError(
                f"{file.name}: {short_repr(name)} is no name of a LoRA of kohya's, ComfyUI's or diffusers' format: "
                "such as lora_unet_….lora_down.weight, diffusion_model.….lora_A.weight or unet.….lora_A.weight."
            )


def _fold_alphas(file: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return kohya's or other programs' tensors with alpha / rank in the second matrix, and without the alphas."""
    down_ending, up_ending = (".lora_down.weight", ".lora_up.weight")
    if not next(iter(tensors)).startswith("lora_"):
        down_ending, up_ending = ".lora_A.weight", ".lora_B.weight"
        tensors = {
            name.replace(".lora_down.weight", down_ending).replace(".lora_up.weight", up_ending): tensor
            for name, tensor in tensors.items()
        }
    folded = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    for name, alpha in tensors.items():
        if not name.endswith(".alpha"):
            continue
        layer = name.removesuffix(".alpha")
        down, up = tensors.get(layer + down_ending), tensors.get(layer + up_ending)
        if down is None or up is None or not down.ndim or not len(down) or alpha.numel() != 1:
            raise ModelError(f"{file.name}: {short_repr(name)} is not one number that belongs to two matrices.")
        folded[layer + up_ending] = up.float() * (float(alpha) / len(down))
    return folded


def _add_part(file: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors whose names have no part as those of the transformer, in diffusers' format."""
    named = {f"transformer.{name.removeprefix('diffusion_model.')}": each for name, each in tensors.items()}
    if len(named) < len(tensors):
        raise ModelError(f"{file.name}: has matrices of one layer under two names.")
    return named


def _convert_names(
    file: pathlib.Path, tensors: dict[str, torch.Tensor], parts: Mapping[str, torch.nn.Module]
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors by part and name in peft's form, `MODULE.lora_A.weight`."""
    from diffusers import loaders
    from diffusers.utils import (
        convert_state_dict_to_diffusers,
        convert_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    num_tensors, denoiser = len(tensors), next(iter(parts))
    try:
        if denoiser == "unet":
            loader = loaders.StableDiffusionLoraLoaderMixin
            states, _ = loader.lora_state_dict(tensors, unet_config=parts[denoiser].config)
        else:
            loader_name = _TRANSFORMER_LOADERS[type(parts[denoiser]).__name__]
            given = _as_kohyas(tensors) if loader_name == _FLUX_LOADER else dict(tensors)
            states = getattr(loaders, loader_name).lora_state_dict(given)
            # Of kohya's names the loaders either return all, or raise, or take those that they know out of the dict.
            unread = num_tensors > len(given) and any(name.startswith("lora_unet_") for name in given)
            if unread or len(states) < num_tensors:
                raise ModelError(f"{file.name}: some of its {num_tensors} tensors are not known.")
        converted: dict[tuple[str, str], torch.Tensor] = {}
        for part in {name.partition(".")[0] for name in states}:
            state = {
                name.removeprefix(f"{part}."): each for name, each in states.items() if name.startswith(f"{part}.")
            }
            if part == denoiser:
                state = convert_unet_state_dict_to_peft(state)
            elif not all(".lora_A." in name or ".lora_B." in name for name in state):
                state = convert_state_dict_to_peft(convert_state_dict_to_diffusers(state))
            converted |= {(part, name): tensor for name, tensor in state.items()}
    except _CONVERSION_ERRORS as error:
        raise ModelError(
            f"{file.name}: its names cannot be converted to those of diffusers: {short_repr(str(error))}."
        ) from error
    # Of a transformer kohya joins layers that diffusers has apart; the loader raises if it does not know one.
    num_expected = num_tensors if denoiser == "unet" else sum(name.startswith(_TEXT_PREFIXES) for name in tensors)
    num_converted = len(converted) if denoiser == "unet" else sum(part != denoiser for part, _ in converted)
    if num_converted != num_expected:
        raise ModelError(f"{file.name}: {num_expected - num_converted} of its {num_tensors} tensors are not known.")
    return converted


def _as_kohyas(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ComfyUI's names of FLUX.1 as kohya's, which diffusers converts; all others as they are."""
    named = {}
    for name, tensor in tensors.items():
        layer, matrix = name.removesuffix(".weight").rsplit(".", 1)
        if name.startswith("diffusion_model."):
            layer = "lora_unet_" + layer.removeprefix("diffusion_model.").replace(".", "_")
            named[f"{layer}.{'lora_down' if matrix == 'lora_A' else 'lora_up'}.weight"] = tensor
        else:
            named[name] = tensor
    return named


def _pairs(
    file: pathlib.Path, tensors: Mapping[tuple[str, str], torch.Tensor]
) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """Return both matrices by part and module."""
    first, second = ".lora_A.weight", ".lora_B.weight"
    pairs = {}
    for part, name in tensors:
        module, ending = name.removesuffix(first).removesuffix(second), second if name.endswith(first) else first
        if module == name or (part, module + ending) not in tensors:
            raise ModelError(f"{file.name}: {short_repr(f'{part}.{name}')} is not one of two matrices of a layer.")
        pairs[part, module] = tensors[part, module + first], tensors[part, module + second]
    return pairs


def _module_name(part: torch.nn.Module, name: str) -> str:
    """Return the name of a module as `part` has it: transformers 5 has taken `text_model` out of one of its classes."""
    return name if hasattr(part, "text_model") else name.removeprefix("text_model.")


def _find_module(
    file: pathlib.Path, parts: Mapping[str, torch.nn.Module], part: str, name: str
) -> torch.nn.Linear | torch.nn.Conv2d:
    module, denoiser = None, type(next(iter(parts.values()))).__name__
    if part in parts and name.startswith(_MERGING_LAYERS.get(denoiser, ())):
        raise ModelError(
            f"{file.name}: {part}.{name} cannot have an adapter, since its calls merge the images of a batch; those of "
            "the layers after it can."
        )
    if part in parts:
        try:
            module = parts[part].get_submodule(_module_name(parts[part], name))
        except AttributeError:
            module = None
    if isinstance(module, torch.nn.Linear):
        return module
    if isinstance(module, torch.nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros":
        return module
    raise ModelError(
        f"{file.name}: the model has no layer {short_repr(f'{part}.{name}')} that an adapter can change: the adapter "
        f"belongs to another family of models. The parts of this one are {', '.join(parts)}."
    )


def _scale(file: pathlib.Path, metadata: Mapping[str, Any], part: str, name: str, rank: int) -> float:
    """Return alpha / rank of a file that diffusers has described, else 1: kohya's alphas are folded in already.

    A pattern of an alpha is compared as the end of the module's name, and never as the expression that it may be.
    """
    if metadata.get(f"{part}.use_dora"):
        raise ModelError(f"{file.name}: is of DoRA, which is not supported; LoRA is.")
    alpha = metadata.get(f"{part}.lora_alpha", rank)
    patterns = metadata.get(f"{part}.alpha_pattern") or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise ModelError(f"{file.name}: its alpha_pattern is no JSON object of at most {_MAX_PATTERNS} entries.")
    for pattern, value in patterns.items():
        if f".{name}".endswith(f".{pattern.removeprefix('^')}"):
            alpha = value
            break
    if not isinstance(alpha, int | float) or not abs(alpha) < _MAX_ALPHA:  # also true for NaN
        raise ModelError(f"{file.name}: the alpha of {part}.{name} is {short_repr(alpha)}; a number is expected.")
    rank = max(1, rank)  # `_fit` rejects others
    return alpha / (math.sqrt(rank) if metadata.get(f"{part}.use_rslora") else rank)


def _fit(where: str, module: torch.nn.Linear | torch.nn.Conv2d, down: torch.Tensor, up: torch.Tensor) -> LoraLayer:
    """Return both matrices in the form of the layer; a 1 × 1 convolution is as a linear layer to some programs."""
    rank = down.shape[0] if down.ndim else 0
    if not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{where} has rank {rank}; allowed are 1 to {MAX_RANK}.")
    if isinstance(module, torch.nn.Linear):
        inputs, outputs = module.in_features, module.out_features
    else:
        inputs, outputs = module.in_channels, module.out_channels
    kernel = (1, 1) if isinstance(module, torch.nn.Linear) else module.kernel_size
    expected = (rank, inputs, *kernel)
    is_down = tuple(down.shape) == expected or (kernel == (1, 1) and tuple(down.shape) == expected[:2])
    if not is_down or tuple(up.shape) not in ((outputs, rank), (outputs, rank, 1, 1)):
        raise ModelError(
            f"{where} has matrices of {list(down.shape)} and {list(up.shape)}; the model's layer takes "
            f"{list(expected) if kernel != (1, 1) else list(expected[:2])} and {[outputs, rank]}: the adapter belongs "
            "to another family of models."
        )
    is_linear = isinstance(module, torch.nn.Linear)
    return LoraLayer(down.reshape(expected[:2] if is_linear else expected).contiguous(), up.reshape(outputs, rank))
