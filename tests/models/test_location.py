"""Where a model's folder is: on this machine or on the hub."""

import pathlib

import huggingface_hub
import pytest

from noria.errors import ModelError
from noria.models.location import locate


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bundeld", "no such folder.*'bundled'"),
        ("./missing", "no such folder: missing"),
        ("/no/where", "no such folder: /no/where"),
        ("~/no-such-model", "no such folder: /"),
        ("a/b/c", "no such folder"),
        ("existing/missing", "no such folder: existing/missing"),
        ("checkpoint.safetensors", "is a file.*from_single_file"),
    ],
)
def test_a_missing_folder_is_not_looked_up_on_the_hub(
    name: str, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    (tmp_path / "existing").mkdir()
    (tmp_path / "checkpoint.safetensors").touch()
    with pytest.raises(ModelError, match=words):
        locate(name)


@pytest.fixture
def downloads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The patterns of each download from the hub; what `tmp_path` has is downloaded."""
    patterns: list[list[str]] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        assert hub_id == "org/tiny"
        patterns.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return patterns


@pytest.fixture
def diffusion_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    for part in ("text_encoder", "unet", "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "model.safetensors").touch()
    return tmp_path


def test_a_hub_model_is_downloaded_without_pickles_and_named_by_its_id(
    diffusion_folder: pathlib.Path, downloads: list[list[str]]
) -> None:
    assert locate("org/tiny") == (diffusion_folder, "org/tiny")
    index, needed = downloads
    assert index == ["model_index.json", "config.json"]
    assert all(pattern.endswith((".json", ".txt", ".safetensors")) and "fp16" not in pattern for pattern in needed)


def test_a_hub_models_fp16_variant_is_downloaded_only_if_there_is_no_other(
    diffusion_folder: pathlib.Path, downloads: list[list[str]]
) -> None:
    (diffusion_folder / "unet/model.safetensors").unlink()
    assert locate("org/tiny") == (diffusion_folder, "org/tiny")
    half = [[pattern for pattern in patterns if "fp16" in pattern] for patterns in downloads]
    assert half[:2] == [[], []]
    assert {pattern.partition("/")[0] for pattern in half[2]} == {"unet"}


def test_of_an_encoder_of_the_hub_its_own_files_are_downloaded(
    tmp_path: pathlib.Path, downloads: list[list[str]]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").touch()
    assert locate("org/tiny") == (tmp_path, "org/tiny")
    _, needed = downloads
    assert {"*.json", "1_Pooling/*.json", "model.safetensors"} <= set(needed)
    assert not any("unet" in pattern for pattern in needed)


def test_of_a_hub_model_of_no_family_no_weights_are_downloaded(
    tmp_path: pathlib.Path, downloads: list[list[str]]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="which no model family has"):
        locate("org/tiny")
    assert downloads == [["model_index.json", "config.json"]]


def test_minilm_is_the_folder_in_its_package() -> None:
    folder, name = locate("minilm")
    assert name == "minilm"
    assert (folder / "model.safetensors").is_file()


def test_a_failed_download_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, allow_patterns: list[str]) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"'org/tiny' could not be downloaded from the hub: no route.*HF_TOKEN"):
        locate("org/tiny")
