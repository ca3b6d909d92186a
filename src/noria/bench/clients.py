"""The programs that load a server, each a process of its own that writes a line for every request as it ends: Locust, and the open loop.

What a client leaves in its folder: `records.jsonl`, `kept/` with a sample of the replies, `log`. A client that is cut short leaves
what it had. A client ends with the bench, however that ends.
"""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import psutil

from noria.bench import scenarios
from noria.bench.openloop import Job
from noria.bench.runs import Traffic
from noria.bench.scenarios import Scenario
from noria.bench.statistics import Record
from noria.bench.workload import Arrival, Ask, Mix
from noria.spec import ModelSpec

_TOLD_EVERY_S = 5.0
_WARM_UP_STEPS = 4
_LOCUST_GRACE_S = 60.0  # to start, and to end what it has begun
_SERVER_ENDED = "the server ended under load; its own words are above"

Body = Mapping[str, Any]


class Load(Protocol):
    """Something to send to a server: a scenario, or arrivals."""

    @property
    def traffic(self) -> Traffic:
        """As the run tells it."""
        ...

    @property
    def warm_up(self) -> list[Body]:
        """Requests of every kind that will be sent."""
        ...

    @property
    def lasts_s(self) -> float:
        """At most, until the client has ended."""
        ...

    def body(self, number: int) -> Body:
        """What its request `number` asks for."""
        ...

    def begin(self, url: str, path: str, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
        """Start the client; a terminal's Ctrl-C does not reach it."""
        ...


@dataclass(frozen=True)
class ScenarioLoad:
    """One of the seed article's, by Locust."""

    scenario: Scenario
    traffic: Traffic
    rows: float  # the work of a request

    @property
    def warm_up(self) -> list[Body]:
        """As many as there are users, twice: the second time everything is there that a batch needs."""
        users = self.scenario.users
        return [scenarios.body(number, self.traffic.seed + 1) for number in range(2 * users)]

    @property
    def lasts_s(self) -> float:
        """Locust ends by itself."""
        return self.traffic.seconds + _LOCUST_GRACE_S

    def body(self, number: int) -> Body:
        """By the article's task."""
        return scenarios.body(number, self.traffic.seed)

    def begin(self, url: str, path: str, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
        """Locust, headless; who is waiting when the time is over is not counted, as Locust never counted him."""
        traffic, file = self.traffic, pathlib.Path(__file__).with_name("locustfiles") / f"{self.scenario.name}.py"
        assert traffic.user_every_s is not None
        options = {
            "--locustfile": file,
            "--host": url,
            "--path": path,
            "--users": traffic.users,
            "--spawn-rate": 1 / traffic.user_every_s,
            "--run-time": f"{traffic.seconds:.0f}s",
            "--body-seed": traffic.seed,
            "--rows": self.rows,
            "--records": folder / "records.jsonl",
            "--keep": folder / "kept",
            "--exit-code-on-error": 0,
            "--loglevel": "WARNING",
        }
        words = [str(word) for option in options.items() for word in option]
        return _started([sys.executable, "-m", "locust", "--headless", "--only-summary", *words], folder, None)


@dataclass(frozen=True)
class OpenLoad:
    """Arrivals that nothing delays, by `openloop`."""

    traffic: Traffic
    arrivals: tuple[Arrival, ...]
    warm_up: list[Body]

    @property
    def lasts_s(self) -> float:
        """After the last arrival, what is still unanswered gets as long as they came for."""
        return self.arrivals[-1].intended_s + self.traffic.seconds

    def body(self, number: int) -> Body:
        """As it was drawn."""
        return self.arrivals[number].body

    def begin(self, url: str, path: str, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
        """The open loop, until everything is answered."""
        job = Job(url + path, self.arrivals, grace_s=self.traffic.seconds, keep=str(folder / "kept"))
        return _started([sys.executable, "-m", "noria.bench.openloop"], folder, msgspec.json.encode(job))


def warm_up_of(mix: Mix, spec: ModelSpec) -> list[Body]:
    """A request, with few steps, of every size, guidance and number of images in `mix`, and of every scheduler."""
    guidances = {guidance > 1.0: guidance for guidance in mix.guidance.values}.values()
    kinds = [
        (size, guidance, spec.default_scheduler, n)
        for size in mix.sizes.values
        for guidance in guidances
        for n in mix.num_images.values
    ]
    kinds += [(mix.sizes.values[0], mix.guidance.values[0], name, 1) for name in mix.schedulers.values]
    return [
        msgspec.to_builtins(Ask("a red circle", place, *size, _WARM_UP_STEPS, guidance, scheduler, n))
        for place, (size, guidance, scheduler, n) in enumerate(kinds)
    ]


def _started(command: list[str], folder: pathlib.Path, job: bytes | None) -> "subprocess.Popen[bytes]":
    """Start a client in a process group of its own; the open loop writes its records to stdout, and reads its job from stdin."""
    folder.mkdir(parents=True, exist_ok=True)
    # Locust reads options from its own variables; what a user has there for other tests would be another load.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    with (folder / "log").open("wb") as log, (folder / "records.jsonl").open("ab") as output:
        client = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log if job is None else output,
            stderr=log,
            process_group=0,
            env=environment,
        )
    assert client.stdin is not None
    try:
        if job is not None:
            client.stdin.write(job)
        client.stdin.close()
    except BaseException:  # Ctrl-C while it comes up, which takes a second, and nobody else knows of it yet
        client.kill()
        client.wait()
        raise
    return client


def send(
    load: Load,
    url: str,
    path: str,
    folder: pathlib.Path,
    server: psutil.Process,
    say: Callable[[str], None],
) -> None:
    """Load a server to the end; `say` hears every few seconds how it goes. What was recorded is read with `records`.

    Raises:
        RuntimeError: the server, or the client, ended too early.

    """
    client, started = load.begin(url, path, folder), time.monotonic()
    told_s = 0.0
    try:
        while client.poll() is None:
            elapsed_s = time.monotonic() - started
            if ended(server):
                raise RuntimeError(_SERVER_ENDED)
            if elapsed_s > load.lasts_s + _LOCUST_GRACE_S:
                raise RuntimeError(f"the client did not end within {elapsed_s:.0f} s")
            if elapsed_s - told_s >= _TOLD_EVERY_S:
                told_s = elapsed_s
                say(progress(records(folder), elapsed_s, load.traffic.seconds))
            time.sleep(0.1)
        if ended(server):  # in the moment before the client did
            raise RuntimeError(_SERVER_ENDED)
    finally:
        client.terminate()
        client.wait()
    if client.returncode:
        words = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RuntimeError(f"the client ended with status {client.returncode}: {' / '.join(words[-3:])}")


def progress(found: list[Record], elapsed_s: float, seconds: float) -> str:
    """How a run goes, in a few words."""
    failed = sum(record.status != 200 for record in found)
    left_s = seconds - elapsed_s
    what = f"{left_s:.0f} s left" if left_s > 0 else "waiting for the last answers"
    return f"{what}: {len(found)} answers, {failed} failed, {(len(found) - failed) / min(elapsed_s, seconds):.2f} requests/s"


def records(folder: pathlib.Path) -> list[Record]:
    """What a client has written until now, in the order of the requests' ends; a line that it is still writing is left."""
    file = folder / "records.jsonl"
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Record) for line in lines]


def ended(process: psutil.Process) -> bool:
    """Whether it has, though nobody may have waited for it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
