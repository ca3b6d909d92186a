"""Folders below the roots of an operator: what a link leads out of them for is never read, whenever it changes."""

import os
import shutil

import pytest

from noria.errors import ModelError, RegistryError
from noria.models.location import BUNDLED
from noria.models.opened_folder import opened_folder
from noria.protocol.routes import Target
from noria.registry.deployments.routed_models import open_target
from noria.registry.manifest import read_manifest
from noria.registry.model_folder import read_model
from noria.registry.sources.limits import SourceLimits
from noria.registry.sources.read import read_source


@pytest.fixture
def root(tmp_path):
    """A root with a model in it, and beside it a folder with a secret."""
    shutil.copytree(BUNDLED, tmp_path / "root" / "model", ignore=shutil.ignore_patterns(".*"))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file.json").write_text('{"_class_name": "hunter2"}')
    return tmp_path / "root"


def read(root, folder):
    limits = SourceLimits((str(root),), 1.0)
    return read_source(str(folder), "m", root.parent / "data", {}, lambda _: None, limits)


def replace_by_link(path, target):
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "path",
    [
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "tokenizer/vocab.json",
        "extra.txt",
        "deep/er/extra.txt",
        "noria.json",
        "noria-lineage.jsonl",
    ],
)
@pytest.mark.parametrize("target", ["secret/file.json", "root/link", "relative", "/proc/self/environ", "/dev/zero"])
def test_a_link_to_a_file_out_of_the_roots_is_rejected_and_named(root, path, target):
    (root / "link").symlink_to(root.parent / "secret" / "file.json")
    link = root / "model" / path
    link.parent.mkdir(parents=True, exist_ok=True)
    is_relative = target == "relative"
    to = os.path.relpath(root.parent / "secret" / "file.json", link.parent) if is_relative else root.parent / target
    replace_by_link(link, to)
    with pytest.raises(ModelError) as caught:
        read(root, root / "model")
    assert caught.value.message.startswith(f"{link}: a link that leads out of registry.source_roots")
    assert "hunter2" not in caught.value.message


def test_a_link_to_a_folder_is_rejected_in_the_roots_and_out_of_them(root):
    (root / "model" / "more").symlink_to(root.parent / "secret")
    with pytest.raises(ModelError, match=r"more: a link that leads out of registry\.source_roots"):
        read(root, root / "model")
    replace_by_link(root / "model" / "more", root / "model" / "unet")
    with pytest.raises(ModelError, match=r"more: a symbolic link to a folder"):
        read(root, root / "model")


def test_links_in_the_roots_are_read_as_a_cache_of_the_hub_has_them(root):
    expected = read_model(str(root / "model"))
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted((root / "model").rglob("*.*"))):
        if file.is_file():
            blob = root / "blobs" / str(number)
            file.rename(blob)
            file.symlink_to(os.path.relpath(blob, file.parent))
    found = read(root, root / "model")
    assert (found.manifest, found.fingerprint, found.url) == (expected.manifest, expected.fingerprint, expected.url)
    assert found.source == str(root / "model")


def test_what_is_swapped_for_a_link_while_it_is_read_stays_what_it_was(root):
    before = read_manifest(root / "model")
    with opened_folder(root / "model", [str(root)]) as opened:
        replace_by_link(root / "model" / "unet" / "config.json", root.parent / "secret" / "file.json")
        (root / "model" / "vae").rename(root / "model" / "away")
        (root / "model" / "vae").symlink_to(root.parent / "secret")
        assert read_manifest(opened) == before
        assert read_model(str(opened)).manifest == before


def test_a_version_whose_file_became_a_link_is_not_loaded(root):
    model = read(root, root / "model")
    target = Target(1, "m@1", model.manifest.digest, model.fingerprint, (model.url,))
    spec = open_target("t2i", target, model.manifest.text, roots=[str(root)])
    assert (spec.folder, spec.name) == (str(root / "model"), "t2i")
    copy = root.parent / "secret" / "copy.json"
    shutil.copy(root / "model" / "unet" / "config.json", copy)
    replace_by_link(root / "model" / "unet" / "config.json", copy)
    with pytest.raises(RegistryError, match=r"unet/config\.json: a link that leads out of registry\.source_roots"):
        open_target("t2i", target, roots=[str(root)])
    assert open_target("t2i", target, roots=[str(root / "blobs")]).folder == spec.folder  # not below a root: as before


def test_errors_name_the_folder_itself(root):
    (root / "model" / "unet" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=rf"^{root}/model/unet/config\.json"):
        read(root, root / "model")
