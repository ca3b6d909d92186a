"""Copies of models: what is listed is checked, and a copy that was cut off is completed."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from noria.errors import ModelError
from noria.registry.manifest import read_manifest
from noria.registry.sources.copies import copy_model
from noria.registry.sources.remote_folder import RemoteFile, RemoteFolder, model_in
from registry.sources.hub_server import REPO
from waiting import wait_until

FILES = {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"weights", "1_Pooling/config.json": b"{}"}


def copy(model, folder, report=print, check=lambda _: None):
    return copy_model(model, folder, report, check)


def remote(files=FILES, sizes=None, **more):
    listed = tuple(RemoteFile(path, (sizes or {}).get(path, len(content))) for path, content in files.items())
    return RemoteFolder("s3://bucket/words", None, listed, lambda path: iter([files[path]]), **more)


@pytest.mark.parametrize("path", ["../config.json", "a/../../b.json", "/etc/b.json", "a//b", "a\\b", "a\nb", "a/."])
def test_a_path_that_could_lead_elsewhere_is_rejected(path):
    with pytest.raises(ModelError, match="allowed are paths of at most 1000 characters without"):
        model_in(remote(FILES | {path: b""}))


def test_texts_that_are_too_large_are_rejected():
    with pytest.raises(ModelError, match=r"config.json has 67108865 bytes; at most 67108864"):
        model_in(remote(sizes={"config.json": 2**26 + 1}))


def test_a_model_in_a_folder_of_its_own_is_copied_without_that_folder(tmp_path):
    nested = remote({f"data/model/{path}": content for path, content in FILES.items()} | {"MLmodel": b"flavors:"})
    folder = copy(model_in(nested), tmp_path)
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == FILES


@pytest.mark.parametrize(("size", "words"), [(3, "has more"), (300, "has 7")])
def test_a_file_of_another_size_than_listed_is_rejected(tmp_path, size, words):
    with pytest.raises(ModelError, match=f"model.safetensors was listed with {size} bytes and {words}"):
        copy(model_in(remote(sizes={"model.safetensors": size})), tmp_path)


def test_a_model_that_does_not_fit_on_the_disk_is_rejected_before_it_is_read(tmp_path):
    huge = remote(sizes={"model.safetensors": 2**60})
    with pytest.raises(ModelError, match=r"takes \d+ bytes more; \d+ are free"):
        copy(model_in(huge), tmp_path)


@pytest.mark.parametrize(
    ("index", "config", "words"),
    [
        ("config.json", b'{"model_type": "llama"}', "llama is a decoder"),
        ("model_index.json", b'{"_class_name": "Kandinsky5T2IPipeline"}', "which no model family has"),
        ("config.json", b"[]", "a JSON object is expected"),
        ("config.json", b"<html>", "not JSON"),
        ("config.json", bytes(2**26 + 1), "at most 67108864 are allowed"),
    ],
)
def test_of_what_is_no_model_of_a_family_only_its_index_is_read(index, config, words):
    read = []
    listed = (RemoteFile(index, 10), RemoteFile("model.safetensors", 2**36))
    folder = RemoteFolder("hf://org/llm", None, listed, lambda path: read.append(path) or iter([config]))
    with pytest.raises(ModelError, match=words) as raised:
        model_in(folder)
    assert read == [index] and "hf://org/llm" in str(raised.value)


def test_a_copy_that_is_rejected_is_deleted(tmp_path):
    def reject(folder):
        assert (folder / "model.safetensors").exists()
        raise ModelError(f"{folder}/model.safetensors: too short.")

    with pytest.raises(ModelError, match=r"^s3://bucket/words/model.safetensors: too short\.$"):
        copy(model_in(remote()), tmp_path, check=reject)
    assert not list(tmp_path.iterdir())


def test_two_that_copy_the_same_read_it_once(tmp_path):
    begun, goes_on, reads, reports = threading.Event(), threading.Event(), [], []

    def read(path):
        reads.append(path)
        begun.set()
        assert goes_on.wait(60)
        yield FILES[path]

    slow = RemoteFolder("s3://bucket/words", None, remote().files, read)
    folders = []
    first = threading.Thread(target=lambda: folders.append(copy(slow, tmp_path)))
    second = threading.Thread(target=lambda: folders.append(copy(slow, tmp_path, reports.append)))
    first.start()
    assert begun.wait(60)
    second.start()
    wait_until(lambda: reports == [f"waiting for another process that copies to {tmp_path}"])
    goes_on.set()
    first.join()
    second.join()
    assert folders[0] == folders[1] and sorted(reads) == sorted(FILES)


def test_the_same_command_completes_a_copy_that_was_killed(hub, bundled_folder, tmp_path):
    hub.stalls_at = "unet/diffusion_pytorch_model.safetensors"
    command = [sys.executable, "-m", "noria", "models", "add", "shapes", f"hf://{REPO}", "--data-dir", str(tmp_path)]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as killed:
        assert hub.is_stalled.wait(120)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    (partial,) = (tmp_path / "models").iterdir()
    assert partial.name.endswith(".partial")
    already_read, hub.stalls_at = set(hub.read) - {hub.stalls_at, "model_index.json"}, None
    hub.read.clear()
    hub.goes_on.set()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("added shapes@1\n")
    assert not already_read & set(hub.read)
    (folder,) = (tmp_path / "models").iterdir()
    assert read_manifest(folder) == read_manifest(bundled_folder)
