"""Exports to ONNX: equal to transformers, checked before they are used, and kept for the next start."""

import pathlib
import shutil
import types
from typing import Any

import numpy as np
import pytest
import torch

from encoders import change_json, make_encoder, open_encoder, sentence_transformer
from noria.config import EngineConfig
from noria.errors import ConfigError, MissingExtra, ModelError
from noria.models.catalog import open_model_of
from noria.models.encoder import onnx_export
from noria.models.encoder.onnx_export import export, find, find_or_export, model_cache
from noria.protocol.text import EncoderModelSpec

# The first export of a process takes 10 s, the others 2 s; tests/engine/encoder/test_sessions.py exports in the fast
# tests, too.
pytestmark = pytest.mark.slow


class WithoutMask(torch.nn.Module):
    """A model that sees padding."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.pad_token_id, self.end_token_id = module, module.pad_token_id, module.end_token_id

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
        return self.module(ids, mask * 0 + 1, types)


@pytest.fixture
def cache(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "cache"


def test_an_export_is_kept_privately_and_found_by_its_weights(folder: pathlib.Path, cache: pathlib.Path) -> None:
    spec = open_encoder(folder)
    assert find(spec, cache) is None
    made = find_or_export(spec, cache)
    assert made.record.exporter == "torchscript"
    assert made.record.max_difference < 1e-5
    assert (made.record.inputs, made.record.output) == (spec.inputs, "sentence_embedding")
    assert find(spec, cache) == made
    assert {path.stat().st_mode & 0o077 for path in (made.file.parent, made.file.parent.parent)} == {0}
    assert sorted(path.name for path in made.file.parent.iterdir()) == ["export.json", "model.onnx"]

    moved = open_encoder(folder.rename(folder.with_name("renamed")))
    assert find(moved, cache) == made
    weights = moved.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-200] ^= 1  # a single bit of a weight
    weights.write_bytes(content)
    assert find(moved, cache) is None


def test_an_export_that_is_there_needs_no_torch(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = open_encoder(folder)
    made, installed = export(spec, cache), onnx_export.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else installed(name))
    assert find_or_export(spec, cache) == made
    with pytest.raises(
        MissingExtra, match=r"torch, which is not installed: pip install 'noria-serve\[encoders-export\]'"
    ):
        find_or_export(spec, cache.with_name("other"))


def test_the_folders_own_file_is_used_if_it_computes_the_same(folder: pathlib.Path, cache: pathlib.Path) -> None:
    made = export(open_encoder(folder), cache)
    (folder / "onnx").mkdir()
    shutil.copyfile(made.file, folder / "onnx/model.onnx")
    assert export(open_encoder(folder), cache.with_name("second")).record.exporter == "folder"


@pytest.mark.parametrize("content", ["other weights", "damaged"])
def test_the_folders_own_file_is_not_used_if_it_computes_something_else(
    folder: pathlib.Path, cache: pathlib.Path, tmp_path: pathlib.Path, content: str
) -> None:
    (folder / "onnx").mkdir()
    if content == "damaged":
        (folder / "onnx/model.onnx").write_bytes(b"not a graph")
    else:
        other = make_encoder(tmp_path / "other", config={"num_hidden_layers": 1}, **sentence_transformer())
        shutil.copyfile(export(open_encoder(other), cache).file, folder / "onnx/model.onnx")
    assert export(open_encoder(folder), cache).record.exporter == "torchscript"


def test_a_graph_with_the_mask_of_its_example_is_not_used(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = onnx_export._export
    spec = open_encoder(folder)

    monkeypatch.setattr(onnx_export, "_export", lambda spec, module, *rest, **options: original(
        spec, WithoutMask(module), *rest, **options))  # fmt: skip
    with pytest.raises(ModelError, match=r"torchscript: differs from the checkpoint by \d.*dynamo"):
        export(spec, cache)
    assert list(cache.rglob("*.onnx")) == []
    assert list((cache / "encoders").iterdir()) == []


def test_a_large_graph_has_its_weights_in_a_file_beside_it(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's older exporter does so by itself; a file of protobuf has at most 2 GiB."""
    original = onnx_export._export

    def fail_unless_dynamo(*arguments: Any, dynamo: bool) -> None:
        assert dynamo
        original(*arguments, dynamo=dynamo)

    monkeypatch.setattr(onnx_export, "_export", fail_unless_dynamo)
    monkeypatch.setattr(onnx_export, "_MAX_INLINE_BYTES", 0)
    made = export(open_encoder(folder), cache)
    assert made.record.exporter == "dynamo"
    assert sorted(path.name for path in made.file.parent.iterdir()) == ["export.json", "model.onnx", "model.onnx.data"]
    assert onnx_export._input_names(made.file) == made.record.inputs  # it loads where it was moved to


def test_an_export_that_others_could_change_is_not_used(folder: pathlib.Path, cache: pathlib.Path) -> None:
    spec = open_encoder(folder)
    export(spec, cache)
    model_cache(spec, cache).chmod(0o777)
    with pytest.raises(ConfigError, match="can be changed by other users"):
        find(spec, cache)


def test_a_cache_folder_that_cannot_be_written_is_a_config_error(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Set engine.cache_dir"):
        export(open_encoder(folder), tmp_path / "file")


@pytest.mark.slow  # imports torch and transformers in a process of its own
def test_an_error_of_the_exporting_process_is_reported(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = open_encoder(folder)
    change_json(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"parameters are missing.*layer\.2"):
        find_or_export(spec, cache)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ModelError, match="ended with status 1"):
        find_or_export(spec, cache)


def test_checked_rows_hold_no_padding_token() -> None:
    spec = open_model_of(EncoderModelSpec, "minilm", EngineConfig())
    rows = onnx_export._sample_rows(spec, types.SimpleNamespace(pad_token_id=7, end_token_id=None))
    assert [len(row.ids) for row in rows] == [3, 8, 21, 64]
    assert all(7 not in row.ids and row.ids.max() < spec.vocab_size for row in rows)
    assert all(row.type_ids is not None and set(np.unique(row.type_ids)) == {0, 1} for row in rows)
