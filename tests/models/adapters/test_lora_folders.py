"""LoRA files that a model has, and their digests."""

import unicodedata

import pytest

from noria.config import EngineConfig
from noria.errors import ConfigError, InvalidField, LoraNotFound
from noria.models.adapters.lora_folders import LoraFolders, digest_of
from noria.protocol.diffusion import Lora


@pytest.fixture
def folders(tmp_path):
    for folder in ("all", "one"):
        (tmp_path / folder).mkdir()
    for file in ("all/a.safetensors", "all/b b.safetensors", "all/c.pt", "one/a.safetensors", "one/ä.v2.safetensors"):
        (tmp_path / file).write_bytes(bytes(8) + file.encode())
    (tmp_path / "all" / "folder.safetensors").mkdir()
    (tmp_path / "all" / "line\nbreak.safetensors").write_bytes(bytes(8))
    return LoraFolders((f"tiny={tmp_path / 'one'}", str(tmp_path / "all")))


def test_names_are_those_of_the_files_of_all_models_and_of_the_model(folders, tmp_path):
    assert list(folders.files("other")) == ["a", "b b"]
    assert list(folders.files("tiny")) == ["a", "b b", "ä.v2"]
    assert folders.files("tiny")["a"] == tmp_path / "one" / "a.safetensors"  # the file of the first folder


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_name_is_found_in_any_form_of_unicode(folders, tmp_path, form):
    (tmp_path / "all" / f"{unicodedata.normalize('NFD', 'é')}.safetensors").write_bytes(bytes(8))
    for name, of_file in (("ä.v2", "ä.v2"), ("é", "e\u0301")):
        found = folders.find(Lora(unicodedata.normalize(form, name)), "tiny")
        assert found.stem == of_file


def test_an_entry_may_name_a_model_of_the_hub_or_a_folder_with_an_equals_sign(folders, tmp_path):
    (tmp_path / "a=b").mkdir()
    (tmp_path / "a=b" / "c.safetensors").write_bytes(bytes(8))
    found = LoraFolders((f"org/tiny={tmp_path / 'one'}", str(tmp_path / "a=b")))
    assert list(found.files("org/tiny")) == ["a", "c", "ä.v2"]
    assert list(found.files("other")) == ["c"]


def test_bundled_ones_are_the_default_and_for_the_bundled_model_alone():
    folders = LoraFolders.of(EngineConfig())
    folders.check_folders()
    assert list(folders.files("noria-shapes")) == ["night", "outline"]
    assert max(file.stat().st_size for file in folders.files("noria-shapes").values()) < 200_000
    assert folders.files("other") == {}
    assert not LoraFolders.of(EngineConfig(compile=True))


def test_files_may_come_and_go(folders, tmp_path):
    (tmp_path / "all" / "new.safetensors").write_bytes(bytes(8))
    (tmp_path / "all" / "a.safetensors").unlink()
    assert list(folders.files("other")) == ["b b", "new"]


@pytest.mark.parametrize(
    "name", ["unknown", "", "../one/a", "a.safetensors", "line\nbreak", "folder", "\udcff", "😀" * 100]
)
def test_an_unknown_name_is_rejected_with_those_that_exist(folders, name):
    with pytest.raises(LoraNotFound, match=r"other has no LoRA .*; allowed are 'a', 'b b'") as caught:
        folders.complete([Lora(name)], "other")
    assert caught.value.field == "loras"


def test_of_many_names_the_first_are_in_the_message(tmp_path):
    for number in range(60):
        (tmp_path / f"{number:02}.safetensors").write_bytes(bytes(8))
    with pytest.raises(LoraNotFound, match="'49' and 10 more"):
        LoraFolders([str(tmp_path)]).complete([Lora("x")], "m")


def test_a_digest_changes_with_the_file(folders, tmp_path):
    (found,) = folders.complete([Lora("a", 0.5)], "tiny")
    assert found == Lora("a", 0.5, digest_of(tmp_path / "one" / "a.safetensors"))
    assert found.digest != digest_of(tmp_path / "all" / "a.safetensors")
    assert folders.complete([found], "tiny") == (found,)
    (tmp_path / "one" / "a.safetensors").write_bytes(bytes(8) + b"other")
    with pytest.raises(InvalidField, match=f"has digest .* now, and not '{found.digest}'"):
        folders.complete([found], "tiny")


def test_a_file_with_a_hostile_header_has_no_digest(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidField, match="'a' cannot be read"):
        LoraFolders([str(tmp_path)]).complete([Lora("a")], "m")


def test_a_missing_folder_is_rejected_at_the_start(folders, tmp_path):
    folders.check_folders()
    with pytest.raises(ConfigError, match="missing' is not a folder"):
        LoraFolders([f"tiny={tmp_path / 'missing'}"]).check_folders()
