"""`kill -9` to random children of a supervisor at random times, and how long the server was not ready."""

import os
import random
import signal
import threading
import time
from collections import Counter

import httpx
import psutil


def role_of(process: psutil.Process) -> str | None:
    """The role of a process: "engine" or "frontend", also of one that has only just been started; None: neither."""
    words = " ".join(process.cmdline())
    return next((role for role in ("engine", "frontend") if f"noria.{role}" in words or f"noria {role}" in words), None)


class Observer(threading.Thread):
    """A thread that runs beside the traffic until `stop`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End as soon as what is begun is done, and wait for the end."""
        self._stopping.set()
        self.join()


class Killer(Observer):
    """Kills `num_kills` children within `seconds`, at uniformly random times; each living child is equally likely."""

    def __init__(self, supervisor_pid: int, num_kills: int, seconds: float, seed: int) -> None:
        super().__init__("killer")
        self._supervisor = psutil.Process(supervisor_pid)
        self._random = random.Random(seed)
        self._times = sorted(self._random.uniform(0, seconds) for _ in range(num_kills))
        self.killed: Counter[str] = Counter()
        self.killed_at_s: list[float] = []  # since the start
        self.pids: set[int] = set()

    def run(self) -> None:
        """Kill until all kills are done, or `stop`."""
        started = time.monotonic()
        for at in self._times:
            if self._stopping.wait(max(0.0, started + at - time.monotonic())):
                return
            while not self._kill_one():  # all are dead at this moment
                if self._stopping.wait(0.05):
                    return
            self.killed_at_s.append(time.monotonic() - started)

    def _kill_one(self) -> bool:
        children = self._supervisor.children()
        self._random.shuffle(children)
        for child in children:
            try:
                role = role_of(child)
                if role is not None and child.status() != psutil.STATUS_ZOMBIE:
                    os.kill(child.pid, signal.SIGKILL)
                    self.killed[role] += 1
                    self.pids.add(child.pid)
                    return True
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return False


class ReadinessMonitor(Observer):
    """Polls `/readyz` five times a second, and records how long it was not 200 each time."""

    def __init__(self, url: str) -> None:
        super().__init__("readiness")
        self._url = url
        self.outages_s: list[float] = []

    def run(self) -> None:
        """Poll until `stop`."""
        since = None
        with httpx.Client(base_url=self._url, timeout=5) as client:
            while not self._stopping.wait(0.2):
                now, ready = time.monotonic(), _is_ready(client)
                if not ready and since is None:
                    since = now
                elif ready and since is not None:
                    self.outages_s.append(now - since)
                    since = None


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False
