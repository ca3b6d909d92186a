"""Checks of decoders that embed texts: which are served, and the token that ends their texts. Knows no torch.

A decoder's embedding is the state of its last token, which alone has seen the whole text.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from noria.errors import ModelError
from noria.models.encoder.architectures import CAUSAL
from noria.models.encoder.folders.config_files import Module
from noria.models.files.weights import read_object
from noria.models.foreign_folders import describe_config


def check_decoder(file: pathlib.Path, tree: Mapping[str, Any], modules: Sequence[Module], *, reranks: bool) -> None:
    """Check a config.json of a decoder's `model_type`, or of any other; `reranks` says that it is a reranker's.

    Raises ModelError: it is a decoder, and not one that is served.
    """
    if tree.get("is_decoder"):
        raise ModelError(f"{file}: is_decoder is true: each token sees only those before it; supported are encoders.")
    model_type = str(tree.get("model_type"))
    if model_type == "gemma3_text" and tree.get("use_bidirectional_attention") is not True:
        raise ModelError(f"{file}: {describe_config(tree)} EmbeddingGemma is one, by use_bidirectional_attention.")
    if model_type not in CAUSAL:
        return
    if not reranks and len(modules) < 2:
        raise ModelError(
            f"{file}: {describe_config(tree)} A decoder that embeds, as Qwen3-Embedding, has a Pooling in "
            "modules.json; one that reranks, as Qwen3-Reranker, a LogitScore, or `reranker` in noria.json."
        )
    if tree.get("is_causal") is False:
        raise ModelError(
            f"{file}: is_causal is false: in the model's own code each token sees all others (as in gte-Qwen2), in "
            "transformers only those before it. Such models are not supported."
        )


def check_end_token(folder: pathlib.Path) -> None:
    """Check that the tokenizer adds a token to the end of each text, whose state is the embedding.

    Raises ModelError: it does not, so that the state would be that of any word.
    """
    file = folder / "tokenizer.json"
    if not ends_texts(read_object(file).get("post_processor")):
        raise ModelError(
            f"{file}: adds no token to the end of a text, and the model's pooling takes the last one (lasttoken). Add "
            "a TemplateProcessing with the end token that the model was trained with, mostly eos_token."
        )


def ends_texts(processor: object) -> bool:
    """Whether a post-processor of tokenizer.json puts a special token behind a text."""
    match processor:
        case {"type": "Sequence", "processors": [*parts]}:
            return any(map(ends_texts, parts))
        case {"type": "TemplateProcessing", "single": [*_, {"SpecialToken": _}]}:
            return True
        case {"type": "BertProcessing" | "RobertaProcessing"}:
            return True
    return False
