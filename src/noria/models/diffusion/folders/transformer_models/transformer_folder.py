"""What the folders of transformers have in common: checks of text encoders, the scheduler, and that the parts fit."""

import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError
from noria.images import scheduler_names
from noria.models.diffusion.folders.pipeline_folder import Count, PipelineFolder, check_vocabulary
from noria.models.sentencepiece_file import SPIECE, needs_pieces, read_vocabulary
from noria.models.weights import REDOWNLOAD_HINT, read_object, read_struct

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
    """Those of a Qwen3."""

    model_type: Literal["qwen3"]


class Gemma2Config(LanguageModelConfig, frozen=True):
    """Those of a Gemma 2."""

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


def read_language_model(folder: PipelineFolder, kind: type[LanguageModelT]) -> LanguageModelT:
    """Return the text encoder's settings. Raises ModelError if it is none, or its tokenizer has more token ids."""
    text_encoder = read_struct(folder.config_file("text_encoder"), kind)
    check_vocabulary(folder.path / "tokenizer", text_encoder.vocab_size)
    return text_encoder


def check_language_model(folder: PipelineFolder, text_encoder: LanguageModelConfig) -> None:
    """Check one tensor of the text encoder."""
    names = ("embed_tokens.weight", "model.embed_tokens.weight")
    expected = {"vocab_size": (0, text_encoder.vocab_size), "hidden_size": (1, text_encoder.hidden_size)}
    folder.check_layer("text_encoder", names, expected)


def read_t5(folder: PipelineFolder, suffix: str) -> T5Config:
    """Return T5's settings. Raises ModelError if it is none, or its tokenizer has token ids beyond its own."""
    part, file = f"text_encoder{suffix}", folder.path / f"tokenizer{suffix}" / "tokenizer.json"
    t5 = read_struct(folder.config_file(part), T5Config)
    folder.family.check_class(folder.config_file(part), part, next(iter(t5.architectures), None))
    if needs_pieces(file.parent):
        file = file.with_name(SPIECE)
        num_ids = len(read_vocabulary(file).pieces)
    else:
        num_ids = _num_token_ids(file)
    if num_ids > t5.vocab_size:
        raise ModelError(
            f"{file}: has {num_ids} token ids, but the text encoder has {t5.vocab_size} tokens. {REDOWNLOAD_HINT}"
        )
    return t5


def _num_token_ids(file: pathlib.Path) -> int:
    tree = read_object(file, f"there is neither tokenizer.json nor {SPIECE}")
    try:
        tokenizer = msgspec.convert(tree, _TokenizerFile)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: contains no vocabulary of T5: {error}. {REDOWNLOAD_HINT}") from error
    return max([len(tokenizer.model.vocab), *(token.id + 1 for token in tokenizer.added_tokens)])


def read_flow_scheduler(folder: PipelineFolder) -> Mapping[str, Any]:
    """Return scheduler_config.json. Raises ModelError if it is not of the flow family."""
    tree = read_object(folder.scheduler_file)
    family = scheduler_names.family_of(tree)
    if family != "flow":
        raise ModelError(
            f"{folder.scheduler_file}: a scheduler of the {family} family; this model predicts a velocity, and needs "
            "one of the flow family."
        )
    return tree


SCHEDULERS_WITH_SIGMAS = ("flow-euler", "flow-unipc")
"""Of pipelines that give noise levels to all schedulers: others fail then, or draw noise without the seed."""


class EulerScheduler(Struct, frozen=True):
    """The settings of a scheduler whose pipeline gives it noise levels and takes no other."""

    class_name: Literal["FlowMatchEulerDiscreteScheduler"] = msgspec.field(name="_class_name")
    num_train_timesteps: Literal[1000] = 1000
    shift: float = 1.0
    stochastic_sampling: Literal[False] = False  # else it draws noise without the seed


def read_euler_scheduler(folder: PipelineFolder) -> EulerScheduler:
    """Return the scheduler's settings. Raises ModelError if it is another one, or has settings that do not work."""
    return read_struct(folder.scheduler_file, EulerScheduler)


def packed_schedulers(scheduler: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the schedulers of models whose pipeline gives noise levels and a shift by the image's size.

    Not: flow-heun, which takes neither; flow-euler-a and flow-lcm, whose noise diffusers' pipelines draw without the
    seed. DPM-Solver++ takes the shift only where it depends on the image's size.
    """
    dynamic = ("flow-dpm++2m",) if scheduler.get("use_dynamic_shifting") else ()
    return ("flow-euler", "flow-unipc", *dynamic)


def check_fit(folder: PipelineFolder, *settings: tuple[str, int, int, str], part: str = "transformer") -> None:
    """Check settings of a part: the name, the value got, the one that another part has, and which that is.

    Raises:
        ModelError: they differ.

    """
    for name, got, wanted, whose in settings:
        if got != wanted:
            raise ModelError(
                f"{folder.config_file(part)}: {name} is {got}; supported is {wanted}, {whose}. The parts belong to two "
                f"models. {REDOWNLOAD_HINT}"
            )
