"""LoRA files with random weights, for tiny models and for any other that is loaded."""

import pathlib
from collections.abc import Iterator, Mapping

import torch
from safetensors.torch import save_file

_KOHYA_PREFIXES = {"unet": "lora_unet_", "text_encoder": "lora_te_", "text_encoder_2": "lora_te2_"}


def layers_of(part: torch.nn.Module, *endings: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the linear and convolutional layers whose names end so; without endings, all of them."""
    for name, module in part.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and (not endings or name.endswith(endings)):
            yield name, module


def random_matrices(module: torch.nn.Module, rank: int, generator: torch.Generator, strength: float = 0.3):
    """Return both matrices of a layer's adapter, such that it changes the output by about `strength` of it."""
    is_linear = isinstance(module, torch.nn.Linear)  # whose weight has another shape if it is quantized
    shape = torch.Size([module.out_features, module.in_features]) if is_linear else module.weight.shape
    down = torch.randn(rank, *shape[1:], generator=generator) / shape[1:].numel() ** 0.5
    up_shape = (shape[0], rank, *([1, 1] if len(shape) == 4 else []))
    return down, torch.randn(up_shape, generator=generator) * (strength / rank**0.5)


def save_diffusers_lora(
    file: pathlib.Path,
    parts: Mapping[str, torch.nn.Module],
    *endings: str,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    metadata: dict[str, str] | None = None,
) -> pathlib.Path:
    """Write an adapter of all layers of `parts` whose names end so, with the names of diffusers and peft."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for part_name, part in parts.items():
        for name, module in layers_of(part, *endings):
            down, up = random_matrices(module, rank, generator)
            tensors[f"{part_name}.{name}.lora_A.weight"] = down.to(dtype)
            tensors[f"{part_name}.{name}.lora_B.weight"] = up.to(dtype)
    save_file(tensors, file, metadata)
    return file


def save_kohya_lora(
    file: pathlib.Path,
    parts: Mapping[str, torch.nn.Module],
    *endings: str,
    rank: int = 4,
    seed: int = 0,
    alpha: float | None = None,
) -> pathlib.Path:
    """Write the adapter that `save_diffusers_lora` writes with kohya's names; with `alpha`, scaled by alpha / rank."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for part_name, part in parts.items():
        for name, module in layers_of(part, *endings):
            down, up = random_matrices(module, rank, generator)
            inner = "" if part_name == "unet" or name.startswith(("text_model.", "text_projection")) else "text_model."
            layer = _KOHYA_PREFIXES[part_name] + (inner + name).replace(".", "_")
            tensors |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
            if alpha is not None:
                tensors[f"{layer}.alpha"] = torch.tensor(alpha)
    save_file(tensors, file)
    return file
