"""Manifests: what sha256sum prints, and what has changed since."""

import os
import subprocess
import time

import pytest

from noria.errors import ModelError
from noria.registry.manifest import differences, read_manifest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    for name, text in {"unet/weights": "w", "unet.json": "{}", "a b/é": "", ".git/x": "x", "unet/.cache": "c"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "noria-lineage.jsonl").write_text("")
    (folder / "link").symlink_to(folder / "unet.json")
    return folder


def test_a_manifest_is_what_sha256sum_prints(folder):
    command = (
        "find -L . -type f ! -path '*/.*' ! -path ./noria-lineage.jsonl -printf '%P\\0'"
        " | LC_ALL=C sort -z | xargs -0 sha256sum"
    )
    printed = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout
    manifest = read_manifest(folder)
    assert (manifest.text, manifest.size_bytes) == (printed, 5)
    assert list(manifest.digests) == ["a b/é", "link", "unet.json", "unet/weights"]


def test_an_interruption_of_reading_ends_at_once_and_leaves_no_thread(tmp_path):
    for name in "abcdefgh":
        with (tmp_path / name).open("wb") as opened:
            opened.truncate(100 * 10**9)  # without blocks on the disk; its digest takes minutes
    seen = []

    def interrupt(num_read, num_bytes):
        seen.append((num_read, num_bytes))
        if num_read:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        read_manifest(tmp_path, interrupt)
    assert time.monotonic() - started < 5.0
    assert 0 < seen[-1][0] < seen[-1][1] == 800 * 10**9


def test_differences_are_missing_added_and_changed_files(folder):
    manifest = read_manifest(folder).text
    assert differences(manifest, folder) == []
    (folder / "a b/é").unlink()
    (folder / "new").touch()
    (folder / "unet/weights").write_text("W")
    assert differences(manifest, folder) == ["a b/é", "new", "unet/weights"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: os.mkfifo(folder / "pipe"), "pipe: not a regular file"),
        (lambda folder: (folder / "loop").symlink_to(folder), "loop: a symbolic link to a folder"),
        (lambda folder: (folder / "two\nlines").touch(), r"a file named 'two\\nlines'"),
        (lambda folder: (folder / "gone").symlink_to("/nowhere"), "gone: cannot be read: No such file"),
    ],
)
def test_what_cannot_be_listed_is_rejected(folder, spoil, words):
    spoil(folder)
    with pytest.raises(ModelError, match=words):
        read_manifest(folder)


def test_a_file_that_becomes_a_pipe_meanwhile_is_rejected(folder):
    large = [folder / name for name in "0123"]  # all threads read them first
    for file in large:
        file.touch()
        os.truncate(file, 100 * 10**9)

    def replace(num_read, _):
        if num_read and (folder / "unet.json").is_file():
            (folder / "unet.json").unlink()
            os.mkfifo(folder / "unet.json")
            for file in large:
                os.truncate(file, 0)

    with pytest.raises(ModelError, match="not a regular file"):
        read_manifest(folder, replace)


def test_a_folder_without_files_is_rejected(tmp_path):
    with pytest.raises(ModelError, match="has no files"):
        read_manifest(tmp_path)
