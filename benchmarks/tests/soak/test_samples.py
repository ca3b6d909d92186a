"""Sizes of files that come and go."""

import pathlib

from noria_bench.soak.samples import _sizes


def test_a_file_that_is_deleted_meanwhile_has_no_size(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_bytes(b"123")
    found = [*tmp_path.rglob("*"), tmp_path / "deleted"]
    monkeypatch.setattr(pathlib.Path, "rglob", lambda *_: found)
    assert _sizes(tmp_path) == {tmp_path / "folder" / "kept": 3}
