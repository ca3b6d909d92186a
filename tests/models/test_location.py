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
def hub_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    for part in ("text_encoder", "unet", "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "model.safetensors").touch()
    return tmp_path


def test_a_hub_model_is_downloaded_without_pickles_and_named_by_its_id(
    hub_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: list[list[str]] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        patterns.append(allow_patterns)
        assert hub_id == "org/tiny"
        return str(hub_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("org/tiny") == (hub_folder, "org/tiny")
    assert len(patterns) == 1
    assert all(pattern.endswith((".json", ".txt", ".safetensors")) and "fp16" not in pattern for pattern in patterns[0])


def test_a_hub_models_fp16_variant_is_downloaded_only_if_there_is_no_other(
    hub_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub_folder / "unet/model.safetensors").unlink()
    patterns: list[list[str]] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        patterns.append([pattern for pattern in allow_patterns if "fp16" in pattern])
        if patterns[-1]:
            (hub_folder / "unet/diffusion_pytorch_model.fp16.safetensors").touch()
        return str(hub_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("org/tiny") == (hub_folder, "org/tiny")
    assert patterns[0] == []
    assert {pattern.partition("/")[0] for pattern in patterns[1]} == {"unet"}


def test_an_encoder_of_the_hub_is_downloaded_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    patterns: list[list[str]] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda _, allow_patterns: patterns.append(allow_patterns) or str(tmp_path)
    )
    assert locate("org/tiny") == (tmp_path, "org/tiny")
    assert len(patterns) == 1
    assert {"*.json", "1_Pooling/*.json", "model.safetensors"} <= set(patterns[0])


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
