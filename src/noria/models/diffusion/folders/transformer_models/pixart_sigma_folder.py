"""Checks and describes a folder of PixArt-Σ: T5 with its tokenizer, transformer, vae, scheduler."""

import pathlib

from noria.errors import ModelError
from noria.images import scheduler_names
from noria.models.diffusion.folders.pipeline_folder import VaeConfig, sides_around
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    HEADS,
    CaptionedTransformer,
    TransformerFolder,
)
from noria.models.diffusion.folders.unet_models.unet_folder import check_does_not_clip, check_scheduler
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

_ALPHA_SIZE = 128  # the size in latents at which diffusers has more inputs by default, which only PixArt-α takes


class _Transformer(CaptionedTransformer, frozen=True):
    use_additional_conditions: bool | None = None


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    check_scheduler(folder)
    check_does_not_clip(folder)
    t5 = folder.read_t5()
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    conditions = transformer.use_additional_conditions
    if conditions or (conditions is None and transformer.sample_size == _ALPHA_SIZE):
        raise ModelError(
            f"{folder.config_file('transformer')}: use_additional_conditions is {conditions}, with which the "
            "transformer also takes sizes and ratios, as PixArt-α's does; supported is false, PixArt-Σ's."
        )
    folder.check_captioned(transformer, vae, t5.d_model, "d_model of text_encoder")
    embedding = {HEADS: (0, transformer.width), "in_channels": (1, transformer.in_channels)}
    folder.check_layer("transformer", ("pos_embed.proj.weight",), embedding)
    return folder.make_spec(
        sides_around(transformer.sample_size * vae.factor, transformer.patch_size * vae.factor),
        tuple(choice.name for choice in scheduler_names.choices_of_family("diffusion")),
        steps=20,
        guidance=4.5,
        scheduler="dpm++2m",
        takes_start_images=False,  # diffusers has no pipeline for them
        takes_loras=False,  # nor a loader
    )
