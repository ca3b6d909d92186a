"""Samples of what a server holds: memory, files, threads and connections of its processes, and the size of its data."""

import contextlib
import pathlib
import stat
import time

import psutil

from noria.testing.server import RunningServer
from noria_bench.soak.killer import Observer, role_of

SUPERVISOR = "supervisor"


class Sampler(Observer):
    """Samples every `interval_s` until `stop`.

    `series` has the values by name, such as "engine threads", each as long as `at_s`; None: there was no such process.
    PSS is memory in which what processes share is divided among them.
    """

    def __init__(self, server: RunningServer, data: pathlib.Path, interval_s: float) -> None:
        super().__init__("sampler")
        self._server, self._data, self._interval_s = server, data, interval_s
        self.at_s: list[float] = []
        self.series: dict[str, list[float | None]] = {}

    def run(self) -> None:
        """Sample until `stop`."""
        started = time.monotonic()
        while not self._stopping.wait(self._interval_s):
            sample = self._sample()
            for name in self.series.keys() | sample.keys():
                values = self.series.setdefault(name, [None] * len(self.at_s))
                values.append(sample.get(name))
            self.at_s.append(round(time.monotonic() - started, 2))

    def _sample(self) -> dict[str, float]:
        sample: dict[str, float] = {}
        for process in (self._server.process, *self._server.process.children()):
            with contextlib.suppress(psutil.Error, OSError):  # killed meanwhile
                role = SUPERVISOR if process == self._server.process else role_of(process)
                if role is not None:
                    memory = process.memory_full_info()
                    values = {
                        "PSS": memory.pss,
                        "RSS": memory.rss,
                        "files": process.num_fds(),
                        "threads": process.num_threads(),
                    }
                    if role == "frontend":
                        values["connections"] = len(process.net_connections("tcp"))
                    for name, value in values.items():
                        sample[f"{role} {name}"] = sample.get(f"{role} {name}", 0) + value
        sizes = _sizes(self._data)
        sample["data bytes"] = sum(sizes.values())
        sample["database bytes"] = sum(size for path, size in sizes.items() if ".sqlite" in path.name)
        return sample


def _sizes(folder: pathlib.Path) -> dict[pathlib.Path, int]:
    """Return the sizes of the files that are still there when they are looked at."""
    sizes = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                sizes[path] = status.st_size
    return sizes
