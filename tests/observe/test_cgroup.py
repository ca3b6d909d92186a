"""Limits and OOM kills of a control group, read from a fake file system."""

import pytest

from noria.observe.cgroup import cpu_limit, free_memory, memory_events, memory_limit, num_oom_kills


def make_group(root, lines, folder):
    """Return the folder of a new group; `lines` are the process's groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    group = root / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    return group


def test_the_groups_own_file_is_read(tmp_path):
    group = make_group(tmp_path, "0::/kubepods/pod1\n", "kubepods/pod1")
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n")
    events = memory_events(tmp_path)
    assert events == group / "memory.events"
    assert num_oom_kills(events) == 2
    events.unlink()
    assert num_oom_kills(events) == 0


def test_without_cgroup_v2_nothing_is_reported(tmp_path):
    assert memory_events(tmp_path) is None
    make_group(tmp_path, "4:memory:/process\n0::/\n", "")
    assert memory_events(tmp_path) is None
    assert num_oom_kills(None) == 0


def test_the_tightest_limit_of_the_group_and_those_above_it_applies(tmp_path):
    group = make_group(tmp_path, "0::/kubepods/pod1\n", "kubepods/pod1")
    assert (memory_limit(tmp_path), cpu_limit(tmp_path)) == (None, None)
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("300000 100000\n")
    (group.parent / "memory.max").write_text("4096\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    (group.parent.parent / "memory.max").write_text("8192\n")
    assert memory_limit(tmp_path) == 4096
    assert cpu_limit(tmp_path) == 1.5


def test_without_cgroup_v2_there_are_no_limits(tmp_path):
    assert (memory_limit(tmp_path), cpu_limit(tmp_path)) == (None, None)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
@pytest.mark.parametrize("group", ["/", "/docker/a-path-of-the-host"])
def test_a_containers_cpu_limit_is_read_under_either_version(tmp_path, files, cpus, group):
    make_group(tmp_path, f"4:cpu,cpuacct:{group}\n0::{group}\n", "cpu")
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)
    assert cpu_limit(tmp_path) == cpus


def test_a_v1_quota_of_the_processs_own_group_is_read(tmp_path):
    group = make_group(tmp_path, "4:cpu,cpuacct:/service\n1:name=systemd:/service\n", "cpu/service")
    (group / "cpu.cfs_quota_us").write_text("250000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_limit(tmp_path) == 2.5


def test_the_least_free_memory_of_the_group_and_those_above_it_applies(tmp_path):
    group = make_group(tmp_path, "0::/kubepods/pod1\n", "kubepods/pod1")
    assert free_memory(tmp_path) is None
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert free_memory(tmp_path) is None
    (group / "memory.max").write_text("4096\n")
    (group / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    (group.parent / "memory.max").write_text("8192\n")
    (group.parent / "memory.current").write_text("2000\n")
    assert free_memory(tmp_path) == 4096 - 1000 + 300
    (group.parent / "memory.current").write_text("9000\n")
    assert free_memory(tmp_path) == 0
