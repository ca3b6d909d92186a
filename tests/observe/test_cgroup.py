"""Reading the kernel's count of processes killed for want of memory."""

from noria.observe.cgroup import cpu_limit, memory_events, memory_limit, num_oom_kills


def test_the_groups_own_file_is_read(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/kubepods/pod1\n")
    group = tmp_path / "sys/fs/cgroup/kubepods/pod1"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n")
    events = memory_events(tmp_path)
    assert events == group / "memory.events"
    assert num_oom_kills(events) == 2
    events.unlink()
    assert num_oom_kills(events) == 0


def test_without_cgroup_v2_nothing_is_reported(tmp_path):
    assert memory_events(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/process\n0::/\n")
    assert memory_events(tmp_path) is None
    assert num_oom_kills(None) == 0


def test_the_tightest_limit_of_the_group_and_those_above_it_holds(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/kubepods/pod1\n")
    group = tmp_path / "sys/fs/cgroup/kubepods/pod1"
    group.mkdir(parents=True)
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
