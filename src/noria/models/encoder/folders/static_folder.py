"""Describes what needs no network: tables of vectors (model2vec), or of a weight for each token (opensearch's queries).

The mean of a text's vectors is its embedding; the weights of its tokens are a sparse one.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from noria.errors import ModelError, short_repr
from noria.models.encoder.folders.config_files import Config, Module, SentenceTransformers, make_spec
from noria.models.encoder.tokenizers.tokenizer_files import token_ids
from noria.models.family import Family
from noria.models.files.weights import REDOWNLOAD_HINT, Shapes, num_tensor_parameters, read_object
from noria.protocol.text import EncoderModelSpec

MODEL_TYPE, ARCHITECTURE = "model2vec", "StaticModel"
TABLE, MAPPING, WEIGHTS = "embeddings", "mapping", "weights"
"""The tensors: vectors [rows, D]; optional are the row of each token [V], and the factor of each token's vector [V]."""

IDF_FILE = "idf.json"
"""A weight for each token, by its text."""

_MAX_WEIGHT = 1e30
_MAX_LENGTH = 131_072  # tokens: nothing limits them
_KNOWN_KEYS = (
    *("_name_or_path", "apply_pca", "apply_zipf", "architectures", "base_model_name", "embedding_dtype", "hidden_dim"),
    *("language", "model_type", "normalize", "seq_length", "sif_coefficient", "token_remove_pattern", "tokenizer_name"),
    "vocabulary_quantization",
)


def static_config(folder: pathlib.Path, shapes: Shapes) -> Config:
    """Return what the weights say of the vocabulary and the vectors. Raises ModelError: they are not a table."""
    table = shapes.get(TABLE, ())
    tokens = shapes.get(MAPPING, table[:1])
    if len(table) != 2 or len(tokens) != 1 or shapes.get(WEIGHTS, tokens) != tokens or 0 in table:
        described = ", ".join(f"{name[:60]} {list(shape)}" for name, shape in sorted(shapes.items())[:4]) or "none"
        raise ModelError(
            f"{folder}: the weights are {described}; a static embedding has {TABLE} [rows, numbers], and perhaps "
            f"{MAPPING} and {WEIGHTS} [tokens]. {REDOWNLOAD_HINT}"
        )
    return Config(MODEL_TYPE, tokens[0], hidden_size=table[1])


def read_weights_of_tokens(folder: pathlib.Path) -> dict[int, float]:
    """Return the weights in idf.json by the tokens' ids.

    Raises ModelError: it is missing or damaged, or has a token that tokenizer.json has not.
    """
    file, ids = folder / IDF_FILE, token_ids(folder)
    weights = {}
    for token, weight in read_object(file, "the weights of tokens are unknown").items():
        if token not in ids or not isinstance(weight, int | float) or not 0 <= weight < _MAX_WEIGHT:
            raise ModelError(
                f"{file}: {short_repr(token)} has the weight {short_repr(weight)}; expected are tokens of "
                f"tokenizer.json, with weights from 0 to {_MAX_WEIGHT:g}. {REDOWNLOAD_HINT}"
            )
        weights[ids[token]] = float(weight)
    return weights


def describe_idf(folder: pathlib.Path, family: Family, config: Config, max_length: int) -> EncoderModelSpec:
    """Return the spec of the weights in idf.json, without name and fingerprint. Raises as `read_weights_of_tokens`."""
    return make_spec(
        folder,
        family,
        num_parameters=len(read_weights_of_tokens(folder)),
        task="sparse_embedding",
        architecture=ARCHITECTURE,
        dimensions=config.vocab_size,
        max_length=max_length,
        vocab_size=config.vocab_size,
    )


def describe_static(
    folder: pathlib.Path,
    family: Family,
    tree: Mapping[str, Any],
    config: Config,
    modules: list[Module],
    library: SentenceTransformers,
    shapes: Shapes,
) -> EncoderModelSpec:
    """Return the spec, without name and fingerprint. With modules.json, these say whether vectors are normalized.

    Raises ModelError: the modules are of another model.
    """
    file = folder / "modules.json"
    if modules and modules[0].name != "StaticEmbedding":
        raise ModelError(f"{file}: the first module is {modules[0].name}, of a model whose type is {MODEL_TYPE}.")
    normalizes = modules[-1].name == "Normalize" if modules else bool(tree.get("normalize"))
    unknown = sorted(key for key, value in tree.items() if key not in _KNOWN_KEYS and value not in (None, False, ""))
    dimensions = config.hidden_size
    assert dimensions is not None, "`static_config` has set it"
    return make_spec(
        folder,
        family,
        num_parameters=num_tensor_parameters(shapes),
        task="embedding",
        architecture=ARCHITECTURE,
        dimensions=dimensions,
        max_length=_MAX_LENGTH,
        vocab_size=config.vocab_size,
        pooling=("mean",),
        normalize=normalizes,
        prompts=tuple(library.prompt_texts.items()),
        default_prompt=library.default_prompt_name,
        unread_keys=tuple(f"{key[:60]} ({short_repr(tree[key])})" for key in unknown[:20]),
    )
