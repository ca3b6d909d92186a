"""Checks a folder's tokenizer against its model: vocabularies of the same size, and files that agree. Knows no library.

`hf_tokenizer.py` loads it.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from noria.errors import ModelError, short_repr
from noria.models.encoder.folders.config_files import Config, Tokenizer, Transformer
from noria.models.files.weights import REDOWNLOAD_HINT, Shapes, read_object, shell_command

_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "spm.model", "sentencepiece.bpe.model", "bpe.codes")
_MIN_VOCABULARY = 1 / 200
"""Share of the model's tokens. A tokenizer that AutoTokenizer makes without a vocabulary has five special tokens."""


_TokenId = Annotated[int, msgspec.Meta(ge=0)]


class _AddedToken(msgspec.Struct, frozen=True):
    id: _TokenId
    content: str


def check_word_embeddings(file: pathlib.Path, config: Config, shapes: Shapes) -> None:
    """Check the first tensor: weights of another model would fail only when loaded, with a stack trace."""
    found = [
        shape
        for name, shape in shapes.items()
        if re.search(r"(word_embeddings|tok_embeddings|embed_tokens|token_embedding)\.weight$", name)
    ]
    if found and found[0][0] != config.vocab_size:
        raise ModelError(
            f"{file}: the word embeddings have {found[0][0]} rows, but config.json has vocab_size {config.vocab_size}: "
            f"weights and configuration belong to two models. {REDOWNLOAD_HINT}"
        )


def check_tokenizer(folder: pathlib.Path, config: Config, transformer: Transformer, settings: Tokenizer) -> None:
    """Check that there is a tokenizer.json whose token ids the model has, and that other files agree with it."""
    file = folder / "tokenizer.json"
    if not file.exists():
        # Without a vocabulary, AutoTokenizer would write one of special tokens alone.
        has_vocabulary = any((folder / name).exists() for name in _VOCABULARIES)
        code = (
            f"from transformers import AutoTokenizer as T; p = {str(folder)!r}; T.from_pretrained(p).save_pretrained(p)"
        )
        raise ModelError(
            f"{file}: missing. "
            + (f"Write it once: {shell_command(code)}" if has_vocabulary else "Copy it from the model's source.")
        )
    num_words, max_id, tree = _read_vocabulary(file)
    if max_id >= config.vocab_size:
        raise ModelError(
            f"{file}: has token ids up to {max_id}, but the model has {config.vocab_size} tokens. {REDOWNLOAD_HINT}"
        )
    if num_words < config.vocab_size * _MIN_VOCABULARY:
        raise ModelError(
            f"{file}: has a vocabulary of {num_words} tokens, but the model has embeddings of {config.vocab_size}: it "
            "is not the model's tokenizer. Copy it from the model's source."
        )
    _check_tokenizer_settings(folder / "tokenizer_config.json", settings, tree)
    if transformer.do_lower_case and not _lowercases(tree.get("normalizer")):
        raise ModelError(
            f"{folder / 'sentence_bert_config.json'}: do_lower_case is true, but tokenizer.json has no normalizer that "
            "makes lower case. Add one to it."
        )


def num_vocabulary_tokens(folder: pathlib.Path) -> int:
    """Return the number of tokens in the tokenizer's vocabulary, without those that were added to it."""
    return _read_vocabulary(folder / "tokenizer.json")[0]


def token_ids(folder: pathlib.Path) -> dict[str, int]:
    """Return the ids of all tokens of tokenizer.json, whose vocabulary was checked."""
    tree = read_object(folder / "tokenizer.json")
    words: dict[str, int] | list[Any] = tree["model"]["vocab"]
    if isinstance(words, list):
        pairs = ((index, each[0]) for index, each in enumerate(words) if isinstance(each, list) and each)
        words = {word: index for index, word in pairs if isinstance(word, str)}
    added = msgspec.convert(tree.get("added_tokens") or [], list[_AddedToken])
    return words | {each.content: each.id for each in added}


def _read_vocabulary(file: pathlib.Path) -> tuple[int, int, dict[str, Any]]:
    """Return the number of tokens in the vocabulary, the largest id of any token (-1: there is none), and the file."""
    tree = read_object(file)
    model = tree.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise ModelError(f"{file}: contains no vocabulary. {REDOWNLOAD_HINT}")
    try:  # a Unigram model has a list of tokens, of which the position is the id
        ids = (
            msgspec.convert(list(vocabulary.values()), list[_TokenId])
            if isinstance(vocabulary, dict)
            else [len(vocabulary) - 1]
        )
        ids += [token.id for token in msgspec.convert(tree.get("added_tokens") or [], list[_AddedToken])]
        return len(vocabulary), max(ids, default=-1), tree
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: contains no vocabulary from words to token ids. {REDOWNLOAD_HINT}") from error


def _check_tokenizer_settings(file: pathlib.Path, settings: Tokenizer, tree: Mapping[str, Any]) -> None:
    """Check that tokenizer_config.json contradicts nothing in tokenizer.json, which alone is used.

    transformers' classes of BERT and RoBERTa change the latter by the former.
    """
    if settings.tokenizer_class in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        return
    normalizer, pre_tokenizer = tree.get("normalizer"), tree.get("pre_tokenizer")
    pairs: list[tuple[str, object, object]] = []
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        pairs = [
            ("do_lower_case", settings.do_lower_case, normalizer.get("lowercase")),
            ("strip_accents", settings.strip_accents, normalizer.get("strip_accents")),
            ("tokenize_chinese_chars", settings.tokenize_chinese_chars, normalizer.get("handle_chinese_chars")),
        ]
    if isinstance(pre_tokenizer, dict) and pre_tokenizer.get("type") == "ByteLevel":
        pairs.append(("add_prefix_space", settings.add_prefix_space, pre_tokenizer.get("add_prefix_space")))
    for key, said, found in pairs:
        if said is not None and said != found:
            raise ModelError(
                f"{file}: {key} is {short_repr(said)}, but tokenizer.json has {short_repr(found)}, and transformers "
                "would go by the former. Make them agree."
            )


def _lowercases(normalizer: object) -> bool:
    """Whether a normalizer of tokenizer.json makes lower case."""
    if not isinstance(normalizer, dict):
        return False
    parts = normalizer.get("normalizers")
    return (
        normalizer.get("type") == "Lowercase"
        or bool(normalizer.get("lowercase"))
        or (isinstance(parts, list) and any(map(_lowercases, parts)))
    )


def max_length(folder: pathlib.Path, config: Config, transformer: Transformer, tokenizer: Tokenizer) -> int:
    """Return the maximum length of a text in tokens: sentence-transformers', else the tokenizer's, else the model's."""
    lengths = [transformer.max_seq_length or tokenizer.model_max_length or config.num_positions, config.num_positions]
    shortest = int(min(lengths))
    if shortest < 3:  # two special tokens and one of a text
        raise ModelError(f"{folder / 'config.json'}: texts could have {shortest} tokens; at least 3 are needed.")
    return shortest
