"""Checks and describes a folder of Chroma: T5 with its tokenizer, transformer, vae, scheduler."""

import pathlib

from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, PipelineFolder, VaeConfig
from noria.models.diffusion.folders.transformer_models.flux_folder import packed_sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PATCH,
    check_fit,
    read_flow_scheduler,
    read_t5,
)
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

# diffusers' pipeline gives all others noise levels: UniPC other ones than it does for FLUX.1, and the rest take none.
_SCHEDULERS = ("flow-euler",)


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    in_channels: Count = 64
    out_channels: Count | None = None
    patch_size: Count = 1
    num_attention_heads: Count = 24
    attention_head_dim: Count = 128
    joint_attention_dim: Count = 4096
    axes_dims_rope: tuple[Count, Count, Count] = (16, 56, 56)
    approximator_num_channels: Count = 64


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = PipelineFolder.open(path, family)
    read_flow_scheduler(folder)
    t5 = read_t5(folder, "")
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    channels = vae.latent_channels * PATCH**2
    check_fit(
        folder,
        ("patch_size", transformer.patch_size, 1, "the pipeline packs latents itself"),
        ("in_channels", transformer.in_channels, channels, "the VAE's latent channels in blocks of 2 × 2"),
        ("out_channels", transformer.out_channels or transformer.in_channels, channels, "those of the input"),
        ("joint_attention_dim", transformer.joint_attention_dim, t5.d_model, "d_model of text_encoder"),
        ("attention_head_dim", transformer.attention_head_dim, sum(transformer.axes_dims_rope), "of axes_dims_rope"),
    )
    inner = transformer.num_attention_heads * transformer.attention_head_dim
    folder.check_layer(
        "text_encoder", ("shared.weight", "encoder.embed_tokens.weight"), {"vocab_size": (0, t5.vocab_size)}
    )
    folder.check_layer(
        "transformer",
        ("x_embedder.weight", "img_in.weight"),
        {"num_attention_heads × attention_head_dim": (0, inner), "in_channels": (1, transformer.in_channels)},
    )
    folder.check_layer(
        "transformer",
        ("context_embedder.weight", "txt_in.weight"),
        {"joint_attention_dim": (1, transformer.joint_attention_dim)},
    )
    folder.check_layer(
        "transformer",
        ("distilled_guidance_layer.in_proj.weight",),
        {"approximator_num_channels": (1, transformer.approximator_num_channels)},
    )
    folder.check_layer("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)})
    return folder.make_spec(packed_sides(vae), _SCHEDULERS, steps=35, guidance=5.0)
