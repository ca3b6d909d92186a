"""Merges the counters of ended processes into one file per kind, so that restarts do not make scrapes slower.

The supervisor merges when a child has ended. It alone starts processes, so no new process can reuse a process id
meanwhile. The merged file has the usual format and a name such as `counter_ended-7.db`; it replaces the files of which
it is the sum, and its new number shows readers that files are gone. Replacing takes several changes to the folder, so
the supervisor and readers hold a file lock, which the kernel releases when a process ends. A supervisor that is killed
while replacing leaves both; the server and the folder end with it.

No counter ever decreases: sums are rounded up, by at most 1 in 10¹⁶. If 0.1 + 0.2 were rounded down, the value shown
before would have been larger.
"""

import contextlib
import fcntl
import math
import pathlib
import re
import struct
from collections.abc import Iterator

import psutil

from noria.observe.metrics.mmap_format import decode_key, iter_entries, read_used_bytes, serialize_file


def merge_dead_processes(folder: str) -> None:
    """Merge the files of all processes that have ended, unless a scrape is reading the folder.

    Raises OSError, for example if the disk is full. The counts are then unchanged, and the next call tries again.
    """
    directory = pathlib.Path(folder)
    for kind in ("counter", "histogram"):
        paths = sorted(directory.glob(f"{kind}_*.db"))
        dead = [path for path in paths if not is_merged(path.name) and not psutil.pid_exists(_number(path))]
        if not dead:
            continue
        merged = [path for path in paths if is_merged(path.name)]
        sequence_number = 1 + max(map(_number, merged), default=0)
        draft = directory / f"{kind}.draft"
        try:
            draft.write_bytes(serialize_file(_sums([*merged, *dead])))
            with contextlib.suppress(BlockingIOError), _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
                draft.rename(directory / f"{kind}_ended-{sequence_number}.db")
                for path in (*merged, *dead):
                    path.unlink()
        finally:
            draft.unlink(missing_ok=True)


def read_lock(folder: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no files are replaced."""
    return _locked(folder, fcntl.LOCK_SH)


def is_merged(name: str) -> bool:
    """Return whether `name` is that of a merged file."""
    return "_ended-" in name


@contextlib.contextmanager
def _locked(folder: pathlib.Path, operation: int) -> Iterator[None]:
    with (folder / "ended.lock").open("ab") as file:  # a file, since some file systems cannot lock a folder
        fcntl.flock(file, operation)
        yield


def _number(path: pathlib.Path) -> int:
    """Return the number at the end of a file's name: a process id, or a merged file's sequence number."""
    return int(re.split("[_-]", path.stem)[-1])


def _sums(paths: list[pathlib.Path]) -> dict[bytes, float]:
    """Return the sums by key, in the order of first appearance; each file is read as far as it is valid."""
    totals: dict[bytes, float] = {}
    for path in paths:
        content = read_used_bytes(path)
        for key, value_offset in iter_entries(content):
            if key not in totals and decode_key(key) is None:
                break
            (value,) = struct.unpack_from("d", content, value_offset)
            totals[key] = _sum_rounded_up(totals.get(key, 0.0), value)
    return totals


def _sum_rounded_up(first: float, second: float) -> float:
    """Return the sum or, if it is not a double, the next larger double."""
    total = first + second
    if math.isfinite(total) and math.fsum((first, second, -total)) > 0.0:
        return math.nextafter(total, math.inf)
    return total
