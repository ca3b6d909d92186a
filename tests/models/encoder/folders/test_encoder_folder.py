"""Facts that the folder of a text encoder states, and folders that are rejected."""

import contextlib
import json
import pathlib
import shlex
import shutil
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoders import change_json, make_encoder, open_encoder, sentence_transformer, write_json
from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.catalog import count_parameters, open_model
from noria.models.encoder.checkpoint import load
from noria.protocol.text import EncoderModelSpec


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
        ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}, "reranking", 1, "identity"),
        ("BertForSequenceClassification",
         {"num_labels": 1, "problem_type": "regression", "sentence_transformers": {"version": "4.0"}},
         "reranking", 1, "sigmoid"),
        ("BertForSequenceClassification",
         {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
         "reranking", 1, "identity"),
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
         "pooling_mode_attention .true.: sentence-transformers' Pooling has no such setting"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "at least 3 are needed"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "'fill-mask' of a model with a Pooling"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SentenceTransformer and CrossEncoder"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "not among the prompts"),
        ("noria.json", {"default_steps": 4}, "default_steps"),
        ("noria.json", {"reranker": {}}, "`reranker` is for decoders that rerank, which"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("config.json", {"position_embedding_type": "alibi"}, "changes the result; supported are 'absolute', or none"),
        ("config.json", {"hidden_act": "swiglu"}, "hidden_act is 'swiglu', .* supported are gelu, gelu_10"),
        ("config.json", {"hidden_act": ["gelu"]}, "hidden_act is .'gelu'., and transformers has no"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "the pooling is .., which is none; supported are cls"),
        ("config.json", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("config.json", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is"),
        ("config.json", {"feed_forward_type": "geglu"}, "feed_forward_type is 'geglu'"),
        ("config.json", {"architectures": ["JinaBertModel"]}, "the model is a 'JinaBertModel'"),
        ("1_Pooling/config.json", {"activation_function": "torch.nn.Tanh"}, "activation_function"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name is 'token_emb"),
        ("sentence_bert_config.json", {"transformer_task": "sequence-classification"}, "with a Pooling; supported is"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"truncation": False}}}, "processing_kwargs"),
        ("sentence_bert_config.json", {"model_args": {"add_pooling_layer": False}}, "model_args"),
        ("sentence_bert_config.json", {"query_length": 8}, "query_length is 8"),
        ("config_sentence_transformers.json", {"truncate_dim": 16}, "truncate_dim is 16, which changes the result"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "hamming"}, "similarity_fn_name"),
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


def test_an_unknown_activation_is_rejected(tmp_path: pathlib.Path) -> None:
    changes = {"num_labels": 1, "sentence_transformers": {"activation_fn": "my_module.Activation"}}
    make_encoder(tmp_path, "BertForSequenceClassification", changes)
    with pytest.raises(ModelError, match=r"activation function is 'my_module.Activation'; supported are torch"):
        open_encoder(tmp_path)


def labelled(folder: pathlib.Path, num_rows: int, **changes: Any) -> pathlib.Path:
    """Write a classifier whose config.json has these keys about labels, and no others."""
    make_encoder(folder, "BertForSequenceClassification", {"num_labels": num_rows})
    change_json(folder / "config.json", **{"id2label": None, "label2id": None} | changes)
    return folder


@pytest.mark.parametrize(
    ("num_rows", "changes", "labels"),
    [
        (1, {"num_labels": 1}, ("LABEL_0",)),
        (3, {"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        (2, {"id2label": {"0": 0, "1": 1.5}}, ("0", "1.5")),
        (2, {"num_labels": 5, "id2label": {"0": "a", "1": "b"}}, ("a", "b")),
        (2, {"id2label": {}}, ("LABEL_0", "LABEL_1")),
        (3, {"id2label": {}, "label2id": {}, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        (2, {"id2label": {"0": None, "1": ""}}, ("LABEL_0", "LABEL_1")),
        (3, {"label2id": {"good": 2, "bad": 0, "so-so": "1"}}, ("bad", "so-so", "good")),
        (1, {"num_labels": 1, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}, ("LABEL_0",)),  # transformers' default two
        (1, {"num_labels": 1, "problem_type": "single_label_classification"}, ("LABEL_0",)),
    ],
)
def test_labels_are_named_by_the_configuration_or_numbered(
    tmp_path: pathlib.Path, num_rows: int, changes: dict[str, Any], labels: tuple[str, ...]
) -> None:
    spec = open_encoder(labelled(tmp_path, num_rows, **changes))
    assert (spec.labels, spec.task) == (labels, "reranking" if num_rows == 1 else "classification")
    assert load(spec, EngineConfig(dtype="float32"), "cpu").model.config.num_labels == num_rows


@pytest.mark.parametrize(
    ("num_rows", "changes", "words"),
    [
        (1, {}, "config.json: has 2 labels, but classifier.weight has the shape .1, 32.. Set num_labels for 1 labels"),
        (3, {"id2label": {"0": "a", "1": "b"}}, "has 2 labels, .* Set id2label for 3"),
        (3, {"id2label": {}}, "config.json: has 2 labels, but classifier.weight .* Set num_labels for 3 labels"),
        (2, {"label2id": {"bad": 0, "good": 0}}, "config.json: label2id is .* labels are numbered from 0"),
        (2, {"id2label": {"0": ["a"], "1": "b"}}, "config.json: id2label"),
        (2, {"num_labels": 0}, "num_labels"),
    ],
)
def test_labels_that_the_weights_have_not_are_rejected(
    tmp_path: pathlib.Path, num_rows: int, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        open_encoder(labelled(tmp_path, num_rows, **changes))


def test_labels_must_be_numbered_from_zero(tmp_path: pathlib.Path) -> None:
    make_encoder(tmp_path, "BertForSequenceClassification", {"num_labels": 3})
    change_json(tmp_path / "config.json", id2label={"1": "a", "2": "b"})
    with pytest.raises(ModelError, match="labels are numbered from 0"):
        open_encoder(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "is_wrapped"), [("RobertaModel", False), ("BertForSequenceClassification", True)]
)
def test_the_command_for_pickles_keeps_the_pooling_the_head_and_the_tokenizer(
    tmp_path: pathlib.Path, architecture: str, is_wrapped: bool
) -> None:
    """BAAI/bge-m3 is such a folder: it has another pickle beside the weights; a training loop may wrap weights."""
    import torch
    from safetensors.torch import load_file

    modules = sentence_transformer(pooling_mode_cls_token=True) if architecture == "RobertaModel" else {}
    folder = make_encoder(tmp_path, architecture, **modules)
    expected = open_encoder(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.save({"state_dict": tensors | {"epoch": 3}} if is_wrapped else tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(2)}, folder / "colbert_linear.pt")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: the weights are a pickle") as rejected:
        open_encoder(folder)
    _, _, code = shlex.split(rejected.value.message[rejected.value.message.index("python -c") :])
    exec(code, {})  # `test_catalog.py` runs one in a shell
    assert msgspec.structs.replace(open_encoder(folder), fingerprint=expected.fingerprint) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tf_model.h5", r"no weights; beside it is tf_model.h5 of TensorFlow, which is not read. Put the model's"),
        ("flax_model.msgpack", "flax_model.msgpack of Flax, which"),
        ("weights.safetensors", r"no weights; beside it is weights.safetensors. Put the model's safetensors here, in"),
        ("training_args.bin", r"has no weights. Copy or download the model again"),
        ("rng_state_0.pth", r"has no weights. Copy or download the model again"),
        ("model.pt", r"model.pt: the weights are a pickle.* Convert it to model.safetensors"),
    ],
)
def test_weights_of_another_name_or_library_are_told(folder: pathlib.Path, name: str, words: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


def test_an_adapter_is_rejected(folder: pathlib.Path) -> None:
    write_json(folder / "adapter_config.json", {})
    with pytest.raises(ModelError, match="adapters are not supported"):
        open_encoder(folder)


def test_keys_that_nothing_reads_are_reported(folder: pathlib.Path) -> None:
    assert open_encoder(folder).unread_keys == ()
    change_json(folder / "config.json", residual_scale=0.5, gradient_checkpointing=True, unknown_but_off=False)
    write_json(folder / "config_sentence_transformers.json", {"score_shift": 1, "__version__": {"pytorch": "2"}})
    assert open_encoder(folder).unread_keys == ("residual_scale (0.5)", "score_shift (1)")
    change_json(folder / "config.json", **{f"unknown_{index}" * 100: 1 for index in range(100)})
    assert sum(map(len, open_encoder(folder).unread_keys)) < 3000


def test_an_unpaired_surrogate_is_rejected_as_any_other_value(folder: pathlib.Path) -> None:
    change_json(folder / "config.json", problem_type="\ud800")
    with pytest.raises(ModelError, match="surrogates not allowed"):
        open_encoder(folder)


def test_similarity_and_the_side_of_truncation_are_read(folder: pathlib.Path) -> None:
    write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "dot"})
    write_json(folder / "tokenizer_config.json", {"truncation_side": "left"})
    spec = open_encoder(folder)
    assert (spec.similarity, spec.truncation_side) == ("dot", "left")


def test_a_default_prompt_of_a_classifier_is_rejected(tmp_path: pathlib.Path) -> None:
    prompts = {"model_type": "CrossEncoder", "prompts": {"q": "query: "}}
    make_encoder(tmp_path, "BertForSequenceClassification", config_sentence_transformers=prompts)
    open_encoder(tmp_path)  # nobody asks for it
    change_json(tmp_path / "config_sentence_transformers.json", default_prompt_name="q")
    with pytest.raises(ModelError, match="default_prompt_name is 'q'; prompts of classifiers are not supported"):
        open_encoder(tmp_path)


NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "auto_map": {"AutoModel": "n--m.NomicBertModel"},
    "n_embd": 32, "n_head": 4, "n_inner": 64, "n_layer": 2, "n_positions": 96, "activation_function": "swiglu",
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, "layer_norm_epsilon": 1e-12,
    "qkv_proj_bias": False, "prenorm": False, "pad_vocab_size_multiple": 64, "type_vocab_size": 2, "vocab_size": 300,
}  # fmt: skip


def test_a_nomic_folder_as_published_is_read(tmp_path: pathlib.Path) -> None:
    """Its config.json has other names than transformers', which would take its own sizes for those that it misses."""
    folder = make_encoder(tmp_path, "NomicBertModel", {"max_position_embeddings": 96}, **sentence_transformer())
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    expected = open_encoder(folder)
    write_json(folder / "config.json", NOMIC | {"vocab_size": vocab_size})
    spec = open_encoder(folder)
    assert (spec.dimensions, spec.max_length, spec.unread_keys) == (32, 96, ())
    assert spec.inputs == expected.inputs
    assert load(spec, EngineConfig(dtype="float32"), "cpu").model.config.intermediate_size == 64


@pytest.mark.parametrize(
    "changes",
    [{"activation_function": "gelu"}, {"rotary_scaling_factor": 2}, {"prenorm": True}, {"rotary_emb_fraction": 0.5},
     {"activation_function": "swiglu", "num_experts": 8}, {"qkv_proj_bias": True}, {"use_rms_norm": True}],
)  # fmt: skip
def test_a_nomic_model_that_computes_something_else_is_rejected(
    tmp_path: pathlib.Path, changes: dict[str, Any]
) -> None:
    folder = make_encoder(tmp_path, "NomicBertModel", **sentence_transformer())
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    write_json(folder / "config.json", NOMIC | {"vocab_size": vocab_size} | changes)
    with pytest.raises(ModelError, match=next(iter(changes))):
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
    extra = ["id2label", "problem_type", "pooling_mode", "sentence_transformers", "architectures", "num_labels"]
    extra += ["n_embd", "n_inner", "activation_function", "position_embedding_type", "similarity_fn_name", "unknown"]
    extra += ["truncation_side", "do_lower_case", "module_input_name", "modality_config", "truncate_dim"]
    target[data.draw(st.sampled_from(sorted(target) + extra))] = data.draw(JSON)
    if file.name == "config.json" and data.draw(st.booleans()):
        target["architectures"] = ["BertForSequenceClassification"]
        (folder / "modules.json").unlink(missing_ok=True)
    write_json(file, tree)
    with contextlib.suppress(ModelError):
        assert isinstance(open_model(str(folder)), EncoderModelSpec)
    shutil.rmtree(folder.parent)
