"""Files of tiny upscalers with random weights, in the names of Real-ESRGAN."""

import torch

_FEATURES, _GROWTH = 8, 32  # spandrel knows no other growth


def esrgan_tensors(seed=0):
    """The tensors of an ESRGAN of one block, which enlarges images four times."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}

    def add(name, inputs, outputs, bias=0.0):
        weight = torch.randn(outputs, inputs, 3, 3, generator=generator) / (3 * inputs**0.5)
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = weight, torch.full((outputs,), bias)

    add("conv_first", 3, _FEATURES)
    for block in ("rdb1", "rdb2", "rdb3"):
        for k in range(4):
            add(f"body.0.{block}.conv{k + 1}", _FEATURES + k * _GROWTH, _GROWTH)
        add(f"body.0.{block}.conv5", _FEATURES + 4 * _GROWTH, _FEATURES)
    for name in ("conv_body", "conv_up1", "conv_up2", "conv_hr"):
        add(name, _FEATURES, _FEATURES)
    add("conv_last", _FEATURES, 3, bias=0.4)
    return tensors


def save_esrgan(path, seed=0):
    """Write such a file, as .pth in the form in which it is trained, and return its path."""
    if path.suffix == ".pth":
        torch.save({"params_ema": esrgan_tensors(seed)}, path)
    else:
        from safetensors.torch import save_file

        save_file(esrgan_tensors(seed), path)
    return path
