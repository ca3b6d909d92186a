"""The vocabulary in SentencePiece's own file, written here by the package for protocol buffers."""

import contextlib
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

import tiny_models
from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.models.families import FAMILIES
from noria.models.files import sentencepiece_file
from noria.models.files.sentencepiece_file import read_vocabulary
from noria.models.needed_files import select_needed_files

PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁red", -1.5), ("é", -300.25)]


def message(pieces=PIECES, **trainer):
    model = sentencepiece.ModelProto()
    for text, score in pieces:
        model.pieces.add(piece=text, score=score, type=2 if text == "<unk>" else 1)
    trained = sentencepiece.TrainerSpec(input=["a.txt"], unk_id=2, self_test_sample_size=300, **trainer)
    model.trainer_spec.CopyFrom(trained)
    model.normalizer_spec.name, model.normalizer_spec.precompiled_charsmap = "nmt_nfkc", b"\x00\xff table"
    return model.SerializeToString()


def read(path, content):
    file = path / "spiece.model"
    file.write_bytes(content)
    return read_vocabulary(file)


def test_pieces_scores_and_the_table_of_normalisation_are_read(tmp_path):
    vocabulary = read(tmp_path, message())
    assert vocabulary.pieces == tuple(PIECES)
    assert vocabulary.normalization == b"\x00\xff table"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (message(model_type=2), "no unigram model"),
        (message(PIECES[:2]), "piece 2 is not <unk>"),
        (message([("a", 0.0)] * 3), "piece 2 is not <unk>"),
        (message()[:-3], "truncated or damaged"),
        (b"\x20\x01", "piece 2 is not <unk>"),
        (b"\x0a\x02\x08\x01", "another type"),
        (b"\x0a\x03\x10\x01\x01", "contains no vocabulary"),
        (b"\xff" * 11, "number is too long"),
        (b"\x0b", "truncated or damaged"),
        (b"\x0a\x03\x0a\x01\xff", "contains no vocabulary"),
    ],
)
def test_a_file_that_is_no_vocabulary_of_t5_is_rejected(tmp_path, content, words):
    with pytest.raises(ModelError, match=words):
        read(tmp_path, content)


def test_the_fields_of_all_messages_are_bounded_together(tmp_path, monkeypatch):
    num_fields = 1 + 4 * len(PIECES) + 100
    monkeypatch.setattr(sentencepiece_file, "_MAX_FIELDS", num_fields)
    assert read(tmp_path, message())
    padded_piece = b"\x0a\x7b" + b"\x0a\x01a" + b"\x20\x01" * 60  # with 61 fields
    with pytest.raises(ModelError, match=f"more than {num_fields} entries"):
        read(tmp_path, message() + 2 * padded_piece)


@given(content=st.binary(max_size=200), cut=st.integers(0, 400))
def test_any_bytes_are_read_or_rejected(tmp_path_factory, content, cut):
    folder = pathlib.Path(tmp_path_factory.getbasetemp())
    with contextlib.suppress(ModelError):
        read(folder, message()[:cut] + content)


def test_a_folder_with_it_alone_gives_the_tokens_of_one_with_tokenizer_json(tmp_path):
    folder = tiny_models.save_pixart_sigma(tmp_path / "model")
    config, prompts = EngineConfig(dtype="float32", slots=4, threads=1), ["a Red  circle.", "é", "many words " * 200]

    def token_ids():
        spec = open_model(str(folder))
        model = FAMILIES[spec.family].load(spec, config, "cpu")
        return spec.fingerprint, model._tokenizer(prompts).input_ids

    fingerprint, expected = token_ids()
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    pieces = json.loads(tokenizer.read_text())["model"]["vocab"]
    tokenizer.unlink()
    with pytest.raises(ModelError, match=r"neither tokenizer\.json nor spiece\.model"):
        open_model(str(folder))
    model = sentencepiece.ModelProto()
    for text, score in pieces:
        model.pieces.add(piece=text, score=score)
    (folder / "tokenizer" / "spiece.model").write_bytes(model.SerializeToString())
    found, ids = token_ids()
    assert ids == expected
    assert found != fingerprint
    (folder / "tokenizer" / "spiece.model").write_bytes(message([*pieces, *[("x", 0.0)] * 64]))
    with pytest.raises(ModelError, match=r"spiece\.model: has 99 token ids, but the text encoder has 64 tokens"):
        open_model(str(folder))


def test_it_is_downloaded():
    paths = ["model_index.json", "tokenizer/spiece.model", "text_encoder/spiece.model", "vae/config.json"]
    assert select_needed_files(paths, FAMILIES["pixart-sigma"], "hf://org/model") == [
        "model_index.json",
        "tokenizer/spiece.model",
        "vae/config.json",
    ]
