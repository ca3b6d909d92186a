"""What processes that have ended had counted: folded into one file of each kind, so that neither the folder nor a scrape grows with restarts.

The supervisor folds when a child has ended; it alone starts processes, so none can come under an old process id meanwhile. What it writes is
a file as any other (`counter_ended-7.db`), and takes the places of those it is the sum of: the number tells front ends that some are gone.
The exchange is several changes to the folder, so nobody reads meanwhile: both hold a lock, which the kernel takes from a process that ends.
A supervisor that is killed within the exchange leaves both; its server ends with it, and with the folder.

No counter falls. Sums are rounded up, by 1 in 10¹⁶ at most: where 0.1 + 0.2 is rounded down, what was shown before would have been more.
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

_MERGED_FILE_NAME = re.compile(r"(?:counter|histogram)_ended-(\d+)\.db")


def merge_dead_processes(folder: str) -> None:
    """Do it for all processes that have ended by now; while a scrape is being read, leave it to the next call.

    Raises OSError: the disk is full, say. What is counted is as before; the next call tries again.
    """
    directory = pathlib.Path(folder)
    for kind in ("counter", "histogram"):
        paths = sorted(directory.glob(f"{kind}_*.db"))
        dead = [path for path in paths if not is_merged(path.name) and not _is_alive(path)]
        if not dead:
            continue
        merged = [path for path in paths if is_merged(path.name)]
        sequence_number = 1 + max((_sequence_number(path) for path in merged), default=0)
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
    """Nothing is exchanged meanwhile."""
    return _locked(folder, fcntl.LOCK_SH)


def is_merged(name: str) -> bool:
    """Whether a file is of many processes that have ended."""
    return _MERGED_FILE_NAME.fullmatch(name) is not None


@contextlib.contextmanager
def _locked(folder: pathlib.Path, operation: int) -> Iterator[None]:
    with (folder / "ended.lock").open("ab") as file:  # which may lie on a disk where a folder cannot be locked
        fcntl.flock(file, operation)
        yield


def _sequence_number(path: pathlib.Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _is_alive(path: pathlib.Path) -> bool:
    is_alive: bool = psutil.pid_exists(int(path.stem.rpartition("_")[2]))
    return is_alive


def _sums(paths: list[pathlib.Path]) -> dict[bytes, float]:
    """The values by key, in the order in which keys came; of each file as far as it can be read."""
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
    """Their sum or, where no double is their sum, the next that is more."""
    total = first + second
    if math.isfinite(total) and math.fsum((first, second, -total)) > 0.0:
        return math.nextafter(total, math.inf)
    return total
