"""What the folders of UNet families have in common: configurations, what is checked of them, and the spec they make.

`stable_diffusion_folder.py` and `stable_diffusion_xl_folder.py` inspect folders with it. A folder's safety_checker,
feature_extractor and image_encoder are ignored: neither read nor checked. This module knows neither torch nor what the
parts compute.
"""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from noria.errors import InvalidField, ModelError, short_repr
from noria.images import scheduler_names
from noria.models.families import Family
from noria.models.weights import (
    REDOWNLOAD_HINT,
    Shapes,
    convert,
    num_tensor_parameters,
    read_object,
    read_struct,
    read_weights,
    weight_files,
)
from noria.protocol.diffusion import DiffusionModelSpec

# Keys by which the libraries choose what they import or download, and the values that they write themselves.
_CODE_KEYS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            f"{prefix}{part}_implementation{suffix}"
            for prefix in ("", "_")
            for part in ("attn", "experts")
            for suffix in ("", "_internal")
        ),
        ("eager", "sdpa"),
    ),
    **dict.fromkeys(
        ("quantization_config", "compression_config", "auto_map", "custom_pipelines", "trust_remote_code"), ()
    ),
}

_DEFAULT_SCHEDULER = "dpm++2m"
OTHER_INPUT = (
    "this UNet needs an input besides the text that its family does not have, as that of unCLIP does; supported are "
    "UNets conditioned on text alone, and those of SDXL in a folder of StableDiffusionXLPipeline."
)
"""Why a UNet is not supported that has one of several settings."""

Count = Annotated[int, Meta(ge=1)]
Side = Annotated[int, Meta(ge=1, le=512)]  # in latents; 128 for SDXL, the largest U-Net in use


class Index(Struct, frozen=True):
    """model_index.json: library and class of each part, and settings of the pipeline."""

    class_name: str = msgspec.field(name="_class_name")
    tokenizer: tuple[str | None, str | None]
    text_encoder: tuple[str | None, str | None]
    unet: tuple[str | None, str | None]
    vae: tuple[str | None, str | None]
    scheduler: tuple[str | None, str | None]
    tokenizer_2: tuple[str | None, str | None] = (None, None)
    text_encoder_2: tuple[str | None, str | None] = (None, None)


class TextEncoderConfig(Struct, frozen=True):
    """The settings of a CLIP text encoder that must fit the other parts."""

    hidden_size: Count
    vocab_size: Count
    max_position_embeddings: Count = 77  # transformers' default
    architectures: tuple[str, ...] = ("CLIPTextModel",)
    projection_dim: Count = 512  # transformers' default; of the pooled output


class _AddedToken(Struct, frozen=True):
    id: int


class UnetConfig(Struct, frozen=True):
    """The settings of the UNet that decide whether it is supported, and its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")
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
    time_cond_proj_dim: Annotated[int, Meta(ge=4)] | None = None  # of a UNet that embeds the guidance scale
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None

    @property
    def text_widths(self) -> set[int]:
        """Widths of the text embeddings that it takes."""
        widths = self.cross_attention_dim
        return {widths} if isinstance(widths, int) else set(widths)


class VaeConfig(Struct, frozen=True):
    """The settings of a VAE that decide its sizes."""

    class_name: str = msgspec.field(name="_class_name")
    latent_channels: Count = 4
    block_out_channels: Annotated[tuple[Count, ...], Meta(max_length=8)] | None = None
    # AutoencoderTiny saved by an older diffusers.
    encoder_block_out_channels: Annotated[tuple[Count, ...], Meta(max_length=8)] | None = None

    @property
    def factor(self) -> int:
        """Pixels per latent along one side, as diffusers' pipeline computes it."""
        default = (64,) if self.class_name == "AutoencoderKL" else (64,) * 4
        blocks = self.block_out_channels or self.encoder_block_out_channels or default
        return int(2 ** (len(blocks) - 1))


class _Scheduler(Struct, frozen=True):
    class_name: str = msgspec.field(name="_class_name")
    prediction_type: Literal["epsilon", "v_prediction", "sample"] = "epsilon"


class Overrides(Struct, frozen=True, forbid_unknown_fields=True):
    """noria.json: defaults for requests, set by the model's author."""

    name: str | None = None  # `models/catalog.py` reads it
    default_scheduler: str | None = None
    default_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    default_guidance: Annotated[float, Meta(ge=0, le=50)] | None = None
    guidance_rescale: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of all requests; 0.7 for models with zero terminal SNR


@dataclass(frozen=True)
class UnetFolder:
    """The configurations of a folder, each of which is checked, and that they fit together."""

    index: Index
    text_encoders: tuple[TextEncoderConfig, ...]
    unet: UnetConfig
    vae: VaeConfig
    shapes: Mapping[str, Shapes]  # of the weights, by part


def read_folder(folder: pathlib.Path, family: Family) -> UnetFolder:
    """Read and check all parts of a folder that `family` lists.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    index_file = folder / "model_index.json"
    index = read_struct(index_file, Index)
    for part in family.parts:
        if family.parts[part].classes:
            family.check_class(index_file, part, getattr(index, part)[1])
    for part in family.weight_stems:
        _check_chooses_no_code(folder / part / "config.json")
    check_scheduler(folder / "scheduler" / "scheduler_config.json")
    suffixes = [part.removeprefix("text_encoder") for part in family.parts if part.startswith("text_encoder")]
    text_encoders = tuple(_read_text_encoder(folder, family, suffix) for suffix in suffixes)
    unet_file, vae_file = folder / "unet" / "config.json", folder / "vae" / "config.json"
    unet, vae = read_struct(unet_file, UnetConfig), read_struct(vae_file, VaeConfig)
    family.check_class(unet_file, "unet", unet.class_name)
    family.check_class(vae_file, "vae", vae.class_name)
    for key in ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type"):
        if getattr(unet, key) is not None:
            raise ModelError(f"{unet_file}: {key} is {getattr(unet, key)!r}: {OTHER_INPUT}")
    if (unet.in_channels, unet.out_channels) != (vae.latent_channels,) * 2:
        raise ModelError(
            f"{unet_file}: in_channels {unet.in_channels} and out_channels {unet.out_channels}, but the VAE has "
            f"{vae.latent_channels} latent channels: an inpainting, depth or upscaling model; supported is text to "
            "image."
        )
    text_width = sum(text_encoder.hidden_size for text_encoder in text_encoders)
    if unet.text_widths != {text_width}:
        raise ModelError(
            f"{unet_file}: cross_attention_dim {unet.cross_attention_dim}, but the text encoder's hidden_size is "
            f"{text_width}: the parts belong to two models. {REDOWNLOAD_HINT}"
        )
    shapes = {part: read_weights(folder, part, stem) for part, stem in family.weight_stems.items()}
    found = UnetFolder(index, text_encoders, unet, vae, shapes)
    _check_first_layers(folder, family, found)
    return found


def make_spec(
    folder: pathlib.Path, family: Family, found: UnetFolder, *, default_steps: int, default_guidance: float
) -> DiffusionModelSpec:
    """Return the spec, without name and fingerprint, with the defaults given here unless noria.json has others.

    Widths and heights are multiples of the factor by which VAE and UNet together downscale. The smallest side is two
    such multiples, the largest twice the side that the model was trained at: beyond that, convolutional models repeat
    content.

    Raises:
        ModelError: noria.json is not valid.

    """
    overrides_file, unet, vae = folder / "noria.json", found.unet, found.vae
    overrides = read_struct(overrides_file, Overrides) if overrides_file.exists() else Overrides()
    sides = unet.sample_size if isinstance(unet.sample_size, tuple) else (unet.sample_size or 64,) * 2
    multiple_px = vae.factor * 2 ** (len(unet.down_block_types) - 1)
    height_px, width_px = (max(multiple_px, side * vae.factor // multiple_px * multiple_px) for side in sides)
    return DiffusionModelSpec(
        name="",  # the catalog sets name and fingerprint
        folder=str(folder),
        fingerprint="",
        family=family.name,
        pipeline=found.index.class_name,
        default_width_px=width_px,
        default_height_px=height_px,
        min_side_px=min(2 * multiple_px, width_px, height_px),
        max_side_px=2 * max(width_px, height_px),
        multiple_px=multiple_px,
        default_scheduler=_default_scheduler(folder, overrides),
        schedulers=tuple(choice.name for choice in scheduler_names.choices_of_family("diffusion")),
        default_steps=default_steps if overrides.default_steps is None else overrides.default_steps,
        default_guidance=default_guidance if overrides.default_guidance is None else overrides.default_guidance,
        guidance_rescale=overrides.guidance_rescale,
        num_parameters=num_tensor_parameters(found.shapes["unet"]),
    )


def _read_text_encoder(folder: pathlib.Path, family: Family, suffix: str) -> TextEncoderConfig:
    """Read and check a text encoder and its tokenizer."""
    part, tokenizer = f"text_encoder{suffix}", folder / f"tokenizer{suffix}"
    file = folder / part / "config.json"
    text_encoder = read_struct(file, TextEncoderConfig)
    family.check_class(file, part, next(iter(text_encoder.architectures), None))
    _check_chooses_no_code(tokenizer / "tokenizer_config.json")
    _check_tokenizer(tokenizer, text_encoder)
    return text_encoder


def _check_chooses_no_code(file: pathlib.Path) -> None:
    """Check that a part's configuration, at any depth, chooses no code, and that no adapter replaces the part."""
    adapter_file = file.parent / "adapter_config.json"
    if adapter_file.exists():
        raise ModelError(f"{adapter_file}: adapters are not supported. Merge it into the model, and remove the file.")
    pending: list[object] = [read_object(file)]
    while pending:
        tree = pending.pop()
        if isinstance(tree, dict):
            for key in tree.keys() & _CODE_KEYS.keys():
                if tree[key] and tree[key] not in _CODE_KEYS[key]:
                    raise ModelError(
                        f"{file}: {key} is {short_repr(tree[key])}, by which a model chooses code to import or "
                        "download. Remove the key; attention is chosen by engine.attention, and quantized models are "
                        "not supported."
                    )
        pending += tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()


def check_scheduler(file: pathlib.Path) -> None:
    """Check that the scheduler is one for models of epsilon, v or the sample."""
    tree = read_object(file)
    family = scheduler_names.family_of(tree)
    if family != "diffusion":
        raise ModelError(
            f"{file}: a scheduler of the {family} family; supported are diffusion models, which predict epsilon, v or "
            "the sample."
        )
    convert(file, tree, _Scheduler)


def _check_tokenizer(folder: pathlib.Path, text_encoder: TextEncoderConfig) -> None:
    """Check that a CLIP tokenizer, in either file format, has no token id or length beyond the text encoder's."""
    file = folder / "tokenizer.json"
    added: object = []
    if file.exists():
        tree = read_object(file)
        model, added = tree.get("model"), tree.get("added_tokens") or []
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
    else:
        file = folder / "vocab.json"
        vocabulary = read_object(file, "there is neither tokenizer.json nor vocab.json with merges.txt")
        if not (folder / "merges.txt").is_file():
            raise ModelError(f"{folder / 'merges.txt'}: missing, but vocab.json needs it. {REDOWNLOAD_HINT}")
    try:
        token_ids = msgspec.convert(vocabulary, dict[str, int])
        max_token_id = max(
            [*token_ids.values(), *(token.id for token in msgspec.convert(added, list[_AddedToken]))], default=-1
        )
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: contains no vocabulary from words to token ids. {REDOWNLOAD_HINT}") from error
    if max_token_id >= text_encoder.vocab_size:
        raise ModelError(
            f"{file}: has token ids up to {max_token_id}, but the text encoder has {text_encoder.vocab_size} tokens. "
            f"{REDOWNLOAD_HINT}"
        )
    file, max_tokens = folder / "tokenizer_config.json", text_encoder.max_position_embeddings
    length = read_object(file, "the maximum length of prompts is unknown").get("model_max_length")
    if not isinstance(length, int) or not 2 <= length <= max_tokens:  # a start token and an end token
        raise ModelError(
            f"{file}: model_max_length is {short_repr(length)}; the text encoder takes 2 to {max_tokens} tokens "
            "(max_position_embeddings of text_encoder/config.json)."
        )


def _default_scheduler(folder: pathlib.Path, overrides: Overrides) -> str:
    """Return the scheduler of noria.json, else the one nearest to scheduler_config.json, else the family's default."""
    if overrides.default_scheduler is None:
        try:
            return scheduler_names.choice_for_config(read_object(folder / "scheduler" / "scheduler_config.json")).name
        except InvalidField:
            return _DEFAULT_SCHEDULER
    try:
        return scheduler_names.find(overrides.default_scheduler).name
    except InvalidField as error:
        raise ModelError(f"{folder / 'noria.json'}: default_scheduler: {error.message}") from error


def _check_first_layers(folder: pathlib.Path, family: Family, found: UnetFolder) -> None:
    """Check one tensor of each part: weights of another model would fail only when loaded, with a stack trace."""
    vae = found.vae
    in_vae = "decoder.conv_in.weight" if vae.class_name == "AutoencoderKL" else "decoder.layers.0.weight"
    text_encoders = [part for part in family.weight_stems if part.startswith("text_encoder")]
    for part, name, axes, expected, where in (
        *(
            (
                part,
                "embeddings.token_embedding.weight",
                slice(2),
                (config.vocab_size, config.hidden_size),
                "vocab_size and hidden_size",
            )
            for part, config in zip(text_encoders, found.text_encoders, strict=True)
        ),
        ("unet", "conv_in.weight", slice(1, 2), (found.unet.in_channels,), "in_channels"),
        ("vae", in_vae, slice(1, 2), (vae.latent_channels,), "latent_channels"),
    ):
        shapes = found.shapes[part]
        shape = shapes.get(name) or shapes.get(f"text_model.{name}")  # before and after transformers 5
        if shape is None or shape[axes] != expected:
            raise ModelError(
                f"{weight_files(folder, part, family.weight_stems[part])[0]}: {name} is "
                f"{list(shape) if shape else 'missing'}, but config.json "
                f"has {where} {', '.join(map(str, expected))}: weights and configuration belong to two models. "
                f"{REDOWNLOAD_HINT}"
            )
