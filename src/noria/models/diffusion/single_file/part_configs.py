"""Makes the configurations of a checkpoint's parts: sizes from the shapes of its tensors, the rest from a table.

Shapes do not tell how many heads attention has, which activation a text encoder uses, and how a VAE's latents and the
noise are scaled: `SETTINGS` has that of each family.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.errors import ModelError
from noria.models.diffusion.single_file.checkpoint_header import StoredTensor
from noria.models.diffusion.single_file.part_names import SD2_LAYERS, ClipTensors, VaeTensors
from noria.models.diffusion.single_file.unet_names import UnetTensors

VERSION = "0.42.1"
"""The release of diffusers whose folders these are."""

LATENT_CHANNELS = 4

_Tensors = Mapping[str, StoredTensor]
_SD2_WIDTH = 1024  # channels of its text encoder
_HEAD_WIDTH = 64  # channels of a head, but in the UNet of SD 1, which has 8 heads of any width


@dataclass(frozen=True)
class FamilySettings:
    """The settings of a family that no tensor tells."""

    title: str
    pipeline: str
    inpainting_pipeline: str
    default_side_px: int
    scaling_factor: float  # factor of the VAE's latents
    unet_heads: int | None = None  # None: heads of `_HEAD_WIDTH` channels
    num_sizes: int = 0  # numbers beside the pooled text: sizes and crops, or a score


SETTINGS: Mapping[str, FamilySettings] = {
    "sd1": FamilySettings(
        "Stable Diffusion 1", "StableDiffusionPipeline", "StableDiffusionInpaintPipeline", 512, 0.18215, unet_heads=8
    ),
    "sd2": FamilySettings(
        "Stable Diffusion 2", "StableDiffusionPipeline", "StableDiffusionInpaintPipeline", 512, 0.18215
    ),
    "sdxl": FamilySettings(
        "Stable Diffusion XL", "StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline", 1024, 0.13025,
        num_sizes=6,
    ),
    "refiner": FamilySettings(
        "the refiner of Stable Diffusion XL", "StableDiffusionXLImg2ImgPipeline", "", 1024, 0.13025, num_sizes=5
    ),
}  # fmt: skip


def unet_config(tensors: _Tensors, found: UnetTensors, settings: FamilySettings, pooled_width: int) -> dict[str, Any]:
    """Return the configuration of a UNet, for the side of images of its family.

    Raises ModelError: its layers are arranged as diffusers' UNet cannot have them. The message names no file.
    """
    depths = _depths(found)
    channels = [_length(tensors, name, 0) for name in found.down_starts]
    cross = next(name for target, name in found.names.items() if target.endswith("attn2.to_k.weight"))
    is_linear = len(tensors[found.names["mid_block.attentions.0.proj_in.weight"]].shape) == 2
    has_sizes = "add_embedding.linear_1.weight" in found.names
    if has_sizes != bool(settings.num_sizes):
        raise ModelError(
            f"its UNet has {'an' if has_sizes else 'no'} input label_emb, unlike that of {settings.title}."
        )
    heads: object = settings.unet_heads or [max(each // _HEAD_WIDTH, 1) for each in channels]
    config: dict[str, Any] = {
        "_class_name": "UNet2DConditionModel",
        "_diffusers_version": VERSION,
        "sample_size": settings.default_side_px // 8,
        "in_channels": _length(tensors, "input_blocks.0.0.weight", 1),
        "out_channels": _length(tensors, "out.2.weight", 0),
        "block_out_channels": channels,
        "layers_per_block": len(found.down_depths[0]),
        "down_block_types": ["CrossAttnDownBlock2D" if any(each) else "DownBlock2D" for each in found.down_depths],
        "up_block_types": ["CrossAttnUpBlock2D" if any(each) else "UpBlock2D" for each in found.up_depths],
        "transformer_layers_per_block": depths,
        "cross_attention_dim": _length(tensors, cross, 1),
        "attention_head_dim": heads,
        "use_linear_projection": is_linear,
    }
    if "time_embedding.cond_proj.weight" in found.names:
        config["time_cond_proj_dim"] = _length(tensors, "time_embed.cond_proj.weight", 1)
    if settings.num_sizes:
        added = _length(tensors, "label_emb.0.0.weight", 1)
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": (added - pooled_width) // settings.num_sizes,
            "projection_class_embeddings_input_dim": added,
        }
    return config


def _depths(found: UnetTensors) -> list[int]:
    """Return the layers of each block's transformers, those of the middle for a last block that has none."""
    down, up, middle = found.down_depths, found.up_depths, found.mid_depth
    is_even = all(len(set(each)) == 1 for each in (*down, *up))
    num_layers = {*map(len, down), *(len(each) - 1 for each in up)}
    depths = [each[0] or 1 for each in down] if is_even else []
    if depths and not down[-1][0]:
        depths[-1] = middle
    if (
        len(num_layers) != 1
        or not middle
        or not depths
        or depths[-1] != middle
        or [each[0] for each in up[::-1]] != [each[0] for each in down]
    ):
        raise ModelError(
            f"its UNet has transformers of {down} layers on the way down, {middle} in the middle and {up} on the way "
            "up: a distilled UNet, as SSD-1B's or Vega's, or an incomplete file. Take its folder in diffusers format."
        )
    return depths


def vae_config(tensors: _Tensors, found: VaeTensors, settings: FamilySettings, side_px: int) -> dict[str, Any]:
    """Return the configuration of a VAE. Raises ModelError, which names no file: it has no blocks, or other latents."""
    num_blocks = len(found.down_starts)
    latent_channels = _length(tensors, found.latent, 1)
    if not num_blocks or latent_channels != LATENT_CHANNELS:
        raise ModelError(
            f"its VAE has {num_blocks} blocks and {latent_channels} channels of latents; {settings.title} needs "
            f"{LATENT_CHANNELS} channels."
        )
    return {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": VERSION,
        "sample_size": side_px,
        "latent_channels": latent_channels,
        "block_out_channels": [_length(tensors, name, 0) for name in found.down_starts],
        "layers_per_block": found.num_layers,
        "down_block_types": ["DownEncoderBlock2D"] * num_blocks,
        "up_block_types": ["UpDecoderBlock2D"] * num_blocks,
        "scaling_factor": settings.scaling_factor,
        "force_upcast": True,
    }


def clip_config(tensors: _Tensors, found: ClipTensors) -> dict[str, Any]:
    """Return the configuration of a text encoder; those of OpenCLIP have another activation.

    Raises ModelError, which names no file: it has no layers, or that of Stable Diffusion 2 too few.
    """
    if not found.num_layers:
        raise ModelError("its text encoder has no layers.")
    width = _length(tensors, found.tokens, 1)
    is_open_clip = found.tokens == "token_embedding.weight"
    if is_open_clip and not found.projection and width == _SD2_WIDTH and found.num_layers < SD2_LAYERS:
        raise ModelError(
            f"its text encoder has {found.num_layers} layers; Stable Diffusion 2 reads {SD2_LAYERS}. The file is "
            "incomplete: download it again."
        )
    num_used = len({target.split(".")[3] for target in found.origins if ".encoder.layers." in target})
    projection = found.projection and found.origins["text_projection.weight"]
    pooled_width = _length(tensors, projection.name, 1 if projection.is_transposed else 0) if projection else width
    return {
        "architectures": ["CLIPTextModelWithProjection" if projection else "CLIPTextModel"],
        "model_type": "clip_text_model",
        "vocab_size": _length(tensors, found.tokens, 0),
        "hidden_size": width,
        "intermediate_size": _length(tensors, found.feed_forward, 0),
        "num_hidden_layers": num_used,
        "num_attention_heads": max(width // _HEAD_WIDTH, 1),
        "max_position_embeddings": _length(tensors, found.positions, 0),
        "projection_dim": pooled_width,
        "hidden_act": "gelu" if is_open_clip else "quick_gelu",
        "layer_norm_eps": 1e-05,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }


def _length(tensors: _Tensors, name: str, axis: int) -> int:
    """Return the length of an axis of a tensor. Raises ModelError: it has no such axis, or one without numbers."""
    shape = tensors[name].shape
    if axis >= len(shape) or not shape[axis]:
        raise ModelError(f"{name} has the shape {list(shape)}: the file is damaged.")
    return shape[axis]


_NOISE: dict[str, Any] = {
    "_diffusers_version": VERSION,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
    "clip_sample": False,
}


def scheduler_config(family: str, *, predicts_v: bool, has_zero_snr: bool) -> dict[str, Any]:
    """Return the configuration of the scheduler: PNDM for SD 1 and 2, Euler for SDXL and where PNDM cannot."""
    config = _NOISE | {"prediction_type": "v_prediction" if predicts_v else "epsilon"}
    if has_zero_snr:
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    elif family in ("sd1", "sd2"):
        return config | {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False}
    return {"timestep_spacing": "leading"} | config | {"_class_name": "EulerDiscreteScheduler"}
