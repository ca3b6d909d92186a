"""Quantizes the linear layers of the blocks that a denoiser repeats, in place, when it is loaded.

All other layers stay: embedders, modulation, norms and the last projection are small, and images suffer most from them.
Scales are of one row of a weight and of one token, so that images of a call do not change each other.

Importing this module is cheap: torch and the libraries that quantize are imported by its functions.
"""

import importlib
import math
import re
import sys
from typing import TYPE_CHECKING, Any

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError
from noria.extras import check_installed
from noria.models.diffusion.folders.quantization import read_quantization
from noria.models.families import FAMILIES
from noria.models.files.gguf_file import SUFFIX as GGUF_SUFFIX
from noria.models.files.weights import read_weights, weight_files
from noria.protocol.diffusion import DiffusionModelSpec

if TYPE_CHECKING:
    import torch

PACKAGES = {"fp8": "torchao", "int8": "torchao", "nf4": "bitsandbytes"}
"""The library of each value of `engine.quantize` but `none`."""

_CONFIGS = {"fp8": "Float8DynamicActivationFloat8WeightConfig", "int8": "Int8DynamicActivationInt8WeightConfig"}
_OF_BLOCKS = re.compile(r"(?:(?:.+\.)?(?:single_)?transformer_blocks|layers)\.\d+\.(?!.*(?:norm|_mod)).+\.weight")
_ALIGNMENT = 16  # float8 products are of whole blocks of so many numbers
_NF4_BLOCK = 64  # numbers with a common factor
_FLOAT32_BYTES = 4


def denoiser_part(spec: DiffusionModelSpec) -> str:
    """Return the name of the part that denoises."""
    return "transformer" if "transformer" in FAMILIES[spec.family].parts else "unet"


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the weight of this name and shape is one that is quantized."""
    is_aligned = len(shape) == 2 and all(size % _ALIGNMENT == 0 for size in shape)
    return is_aligned and _OF_BLOCKS.fullmatch(name) is not None


def quantized_bytes(spec: DiffusionModelSpec, kind: str, item_bytes: int) -> int:
    """Return the bytes of the denoiser if `kind` quantizes it, and its other numbers have `item_bytes`."""
    part = denoiser_part(spec)
    shapes = read_weights(spec.path, part, FAMILIES[spec.family].weight_stems[part])
    return sum(
        _weight_bytes(shape, kind) if is_quantizable(name, shape) else item_bytes * math.prod(shape)
        for name, shape in shapes.items()
    )


def _weight_bytes(shape: tuple[int, ...], kind: str) -> int:
    num_numbers = math.prod(shape)
    if kind == "nf4":
        return num_numbers // 2 + _FLOAT32_BYTES * math.ceil(num_numbers / _NF4_BLOCK)
    return num_numbers + _FLOAT32_BYTES * shape[0]


def check_quantizable(spec: DiffusionModelSpec, kind: str) -> None:
    """Check that `kind` can quantize a model.

    Raises:
        MissingExtra: its library is not installed.
        ModelError: the folder is quantized already, or has no layers that are quantized.
    """
    check_installed((PACKAGES[kind],), "quantized", f"engine.quantize {kind!r}")
    what = f"engine.quantize is {kind!r}, but the {denoiser_part(spec)} in {spec.path}"
    if is_quantized(spec, denoiser_part(spec)):
        raise ModelError(f"{what} is quantized already. Set it to 'none'.")
    if not has_quantizable_layers(spec):
        raise ModelError(f"{what} has no linear layers in repeated blocks, which it is for. Set it to 'none'.")


def is_quantized(spec: DiffusionModelSpec, part: str) -> bool:
    """Whether the weights of a part are quantized in its folder."""
    file = weight_files(spec.path, part, FAMILIES[spec.family].weight_stems[part])[0]
    return file.suffix == GGUF_SUFFIX or read_quantization(spec.path / part / "config.json") is not None


def check_streamable(spec: DiffusionModelSpec, part: str) -> None:
    """Raise ModelError if a part cannot stream from the host's memory, because its weights are quantized."""
    if is_quantized(spec, part):
        raise ModelError(
            f"engine.offload does not work with the {part} in {spec.path}, which is quantized: such weights do not "
            "stream. Set it to 'none'."
        )


def has_quantizable_layers(spec: DiffusionModelSpec) -> bool:
    """Whether a denoiser is not quantized yet, and has layers that can be."""
    part = denoiser_part(spec)
    shapes = read_weights(spec.path, part, FAMILIES[spec.family].weight_stems[part])
    return not is_quantized(spec, part) and any(is_quantizable(name, shape) for name, shape in shapes.items())


def check_device(config: EngineConfig, device: str) -> None:
    """Check that a device multiplies numbers in float8, if `config` asks for them. Raises ConfigError: it does not."""
    if config.quantize == "fp8" and not has_float8(device):
        raise ConfigError(
            f"engine.quantize is 'fp8', but {device} has no float8, which GPUs have from compute capability 8.9 on "
            "(Ada, Hopper, Blackwell). Use 'int8' or 'nf4'."
        )


def has_float8(device: str) -> bool:
    """Whether "cpu" or "cuda:N" multiplies numbers in float8."""
    import torch

    return device != "cpu" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_blocks(denoiser: "torch.nn.Module", kind: str, device: str) -> int:
    """Quantize the layers one by one, on `device`, and move the others there, too; return how many are quantized.

    So a denoiser that is in the host's memory needs no more of the device's than when it is quantized.
    """
    import torch

    layers = [
        name
        for name, module in denoiser.named_modules()
        if isinstance(module, torch.nn.Linear) and is_quantizable(f"{name}.weight", tuple(module.weight.shape))
    ]
    if kind == "nf4":
        _quantize_to_nf4(denoiser, layers, device)
    else:
        torchao = importlib.import_module("torchao.quantization")
        # Inductor's settings would change torch for the whole process: the precision of float32, minutes of tuning.
        config = getattr(torchao, _CONFIGS[kind])(granularity=torchao.PerRow(), set_inductor_config=False)
        chosen = {denoiser.get_submodule(name) for name in layers}
        torchao.quantize_(denoiser, config, filter_fn=lambda module, _: module in chosen, device=device)
    denoiser.to(device).requires_grad_(requires_grad=False)
    return len(layers)


def _quantize_to_nf4(denoiser: "torch.nn.Module", layers: list[str], device: str) -> None:
    nn = _import_bitsandbytes().nn
    for name in layers:
        parent, _, child = name.rpartition(".")
        layer = denoiser.get_submodule(name)
        quantized = nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=layer.weight.dtype,
            compress_statistics=False,
            quant_type="nf4",
            device="meta",
        )
        quantized.weight = nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=False, quant_type="nf4", module=quantized
        )
        quantized.bias = layer.bias
        # Else the first call repacks the weight on some CPUs, which fails if a row is not of whole blocks.
        quantized.support_avx512bf16_for_cpu = False
        setattr(denoiser.get_submodule(parent), child, quantized.to(device).eval())


def _import_bitsandbytes() -> Any:
    """Import bitsandbytes without the package `kernels`, by which it would download code from the hub."""
    modules: dict[str, Any] = sys.modules
    kernels = modules.get("kernels")
    modules["kernels"] = None
    try:
        return importlib.import_module("bitsandbytes")
    finally:
        del modules["kernels"]
        if kernels is not None:
            modules["kernels"] = kernels
