"""Reads the configuration files of a text encoder's folder: transformers', and sentence-transformers' if it has them.

Each is checked by itself. `encoder_folder.py` checks that they, the weights and the tokenizer fit together.
"""

import pathlib
import re
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError, short_repr
from noria.models.encoder.architectures import OFFSET_POSITIONS
from noria.models.weights import REDOWNLOAD_HINT, convert, read_object, read_text
from noria.protocol.text import ProblemType

_MODULES = ("Transformer", "Pooling", "Normalize")
_TRANSFORMER_TASKS = ("feature-extraction", "sequence-classification")

T = TypeVar("T")
Count = Annotated[int, Meta(ge=1)]


class CrossEncoder(Struct, frozen=True):
    """`sentence_transformers` in config.json."""

    activation_fn: str | None = None


class Config(Struct, frozen=True):
    """config.json: what is checked of it; defaults are transformers'."""

    model_type: str
    vocab_size: Count
    architectures: tuple[str, ...] | None = None
    hidden_size: Count | None = None
    dim: Count | None = None  # DistilBERT's hidden size
    max_position_embeddings: Count = 512
    type_vocab_size: int = 0
    pad_token_id: int | None = None
    is_decoder: bool = False
    id2label: dict[str, str] | None = None
    problem_type: ProblemType | None = None
    sentence_transformers: CrossEncoder | None = None
    sbert_ce_default_activation_function: str | None = None
    matryoshka_dimensions: tuple[Count, ...] | None = None

    @property
    def num_positions(self) -> int:
        """The number of tokens that the model has positions for."""
        padding = 1 if self.pad_token_id is None else self.pad_token_id
        return self.max_position_embeddings - (padding + 1 if self.model_type in OFFSET_POSITIONS else 0)


class Module(Struct, frozen=True):
    """An entry of modules.json. Only the last part of `type` counts: classes move between versions."""

    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.type.rpartition(".")[2]


class Transformer(Struct, frozen=True):
    """sentence_bert_config.json."""

    max_seq_length: Count | None = None
    do_lower_case: bool = False
    transformer_task: str = "feature-extraction"


class SentenceTransformers(Struct, frozen=True):
    """config_sentence_transformers.json."""

    model_type: str = "SentenceTransformer"
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    activation_fn: str | None = None


class Tokenizer(Struct, frozen=True):
    """tokenizer_config.json; transformers writes 1e30 for a tokenizer without a maximum."""

    model_max_length: Annotated[float, Meta(ge=1)] | None = None


class Overrides(Struct, frozen=True, forbid_unknown_fields=True):
    """noria.json."""

    name: str | None = None  # `models/catalog.py` reads it


def read_modules(folder: pathlib.Path) -> list[Module]:
    """Return the entries of modules.json, empty if there is no such file."""
    file = folder / "modules.json"
    if not file.exists():
        return []
    try:
        modules = msgspec.json.decode(read_text(file), type=list[Module])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: not a list of sentence-transformers' modules: {error}. {REDOWNLOAD_HINT}") from error
    for module in modules:
        if module.name not in _MODULES:
            raise ModelError(
                f"{file}: has a module of the type {short_repr(module.type)}; supported are {', '.join(_MODULES)}."
            )
        if (module.path and not re.fullmatch(r"[\w.-]+", module.path)) or module.path.startswith("."):
            raise ModelError(f"{file}: the path {short_repr(module.path)} is not the name of a subfolder.")
    names = [module.name for module in modules]
    if names not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{file}: the modules are {', '.join(names) or 'none'}; supported are Transformer, Pooling and, "
            "optionally, Normalize, in this order, or Transformer alone for a cross-encoder."
        )
    if modules[0].path:
        raise ModelError(
            f"{file}: the Transformer is in the subfolder {modules[0].path!r}, as sentence-transformers before 1.0 "
            "wrote it. Save the model again with a newer version."
        )
    return modules


def read_transformer(folder: pathlib.Path) -> Transformer:
    """Read sentence_bert_config.json, or that of another architecture (sentence_roberta_config.json)."""
    file = next(iter(sorted(folder.glob("sentence_*_config.json"))), folder / "sentence_bert_config.json")
    transformer = read_if_there(file, Transformer)
    if transformer.transformer_task not in _TRANSFORMER_TASKS:
        raise ModelError(
            f"{file}: transformer_task is {short_repr(transformer.transformer_task)}; supported are "
            f"{', '.join(_TRANSFORMER_TASKS)}."
        )
    return transformer


def read_if_there(file: pathlib.Path, kind: type[T]) -> T:
    """Read a file of which every field has a default, or return the defaults."""
    return convert(file, read_object(file) if file.exists() else {}, kind)
