"""Where a model's folder is: on this machine or on the hub."""

import os
import pathlib
import socket
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors.numpy import save_file

from noria.config import EngineConfig
from noria.errors import ModelError, SetupError, UnavailableNow
from noria.models.location import locate

INDEX = ["model_index.json", "config.json", "adapter_config.json", "modules.json", "0_CLIPModel/config.json"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bundeld", "no such folder.*'bundled'"),
        ("./missing", "no such folder: missing"),
        ("/no/where", "no such folder: /no/where"),
        ("~/no-such-model", "no such folder: /"),
        ("a/b/c", "no such folder"),
        ("./missing.safetensors", "no such file: missing.safetensors"),
        ("existing/missing", "no such folder: existing/missing"),
        ("checkpoint.safetensors", "checkpoint.safetensors: truncated"),
        ("checkpoint.ckpt", "is a file.*a pickle, which can run code"),
        ("model.zip", "is a file.*served as .safetensors"),
        ("model.gguf", "model.gguf: truncated or damaged"),
        ("https://huggingface.co/org/name", "is a URL; give the hub id org/name.$"),
        (
            "https://huggingface.co/org/name/blob/main/a/b.safetensors",
            "org/name, or its file as hf://org/name/a/b.sa.*@main",
        ),
        ("https://huggingface.co/org/name.v1.5/tree/main", "give the hub id org/name.v1.5.$"),
        ("http://hf.co/org/name.git", "give the hub id org/name.$"),
        ("hf://org/name@main", "give the hub id org/name.$"),
        ("git@hf.co:org/name.git", "give the hub id org/name.$"),
        ("https://huggingface.co/org", "is a URL; give a folder"),
        ("https://huggingface.co/datasets/org/name", "is a URL; give a folder"),
        ("https://elsewhere.example/org/name", "is a URL; give a folder"),
        ("s3://bucket/model", "is a URL; give a folder"),
    ],
)
def test_a_missing_folder_is_not_looked_up_on_the_hub(
    name: str, words: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    (tmp_path / "existing").mkdir()
    for file in ("checkpoint.safetensors", "checkpoint.ckpt", "model.gguf", "model.zip"):
        (tmp_path / file).touch()
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
    assert index == INDEX
    endings = (".json", ".jinja", ".metadata", ".safetensors", ".txt")
    assert all(pattern.endswith(endings) and "fp16" not in pattern for pattern in needed)


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


def test_a_clip_model_of_sentence_transformers_is_the_subfolder_of_its_files(
    tmp_path: pathlib.Path, downloads: list[list[str]]
) -> None:
    own = tmp_path / "0_CLIPModel"
    own.mkdir()
    (own / "config.json").write_text('{"model_type": "clip"}')
    (own / "model.safetensors").touch()
    assert locate("org/tiny") == (own, "org/tiny")
    assert {"0_CLIPModel/*.json", "0_CLIPModel/model.safetensors"} <= set(downloads[1])
    assert locate(str(tmp_path)) == (own, tmp_path.name)


def test_of_other_parts_of_the_hub_the_transformer_is_not_downloaded(
    tmp_path: pathlib.Path, downloads: list[list[str]]
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    for part in ("text_encoder", "text_encoder_2", "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "model.safetensors").touch()
    file, engine = tmp_path / "flux.safetensors", EngineConfig(parts=("org/tiny",))
    file.touch()
    with pytest.raises(ModelError, match="truncated"):
        locate(str(file), engine)
    assert downloads == []
    names = ("double_blocks.0.img_mod.lin.weight", "vector_in.in_layer.weight")
    save_file({name: np.zeros((1, 1), np.float32) for name in names}, file)
    with pytest.raises(ModelError, match=r"tensors of FLUX\.1 are missing"):
        locate(str(file), engine)
    _, needed = downloads
    assert {"transformer/*.json", "vae/diffusion_pytorch_model.safetensors"} <= set(needed)
    assert not any(pattern.startswith("transformer/") and "safetensors" in pattern for pattern in needed)


def test_of_a_hub_model_of_no_family_no_weights_are_downloaded(
    tmp_path: pathlib.Path, downloads: list[list[str]]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="llama is a decoder"):
        locate("org/tiny")
    assert downloads == [INDEX]


def test_a_file_of_the_hub_is_downloaded_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[tuple[str, str, str | None]] = []

    def download(hub_id: str, path: str, revision: str | None) -> str:
        downloads.append((hub_id, path, revision))
        return str(tmp_path / "model.safetensors")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ModelError, match=f"{tmp_path}/model.safetensors: cannot be read: No such file"):
        locate("hf://org/name/a/model.safetensors@v1")
    assert downloads == [("org/name", "a/model.safetensors", "v1")]
    (tmp_path / "b.safetensors").touch()
    downloads.clear()
    with pytest.raises(ModelError, match="truncated: its header"):
        locate(str(tmp_path / "b.safetensors"), EngineConfig(vae="hf://org/name/a/model.safetensors@v1"))
    assert downloads == [("org/name", "a/model.safetensors", "v1")]


def test_minilm_is_the_folder_in_its_package() -> None:
    folder, name = locate("minilm")
    assert name == "minilm"
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("error", "cause", "kind"),
    [
        (LocalEntryNotFoundError, ConnectionError(), UnavailableNow),
        (LocalEntryNotFoundError, OfflineModeIsEnabled(), ModelError),
        (ValueError, None, ModelError),
    ],
)
def test_a_failed_download_is_reported_in_one_line(
    error: type[Exception], cause: Exception | None, kind: type[SetupError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(hub_id: str, allow_patterns: list[str]) -> str:
        raise error("\nGot: no route.\nto the hub") from cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind, match=r"'org/tiny' could not be downloaded from the hub: no route\. Check.*HF_TOKEN"):
        locate("org/tiny")


def test_a_hub_that_cannot_be_reached_may_be_there_later(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed_port = taken.getsockname()[1]
    environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "noria", "serve", "org/tiny", "--data-dir", str(tmp_path)]
    done = subprocess.run(
        command, env=environment | {"HF_HUB_OFFLINE": "0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == UnavailableNow.exit_status, done.stderr
