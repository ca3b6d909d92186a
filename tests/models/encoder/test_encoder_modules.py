"""Modules and poolings of sentence-transformers that a folder may have."""

import json
import pathlib
import re
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders import IDENTITY, TANH, add_dense, change_json, make_encoder, make_tokenizer, open_encoder, write_json
from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.catalog import count_parameters
from noria.models.encoder.checkpoint import load
from noria.models.encoder.onnx_export import model_cache
from noria.protocol.text import DenseLayer


def test_a_folder_without_modules_is_pooled_by_the_mean_as_by_sentence_transformers(tmp_path: pathlib.Path) -> None:
    spec = open_encoder(make_encoder(tmp_path, "DistilBertForMaskedLM"))
    assert (spec.task, spec.architecture, spec.pooling, spec.normalize) == (
        "embedding", "DistilBertModel", ("mean",), False
    )  # fmt: skip
    assert spec.inputs == ("input_ids", "attention_mask")


def test_poolings_are_concatenated_in_the_order_of_sentence_transformers(folder: pathlib.Path) -> None:
    flags = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, **flags})
    spec = open_encoder(folder)
    assert (spec.pooling, spec.dimensions) == (("cls", "mean", "lasttoken"), 96)
    write_json(folder / "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": ["max", "cls"]})
    assert open_encoder(folder).pooling == ("max", "cls")


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["Transformer", "Pooling", "LSTM"], "type '.*LSTM'; supported are Transformer, Pooling, Dense, Normalize"),
        (["Transformer", "Dense", "Pooling"], "the modules are Transformer, Dense, Pooling; supported"),
        (["StaticEmbedding"], "StaticEmbedding"),
        (["Pooling", "Transformer"], "the modules are Pooling, Transformer; supported"),
        ([], "the modules are none"),
        (["Transformer"], "has no Pooling; supported without one are cross-encoders"),
    ],
)  # fmt: skip
def test_other_modules_of_sentence_transformers_are_rejected(
    folder: pathlib.Path, modules: list[str], words: str
) -> None:
    entries = [{"type": f"sentence_transformers.models.{name}", "path": ""} for name in modules]
    write_json(folder / "modules.json", entries)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


@pytest.mark.parametrize(
    "module_type",
    ["custom_st.Pooling", "own.sentence_transformers.models.Pooling", "Pooling", "sentence_transformers.evil.Pooling",
     "sentence_transformers.models.Pooling.Pooling.Pooling", "sentence_transformers.models.Normalize.pooling"],
)  # fmt: skip
def test_a_class_of_the_same_name_is_not_taken_for_that_of_the_library(folder: pathlib.Path, module_type: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = module_type
    write_json(folder / "modules.json", modules)
    with pytest.raises(ModelError, match=f"a module of the type '{re.escape(module_type)}'; supported"):
        open_encoder(folder)


def test_the_modules_that_the_library_writes_are_read(folder: pathlib.Path) -> None:
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(str(folder), device="cpu").save_pretrained(str(folder.parent / "saved"))
    shutil.copy(folder / "tokenizer.json", folder.parent / "saved")  # without a token for masks
    saved = open_encoder(folder.parent / "saved")
    assert (saved.pooling, saved.normalize, saved.unread_keys) == (("mean",), True, ())


@pytest.fixture
def dense_folder(folder: pathlib.Path) -> pathlib.Path:
    """A folder with two layers: from 32 numbers to 64, and to 16."""
    add_dense(folder, (32, 64, TANH, True), (64, 16, IDENTITY, False))
    return folder


def test_layers_after_the_pooling_are_described(dense_folder: pathlib.Path, folder: pathlib.Path) -> None:
    spec = open_encoder(dense_folder)
    assert spec.dense == (
        DenseLayer("2_Dense", 32, 64, True, "Tanh"), DenseLayer("3_Dense", 64, 16, False, "Identity")
    )  # fmt: skip
    assert (spec.dimensions, spec.normalize, spec.unread_keys) == (16, True, ())
    assert spec.num_parameters == count_parameters(spec)
    write_json(folder / "modules.json", json.loads((folder / "modules.json").read_text())[:2])
    assert spec.num_parameters - open_encoder(folder).num_parameters == 32 * 64 + 64 + 64 * 16


def test_the_weights_of_a_layer_identify_the_model_and_its_export(
    dense_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    before, cache = open_encoder(dense_folder), model_cache(open_encoder(dense_folder), tmp_path)
    file = dense_folder / "3_Dense/model.safetensors"
    save_file({"linear.weight": load_file(file)["linear.weight"] * 2}, file)
    assert open_encoder(dense_folder).fingerprint != before.fingerprint
    assert model_cache(before, tmp_path) != cache


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"in_features": 48}, "2_Dense/config.json: in_features is 48, but the modules before it make 32 numbers"),
        ({"out_features": 63}, r"the weights are linear.bias .64., linear.weight .64, 32.; by config.json they are"),
        ({"bias": False}, r"by config.json they are linear.weight .64, 32."),
        ({"activation_function": "own.Swish"}, "activation_function is 'own.Swish'; supported are Identity, Tanh"),
        ({"activation_function": "torch.nn.Bilinear"}, "activation_function is 'torch.nn.Bilinear'; supported"),
        ({"use_residual": True}, "use_residual is true, which changes the result; this is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings', which changes"),
        ({"dropout": 0.5}, "sentence-transformers' Dense has no such setting"),
        ({"in_features": None}, "2_Dense/config.json: the key 'in_features' is missing"),
    ],
)
def test_a_layer_that_is_not_supported_or_does_not_fit_is_rejected(
    dense_folder: pathlib.Path, changes: dict[str, Any], words: str
) -> None:
    change_json(dense_folder / "2_Dense/config.json", **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(dense_folder)


def test_a_layer_may_be_in_another_subfolder(dense_folder: pathlib.Path) -> None:
    """Its weights are part of the fingerprint, and of what is downloaded."""
    rename_layer(dense_folder, "2_Dense_1024")
    before = open_encoder(dense_folder)
    assert before.dense[0].path == "2_Dense_1024"
    assert before.num_parameters == count_parameters(before)
    file = dense_folder / "2_Dense_1024/model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)
    assert open_encoder(dense_folder).fingerprint != before.fingerprint
    rename_layer(dense_folder, "Head")
    with pytest.raises(ModelError, match=r"a Dense is in 'Head'; supported are subfolders like 2_Dense. Rename"):
        open_encoder(dense_folder)


def rename_layer(folder: pathlib.Path, name: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / modules[2]["path"]).rename(folder / name)
    modules[2]["path"] = name
    write_json(folder / "modules.json", modules)


def test_a_missing_layer_is_named(dense_folder: pathlib.Path) -> None:
    (dense_folder / "3_Dense/model.safetensors").rename(dense_folder / "3_Dense/pytorch_model.bin")
    with pytest.raises(ModelError, match=r"3_Dense/pytorch_model.bin: the weights are a pickle.*Convert it once"):
        open_encoder(dense_folder)
    shutil.rmtree(dense_folder / "3_Dense")
    with pytest.raises(ModelError, match=r"3_Dense/config.json: missing, so the Dense of modules.json is unknown"):
        open_encoder(dense_folder)


def test_a_layer_with_nan_is_rejected_when_it_is_loaded(dense_folder: pathlib.Path) -> None:
    file = dense_folder / "3_Dense/model.safetensors"
    save_file({"linear.weight": load_file(file)["linear.weight"] * float("nan")}, file)
    with pytest.raises(ModelError, match=r"the weights in .*3_Dense are not finite: weight has NaN or infinity"):
        load(open_encoder(dense_folder), EngineConfig(dtype="float32"), "cpu")


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Gemma3TextModel", "gemma3_text is a decoder: .* supported are encoders. EmbeddingGemma is one"),
        ("Gemma3TextForSequenceClassification", "the model is a 'Gemma3TextForSequenceClassification'; supported"),
    ],
)
def test_a_gemma_that_is_no_encoder_is_rejected(tmp_path: pathlib.Path, architecture: str, words: str) -> None:
    make_encoder(tmp_path, architecture, {"use_bidirectional_attention": not architecture.endswith("Model")})
    with pytest.raises(ModelError, match=words):
        open_encoder(tmp_path)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", ".."])
def test_a_module_is_read_only_from_a_subfolder(folder: pathlib.Path, path: str) -> None:
    types = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
    write_json(folder / "modules.json", [{"type": name, "path": path * index} for index, name in enumerate(types)])
    with pytest.raises(ModelError, match="is not the name of a subfolder"):
        open_encoder(folder)


def test_prompts_that_are_left_out_of_the_pooling_are_rejected(folder: pathlib.Path) -> None:
    change_json(folder / "1_Pooling/config.json", include_prompt=False)
    assert open_encoder(folder).prompts == ()
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    with pytest.raises(ModelError, match="include_prompt is false"):
        open_encoder(folder)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"embeddings": (300,)}, r"are embeddings .300.; a static embedding has embeddings .rows, numbers."),
        ({"embeddings": (300, 8), "mapping": (300,), "weights": (299,)}, r"weights .299.; a static embedding has"),
        ({"embeddings": (9, 8)}, "has token ids up to 299, but the model has 9 tokens"),
    ],
)
def test_a_static_embedding_that_is_no_table_is_rejected(
    tmp_path: pathlib.Path, tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    make_tokenizer(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "model2vec"})
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        open_encoder(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("BertForTokenClassification", "the pooling is 'none'.*this one is for token classification"),
     ("StaticModel", "pooling and reranker are not for 'model2vec'")],
)  # fmt: skip
def test_states_of_tokens_are_of_models_for_embeddings(tmp_path: pathlib.Path, architecture: str, words: str) -> None:
    if architecture == "StaticModel":
        write_json(tmp_path / "config.json", {"model_type": "model2vec"})
    else:
        make_encoder(tmp_path, architecture)
    write_json(tmp_path / "noria.json", {"pooling": "none"})
    with pytest.raises(ModelError, match=words):
        open_encoder(tmp_path)
