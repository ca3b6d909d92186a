"""Limits and events of this process's control group (cgroup v2; of v1 the CPU limit only).

Linux only; elsewhere there are none.
"""

import pathlib


def memory_events(root: pathlib.Path = pathlib.Path("/")) -> pathlib.Path | None:
    """Return the memory.events file of this process's group, which also counts for the groups below.

    None without one.
    """
    group = _group(root)
    file = group / "memory.events" if group is not None else None
    return file if file is not None and file.exists() else None


def _group(root: pathlib.Path, v1_controller: str = "") -> pathlib.Path | None:
    """The folder of this process's cgroup v2 group, or of its group under a v1 controller; None if it is in none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if v1_controller in controllers.split(",") and (v1_controller or number == "0"):
            return root / "sys/fs/cgroup" / v1_controller / path.lstrip("/")
    return None


def num_oom_kills(events: pathlib.Path | None) -> int:
    """Return how many processes of the group the OOM killer has killed so far; 0 if `events` is None or unreadable."""
    if events is None:
        return 0
    try:
        counts = dict(line.split() for line in events.read_text().splitlines())
    except OSError:  # the group is gone
        return 0
    return int(counts.get("oom_kill", 0))


def memory_limit(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Return the tightest memory limit of this process's group and the groups above it, in bytes.

    None without a limit.
    """
    return min(map(int, _limits("memory.max", root)), default=None)


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Return the bytes that this process's group, and every group above it, has left; None without a limit.

    Cached files that the kernel drops first count as free.
    """
    group, free = _group(root), list[int]()
    for folder in _upwards(group, root / "sys/fs/cgroup") if group is not None else []:
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdecimal() and used:
            counts = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            free.append(int(limit) - int(used) + int(counts.get("inactive_file", 0)))
    return max(0, min(free)) if free else None


def cpu_limit(root: pathlib.Path = pathlib.Path("/")) -> float | None:
    """Cores' worth of time that this process's group, and every group above it, may use; None without a limit.

    Where the cpu controller is a cgroup v1 one, its quota and period are read instead.
    """
    quotas = [line.split() for line in _limits("cpu.max", root)] or _quotas_v1(root)
    return min((int(quota) / int(period) for quota, period in quotas), default=None)


def usable_cores(num_scheduled: int, limit: float | None) -> int:
    """Threads that may run at once: the cores of the process's affinity, at most `limit`, its `cpu_limit`.

    At least 1.
    """
    return max(1, num_scheduled if limit is None else min(num_scheduled, int(limit)))


def _limits(name: str, root: pathlib.Path) -> list[str]:
    """The contents of the file `name` in this process's group and those above it, where it sets a limit."""
    group = _group(root)
    if group is None:
        return []
    limits = [_read(folder / name) for folder in _upwards(group, root / "sys/fs/cgroup")]
    return [limit for limit in limits if limit and not limit.startswith("max")]


def _quotas_v1(root: pathlib.Path) -> list[list[str]]:
    """[quota, period] in microseconds of this process's v1 cpu group and those above it, where there is a quota."""
    group, top = _group(root, "cpu"), root / "sys/fs/cgroup/cpu"
    folders = _upwards(group, top) if group is not None else []
    quotas = [[_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")] for folder in folders]
    return [[quota, period] for quota, period in quotas if quota not in ("", "-1") and period]


def _upwards(folder: pathlib.Path, top: pathlib.Path) -> list[pathlib.Path]:
    """`folder` and its parents up to `top`; in a container whose paths are the host's, most of them do not exist."""
    return [each for each in (folder, *folder.parents) if each.is_relative_to(top)]


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
