"""Files of IP-Adapters in their authors' layouts, with random numbers, and stubs of their image encoders."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from safetensors.numpy import save_file

ENCODER = {
    "architectures": ["CLIPVisionModelWithProjection"],
    "hidden_size": 32,
    "projection_dim": 24,
    "image_size": 32,
}
FLUX_LAYER = "double_blocks.{}.processor.ip_adapter_double_stream_{}_proj"
_DIM, _NUM_QUERIES, _DEPTH = 64, 6, 4  # sizes of the plus kind's resampler, which has heads of 64


def save_ip_adapter(
    file: pathlib.Path,
    layers: Sequence[tuple[int, int]],
    *,
    kind: str = "plain",
    seed: int = 0,
    hidden: int = ENCODER["hidden_size"],
    projected: int = ENCODER["projection_dim"],
    **changes: np.ndarray | None,
) -> pathlib.Path:
    """Write an adapter for attentions of these shapes, [inner, width]; a change of None leaves a tensor out.

    It is in the layout of h94/IP-Adapter or, of the kind "flux", of XLabs-AI/flux-ip-adapter.
    """
    random, width, is_flux = np.random.default_rng(seed), layers[0][1], kind == "flux"
    shapes: dict[str, tuple[int, ...]] = {
        f"{FLUX_LAYER.format(k, what)}.weight" if is_flux else f"ip_adapter.{2 * k + 1}.to_{what}_ip.weight": shape
        for k, shape in enumerate(layers)
        for what in "kv"
    }
    shapes |= {f"{name.removesuffix('.weight')}.bias": shape[:1] for name, shape in shapes.items() if is_flux}
    of_projection: dict[str, tuple[int, ...]]
    if kind in ("plain", "flux"):
        of_projection = {"proj.weight": (4 * width, projected), "proj.bias": (4 * width,)} | _norm("norm", width)
    elif kind == "full":
        of_projection = {"proj.0.weight": (hidden, hidden), "proj.0.bias": (hidden,)}
        of_projection |= {"proj.2.weight": (width, hidden), "proj.2.bias": (width,)} | _norm("proj.3", width)
    elif kind == "plus":
        of_projection = {"latents": (1, _NUM_QUERIES, _DIM), "proj_in.weight": (_DIM, hidden), "proj_in.bias": (_DIM,)}
        of_projection |= {"proj_out.weight": (width, _DIM), "proj_out.bias": (width,)} | _norm("norm_out", width)
        for k in range(_DEPTH):
            at = f"layers.{k}"
            of_projection |= _norm(f"{at}.0.norm1", _DIM) | _norm(f"{at}.0.norm2", _DIM) | _norm(f"{at}.1.0", _DIM)
            of_projection |= {f"{at}.0.to_q.weight": (_DIM, _DIM), f"{at}.0.to_kv.weight": (2 * _DIM, _DIM)}
            of_projection |= {f"{at}.0.to_out.weight": (_DIM, _DIM)}
            of_projection |= {f"{at}.1.1.weight": (4 * _DIM, _DIM), f"{at}.1.3.weight": (_DIM, 4 * _DIM)}
    else:  # face-id
        of_projection = {"proj.0.weight": (64, 32), "proj.2.weight": (4 * width, 64)} | _norm("norm", width)
    prefix = "ip_adapter_proj_model" if is_flux else "image_proj"
    shapes |= {f"{prefix}.{name}": shape for name, shape in of_projection.items()}
    tensors = {
        name: (random.standard_normal(shape) / np.sqrt(shape[-1] if len(shape) > 1 else 100)).astype(np.float32)
        + np.float32(len(shape) == 1 and "norm" in name and name.endswith("weight"))
        for name, shape in shapes.items()
    }
    strength = 8 if kind == "full" else 4  # the mean of many random values is small
    tensors = {name: each * (1 if name.startswith(prefix) else strength) for name, each in tensors.items()}
    tensors |= {name: change for name, change in changes.items() if change is not None}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: each for name, each in tensors.items() if name not in changes or each is changes[name]}, file)
    return file


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def save_encoder(folder: pathlib.Path, **settings: object) -> pathlib.Path:
    """Write what is checked of an image encoder before it is loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ENCODER | settings))
    save_file({"visual_projection.weight": np.zeros((24, 32), np.float32)}, folder / "model.safetensors")
    return folder


def save_unet(folder: pathlib.Path, layers: Sequence[tuple[int, int]]) -> pathlib.Path:
    """Write the cross attentions of a UNet, the last of which is the middle's. Return the model's folder."""
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "config.json").write_text("{}")
    names = [f"down_blocks.0.attentions.{k}.transformer_blocks.0" for k in range(len(layers) - 1)]
    names.append("mid_block.attentions.0.transformer_blocks.0")
    tensors = {
        f"{name}.attn2.to_k.weight": np.zeros(shape, np.float32) for name, shape in zip(names, layers, strict=True)
    }
    save_file(tensors, folder / "unet" / "diffusion_pytorch_model.safetensors")
    return folder
