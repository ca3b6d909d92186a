"""What the kernel tells of this process's control group (cgroup v2). Linux only; elsewhere, and under v1, nothing is told."""

import pathlib


def memory_events(root: pathlib.Path = pathlib.Path("/")) -> pathlib.Path | None:
    """The file that counts what want of memory has done to this process's group and those below; None where there is none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::"):
            file = root / "sys/fs/cgroup" / line.removeprefix("0::").lstrip("/") / "memory.events"
            return file if file.exists() else None
    return None


def num_oom_kills(events: pathlib.Path | None) -> int:
    """How many processes of the group the kernel has killed so far because no memory was left; 0 where nobody counts."""
    if events is None:
        return 0
    try:
        counts = dict(line.split() for line in events.read_text().splitlines())
    except OSError:  # the group is gone
        return 0
    return int(counts.get("oom_kill", 0))
