"""The common part of the folders of transformers: checks of text encoders, the scheduler, and that the parts fit."""

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError
from noria.images import scheduler_names
from noria.models.diffusion.folders.pipeline_folder import (
    Count,
    PartConfig,
    PipelineFolder,
    VaeConfig,
    check_vocabulary,
)
from noria.models.files.sentencepiece_file import SPIECE, needs_pieces, read_vocabulary
from noria.models.files.weights import REDOWNLOAD_HINT, convert, read_object, read_struct

PATCH = 2
"""Latents of a token along one side, of the transformers whose tokens are patches of them."""

MAX_PROMPT_TOKENS = 512
"""Of T5 and Qwen3, where a pipeline has no other number; longer prompts are cut, as by diffusers."""


class LanguageModelConfig(Struct, frozen=True):
    """The settings of a text encoder that must fit the other parts; they have no defaults in a published model."""

    hidden_size: Count
    vocab_size: Count
    num_hidden_layers: Annotated[int, Meta(ge=2)]
    max_position_embeddings: Annotated[int, Meta(ge=MAX_PROMPT_TOKENS)]


class Qwen3Config(LanguageModelConfig, frozen=True):
    """The settings of a Qwen3."""

    model_type: Literal["qwen3"]


class Gemma2Config(LanguageModelConfig, frozen=True):
    """The settings of a Gemma 2."""

    model_type: Literal["gemma2"]


class T5Config(Struct, frozen=True):
    """The settings of T5 that must fit the transformer and the tokenizer."""

    d_model: Count
    vocab_size: Count
    architectures: tuple[str, ...] = ("T5EncoderModel",)


class _Unigram(Struct, frozen=True):
    vocab: tuple[tuple[str, float], ...]


class _AddedToken(Struct, frozen=True):
    id: int


class _TokenizerFile(Struct, frozen=True):
    model: _Unigram
    added_tokens: tuple[_AddedToken, ...] = ()


LanguageModelT = TypeVar("LanguageModelT", bound=LanguageModelConfig)

HEADS = "num_attention_heads × attention_head_dim"
PACKING = "the pipeline packs latents itself"

Axes = Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)]
"""The axes of a token: its place in the text or among frames, its row, its column."""


class PackedTransformer(PartConfig, frozen=True):
    """The settings of a transformer of packed latents that decide its sizes; defaults are diffusers' for Chroma."""

    in_channels: Count = 64
    out_channels: Count | None = None
    patch_size: Count = 1
    num_attention_heads: Count = 24
    attention_head_dim: Count = 128
    joint_attention_dim: Count = 4096
    axes_dims_rope: tuple[Count, ...] = (16, 56, 56)


class CaptionedTransformer(PartConfig, frozen=True):
    """The settings of a transformer that projects captions; defaults are diffusers' for PixArt."""

    sample_size: Annotated[int, Meta(ge=4, le=512)] = 128
    patch_size: Count = 2
    in_channels: Count = 4
    out_channels: Count | None = 8
    num_attention_heads: Count = 16
    attention_head_dim: Count = 72
    cross_attention_dim: Count = 1152
    caption_channels: Count | None = None

    @property
    def width(self) -> int:
        """The width of its tokens."""
        return self.num_attention_heads * self.attention_head_dim


SCHEDULERS_WITH_SIGMAS = ("flow-euler", "flow-unipc")
"""Of pipelines that give noise levels to all schedulers: others fail then, or draw noise without the seed."""


class EulerScheduler(Struct, frozen=True):
    """The settings of a scheduler whose pipeline gives it noise levels and takes no other."""

    class_name: Literal["FlowMatchEulerDiscreteScheduler"] = msgspec.field(name="_class_name")
    num_train_timesteps: Literal[1000] = 1000
    shift: float = 1.0
    stochastic_sampling: Literal[False] = False  # else it draws noise without the seed


def packed_schedulers(scheduler: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the schedulers of models whose pipeline gives noise levels and a shift by the image's size.

    Not: flow-heun, which takes neither; flow-euler-a and flow-lcm, whose noise diffusers' pipelines draw without the
    seed. DPM-Solver++ takes the shift only where it depends on the image's size.
    """
    dynamic = ("flow-dpm++2m",) if scheduler.get("use_dynamic_shifting") else ()
    return ("flow-euler", "flow-unipc", *dynamic)


@dataclass(frozen=True)
class TransformerFolder(PipelineFolder):
    """A pipeline's folder with a transformer. All methods raise ModelError if what they read does not fit."""

    def read_language_model(self, kind: type[LanguageModelT]) -> LanguageModelT:
        """Return the text encoder's settings, to which its tokenizer and one tensor fit."""
        text_encoder = read_struct(self.config_file("text_encoder"), kind)
        check_vocabulary(self.path / "tokenizer", text_encoder.vocab_size)
        expected = {"vocab_size": (0, text_encoder.vocab_size), "hidden_size": (1, text_encoder.hidden_size)}
        self.check_layer("text_encoder", ("embed_tokens.weight", "model.embed_tokens.weight"), expected)
        return text_encoder

    def read_vision_language_model(
        self, model_type: str, kind: type[LanguageModelT], tokenizer: str = "tokenizer"
    ) -> LanguageModelT:
        """Return the settings for texts of a text encoder of `model_type` that reads images, too.

        The tokenizer, in the folder of that name, and one tensor fit to them.
        """
        file = self.config_file("text_encoder")
        tree = read_object(file)
        if tree.get("model_type") != model_type:
            raise ModelError(f"{file}: model_type is {tree.get('model_type')!r}; supported: {model_type}.")
        of_text = tree.get("text_config")  # older versions of transformers write its settings beside the others
        text_encoder = convert(file, of_text if isinstance(of_text, dict) else tree, kind)
        check_vocabulary(self.path / tokenizer, text_encoder.vocab_size)
        embedding = {"vocab_size": (0, text_encoder.vocab_size), "hidden_size": (1, text_encoder.hidden_size)}
        # As transformers 5 names it in the part alone and below a head, and as older versions do.
        names = ("language_model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
        older = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
        self.check_layer("text_encoder", (*names, *older), embedding)
        return text_encoder

    def read_t5(self, suffix: str = "") -> T5Config:
        """Return T5's settings, to which its tokenizer and one tensor fit; parts have this suffix."""
        part, file = f"text_encoder{suffix}", self.path / f"tokenizer{suffix}" / "tokenizer.json"
        t5 = read_struct(self.config_file(part), T5Config)
        self.family.check_class(self.config_file(part), part, next(iter(t5.architectures), None))
        if needs_pieces(file.parent):
            file = file.with_name(SPIECE)
            num_ids = len(read_vocabulary(file).pieces)
        else:
            num_ids = _num_token_ids(file)
        if num_ids > t5.vocab_size:
            raise ModelError(
                f"{file}: has {num_ids} token ids, but the text encoder has {t5.vocab_size} tokens. {REDOWNLOAD_HINT}"
            )
        self.check_layer(part, ("shared.weight", "encoder.embed_tokens.weight"), {"vocab_size": (0, t5.vocab_size)})
        return t5

    def read_flow_scheduler(self) -> Mapping[str, Any]:
        """Return scheduler_config.json, which is of the flow family."""
        tree = read_object(self.scheduler_file)
        family = scheduler_names.family_of(tree)
        if family != "flow":
            raise ModelError(
                f"{self.scheduler_file}: a scheduler of the {family} family; this model predicts a velocity, and needs "
                "one of the flow family."
            )
        return tree

    def read_euler_scheduler(self) -> EulerScheduler:
        """Return the scheduler's settings; another one, or other settings, do not work."""
        return read_struct(self.scheduler_file, EulerScheduler)

    def check_fit(self, *settings: tuple[str, int, int, str], part: str = "transformer") -> None:
        """Check settings of a part: the name, the value got, the one that another part has, and which that is."""
        for name, got, wanted, whose in settings:
            if got != wanted:
                raise ModelError(
                    f"{self.config_file(part)}: {name} is {got}; supported is {wanted}, {whose}. The parts belong to "
                    f"two models. {REDOWNLOAD_HINT}"
                )

    def check_vae(self, vae: VaeConfig) -> None:
        """Check one tensor of the VAE."""
        self.check_layer("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)})

    def check_packed(self, transformer: PackedTransformer, vae: VaeConfig, text_width: int, whose: str) -> None:
        """Check a transformer of packed latents with the VAE and the width of texts, and tensors of both."""
        channels, text = vae.latent_channels * PATCH**2, transformer.joint_attention_dim
        head_width = transformer.attention_head_dim
        self.check_fit(
            ("patch_size", transformer.patch_size, 1, PACKING),
            ("in_channels", transformer.in_channels, channels, "the VAE's latent channels in blocks of 2 × 2"),
            ("out_channels", transformer.out_channels or transformer.in_channels, channels, "those of the input"),
            ("joint_attention_dim", text, text_width, whose),
            ("attention_head_dim", head_width, sum(transformer.axes_dims_rope), "of axes_dims_rope"),
        )
        width = transformer.num_attention_heads * head_width
        embedding = {HEADS: (0, width), "in_channels": (1, transformer.in_channels)}
        self.check_layer("transformer", ("x_embedder.weight", "img_in.weight"), embedding)
        context = {"joint_attention_dim": (1, text)}
        self.check_layer("transformer", ("context_embedder.weight", "txt_in.weight"), context)
        self.check_vae(vae)

    def check_captioned(self, transformer: CaptionedTransformer, vae: VaeConfig, text_width: int, whose: str) -> None:
        """Check a transformer that projects captions with the VAE and the width of texts, and a tensor of the VAE."""
        self.check_fit(
            ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
            ("caption_channels", transformer.caption_channels or 0, text_width, whose),
            ("cross_attention_dim", transformer.cross_attention_dim, transformer.width, HEADS),
        )
        out_channels = transformer.out_channels or transformer.in_channels
        if out_channels != 2 * transformer.in_channels:  # the second half of twice as many, a variance, is not used
            self.check_fit(("out_channels", out_channels, vae.latent_channels, "in_channels or twice as many"))
        self.check_vae(vae)


def _num_token_ids(file: pathlib.Path) -> int:
    tree = read_object(file, f"there is neither tokenizer.json nor {SPIECE}")
    try:
        tokenizer = msgspec.convert(tree, _TokenizerFile)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: contains no vocabulary of T5: {error}. {REDOWNLOAD_HINT}") from error
    return max([len(tokenizer.model.vocab), *(token.id + 1 for token in tokenizer.added_tokens)])
