"""Models of the hub and of fsspec's filesystems, read for the registry."""

import os

import huggingface_hub
import huggingface_hub.constants
import pytest

import single_files
import tiny_models
from noria.errors import ModelError
from noria.models.location import locate
from noria.registry.manifest import read_manifest
from noria.registry.sources.limits import SourceLimits
from noria.registry.sources.read import read_source
from registry.sources.hub_server import COMMITS, REPO


@pytest.fixture
def read(tmp_path):
    """Reads a source, with a data folder of its own."""

    def call(source):
        call.reports.clear()
        return read_source(source, "shapes", tmp_path / "data", {}, call.reports.append)

    call.reports = []
    return call


def copies_in(folder):
    return sorted(path.name for path in (folder / "data" / "models").iterdir())


def test_a_model_of_the_hub_is_copied_at_the_commit_of_its_revision(read, hub, bundled_folder, tmp_path):
    model = read(f"hf://{REPO}@v1")
    assert (model.source, model.revision, model.kind) == (f"hf://{REPO}@v1", COMMITS["v1"], "diffusion")
    assert model.manifest == read_manifest(bundled_folder)
    assert model.url == (tmp_path / "data" / "models" / copies_in(tmp_path)[0]).as_uri()
    assert len(model.events) > 0  # events of noria-lineage.jsonl
    assert read.reports[0].startswith(f"copying hf://{REPO}@{COMMITS['v1']} to {tmp_path}/data/models: ")
    assert read.reports[1] == "1 of 14: model_index.json, 582 bytes"
    assert os.stat(tmp_path / "data" / "models").st_mode & 0o077 == 0


def test_a_model_of_the_hub_that_is_here_is_not_read_again_not_even_at_a_commit_that_changed_other_files(read, hub):
    first = read(f"hf://{REPO}")
    hub.read.clear()
    hub.files["README.md"] = b"# Shapes"
    second = read(f"hf://{REPO}@v1")
    assert (second.url, second.revision, first.revision) == (first.url, COMMITS["v1"], COMMITS["main"])
    assert (hub.read, read.reports) == (["model_index.json"], [])


@pytest.mark.parametrize("source", ["hf://org/nothing", f"hf://{REPO}@nothing"])
def test_a_model_that_the_hub_does_not_have_is_one_sentence(read, hub, source):
    with pytest.raises(ModelError, match=rf"{source} cannot be read from http://127.0.0.1:\d+: .*Check the name"):
        read(source)


def test_without_a_network_a_model_of_the_hub_says_what_to_do(read, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()  # it holds the setting
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE; or copy the model's folder to this machine"):
        read(f"hf://{REPO}")


@pytest.mark.parametrize(("content", "words"), [(b"short", "has 5"), (None, r"the SHA-256 \w{64} and has")])
def test_weights_that_are_not_what_was_listed_are_rejected_and_read_again(read, hub, content, words):
    path = "unet/diffusion_pytorch_model.safetensors"
    hub.replaced[path] = content or bytes(len(hub.files[path]))
    with pytest.raises(ModelError, match=rf"{path} was listed with .*{words}"):
        read(f"hf://{REPO}")
    hub.replaced.clear()
    hub.read.clear()
    assert read(f"hf://{REPO}").kind == "diffusion"
    assert path in hub.read and "unet/config.json" not in hub.read


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        (
            "text_encoder/config.json",
            b'{"architectures": ["T5EncoderModel"]}',
            "hf://org/shapes@a+/text_encoder/config.json: ",
        ),
        ("noria-lineage.jsonl", b"{}", "hf://org/shapes@a+/noria-lineage.jsonl: "),
    ],
)
def test_what_is_no_model_that_can_be_served_leaves_no_copy(read, hub, tmp_path, path, content, words):
    hub.files[path] = content
    with pytest.raises(ModelError, match=words):
        read(f"hf://{REPO}")
    assert not copies_in(tmp_path)


def test_a_folder_of_a_filesystem_is_copied_and_copied_anew_when_it_has_changed(read, memory, bundled_folder, tmp_path):
    first = read("memory://models/shapes")
    assert (first.manifest, first.revision) == (read_manifest(bundled_folder), None)
    assert read("memory://models/shapes").url == first.url
    memory.pipe_file("/models/shapes/noria.json", b'{"default_steps": 12}')
    assert read("memory://models/shapes").manifest != first.manifest
    assert len(copies_in(tmp_path)) == 2


def test_pickles_and_what_serving_does_not_need_are_not_copied(read, memory, tmp_path):
    memory.pipe_file("/models/shapes/unet/diffusion_pytorch_model.bin", b"pickle")
    memory.pipe_file("/models/shapes/README.md", b"# Shapes")
    (copied,) = (
        tmp_path / "data" / "models" / name for name in [read("memory://models/shapes").url.rpartition("/")[2]]
    )
    names = {path.name for path in copied.rglob("*")}
    assert "diffusion_pytorch_model.safetensors" in names
    assert not {"diffusion_pytorch_model.bin", "README.md"} & names


def test_the_two_folders_of_mlflows_flavour_for_transformers_are_one_model(read, memory, tmp_path):
    folder, logged = locate("minilm")[0], "/logged/text/artifacts"
    memory.pipe_file(f"{logged}/MLmodel", b"flavors: {}")
    for file in folder.iterdir():
        if file.is_file() and file.name != "modules.json":  # which a model of transformers does not have
            inside = "components/tokenizer" if file.name.startswith(("tokenizer", "vocab", "special")) else "model"
            memory.pipe_file(f"{logged}/{inside}/{file.name}", file.read_bytes())
    model = read("memory://logged/text")
    assert model.kind == "encoder"
    copied = tmp_path / "data" / "models" / model.url.rpartition("/")[2]
    assert (copied / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (copied / "components").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("memory://models/nothing", "cannot be read: .*Check the URL"),
        ("memory://models/shapes/unet/config.json", "neither model_index.json nor config.json"),
        ("nosuch://models", "Protocol not known: nosuch"),
        ("s3://bucket/models", "needs a package that is missing: Install s3fs"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_sentence(read, memory, source, words):
    with pytest.raises(ModelError, match=words) as raised:
        read(source)
    assert source in str(raised.value) and "\n" not in str(raised.value)


def test_a_single_file_is_converted_to_a_folder_but_not_for_clients(read, tmp_path):
    parts = single_files.load_parts(single_files.save_folder(tmp_path / "folder", "sd1"))
    tensors = single_files.checkpoint_tensors(parts, "sd1")
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", tensors)
    model = read(str(file))
    (folder,) = (tmp_path / "data" / "checkpoints").iterdir()
    assert (model.source, model.url) == (str(file), folder.as_uri())
    limits = SourceLimits(roots=(str(tmp_path),), max_gib=1.0)
    for source in (str(file), file.as_uri(), "hf://org/name/a.safetensors"):
        with pytest.raises(ModelError, match="may not be read over HTTP"):
            read_source(source, "shapes", tmp_path / "data", {}, print, limits)


def test_the_file_of_a_transformer_takes_its_other_parts_from_a_folder(tmp_path):
    parts = tiny_models.save_flux(tmp_path / "flux")
    file = parts / "transformer" / "diffusion_pytorch_model.safetensors"
    model = read_source(str(file), "flux", tmp_path / "data", {}, print, parts=[str(parts)])
    (folder,) = (tmp_path / "data" / "checkpoints").iterdir()
    assert (model.url, model.manifest.digests.keys()) == (folder.as_uri(), read_manifest(parts).digests.keys())


def test_a_local_folder_is_used_where_it_is(read, bundled_folder, tmp_path):
    assert read(bundled_folder.as_uri()).url == read(str(bundled_folder)).url == bundled_folder.as_uri()
    assert not (tmp_path / "data").exists()
