"""What the folder of a text encoder says, and which ones are rejected."""

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders import change_json, make_encoder, sentence_transformer, write_json
from noria.errors import ModelError
from noria.models.catalog import count_parameters, open_model, open_model_of
from noria.protocol.text import EncoderModelSpec


def open_encoder(folder: pathlib.Path) -> EncoderModelSpec:
    return open_model_of(EncoderModelSpec, str(folder))


@pytest.fixture
def folder(embedding_folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may change."""
    return shutil.copytree(embedding_folder, tmp_path / "model")


def test_minilm_is_described_by_its_own_files() -> None:
    spec = open_model("minilm")
    assert isinstance(spec, EncoderModelSpec)
    assert (spec.name, spec.kind, spec.task, spec.architecture) == ("minilm", "encoder", "embedding", "BertModel")
    assert (spec.dimensions, spec.max_length, spec.vocab_size) == (384, 256, 30522)
    assert (spec.pooling, spec.normalize, spec.prompts, spec.default_prompt) == (("mean",), True, (), None)
    assert spec.inputs == ("input_ids", "attention_mask", "token_type_ids")
    assert spec.num_parameters == count_parameters(spec) == 22_713_728


def test_inspecting_a_folder_imports_no_library() -> None:
    code = (
        "import sys, noria.models.catalog as catalog; catalog.open_model('minilm');"
        "sys.exit(bool({'torch', 'transformers', 'tokenizers', 'onnxruntime'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


def test_prompts_and_matryoshka_dimensions_are_read(folder: pathlib.Path) -> None:
    prompts = {"prompts": {"query": "query: ", "document": None}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    change_json(folder / "config.json", matryoshka_dimensions=[8, 16])
    spec = open_encoder(folder)
    assert spec.prompts == (("query", "query: "), ("document", ""))
    assert (spec.default_prompt, spec.matryoshka_dimensions) == ("query", (8, 16))


@pytest.mark.parametrize(
    ("architecture", "config", "task", "labels", "activation"),
    [
        ("BertForSequenceClassification", {"num_labels": 3}, "classification", 3, "softmax"),
        ("BertForSequenceClassification", {}, "classification", 2, "softmax"),  # labels of which nothing is written
        ("RobertaForSequenceClassification", {"num_labels": 4, "problem_type": "multi_label_classification"},
         "classification", 4, "sigmoid"),
        ("DistilBertForSequenceClassification", {"num_labels": 2, "problem_type": "regression"},
         "classification", 2, "identity"),
        ("BertForSequenceClassification", {"num_labels": 1}, "reranking", 1, "sigmoid"),
        ("BertForSequenceClassification",
         {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
         "reranking", 1, "identity"),
        ("BertForSequenceClassification",
         {"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
         "classification", 3, "sigmoid"),
        ("BertForSequenceClassification", {"num_labels": 3, "sentence_transformers": {"version": "4.0"}},
         "classification", 3, "identity"),
        ("RobertaForTokenClassification", {"num_labels": 5}, "token_classification", 5, "softmax"),
    ],
)  # fmt: skip
def test_labels_have_the_activation_of_transformers_or_of_the_cross_encoder(
    tmp_path: pathlib.Path, architecture: str, config: dict[str, Any], task: str, labels: int, activation: str
) -> None:
    spec = open_encoder(make_encoder(tmp_path, architecture, config))
    assert (spec.task, spec.architecture, spec.activation) == (task, architecture, activation)
    assert spec.labels == tuple(f"LABEL_{index}" for index in range(labels))
    assert (spec.dimensions, spec.pooling, spec.max_length) == (labels, (), 64)


def test_a_cross_encoder_of_newer_sentence_transformers_is_a_transformer_alone(tmp_path: pathlib.Path) -> None:
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    files = {
        "modules": [{"idx": 0, "name": "0", "path": "", "type": kind}],
        "sentence_bert_config": {"transformer_task": "sequence-classification", "max_seq_length": 20},
        "config_sentence_transformers": {"model_type": "CrossEncoder"},
    }
    spec = open_encoder(make_encoder(tmp_path, "BertForSequenceClassification", {"num_labels": 1}, **files))
    assert (spec.task, spec.activation, spec.max_length) == ("reranking", "sigmoid", 20)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"architectures": ["BertForQuestionAnswering"], "modules": 0},
         "the model is a 'BertForQuestionAnswering'; supported: .*BertModel, BertForSequenceClassification"),
        ("config.json", {"model_type": "longformer"}, "which no model family has"),
        ("config.json", {"is_decoder": True}, "supported are encoders"),
        ("config.json", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized weights are not"),
        ("config.json", {"vocab_size": 1000}, "have .* rows, but config.json has vocab_size 1000"),
        ("config.json", {"vocab_size": 10}, "word embeddings have"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 48}, "pools tokens of 48 .* model's have 32"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pooling is 'attention'; supported are cls, max"),
        ("1_Pooling/config.json", {"pooling_mode_attention": True, "pooling_mode_mean_tokens": False},
         "pooling is 'pooling_mode_attention'"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "at least 3 are needed"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'; supported"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SentenceTransformer and CrossEncoder"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "not among the prompts"),
        ("noria.json", {"default_steps": 4}, "default_steps"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_rejected(
    folder: pathlib.Path, file: str, changes: dict[str, Any], words: str
) -> None:
    if changes.pop("modules", 1) == 0:
        (folder / "modules.json").unlink()
    if not (folder / file).exists():
        write_json(folder / file, {})
    change_json(folder / file, **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["Transformer", "Pooling", "Dense"], "type '.*Dense'; supported are Transformer, Pooling, Normalize"),
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


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", ".."])
def test_a_module_is_read_only_from_a_subfolder(folder: pathlib.Path, path: str) -> None:
    types = ["Transformer", "Pooling"]
    write_json(folder / "modules.json", [{"type": name, "path": path * index} for index, name in enumerate(types)])
    with pytest.raises(ModelError, match="is not the name of a subfolder"):
        open_encoder(folder)


def test_prompts_that_are_left_out_of_the_pooling_are_rejected(folder: pathlib.Path) -> None:
    change_json(folder / "1_Pooling/config.json", include_prompt=False)
    assert open_encoder(folder).prompts == ()
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
    with pytest.raises(ModelError, match="include_prompt is false"):
        open_encoder(folder)


def test_an_unknown_activation_is_rejected(tmp_path: pathlib.Path) -> None:
    changes = {"num_labels": 1, "sentence_transformers": {"activation_fn": "my_module.Activation"}}
    make_encoder(tmp_path, "BertForSequenceClassification", changes)
    with pytest.raises(ModelError, match=r"activation function is 'my_module.Activation'; supported are torch"):
        open_encoder(tmp_path)


def test_labels_must_be_numbered_from_zero(tmp_path: pathlib.Path) -> None:
    make_encoder(tmp_path, "BertForSequenceClassification", {"num_labels": 3})
    change_json(tmp_path / "config.json", id2label={"1": "a", "2": "b"})
    with pytest.raises(ModelError, match="labels are numbered from 0"):
        open_encoder(tmp_path)


def test_a_missing_tokenizer_is_rejected_with_how_to_write_it(folder: pathlib.Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json: missing. Write it once: python -c .*AutoTokenizer"):
        open_encoder(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"type": "WordPiece"}}, "contains no vocabulary"),
        ({"model": {"vocab": {"a": "b"}}}, "no vocabulary from words to token ids"),
        ({"model": {"vocab": [["a", 0.0]] * 5000}}, "token ids up to 4999"),
        ({"added_tokens": [{"id": 70_000}]}, "token ids up to 70000"),
    ],
)
def test_a_tokenizer_of_another_model_is_rejected(folder: pathlib.Path, changes: dict[str, Any], words: str) -> None:
    change_json(folder / "tokenizer.json", **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


def test_lower_case_must_be_made_by_the_tokenizer(folder: pathlib.Path) -> None:
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    open_encoder(folder)  # its normalizer does
    change_json(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})
    with pytest.raises(ModelError, match="do_lower_case is true"):
        open_encoder(folder)


def test_an_adapter_is_rejected(folder: pathlib.Path) -> None:
    write_json(folder / "adapter_config.json", {})
    with pytest.raises(ModelError, match="adapters are not supported"):
        open_encoder(folder)


def test_positions_before_the_first_token_are_not_counted(tmp_path: pathlib.Path) -> None:
    assert open_encoder(make_encoder(tmp_path, "RobertaModel", **sentence_transformer())).max_length == 64


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
def test_any_value_in_any_file_is_accepted_or_rejected_as_a_model_error(
    embedding_folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = shutil.copytree(embedding_folder, tmp_path_factory.mktemp("fuzzed") / "model")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"q": "q: "}, "default_prompt_name": "q"})
    write_json(folder / "tokenizer_config.json", {"model_max_length": 30})
    file = data.draw(st.sampled_from(sorted(folder.rglob("*.json"))))
    tree: Any = json.loads(file.read_text())
    target = tree[data.draw(st.integers(0, 2))] if isinstance(tree, list) else tree
    extra = ["id2label", "problem_type", "pooling_mode", "sentence_transformers", "architectures"]
    target[data.draw(st.sampled_from(sorted(target) + extra))] = data.draw(JSON)
    if file.name == "config.json" and data.draw(st.booleans()):
        target["architectures"] = ["BertForSequenceClassification"]
        (folder / "modules.json").unlink(missing_ok=True)
    write_json(file, tree)
    with contextlib.suppress(ModelError):
        assert isinstance(open_model(str(folder)), EncoderModelSpec)
    shutil.rmtree(folder.parent)
