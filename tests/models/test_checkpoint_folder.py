"""The folder of models that are loaded on demand: what is in it, by headers alone."""

import pytest
import torch

import single_files
from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.checkpoint_folder import checkpoint_files, list_checkpoints


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    folder = single_files.save_folder(tmp_path_factory.mktemp("sd1") / "folder", "sd1")
    return single_files.checkpoint_tensors(single_files.load_parts(folder), "sd1")


def test_files_and_folders_are_listed_without_reading_their_numbers(tmp_path, tensors, tiny_folder):
    single_files.save_header(tmp_path / "my model.safetensors", tensors)
    single_files.save_header(tmp_path / "lora.safetensors", {"lora_unet_x.lora_up.weight": torch.zeros(1, 1)})
    single_files.save_header(tmp_path / "served.safetensors", tensors)
    (tmp_path / "._my model.safetensors").write_bytes(b"macOS")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "folder").symlink_to(tiny_folder)
    (tmp_path / "gone.safetensors").symlink_to("nowhere")
    (tmp_path / "SDXL").mkdir()
    single_files.save_header(tmp_path / "SDXL" / "other.safetensors", tensors)
    engine = EngineConfig(checkpoints=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    found, refused = list_checkpoints(engine, [str(tmp_path / "served.safetensors")])
    assert found == ("folder", "my model.safetensors")
    assert len(refused) == 3
    assert "SDXL has no model_index.json, and single files in a subfolder are not served." in refused[0]
    assert "gone.safetensors cannot be read: No such file or directory." in refused[1]
    assert "lora.safetensors" in refused[2]
    assert list(checkpoint_files(str(tmp_path), found)) == ["folder", "my-model"]
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_models_and_two_of_one_name_are_rejected(tmp_path, tensors):
    engine = EngineConfig(checkpoints=str(tmp_path / "set"))
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        list_checkpoints(engine)
    (tmp_path / "set").mkdir()
    with pytest.raises(ConfigError, match=r"nothing can be loaded on demand, neither \.safetensors nor a folder"):
        list_checkpoints(engine)
    for name in ("a b", "a-b"):
        single_files.save_header(tmp_path / "set" / f"{name}.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"a b\.safetensors and a-b\.safetensors are both called 'a-b'"):
        list_checkpoints(engine)
