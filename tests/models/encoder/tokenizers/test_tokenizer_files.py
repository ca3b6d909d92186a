"""Tokenizers that a folder of a text encoder may have."""

import pathlib
import shlex
from typing import Any

import pytest

from encoders import change_json, make_encoder, open_encoder, write_json
from noria.errors import ModelError
from noria.models.encoder.tokenizers.tokenizer_files import token_ids


def test_a_missing_tokenizer_is_rejected_with_how_to_get_it(folder: pathlib.Path) -> None:
    """AutoTokenizer writes special tokens alone where there is no vocabulary."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json: missing. Copy it from the model's source"):
        open_encoder(folder)
    (folder / "vocab.txt").write_text("[PAD]")
    named = folder.rename(folder.with_name("it's"))
    with pytest.raises(ModelError, match=r"tokenizer.json: missing. Write it once: ") as caught:
        open_encoder(named)
    python, _, code = shlex.split(caught.value.message.partition("Write it once: ")[2])
    assert python == "python"
    compile(code, "advice", "exec")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"type": "WordPiece"}}, "contains no vocabulary"),
        ({"model": {"vocab": {"a": "b"}}}, "no vocabulary from words to token ids"),
        ({"model": {"vocab": {"a": -1}}}, "no vocabulary from words to token ids"),
        ({"model": {"vocab": [["a", 0.0]] * 5000}}, "token ids up to 4999"),
        ({"added_tokens": [{"id": 70_000, "content": "a"}]}, "token ids up to 70000"),
        ({"added_tokens": [{"id": 7}]}, "no vocabulary from words"),
        ({"model": {"vocab": {"[UNK]": 0}}}, "has a vocabulary of 1 tokens, but the model has embeddings of"),
    ],
)
def test_a_tokenizer_of_another_model_is_rejected(folder: pathlib.Path, changes: dict[str, Any], words: str) -> None:
    change_json(folder / "tokenizer.json", **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


def test_entries_of_a_vocabulary_that_are_no_texts_have_no_ids(folder: pathlib.Path) -> None:
    change_json(folder / "tokenizer.json", model={"vocab": [[{}, 0.0], [[], 0.0], 7, ["a", 0.0]]}, added_tokens=[])
    assert token_ids(folder) == {"a": 3}


def test_lower_case_must_be_made_by_the_tokenizer(folder: pathlib.Path) -> None:
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    open_encoder(folder)  # its normalizer does
    change_json(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})
    with pytest.raises(ModelError, match="do_lower_case is true"):
        open_encoder(folder)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("do_lower_case", False, "do_lower_case is false, but tokenizer.json has true"),
        ("strip_accents", True, "strip_accents is true, but tokenizer.json has null"),
        ("tokenize_chinese_chars", False, "tokenize_chinese_chars is false"),
    ],
)
def test_a_tokenizer_that_transformers_would_change_is_rejected(
    folder: pathlib.Path, key: str, value: bool, words: str
) -> None:
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", key: value})
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", key: value})
    open_encoder(folder)  # this class changes nothing


def test_a_space_before_the_text_must_be_added_by_the_tokenizer(tmp_path: pathlib.Path) -> None:
    make_encoder(tmp_path, "RobertaModel", tokenizer_config={"add_prefix_space": True})
    with pytest.raises(ModelError, match=r"add_prefix_space is true, but tokenizer.json has false"):
        open_encoder(tmp_path)
