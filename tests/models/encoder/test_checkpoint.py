"""Checkpoints in torch: poolings as sentence-transformers computes them, and what never reaches a loader."""

import pathlib
import shutil
from typing import Any, get_args

import pytest
import torch
import transformers

from encoders import change_json, make_encoder
from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.catalog import open_model_of
from noria.models.encoder.checkpoint import load, pool
from noria.protocol.text import EncoderModelSpec, Pooling


@pytest.mark.parametrize("mode", get_args(Pooling))
def test_pooling_equals_that_of_sentence_transformers(mode: Pooling) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling as TheirPooling  # three seconds

    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 5)
    mask = (torch.arange(7) < torch.tensor([[7], [3], [1]])).long()
    theirs = TheirPooling(5, pooling_mode=mode)({"token_embeddings": hidden, "attention_mask": mask})
    torch.testing.assert_close(pool(mode, hidden, mask.unsqueeze(-1)), theirs["sentence_embedding"])


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
    module = load(open_model_of(EncoderModelSpec, str(folder)), EngineConfig(dtype="float32"), "cpu")
    assert "evil" not in str(given["config"].to_dict()) + str(vars(given["config"]))
    assert "trust_remote_code" not in given
    assert next(module.parameters()).dtype == torch.float32


def test_a_checkpoint_without_the_head_is_rejected(embedding_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = shutil.copytree(embedding_folder, tmp_path / "model")
    change_json(folder / "config.json", architectures=["BertForSequenceClassification"])
    for file in ("modules.json", "1_Pooling/config.json"):
        (folder / file).unlink()
    with pytest.raises(ModelError, match=r"parameters are missing .*the first is classifier"):
        load(open_model_of(EncoderModelSpec, str(folder)), EngineConfig(dtype="float32"), "cpu")


def test_a_pooler_may_be_missing(tmp_path: pathlib.Path) -> None:
    """A checkpoint of a masked language model has none, and embeddings use none."""
    folder = make_encoder(tmp_path, "BertForMaskedLM")
    load(open_model_of(EncoderModelSpec, str(folder)), EngineConfig(dtype="float32"), "cpu")
