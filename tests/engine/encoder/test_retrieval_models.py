"""Encoders for retrieval: equal to sentence-transformers' SparseEncoder and MultiVectorEncoder, on each path."""

import json
import pathlib
import shlex
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders import (
    IDENTITY,
    TANH,
    TEXTS,
    assert_results,
    change_json,
    make_encoder,
    open_encoder,
    open_session,
    rows_of,
    transformers_alone,
    write_json,
)
from noria.engine.encoder.executor import execute
from noria.engine.encoder.request import PreparedTextRequest, prepare
from noria.errors import ModelError
from noria.frontend.services.texts.text_request import (
    TextRequestSettings,
    TextRole,
    fit_to_role,
    make_payload,
    with_prompt,
)
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import Session, TokenRow
from noria.protocol.request import EngineRequest
from noria.protocol.text import EncoderModelSpec, Splade
from noria.scheduling.types import BatchPlan, ItemId


def splade(
    folder: pathlib.Path, architecture: str = "BertForMaskedLM", transformer: str = "", **pooling: Any
) -> pathlib.Path:
    """A folder as SparseEncoder writes it; `transformer` is the older module."""
    make_encoder(folder, architecture)
    first = transformer or "sentence_transformers.base.modules.transformer.Transformer"
    last = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
    if transformer:
        last = "sentence_transformers.sparse_encoder.models.SpladePooling"
    paths = {"": first, "1_SpladePooling": last}
    modules = [{"idx": n, "name": str(n), "path": path, "type": paths[path]} for n, path in enumerate(paths)]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_SpladePooling/config.json", pooling)
    write_json(
        folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "similarity_fn_name": "dot"}
    )
    if not transformer:
        logits = {"text": {"method": "forward", "method_output_name": "logits"}}
        settings = {
            "transformer_task": "fill-mask",
            "modality_config": logits,
            "module_output_name": "token_embeddings",
        }
        write_json(folder / "sentence_bert_config.json", settings)
    return folder


OLDER = "sentence_transformers.sparse_encoder.models.MLMTransformer"
KINDS: dict[str, Any] = {
    "bert": {"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": None},
    "distilbert": {"architecture": "DistilBertForMaskedLM", "transformer": OLDER, "pooling_strategy": "sum"},
    "modernbert": {"architecture": "ModernBertForMaskedLM", "activation_function": "log1p_relu"},
}


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A model, and what sentence-transformers computes of each text alone."""
    from sentence_transformers import SparseEncoder
    from transformers import PreTrainedTokenizerFast

    folder = splade(tmp_path_factory.mktemp(request.param), **KINDS[request.param])
    settings = {"pad_token": "<pad>" if request.param == "modernbert" else "[PAD]", "model_max_length": 64}
    write_json(folder / "tokenizer_config.json", settings)
    theirs = SparseEncoder(str(folder), device="cpu")
    theirs[0].processor = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    return open_encoder(folder), [theirs.encode(text, convert_to_sparse_tensor=False).numpy() for text in TEXTS]


@pytest.mark.parametrize(("made", "path"), [*[(kind, "torch") for kind in KINDS], ("bert", "graph")], indirect=["made"])
def test_it_computes_the_numbers_of_sentence_transformers(
    made: tuple[EncoderModelSpec, Any], path: str, tmp_path: pathlib.Path
) -> None:
    spec, expected = made
    assert_results(open_session(spec, path, tmp_path), rows_of(spec, TEXTS), expected)
    assert expected[0].shape == (spec.dimensions,) == (spec.vocab_size,)
    assert 0 < np.count_nonzero(expected) < np.size(expected)


def test_a_masked_language_model_is_sparse_if_noria_json_says_so(tmp_path: pathlib.Path) -> None:
    make_encoder(tmp_path, "BertForMaskedLM")
    assert open_encoder(tmp_path).task == "embedding"
    write_json(tmp_path / "noria.json", {"pooling": "splade"})
    spec = open_encoder(tmp_path)
    assert (spec.task, spec.architecture, spec.splade) == ("sparse_embedding", "BertForMaskedLM", Splade())
    write_modules(tmp_path, {"": "sentence_transformers.models.Transformer"})
    with pytest.raises(ModelError, match=r"has no SpladePooling, but noria.json says that the pooling is 'splade'"):
        open_encoder(tmp_path)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("1_SpladePooling/config", {"pooling_strategy": "mean"}, "pooling_strategy is 'mean'; supported are max, sum"),
        ("1_SpladePooling/config", {"top_k": 9}, "SpladePooling has no such setting"),
        ("sentence_bert_config", {"transformer_task": "feature-extraction"}, "needs the head of fill-mask"),
        ("config_sentence_transformers", {"model_type": "CrossEncoder"}, "supported is SparseEncoder"),
        ("config_sentence_transformers", {"max_active_dims": 9}, "max_active_dims is 9, which changes the result"),
    ],
)
def test_what_changes_a_sparse_embedding_is_rejected(
    tmp_path: pathlib.Path, file: str, changes: dict[str, Any], words: str
) -> None:
    folder = splade(tmp_path, pooling_strategy="max")
    change_json(folder / f"{file}.json", **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


def pylate(folder: pathlib.Path, architecture: str = "BertModel", **settings: Any) -> pathlib.Path:
    """A folder as PyLate writes it."""
    make_encoder(folder, architecture)
    add_tokens(folder, "[MASK]", "[Q] ", "[D] ")
    types = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    write_modules(folder, types)
    add_layer(
        folder / "1_Dense", {"bias": False, "activation_function": IDENTITY, "in_features": 32, "out_features": 8}
    )
    write_json(folder / "config_sentence_transformers.json", {
        "model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12,
        "document_length": 40, "attend_to_expansion_tokens": False, "similarity_fn_name": "MaxSim",
    } | settings)  # fmt: skip
    return folder


def multi_vector(folder: pathlib.Path) -> pathlib.Path:
    """A folder as sentence-transformers' MultiVectorEncoder writes it."""
    make_encoder(folder, "DistilBertModel")
    add_tokens(folder, "[MASK]")
    package = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
    base = "sentence_transformers.base.modules"
    write_modules(folder, {
        "": f"{base}.transformer.Transformer", "1_Dense": f"{base}.dense.Dense", "2_MultiVectorMask": package,
        "3_Normalize": f"{base}.normalize.Normalize",
    })  # fmt: skip
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    layer = {"bias": True, "activation_function": TANH, "in_features": 32, "out_features": 8}
    add_layer(folder / "1_Dense", layer | tokens)
    write_json(folder / "2_MultiVectorMask/config.json", {"skiplist_words": [",", "."], "skiplist_tasks": ["document"]})
    write_json(folder / "3_Normalize/config.json", tokens)
    expansion = {"strategy": "min", "attend": True, "length": 10, "token": "[MASK]"}
    write_json(folder / "sentence_bert_config.json", {"query_expansion": expansion, "document_length": 30})
    prompts = {"query": "query: ", "document": "passage: "}
    write_json(folder / "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder", "prompts": prompts})
    return folder


def write_modules(folder: pathlib.Path, types: dict[str, str]) -> None:
    modules = [{"idx": n, "name": str(n), "path": path, "type": types[path]} for n, path in enumerate(types)]
    write_json(folder / "modules.json", modules)


def add_layer(folder: pathlib.Path, config: dict[str, Any]) -> None:
    torch.manual_seed(1)
    write_json(folder / "config.json", config)
    tensors = {"linear.weight": torch.randn(config["out_features"], config["in_features"])}
    if config["bias"]:
        tensors["linear.bias"] = torch.randn(config["out_features"])
    save_file(tensors, folder / "model.safetensors")


def add_tokens(folder: pathlib.Path, *tokens: str) -> None:
    """Add tokens to the tokenizer in place of the last words, so that the model has embeddings of them."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    flags = dict.fromkeys(["lstrip", "rstrip", "single_word"], False)
    for token in tokens:
        word = max((each for each in vocabulary if each not in tokens), key=lambda each: vocabulary[each])
        number = vocabulary.pop(word)
        special = token == "[MASK]"
        tree["added_tokens"].append({"id": number, "content": token, "special": special, "normalized": True} | flags)
        vocabulary[token] = number
    write_json(folder / "tokenizer.json", tree)
    named = {"mask_token": "[MASK]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    write_json(
        folder / "tokenizer_config.json",
        named | {"model_max_length": 64, "tokenizer_class": "PreTrainedTokenizerFast"},
    )


def colbert(folder: pathlib.Path) -> pathlib.Path:
    """A folder as ColBERT's authors write it."""
    make_encoder(folder, "BertModel")
    add_tokens(folder, "[MASK]", "[unused0]", "[unused1]")
    tree = json.loads((folder / "tokenizer.json").read_text())
    write_json(folder / "tokenizer.json", tree | {"added_tokens": tree["added_tokens"][:-2]})  # words alone
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(1)
    tensors["linear.weight"] = torch.randn(8, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", architectures=["HF_ColBERT"])
    write_json(folder / "artifact.metadata", {"query_maxlen": 12, "doc_maxlen": 40, "attend_to_mask_tokens": False})
    return folder


LATE_KINDS: dict[str, Any] = {
    "pylate": pylate,
    "pylate_attending": lambda folder: pylate(folder, attend_to_expansion_tokens=True, skiplist_words=["a"]),
    "pylate_without_expansion": lambda folder: pylate(folder, do_query_expansion=False, query_prefix="ask "),
    "multi_vector": multi_vector,
    "colbert": colbert,
}
ROLES: list[TextRole | None] = ["query", "document", None]


@pytest.fixture(scope="module")
def late(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[EncoderModelSpec, Any]:
    """A model, and what sentence-transformers computes of each text alone, by its side of a search."""
    from sentence_transformers import MultiVectorEncoder

    folder = LATE_KINDS[request.param](tmp_path_factory.mktemp(request.param))
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    encode = {"query": theirs.encode_query, "document": theirs.encode_document, None: theirs.encode}
    texts = [text for text in TEXTS if text]
    return open_encoder(folder), {role: [encode[role](text).numpy() for text in texts] for role in ROLES}


@pytest.mark.parametrize(
    ("late", "path"), [*[(kind, "torch") for kind in LATE_KINDS], ("pylate", "graph")], indirect=["late"]
)
def test_it_computes_the_vectors_of_sentence_transformers(
    late: tuple[EncoderModelSpec, Any], path: str, tmp_path: pathlib.Path
) -> None:
    spec, expected = late
    session = open_session(spec, path, tmp_path)
    for role in ROLES:
        settings = TextRequestSettings(inputs=[text for text in TEXTS if text], role=role)
        tokenized = HuggingFaceTokenizer(spec).encode(with_prompt(settings, spec))
        fitted = [fit_to_role(text, role, spec) for text in tokenized]
        rows = [TokenRow.of(text) for text in fitted]
        for batches in ([rows], [rows[:2], rows[2:]], [[row] for row in rows]):
            got = [vectors for batch in batches for vectors in session.run(batch)]
            for text, own, right in zip(fitted, got, expected[role], strict=True):
                np.testing.assert_allclose(np.delete(own, list(text.skipped), axis=0), right, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        (
            "config_sentence_transformers",
            {"model_type": "SentenceTransformer"},
            "supported are ColBERT and Multi",
        ),
        ("1_Dense/config", {"module_input_name": "sentence_embedding"}, "module_input_name is 'sentence_embedding'"),
        ("1_Dense/config", {"out_features": 16}, "the weights are linear.weight"),
        ("tokenizer_config", {"mask_token": None}, "has no token 'mask_token', which fills queries up"),
    ],
)
def test_what_changes_a_vector_of_a_token_is_rejected(
    tmp_path: pathlib.Path, file: str, changes: dict[str, Any], words: str
) -> None:
    folder = pylate(tmp_path)
    change_json(folder / f"{file}.json", **changes)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


def test_colbert_without_its_projection_is_rejected(tmp_path: pathlib.Path) -> None:
    folder = colbert(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("linear.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"the weights have no linear.weight; ColBERT's projection"):
        open_encoder(folder)


def m3(folder: pathlib.Path, pooling: str) -> pathlib.Path:
    """A folder as bge-m3's, whose two layers were converted."""
    make_encoder(folder, "RobertaModel")
    torch.manual_seed(1)
    for stem, size in (("sparse_linear", 1), ("colbert_linear", 8)):
        layer = {"weight": torch.randn(size, 32) / 4, "bias": torch.randn(size) / 4}
        save_file(layer, folder / f"{stem}.safetensors")
    special = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", special | {"model_max_length": 64})
    write_json(folder / "noria.json", {"pooling": pooling})
    return folder


def executed(spec: EncoderModelSpec, inputs: list[str], session: Session) -> PreparedTextRequest:
    """A request whose texts an executor has computed in one batch."""
    payload = make_payload(HuggingFaceTokenizer(spec).encode(inputs), spec, TextRequestSettings(inputs=inputs))
    prepared = prepare(EngineRequest("a", spec.name, payload, 60.0, model_version=spec.fingerprint), spec)
    rows = tuple(ItemId("", index) for index in range(len(inputs)))
    plan = BatchPlan(0, prepared.batch_key, rows, payload.lengths)
    assert not execute(plan, [(prepared, index) for index in range(len(inputs))], spec, session).failed
    return prepared


@pytest.mark.parametrize("pooling", ["bge-m3-sparse", "bge-m3-colbert"])
def test_the_other_outputs_of_bge_m3_are_those_of_its_authors_rule(tmp_path: pathlib.Path, pooling: str) -> None:
    """Weights: the largest above 0 of each token, without special ones. Vectors: those after the first, normalized."""
    spec = open_encoder(m3(tmp_path, pooling))
    texts = HuggingFaceTokenizer(spec).encode(TEXTS)
    prepared = executed(spec, TEXTS, open_session(spec, "torch", tmp_path))
    layer = load_file(tmp_path / f"{pooling.removeprefix('bge-m3-')}_linear.safetensors")
    states = transformers_alone(tmp_path, "RobertaModel", prepared.rows)
    for text, state, row, got in zip(texts, states, prepared.rows, prepared.results, strict=True):
        made = state @ layer["weight"].numpy().T + layer["bias"].numpy()
        if pooling == "bge-m3-colbert":
            right = made[1:] / np.linalg.norm(made[1:], axis=1, keepdims=True)
            fitted = fit_to_role(text, "query", spec)
            np.testing.assert_allclose(np.delete(got, list(fitted.skipped), axis=0), right, atol=1e-5)
            continue
        weights: dict[int, float] = {}
        for token, weight in zip(row.ids.tolist(), made[:, 0], strict=True):
            if token > 3 and weight > 0:
                weights[token] = max(weights.get(token, 0.0), float(weight))
        assert got[:, 0].tolist() == sorted(weights)
        np.testing.assert_allclose(got[:, 1], [weights[token] for token in sorted(weights)], atol=1e-5)


def idf(folder: pathlib.Path) -> pathlib.Path:
    """A folder as opensearch's encoders of documents, with the weights of queries' tokens."""
    make_encoder(folder, "DistilBertForMaskedLM")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    write_json(
        folder / "idf.json", {token: 1 + row % 7 / 3 for token, row in vocabulary.items() if row % 5 and row > 3}
    )
    write_json(folder / "tokenizer_config.json", {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 64})
    write_json(folder / "noria.json", {"pooling": "idf"})
    return folder


@pytest.mark.parametrize("path", ["torch", "graph"])
def test_queries_without_a_network_are_those_of_sentence_transformers(tmp_path: pathlib.Path, path: str) -> None:
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
    from transformers import PreTrainedTokenizerFast

    spec = open_encoder(idf(tmp_path))
    assert (spec.task, spec.dimensions) == ("sparse_embedding", spec.vocab_size)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    theirs = SparseStaticEmbedding.from_json(str(tmp_path / "idf.json"), tokenizer)
    queries = [text for text in TEXTS if text]
    expected = theirs(theirs.preprocess(queries))["sentence_embedding"].detach().numpy()
    prepared = executed(spec, queries, open_session(spec, path, tmp_path / "cache"))
    for right, got in zip(expected, prepared.results, strict=True):
        assert got[:, 0].tolist() == np.flatnonzero(right).tolist()
        np.testing.assert_allclose(got[:, 1], right[np.flatnonzero(right)], rtol=1e-6)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"unheard-of": 1.0}, "'unheard-of' has the weight 1.0; expected are tokens of tokenizer.json"),
        ({"a": -1.0}, "'a' has the weight -1.0; expected"),
        ({"a": "1"}, "'a' has the weight '1'; expected"),
        (None, "idf.json: missing, so the weights of tokens are unknown"),
    ],
)
def test_weights_of_other_tokens_are_rejected(tmp_path: pathlib.Path, weights: Any, words: str) -> None:
    folder = idf(tmp_path)
    (folder / "idf.json").unlink()
    if weights is not None:
        write_json(folder / "idf.json", weights)
    with pytest.raises(ModelError, match=words):
        open_encoder(folder)


def test_a_layer_of_bge_m3_that_is_a_pickle_is_converted_once(tmp_path: pathlib.Path) -> None:
    folder = m3(tmp_path, "bge-m3-sparse")
    layer = load_file(folder / "sparse_linear.safetensors")
    (folder / "sparse_linear.safetensors").unlink()
    torch.save(layer, folder / "sparse_linear.pt")
    with pytest.raises(ModelError, match=r"missing. Write it once, without running the pickle's code") as rejected:
        open_encoder(folder)
    *_, code = shlex.split(rejected.value.message.rpartition("code: ")[2])
    subprocess.run([sys.executable, "-c", code], check=True)
    assert open_encoder(folder).task == "sparse_embedding"
