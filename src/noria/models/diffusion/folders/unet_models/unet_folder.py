"""The common part of the folders of UNet families: configurations, what is checked of them, and the spec they make.

`stable_diffusion_folder.py` and `stable_diffusion_xl_folder.py` inspect folders with it. A folder's safety_checker,
feature_extractor and image_encoder are ignored: neither read nor checked.
"""

import pathlib
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from noria.errors import ModelError, short_repr
from noria.images import scheduler_names
from noria.models.diffusion.folders.pipeline_folder import (
    Count,
    Overrides,
    PartConfig,
    PipelineFolder,
    Sides,
    VaeConfig,
    check_vocabulary,
)
from noria.models.family import Family
from noria.models.files.weights import REDOWNLOAD_HINT, convert, read_object, read_struct
from noria.protocol.diffusion import DiffusionModelSpec, PromptSyntax

OTHER_INPUT = (
    "this UNet needs an input besides the text that its family does not have, as that of unCLIP does; supported are "
    "UNets conditioned on text alone, and those of SDXL in a folder of StableDiffusionXLPipeline."
)
"""Why a UNet is not supported that has one of several settings."""

Side = Annotated[int, Meta(ge=1, le=512)]  # in latents; 128 for SDXL, the largest U-Net in use


class TextEncoderConfig(Struct, frozen=True):
    """The settings of a CLIP text encoder that must fit the other parts."""

    hidden_size: Count
    vocab_size: Count
    max_position_embeddings: Count = 77  # transformers' default
    architectures: tuple[str, ...] = ("CLIPTextModel",)
    projection_dim: Count = 512  # transformers' default; of the pooled output
    num_hidden_layers: Count = 12  # transformers' default


class UnetConfig(PartConfig, frozen=True):
    """The settings of the UNet."""

    # A pair has no fixed-length type here: msgspec 0.22 corrupts memory on `Annotated[int, Meta(ge=1)] | tuple[int,
    # int]`.
    sample_size: Side | Annotated[tuple[Side, ...], Meta(min_length=2, max_length=2)] | None = None
    in_channels: Count = 4
    out_channels: Count = 4
    down_block_types: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)] = ("",) * 4
    cross_attention_dim: Count | tuple[Count, ...] = 1280
    addition_embed_type: str | None = None
    class_embed_type: str | None = None
    num_class_embeds: int | None = None
    encoder_hid_dim_type: str | None = None
    time_cond_proj_dim: Annotated[int, Meta(ge=4)] | None = None  # set in a UNet that embeds the guidance scale
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None

    @property
    def text_widths(self) -> set[int]:
        """Widths of the text embeddings that it takes."""
        widths = self.cross_attention_dim
        return {widths} if isinstance(widths, int) else set(widths)


class _Scheduler(PartConfig, frozen=True):
    prediction_type: Literal["epsilon", "v_prediction", "sample"] = "epsilon"


class UnetOverrides(Overrides, frozen=True, forbid_unknown_fields=True):
    """noria.json of a model with a UNet."""

    guidance_rescale: Annotated[float, Meta(ge=0, le=1)] = 0.0  # all requests share it; 0.7 with zero terminal SNR
    default_prompt_syntax: PromptSyntax = "plain"
    default_clip_skip: Annotated[int, Meta(ge=1)] | None = None  # None: the family's


@dataclass(frozen=True)
class UnetFolder:
    """The configurations of a folder, each of which is checked, and that they fit together."""

    folder: PipelineFolder
    text_encoders: tuple[TextEncoderConfig, ...]
    unet: UnetConfig
    vae: VaeConfig

    @property
    def needs_mask(self) -> bool:
        """Whether the UNet takes a mask and the latents of what it keeps besides the latents, for inpainting."""
        return self.unet.in_channels != self.unet.out_channels


def read_folder(path: pathlib.Path, family: Family) -> UnetFolder:
    """Read and check all parts of a folder that `family` lists.

    Raises ModelError: a file is damaged, or a part is not supported.
    """
    folder = PipelineFolder.open(path, family)
    check_scheduler(folder)
    suffixes = [part.removeprefix("text_encoder") for part in family.parts if part.startswith("text_encoder")]
    text_encoders = tuple(read_text_encoder(folder, suffix) for suffix in suffixes)
    unet, vae = read_unet(folder, text_encoders), folder.read_part("vae", VaeConfig)
    of_latents = vae.latent_channels
    if unet.in_channels not in (of_latents, 2 * of_latents + 1) or unet.out_channels != of_latents:
        raise ModelError(
            f"{folder.config_file('unet')}: in_channels {unet.in_channels} and out_channels {unet.out_channels}, but "
            f"the VAE has {of_latents} latent channels: a depth, editing or upscaling model; supported are text to "
            f"image, with in_channels {of_latents}, and inpainting, with {2 * of_latents + 1}."
        )
    check_text_layers(folder, text_encoders)
    check_unet_layer(folder, unet)
    in_vae = "decoder.conv_in.weight" if vae.class_name == "AutoencoderKL" else "decoder.layers.0.weight"
    folder.check_layer("vae", (in_vae,), {"latent_channels": (1, vae.latent_channels)})
    return UnetFolder(folder, text_encoders, unet, vae)


def read_unet(folder: PipelineFolder, text_encoders: Sequence[TextEncoderConfig]) -> UnetConfig:
    """Read a UNet's configuration, and check that it takes the outputs of these text encoders and nothing else."""
    file, unet = folder.config_file("unet"), folder.read_part("unet", UnetConfig)
    for key in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type"):
        if getattr(unet, key) is not None:
            raise ModelError(f"{file}: {key} is {getattr(unet, key)!r}: {OTHER_INPUT}")
    text_width = sum(text_encoder.hidden_size for text_encoder in text_encoders)
    if unet.text_widths != {text_width}:
        raise ModelError(
            f"{file}: cross_attention_dim {unet.cross_attention_dim}, but the text encoder's hidden_size is "
            f"{text_width}: the parts belong to two models. {REDOWNLOAD_HINT}"
        )
    return unet


def make_unet_spec(
    found: UnetFolder, *, steps: int, guidance: float, inpaint_strength: float, clip_skip: int
) -> DiffusionModelSpec:
    """Return the spec, without name and fingerprint, with the defaults given here unless noria.json has others.

    `inpaint_strength` is the default of a model for inpainting, all of whose requests begin with an image; `clip_skip`
    is the layer of the text encoders that the family reads, from the end.

    Widths and heights are multiples of the factor by which VAE and UNet together downscale. The smallest side is two
    such multiples, the largest twice the side that the model was trained at: beyond that, convolutional models repeat
    content.

    Raises ModelError: noria.json is not valid.
    """
    overrides, unet, vae = found.folder.read_overrides(UnetOverrides), found.unet, found.vae
    max_clip_skip = min(text_encoder.num_hidden_layers for text_encoder in found.text_encoders)
    default_clip_skip = overrides.default_clip_skip or clip_skip
    if overrides.default_clip_skip is not None and default_clip_skip > max_clip_skip:
        raise ModelError(
            f"{found.folder.path / 'noria.json'}: default_clip_skip is {default_clip_skip}; allowed are 1 to "
            f"{max_clip_skip}, the layers of the text encoder."
        )
    sides = unet.sample_size if isinstance(unet.sample_size, tuple) else (unet.sample_size or 64,) * 2
    multiple_px = vae.factor * 2 ** (len(unet.down_block_types) - 1)
    height_px, width_px = (max(multiple_px, side * vae.factor // multiple_px * multiple_px) for side in sides)
    schedulers = tuple(
        choice.name
        for choice in scheduler_names.choices_of_family("diffusion")
        if choice.takes_start_image or not found.needs_mask
    )
    return found.folder.make_spec(
        Sides(
            width_px, height_px, min(2 * multiple_px, width_px, height_px), 2 * max(width_px, height_px), multiple_px
        ),
        schedulers,
        steps=steps,
        guidance=guidance,
        scheduler="dpm++2m",
        overrides=overrides,
        denoiser="unet",
        guidance_rescale=overrides.guidance_rescale,
        prompt_syntaxes=typing.get_args(PromptSyntax),
        default_prompt_syntax=overrides.default_prompt_syntax,
        max_clip_skip=max_clip_skip,
        family_clip_skip=clip_skip,
        default_clip_skip=default_clip_skip,
        **({"needs_mask": True, "default_strength": inpaint_strength} if found.needs_mask else {}),
    )


def read_text_encoder(folder: PipelineFolder, suffix: str) -> TextEncoderConfig:
    """Read and check a text encoder and its tokenizer."""
    part, tokenizer = f"text_encoder{suffix}", folder.path / f"tokenizer{suffix}"
    file = folder.config_file(part)
    text_encoder = read_struct(file, TextEncoderConfig)
    folder.family.check_class(file, part, next(iter(text_encoder.architectures), None))
    check_vocabulary(tokenizer, text_encoder.vocab_size)
    _check_length(tokenizer, text_encoder)
    return text_encoder


def check_scheduler(folder: PipelineFolder) -> None:
    """Check that the scheduler is one for models of epsilon, v or the sample."""
    file, tree = folder.scheduler_file, read_object(folder.scheduler_file)
    family = scheduler_names.family_of(tree)
    if family != "diffusion":
        raise ModelError(
            f"{file}: a scheduler of the {family} family; supported are diffusion models, which predict epsilon, v or "
            "the sample."
        )
    convert(file, tree, _Scheduler)


def check_does_not_clip(folder: PipelineFolder) -> None:
    """Raise ModelError if the scheduler clips, which this family's pipeline does not switch off."""
    if read_object(folder.scheduler_file).get("clip_sample"):
        raise ModelError(
            f"{folder.scheduler_file}: clip_sample is true: the scheduler would clip, which is not linear. Set it to "
            "false; models of latents are trained without."
        )


def _check_length(folder: pathlib.Path, text_encoder: TextEncoderConfig) -> None:
    """Check that a tokenizer says a length of prompts that its text encoder can have."""
    file, max_tokens = folder / "tokenizer_config.json", text_encoder.max_position_embeddings
    length = read_object(file, "the maximum length of prompts is unknown").get("model_max_length")
    if not isinstance(length, int) or not 2 <= length <= max_tokens:  # a start token and an end token
        raise ModelError(
            f"{file}: model_max_length is {short_repr(length)}; the text encoder takes 2 to {max_tokens} tokens "
            "(max_position_embeddings of text_encoder/config.json)."
        )


def check_text_layers(folder: PipelineFolder, text_encoders: Sequence[TextEncoderConfig]) -> None:
    """Check one tensor of each text encoder."""
    parts = [part for part in folder.family.weight_stems if part.startswith("text_encoder")]
    embedding = "embeddings.token_embedding.weight"
    for part, config in zip(parts, text_encoders, strict=True):
        names = (embedding, f"text_model.{embedding}")  # after and before transformers 5
        expected = {"vocab_size": (0, config.vocab_size), "hidden_size": (1, config.hidden_size)}
        folder.check_layer(part, names, expected)


def check_unet_layer(folder: PipelineFolder, unet: UnetConfig) -> None:
    """Check one tensor of the UNet."""
    folder.check_layer("unet", ("conv_in.weight",), {"in_channels": (1, unet.in_channels)})
