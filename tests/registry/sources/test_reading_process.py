"""The process that reads a source."""

import os

import pytest

from noria.errors import RegistryUnavailable
from noria.registry.sources import reading_process
from noria.registry.sources.limits import SourceLimits
from noria.registry.sources.reading_process import ReadingTask, read_in_process


async def test_a_killed_reader_is_no_fault_of_the_source(monkeypatch, tmp_path):
    monkeypatch.setattr(reading_process.sys, "executable", "/bin/false")
    task = ReadingTask("bundled", "shapes", str(tmp_path), SourceLimits((), 1.0), os.getpid())
    with pytest.raises(RegistryUnavailable, match="ended with status 1"):
        await read_in_process(task, 60)


async def test_a_reader_that_takes_too_long_is_killed(monkeypatch, tmp_path):
    executable = tmp_path / "slow"
    executable.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    executable.chmod(0o700)
    monkeypatch.setattr(reading_process.sys, "executable", str(executable))
    task = ReadingTask("bundled", "shapes", str(tmp_path), SourceLimits((), 1.0), os.getpid())
    with pytest.raises(RegistryUnavailable, match=r"bundled was not read within 1 s\."):
        await read_in_process(task, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
