"""What the kernel tells of this process's control group (cgroup v2). Linux only; elsewhere, and under v1, nothing is told."""

import contextlib
import pathlib


def memory_events(root: pathlib.Path = pathlib.Path("/")) -> pathlib.Path | None:
    """The file that counts what want of memory has done to this process's group and those below; None where there is none."""
    group = _group(root)
    file = group / "memory.events" if group is not None else None
    return file if file is not None and file.exists() else None


def _group(root: pathlib.Path) -> pathlib.Path | None:
    """The group of this process, as a folder; None where there are none, or only v1's."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("0::"):
            return root / "sys/fs/cgroup" / line.removeprefix("0::").lstrip("/")
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


def memory_limit(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Bytes that this process's group, and every group above it, may use; None without a limit."""
    return min(map(int, _limits("memory.max", root)), default=None)


def cpu_limit(root: pathlib.Path = pathlib.Path("/")) -> float | None:
    """Cores' worth of time that this process's group, and every group above it, may use; None without a limit."""
    quotas = (line.split() for line in _limits("cpu.max", root))
    return min((int(quota) / int(period) for quota, period in quotas), default=None)


def _limits(name: str, root: pathlib.Path) -> list[str]:
    """What the file of that name says in this process's group and those above it, where it sets a limit."""
    group = _group(root)
    if group is None:
        return []
    top, limits = root / "sys/fs/cgroup", []
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError):
            limit = (folder / name).read_text().strip()
            if not limit.startswith("max"):
                limits.append(limit)
        if folder == top:
            break
    return limits
