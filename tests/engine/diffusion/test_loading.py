"""Settings that the executor takes from the machine."""

import functools
import os

from noria.config import EngineConfig
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto
from noria.models.catalog import open_model
from noria.observe import cgroup


def test_automatic_threads_respect_the_quota_of_the_processs_own_group(tmp_path, monkeypatch, bundled_folder):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/noria.service\n")
    group = tmp_path / "sys/fs/cgroup/system.slice/noria.service"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("300000 100000\n")
    monkeypatch.setattr(cgroup, "cpu_limit", functools.partial(cgroup.cpu_limit, tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    machine = detect_machine()
    assert machine.num_cores == 3
    assert resolve_auto(EngineConfig(), open_model(str(bundled_folder)), "cpu", machine).threads == 3
