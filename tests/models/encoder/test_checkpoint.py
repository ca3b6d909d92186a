"""Checkpoints in torch: poolings as sentence-transformers computes them, and what never reaches a loader."""

import pathlib
import shutil
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from encoders import PAIRS, change_json, make_encoder
from noria.config import EngineConfig
from noria.errors import ModelError
from noria.frontend.services.texts.scores import scores, similarities
from noria.models.catalog import open_model_of
from noria.models.encoder.checkpoint import load
from noria.models.encoder.pooling import PaddedTexts, pool
from noria.protocol.text import EncoderModelSpec, Pooling, Similarity


@pytest.mark.parametrize("mode", get_args(Pooling))
def test_pooling_equals_that_of_sentence_transformers(mode: Pooling) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling as TheirPooling  # three seconds

    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 5)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [1]])).long()
    theirs = TheirPooling(5, pooling_mode=mode)({"token_embeddings": hidden, "attention_mask": mask})
    torch.testing.assert_close(pool(mode, hidden, PaddedTexts(mask)), theirs["sentence_embedding"])


def test_what_chooses_code_is_removed_from_the_configuration(
    embedding_folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(embedding_folder, tmp_path / "model")
    change_json(
        folder / "config.json",
        attn_implementation="kernels-community/evil",
        _attn_implementation="kernels-community/evil",
        auto_map={"AutoModel": "evil.EvilModel"},
        transformers_weights="../evil.safetensors",
        torch_dtype="float16",
    )
    given: dict[str, Any] = {}
    original = transformers.BertModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, folder: str, **options: Any) -> Any:
        given.update(options)
        return original(cls, folder, **options)

    monkeypatch.setattr(transformers.BertModel, "from_pretrained", classmethod(from_pretrained))
    module = load(open_model_of(EncoderModelSpec, str(folder), EngineConfig()), EngineConfig(dtype="float32"), "cpu")
    assert "evil" not in str(given["config"].to_dict()) + str(vars(given["config"]))
    assert "trust_remote_code" not in given
    assert next(module.parameters()).dtype == torch.float32


def test_a_checkpoint_without_the_head_is_rejected(embedding_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(embedding_folder, tmp_path / "model")
    change_json(folder / "config.json", architectures=["BertForSequenceClassification"])
    for file in ("modules.json", "1_Pooling/config.json"):
        (folder / file).unlink()
    with pytest.raises(ModelError, match=r"parameters are missing, the first is classifier"):
        load(open_model_of(EncoderModelSpec, str(folder), EngineConfig()), EngineConfig(dtype="float32"), "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 65}, r"6 parameters have another shape, the first is encoder.layer.0.intermediate.dense."
                                    r"bias: .64., and by config.json .65.\. Copy or download"),
        ({"num_hidden_layers": 3}, "16 parameters are missing, the first is encoder.layer.2"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"hidden_dropout_prob": "much"}, "cannot be loaded: Validation error for field 'hidden_dropout_prob': TypeEr"),
    ],
)  # fmt: skip
def test_weights_that_the_configuration_does_not_fit_are_rejected_with_the_reason(
    embedding_folder: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, Any], words: str
) -> None:
    folder = shutil.copytree(embedding_folder, tmp_path / "model")
    change_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=words):
        load(open_model_of(EncoderModelSpec, str(folder), EngineConfig()), EngineConfig(dtype="float32"), "cpu")


def test_a_pooler_may_be_missing(tmp_path: pathlib.Path) -> None:
    """A checkpoint of a masked language model has none, and embeddings use none."""
    folder = make_encoder(tmp_path, "BertForMaskedLM")
    load(open_model_of(EncoderModelSpec, str(folder), EngineConfig()), EngineConfig(dtype="float32"), "cpu")


@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")  # warning of sentence-transformers
@pytest.mark.parametrize(
    ("num_labels", "config", "files"),
    [
        (1, {}, {}),
        (3, {"sentence_transformers": {"version": "5.0"}}, {}),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}),
        (3, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"}}, {}),
        (2, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
         {"activation_fn": "torch.nn.modules.activation.Sigmoid"}),
    ],
)  # fmt: skip
def test_scores_are_those_of_a_cross_encoder(
    tmp_path: pathlib.Path, num_labels: int, config: dict[str, Any], files: dict[str, Any]
) -> None:
    from sentence_transformers import CrossEncoder

    if files:
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        files = {
            "modules": [{"idx": 0, "name": "0", "path": "", "type": kind}],
            "sentence_bert_config": {"transformer_task": "sequence-classification"},
            "config_sentence_transformers": {"model_type": "CrossEncoder"} | files,
        }
    make_encoder(tmp_path, "BertForSequenceClassification", {"num_labels": num_labels} | config, **files)
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    spec = open_model_of(EncoderModelSpec, str(tmp_path), EngineConfig())
    ids = theirs.tokenizer([PAIRS[0]], return_tensors="pt")
    logits = load(spec, EngineConfig(dtype="float32"), "cpu")(**ids)[0].tolist()
    np.testing.assert_allclose(scores(logits, spec.activation), np.atleast_1d(theirs.predict([PAIRS[0]])[0]), rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [{"num_labels": 1}, {"num_labels": 3}, {"num_labels": 1, "problem_type": "regression"},
     {"num_labels": 2, "problem_type": "regression"}, {"num_labels": 2, "problem_type": "multi_label_classification"},
     {"num_labels": 2, "problem_type": "single_label_classification"}],
)  # fmt: skip
def test_scores_are_those_of_the_pipeline_of_transformers(tmp_path: pathlib.Path, config: dict[str, Any]) -> None:
    make_encoder(tmp_path, "BertForSequenceClassification", config)
    pipeline = transformers.pipeline("text-classification", str(tmp_path), device="cpu")
    theirs = {each["label"]: each["score"] for each in pipeline("a red circle", top_k=None)}
    spec = open_model_of(EncoderModelSpec, str(tmp_path), EngineConfig())
    ids = pipeline.tokenizer("a red circle", return_tensors="pt")
    logits = load(spec, EngineConfig(dtype="float32"), "cpu")(**ids)[0].tolist()
    own = dict(zip(spec.labels, scores(logits, spec.activation), strict=True))
    assert own == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("kind", get_args(Similarity))
def test_similarities_are_those_of_sentence_transformers(kind: Similarity) -> None:
    from sentence_transformers.util import SimilarityFunction

    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs = SimilarityFunction.to_similarity_fn(kind)(rows[:1], rows[1:])
    source, *others = rows.tolist()
    assert similarities(kind, source, others) == pytest.approx(theirs[0].tolist(), rel=1e-6)


def test_weights_that_the_class_has_no_place_for_are_rejected(
    embedding_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """transformers leaves them out and says so in a log: relative positions, biases or adapters would be missing."""
    folder = shutil.copytree(embedding_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.attention.self.distance_embedding.weight"
    others = {"cls.predictions.bias": torch.zeros(3), "embeddings.position_ids": torch.arange(3)}
    save_file(weights | others, folder / "model.safetensors", {"format": "pt"})
    spec = open_model_of(EncoderModelSpec, str(folder), EngineConfig())
    load(spec, EngineConfig(dtype="float32"), "cpu")
    save_file(weights | {name: torch.zeros(3, 8)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 parameters that BertModel has not, the first is {name}"):
        load(spec, EngineConfig(dtype="float32"), "cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected(
    embedding_folder: pathlib.Path, tmp_path: pathlib.Path, value: float
) -> None:
    folder = shutil.copytree(embedding_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.1.output.dense.weight"][3, 5] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"are not finite: encoder.layer.1.output.dense.weight has NaN or infinity"):
        load(open_model_of(EncoderModelSpec, str(folder), EngineConfig()), EngineConfig(dtype="float32"), "cpu")
