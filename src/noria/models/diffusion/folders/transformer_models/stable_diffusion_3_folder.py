"""Checks and describes a folder of Stable Diffusion 3 or 3.5: two CLIPs, T5, transformer, vae, scheduler."""

import pathlib

from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, Sides, VaeConfig
from noria.models.diffusion.folders.transformer_models.transformer_folder import TransformerFolder
from noria.models.diffusion.folders.unet_models.unet_folder import read_text_encoder
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

# Not: flow-euler-a and flow-lcm, whose noise diffusers' pipeline draws without the seed.
_SCHEDULERS = ("flow-euler", "flow-heun", "flow-unipc", "flow-dpm++2m")
_DYNAMIC_SCHEDULERS = ("flow-euler", "flow-unipc", "flow-dpm++2m")  # with a shift by the image's size


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    sample_size: Count = 128
    patch_size: Count = 2
    in_channels: Count = 16
    out_channels: Count = 16
    joint_attention_dim: Count = 4096
    pooled_projection_dim: Count = 2048
    pos_embed_max_size: Count = 96


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    scheduler = folder.read_flow_scheduler()
    transformer, vae = _read_sizes(folder)
    expected = {"in_channels": (1, transformer.in_channels)}
    names = ("pos_embed.proj.weight", "x_embedder.proj.weight")
    folder.check_layer("transformer", names, expected)
    positions = ("pos_embed.pos_embed", "pos_embed")
    if any(name in folder.shapes["transformer"] for name in positions):
        # Their buffer is made at this size before it is filled.
        length = transformer.pos_embed_max_size**2
        folder.check_layer("transformer", positions, {"pos_embed_max_size squared": (1, length)})
    schedulers = _DYNAMIC_SCHEDULERS if scheduler.get("use_dynamic_shifting") else _SCHEDULERS
    multiple_px = transformer.patch_size * vae.factor
    max_side_px = min(2 * transformer.sample_size * vae.factor, transformer.pos_embed_max_size * multiple_px)
    side_px = min(transformer.sample_size * vae.factor, max_side_px) // multiple_px * multiple_px
    return folder.make_spec(
        Sides(side_px, side_px, min(2 * multiple_px, side_px), max_side_px // multiple_px * multiple_px, multiple_px),
        schedulers,
        steps=28,
        guidance=7.0,
    )


def _read_sizes(folder: TransformerFolder) -> tuple[_Transformer, VaeConfig]:
    """Read the configurations, and check that the parts fit together."""
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    t5 = folder.read_t5("_3")
    clips = [read_text_encoder(folder, suffix) for suffix in ("", "_2")]
    pooled = sum(clip.projection_dim for clip in clips)
    folder.check_fit(
        ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("out_channels", transformer.out_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("joint_attention_dim", transformer.joint_attention_dim, t5.d_model, "d_model of text_encoder_3"),
        ("pooled_projection_dim", transformer.pooled_projection_dim, pooled, "the projection_dim of both CLIPs"),
    )
    return transformer, vae
