"""Checks and describes a folder of FLUX.1, Kontext too: CLIP, T5, their tokenizers, transformer, vae, scheduler."""

import pathlib
from typing import Any

from noria.models.diffusion.folders.pipeline_folder import Count, Sides, VaeConfig
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PACKING,
    PATCH,
    SCHEDULERS_WITH_SIGMAS,
    PackedTransformer,
    TransformerFolder,
    packed_schedulers,
)
from noria.models.diffusion.folders.unet_models.unet_folder import read_text_encoder
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

KONTEXT = "FluxKontextPipeline"

_KONTEXT_GUIDANCE = 2.5  # its authors'
_TRAINED_LATENTS = 128  # latents of a side: about a million pixels


class _Transformer(PackedTransformer, frozen=True):
    pooled_projection_dim: Count = 768
    guidance_embeds: bool = False


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    scheduler = folder.read_flow_scheduler()
    transformer, vae = _read_sizes(folder)
    expected = {"in_channels": (1, transformer.in_channels)}
    folder.check_layer("transformer", ("x_embedder.weight", "img_in.weight"), expected)
    fills, is_kontext = transformer.in_channels != vae.latent_channels * PATCH**2, folder.pipeline == KONTEXT
    of_inpainting: dict[str, Any] = {"needs_mask": True, "default_strength": 1.0} if fills else {}
    steps, guidance = (50, 30.0) if fills else (28, 3.5) if transformer.guidance_embeds else (4, 0.0)
    schedulers = packed_schedulers(scheduler)
    if is_kontext:
        guidance, schedulers = _KONTEXT_GUIDANCE, SCHEDULERS_WITH_SIGMAS
    return folder.make_spec(
        packed_sides(vae),
        schedulers,
        steps=steps,
        guidance=guidance,
        max_references=int(is_kontext),  # its pipeline takes more only for several prompts
        reference_size="preferred" if is_kontext else "area",
        **of_inpainting,
    )


def packed_sides(vae: VaeConfig) -> Sides:
    """Return the sides of images of models of this size, whose transformer takes packed latents."""
    multiple_px, side_px = PATCH * vae.factor, _TRAINED_LATENTS * vae.factor
    return Sides(side_px, side_px, 2 * multiple_px, 2 * side_px, multiple_px)


def _read_sizes(folder: TransformerFolder) -> tuple[_Transformer, VaeConfig]:
    """Read the configurations, and check that the parts fit together."""
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    t5, clip = folder.read_t5("_2"), read_text_encoder(folder, "")
    channels = vae.latent_channels * PATCH**2
    fill_channels = 2 * channels + vae.factor**2 * PATCH**2
    in_channels = fill_channels if transformer.in_channels == fill_channels else channels
    meaning = (
        f"the VAE's latent channels in blocks of 2 × 2; of Fill {fill_channels}, with mask and image; models for depth "
        "or edges are not supported"
    )
    folder.check_fit(
        ("patch_size", transformer.patch_size, 1, PACKING),
        ("in_channels", transformer.in_channels, in_channels, meaning),
        ("out_channels", transformer.out_channels or transformer.in_channels, channels, "those of the latents"),
        ("joint_attention_dim", transformer.joint_attention_dim, t5.d_model, "d_model of text_encoder_2"),
        ("pooled_projection_dim", transformer.pooled_projection_dim, clip.hidden_size, "hidden_size of text_encoder"),
    )
    return transformer, vae
