"""Checks and describes a folder of PixArt-Σ: T5 with its tokenizer, transformer, vae, scheduler."""

import pathlib
from typing import Annotated

from msgspec import Meta

from noria.errors import ModelError
from noria.images import scheduler_names
from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, PipelineFolder, VaeConfig, sides_around
from noria.models.diffusion.folders.transformer_models.transformer_folder import check_fit, read_t5
from noria.models.diffusion.folders.unet_models.unet_folder import check_does_not_clip, check_scheduler
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

_ALPHA_SIZE = 128  # of latents, at which diffusers has more inputs by default, which only PixArt-α takes


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    sample_size: Annotated[int, Meta(ge=4, le=512)] = _ALPHA_SIZE
    patch_size: Count = 2
    in_channels: Count = 4
    out_channels: Count | None = 8
    num_attention_heads: Count = 16
    attention_head_dim: Count = 72
    cross_attention_dim: Count = 1152
    caption_channels: Count | None = None
    use_additional_conditions: bool | None = None


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = PipelineFolder.open(path, family)
    check_scheduler(folder)
    check_does_not_clip(folder)
    t5 = read_t5(folder, "")
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    conditions = transformer.use_additional_conditions
    if conditions or (conditions is None and transformer.sample_size == _ALPHA_SIZE):
        raise ModelError(
            f"{folder.config_file('transformer')}: use_additional_conditions is {conditions}, with which the "
            "transformer also takes sizes and ratios, as PixArt-α's does; supported is false, PixArt-Σ's."
        )
    width = transformer.num_attention_heads * transformer.attention_head_dim
    out_channels = transformer.out_channels or transformer.in_channels
    check_fit(
        folder,
        ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("caption_channels", transformer.caption_channels or 0, t5.d_model, "d_model of text_encoder"),
        ("cross_attention_dim", transformer.cross_attention_dim, width, "num_attention_heads × attention_head_dim"),
    )
    if out_channels != 2 * transformer.in_channels:  # of those the second half, a variance, is not used
        check_fit(folder, ("out_channels", out_channels, vae.latent_channels, "in_channels or twice as many"))
    heads = "num_attention_heads × attention_head_dim"
    folder.check_layer(
        "text_encoder", ("shared.weight", "encoder.embed_tokens.weight"), {"vocab_size": (0, t5.vocab_size)}
    )
    embedding = {heads: (0, width), "in_channels": (1, transformer.in_channels)}
    folder.check_layer("transformer", ("pos_embed.proj.weight",), embedding)
    folder.check_layer("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)})
    return folder.make_spec(
        sides_around(transformer.sample_size * vae.factor, transformer.patch_size * vae.factor),
        tuple(choice.name for choice in scheduler_names.choices_of_family("diffusion")),
        steps=20,
        guidance=4.5,
        scheduler="dpm++2m",
        takes_start_images=False,  # diffusers has no pipeline for them
        takes_loras=False,  # nor a loader
    )
