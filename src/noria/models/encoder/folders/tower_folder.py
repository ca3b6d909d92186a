"""Checks and describes a text tower of CLIP or SigLIP: alone, or in the folder of a model of texts and images.

Knows no torch. `image_folder.py` describes the images.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from noria.errors import ModelError, short_list, short_repr
from noria.models.encoder.folders.config_files import (
    SENTENCE_TRANSFORMERS_FILE,
    Config,
    Module,
    SentenceTransformers,
    Tokenizer,
    check_library_keys,
    decode_modules,
    embedding_settings,
    make_spec,
    read_if_there,
    read_transformer,
)
from noria.models.encoder.folders.config_keys import check_model_keys
from noria.models.encoder.folders.image_folder import read_image_input
from noria.models.encoder.folders.tower_config import CLIP_FOLDER, OTHER_TOWER, TOWERS, Tower
from noria.models.encoder.tokenizers.tokenizer_files import (
    check_tokenizer,
    check_word_embeddings,
    max_length,
    token_ids,
)
from noria.models.family import Family
from noria.models.files.weights import (
    REDOWNLOAD_HINT,
    convert,
    num_tensor_parameters,
    read_object,
    read_weights,
    weight_files,
)
from noria.protocol.text import EncoderModelSpec

_LEGACY_END_ID = 2
"""CLIP's `eos_token_id` in older configurations, with which the embedding is that of the token with the largest id."""


class _Tower(Struct, frozen=True):
    """The numbers of a tower that must be right before its class sees them."""

    eos_token_id: int | None = None
    projection_dim: Annotated[int, Meta(ge=1)] | None = None
    projection_size: Annotated[int, Meta(ge=1)] | None = None


class _Token(Struct, frozen=True):
    content: str


class _Padding(Struct, frozen=True):
    """tokenizer_config.json: how texts are filled up."""

    pad_token: str | _Token | None = None
    padding_side: Literal["left", "right"] = "right"
    model_input_names: tuple[str, ...] = ("input_ids",)


def inspect_tower(
    folder: pathlib.Path, family: Family, tree: Mapping[str, Any], modules: Sequence[Module]
) -> EncoderModelSpec:
    """Check a folder whose text tower has the configuration `tree`, and return its spec, without name and fingerprint.

    Raises ModelError: a file is damaged, or the folder computes something that is not supported.
    """
    file, model_type = folder / "config.json", str(tree["model_type"])
    tower = TOWERS[model_type]
    _check_outer_modules(folder)
    names = [module.name for module in modules]
    if names not in ([], ["Transformer"], ["Transformer", "Normalize"]):
        raise ModelError(
            f"{folder / 'modules.json'}: the modules are {', '.join(names)}; supported of {model_type} are Transformer "
            "alone or with Normalize, since it has a pooling and a projection itself."
        )
    config, own = convert(file, dict(tree), Config), convert(file, dict(tree), _Tower)
    transformer = read_transformer(folder)
    if transformer.transformer_task != "feature-extraction":
        raise ModelError(
            f"{folder}: transformer_task is {short_repr(transformer.transformer_task)}; supported of {model_type} is "
            "feature-extraction."
        )
    all_shapes = read_weights(folder, "", family.weight_stems[""])
    shapes = {name: shape for name, shape in all_shapes.items() if not name.startswith(OTHER_TOWER)}
    check_word_embeddings(weight_files(folder, "", family.weight_stems[""])[0], config, shapes)
    tokenizer = read_if_there(folder / "tokenizer_config.json", Tokenizer)
    check_tokenizer(folder, config, transformer, tokenizer)
    if not tower.fills_texts:
        _check_end_token(folder, own.eos_token_id)
    library = read_if_there(folder / SENTENCE_TRANSFORMERS_FILE, SentenceTransformers)
    dimensions = getattr(own, tower.width)
    if dimensions is None:
        raise ModelError(f"{file}: {tower.width} and hidden_size are null; a number is expected. {REDOWNLOAD_HINT}")
    image_input, unread_keys = read_image_input(folder, tree, dimensions)
    return make_spec(
        folder,
        family,
        num_parameters=num_tensor_parameters(shapes if image_input is None else all_shapes),
        task="embedding",
        architecture=tower.architecture,
        dimensions=dimensions,
        max_length=max_length(folder, config, transformer, tokenizer),
        vocab_size=config.vocab_size,
        truncation_side=tokenizer.truncation_side,
        unread_keys=(
            *check_model_keys(file, tree, model_type),
            *unread_keys,
            *check_library_keys(folder, of_tower=True),
        ),
        pooling=("lasttoken",),
        normalize=names[-1:] == ["Normalize"],
        fill_id=_fill_id(folder, tower),
        lowercases=tower.fills_texts and tokenizer.do_lower_case is not False,
        image_input=image_input,
        **embedding_settings(folder / SENTENCE_TRANSFORMERS_FILE, library),
    )


def _check_outer_modules(folder: pathlib.Path) -> None:
    """Check that nothing follows CLIP in a folder whose subfolder `CLIP_FOLDER` is `folder`."""
    file = folder.parent / "modules.json"
    if folder.name != CLIP_FOLDER or not file.exists():
        return
    names = [module.type.rpartition(".")[2] for module in decode_modules(file)]
    if names != ["CLIPModel"]:
        raise ModelError(
            f"{file}: the modules are {short_list(names) or 'none'}; supported in a folder with {CLIP_FOLDER} is "
            "CLIPModel alone, since it has a pooling and a projection itself."
        )


def _fill_id(folder: pathlib.Path, tower: Tower) -> int | None:
    """Return the token that fills texts up; None: the tower sees no such tokens."""
    if not tower.fills_texts:
        return None
    file = folder / "tokenizer_config.json"
    padding = read_if_there(file, _Padding)
    if padding.padding_side == "left" or "attention_mask" in padding.model_input_names:
        key = "padding_side" if padding.padding_side == "left" else "model_input_names"
        raise ModelError(
            f"{file}: {key} is {short_repr(read_object(file)[key])}; the texts of SigLIP are filled up on the right, "
            "with tokens that it sees, so that padding_side is right and model_input_names are input_ids alone."
        )
    token = padding.pad_token.content if isinstance(padding.pad_token, _Token) else padding.pad_token
    found = None if token is None else token_ids(folder).get(token)
    if found is None:
        raise ModelError(
            f"{file}: pad_token is {short_repr(token)}; needed is a token of tokenizer.json, with which SigLIP's texts "
            "are filled up. Copy the file from the model's source."
        )
    return found


def _check_end_token(folder: pathlib.Path, end_id: int | None) -> None:
    """Check that texts end with the token whose state is the embedding; older configurations name none."""
    file = folder / "tokenizer.json"
    found = _end_id(read_object(file).get("post_processor"))
    if found is None or (end_id not in (found, _LEGACY_END_ID)):
        ends = "adds no token to the end of a text" if found is None else f"ends texts with the token {found}"
        raise ModelError(
            f"{file}: {ends}, and the embedding is the state of the token {end_id} (eos_token_id of the text tower): "
            "the parts belong to two models. Copy tokenizer.json and config.json from the model's source."
        )


def _end_id(processor: object) -> int | None:
    """Return the id of the token that a post-processor of tokenizer.json puts behind a text; None: it puts none."""
    match processor:
        case {"type": "Sequence", "processors": [*parts]}:
            return next((found for found in map(_end_id, parts) if found is not None), None)
        case {
            "type": "TemplateProcessing",
            "single": [*_, {"SpecialToken": {"id": str(name)}}],
            "special_tokens": {**tokens},
        }:
            match tokens.get(name):
                case {"ids": [*_, int(end)]}:
                    return end
        case {"type": "BertProcessing" | "RobertaProcessing", "sep": [_, int(end)]}:
            return end
    return None
