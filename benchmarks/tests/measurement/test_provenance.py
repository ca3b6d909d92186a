"""The provenance of a result, also where little is installed."""

import importlib.metadata
import sys

import pytest

from noria_bench.measurement.provenance import collect_provenance


def test_a_result_has_the_versions_of_installed_packages_only(monkeypatch):
    version = importlib.metadata.version

    def lacking(name):
        if name == "starlette":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", lacking)
    found = collect_provenance()
    assert found["versions"]["torch"] == version("torch") and "starlette" not in found["versions"]
    assert found["machine"]["memory_bytes"] > 2**28 and found["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("typed", "reported"),
    [
        (["/bin/python", "/bin/noria", "bench", "quick"], "noria bench quick"),
        (["/bin/python", "-m", "noria", "bench", "quick"], "noria bench quick"),
        (["/bin/python", "-m", "noria_bench.device", "bench", "quick"], "python -m noria_bench.device bench quick"),
    ],
)
def test_a_result_has_the_command_as_it_can_be_typed_again(typed, reported, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(sys, "argv", ["noria", "bench", "quick"])
    assert collect_provenance()["command"] == reported
