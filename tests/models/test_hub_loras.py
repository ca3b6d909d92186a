"""LoRAs of the hub: what is downloaded, what they are called, and what a wrong entry says."""

import pathlib

import huggingface_hub
import msgspec
import pytest

from noria.config import Config
from noria.errors import ConfigError, ModelError
from noria.models.hub_loras import download_hub_loras
from noria.models.lora_folders import LoraFolders


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache with `org/one`, which has one file, and `org/two`, with two and one in a folder."""
    for file in ("one/pytorch_lora_weights", "two/a", "two/b", "two/unet/whole"):
        path = tmp_path / "hub" / "org" / f"{file}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(8))

    def download(repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert revision in (None, "v1"), revision
        if not (folder := tmp_path / "hub" / repo).is_dir():
            raise huggingface_hub.errors.LocalEntryNotFoundError("no route\nto the hub")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path / "hub" / "org"


def names(tmp_path: pathlib.Path, *entries: str, model: str = "tiny") -> dict[str, pathlib.Path]:
    config = Config(data_dir=str(tmp_path / "data"))
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, loras=entries))
    folders = LoraFolders.of(download_hub_loras(config, {}).engine)
    folders.check()
    return {name: file.resolve() for name, file in folders.files(model).items()}


def test_a_file_is_called_like_its_repository_and_several_have_their_names_too(
    hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert names(tmp_path, "hf://org/one@v1") == {"one": hub / "one" / "pytorch_lora_weights.safetensors"}
    assert list(names(tmp_path, "hf://org/two")) == ["two-a", "two-b"]
    assert names(tmp_path, "hf://org/two/unet/whole.safetensors") == {"two": hub / "two/unet/whole.safetensors"}
    assert list(names(tmp_path, "hf://org/two", "other=hf://org/one")) == ["two-a", "two-b"]
    assert list(names(tmp_path, "other=hf://org/one", model="other")) == ["one"]
    (hub / "two" / "b.safetensors").unlink()  # a new revision, with the next start
    assert list(names(tmp_path, "hf://org/two")) == ["two"]


@pytest.mark.parametrize(
    ("entry", "error", "words"),
    [
        ("hf://org", ConfigError, "names no LoRA of the hub. The form is hf://ORG/NAME"),
        ("tiny=hf://org/one/file.ckpt", ConfigError, "The form is"),
        ("hf://org/one/../../x.safetensors", ModelError, "has no"),
        ("hf://org/one/missing.safetensors", ModelError, "'org/one' on the hub has no missing.safetensors"),
        ("hf://org/none", ModelError, "'org/none' could not be downloaded from the hub: no route Check"),
    ],
)
def test_a_wrong_entry_is_an_error_at_the_start(
    hub: pathlib.Path, tmp_path: pathlib.Path, entry: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        names(tmp_path, entry)
