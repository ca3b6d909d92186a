"""The clients that load a server, Locust and that of traces. Each is a process that writes a line for every request as
it ends.

A client writes into its folder: `records.jsonl`, `samples/` with some of the replies, and `log`. After an interruption
they hold what was recorded. A client ends when the bench does, even if the bench is killed.
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

from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.benches import scenarios
from noria_bench.benches.scenarios import Scenario
from noria_bench.load.trace_client import TraceConfig
from noria_bench.load.workload import Arrival, Mix, RequestTemplate
from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import Traffic

_PROGRESS_INTERVAL_S = 5.0
_WARM_UP_STEPS = 4
# For Locust to start, and to finish requests in flight.
_LOCUST_GRACE_S = 60.0
_SERVER_ENDED = "the server ended under load; its stderr is above"
# Of a client's folder, for some of the replies.
SAMPLE_FOLDER = "samples"

Body = Mapping[str, Any]


class LoadGenerator(Protocol):
    """What is sent to a server: a scenario, or a trace of arrivals."""

    @property
    def traffic(self) -> Traffic:
        """Its description, as a run stores it."""
        ...

    @property
    def warm_up_bodies(self) -> list[Body]:
        """Bodies of every kind that will be sent."""
        ...

    @property
    def max_duration_s(self) -> float:
        """An upper bound on the seconds until the client ends."""
        ...

    def body(self, number: int) -> Body:
        """The body of request `number`."""
        ...

    def start(self, url: str, path: str, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
        """Start the client; a terminal's Ctrl-C does not reach it."""
        ...


@dataclass(frozen=True)
class ScenarioLoadGenerator:
    """One of the reference article's scenarios, by Locust."""

    scenario: Scenario
    traffic: Traffic
    rows: float  # of a request

    @property
    def warm_up_bodies(self) -> list[Body]:
        """Two for each user: the second time, all that a batch needs is loaded."""
        users = self.scenario.num_users
        return [scenarios.request_body(number, self.traffic.seed + 1) for number in range(2 * users)]

    @property
    def max_duration_s(self) -> float:
        """The traffic, and Locust's start and end."""
        return self.traffic.seconds + _LOCUST_GRACE_S

    def body(self, number: int) -> Body:
        """As the article's Locust task builds it."""
        return scenarios.request_body(number, self.traffic.seed)

    def start(self, url: str, path: str, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
        """Start Locust, headless. As in the article, a request in flight at the end of the time is not counted."""
        traffic, file = self.traffic, pathlib.Path(__file__).with_name("locustfiles") / f"{self.scenario.name}.py"
        assert traffic.spawn_interval_s is not None
        options = {
            "--locustfile": file,
            "--host": url,
            "--path": path,
            "--users": traffic.num_users,
            "--spawn-rate": 1 / traffic.spawn_interval_s,
            "--run-time": f"{traffic.seconds:.0f}s",
            "--body-seed": traffic.seed,
            "--rows": self.rows,
            "--records": folder / "records.jsonl",
            "--sample-folder": folder / SAMPLE_FOLDER,
            "--exit-code-on-error": 0,
            "--loglevel": "WARNING",
        }
        arguments = [str(argument) for option in options.items() for argument in option]
        return _start_client([sys.executable, "-m", "locust", "--headless", "--only-summary", *arguments], folder, None)


@dataclass(frozen=True)
class TraceLoadGenerator:
    """A trace of arrivals, by `trace_client`: an open loop, or a closed one if the traffic has users."""

    traffic: Traffic
    arrivals: tuple[Arrival, ...]
    warm_up_bodies: list[Body]
    grace_s: float  # from the end of the trace until requests count as unanswered

    @property
    def max_duration_s(self) -> float:
        """Until no answer counts any more."""
        return self._config("", None).end_s

    def body(self, number: int) -> Body:
        """As the trace has it."""
        return self.arrivals[number % len(self.arrivals)].body

    def start(self, url: str, path: str, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
        """Start the client, which ends when everything is answered."""
        config = msgspec.json.encode(self._config(url + path, str(folder / SAMPLE_FOLDER)))
        return _start_client([sys.executable, "-m", "noria_bench.load.trace_client"], folder, config)

    def _config(self, url: str, sample_folder: str | None) -> TraceConfig:
        num_users = self.traffic.num_users
        users_s = 0.0 if num_users is None else self.traffic.seconds
        return TraceConfig(url, self.arrivals, self.grace_s, sample_folder, num_users, users_s)


def bodies_of_every_kind(mix: Mix, spec: DiffusionModelSpec) -> list[Body]:
    """A body, with few steps, for every size, guidance and number of images in `mix`, every scheduler, every LoRA.

    Of start images one strength is enough.
    """
    guidances = {guidance > 1.0: guidance for guidance in mix.guidance.values}.values()
    first = RequestTemplate(
        "a red circle", 0, *mix.sizes.values[0], _WARM_UP_STEPS, mix.guidance.values[0], spec.default_scheduler, 1
    )
    changes: list[dict[str, Any]] = [
        {"width": width, "height": height, "guidance_scale": guidance, "n": n}
        for width, height in mix.sizes.values
        for guidance in guidances
        for n in mix.num_images.values
    ]
    changes += [{"scheduler": name} for name in mix.schedulers.values]
    changes += [{"lora": name} for name in mix.loras.values if name]
    changes += [{"strength": strength} for strength in mix.strengths.values if strength is not None][:1]
    return [msgspec.structs.replace(first, seed=seed, **change).body for seed, change in enumerate(changes)]


def _start_client(command: list[str], folder: pathlib.Path, stdin_bytes: bytes | None) -> "subprocess.Popen[bytes]":
    """Start a client in a process group of its own.

    The client of traces reads its job from stdin and writes its records to stdout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Locust reads options from variables LOCUST_*; a user's own would change the load.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    with (folder / "log").open("wb") as log, (folder / "records.jsonl").open("ab") as output:
        client = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log if stdin_bytes is None else output,
            stderr=log,
            process_group=0,
            env=environment,
        )
    assert client.stdin is not None
    try:
        if stdin_bytes is not None:
            client.stdin.write(stdin_bytes)
        client.stdin.close()
    # Ctrl-C while the client starts, which takes a second; no caller can stop it yet.
    except BaseException:
        client.kill()
        client.wait()
        raise
    return client


def run_load(
    generator: LoadGenerator,
    url: str,
    path: str,
    folder: pathlib.Path,
    server: psutil.Process,
    log_status: Callable[[str], None],
) -> None:
    """Load a server until the client ends, and report progress every few seconds. `read_records` returns the results.

    Raises:
        RuntimeError: the server, or the client, ended too early.

    """
    client, started = generator.start(url, path, folder), time.monotonic()
    reported_s = 0.0
    try:
        while client.poll() is None:
            elapsed_s = time.monotonic() - started
            if has_ended(server):
                raise RuntimeError(_SERVER_ENDED)
            if elapsed_s > generator.max_duration_s + _LOCUST_GRACE_S:
                raise RuntimeError(f"the client did not end within {elapsed_s:.0f} s")
            if elapsed_s - reported_s >= _PROGRESS_INTERVAL_S:
                reported_s = elapsed_s
                log_status(progress_line(read_records(folder), elapsed_s, generator.traffic.seconds))
            time.sleep(0.1)
        # It may have ended just before the client did.
        if has_ended(server):
            raise RuntimeError(_SERVER_ENDED)
    finally:
        client.terminate()
        client.wait()
    if client.returncode:
        log_lines = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise RuntimeError(f"the client ended with status {client.returncode}: {' / '.join(log_lines[-3:])}")


def progress_line(records: list[RequestRecord], elapsed_s: float, seconds: float) -> str:
    """The progress of a run as one line."""
    num_failed = sum(record.status != 200 for record in records)
    remaining_s = seconds - elapsed_s
    phase = f"{remaining_s:.0f} s left" if remaining_s > 0 else "waiting for the last answers"
    requests_per_s = (len(records) - num_failed) / min(elapsed_s, seconds)
    return f"{phase}: {len(records)} answers, {num_failed} failed, {requests_per_s:.2f} requests/s"


def read_records(folder: pathlib.Path) -> list[RequestRecord]:
    """What a client has written until now, in the order of the requests' ends; an incomplete last line is ignored."""
    file = folder / "records.jsonl"
    if not file.exists():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=RequestRecord) for line in lines]


def has_ended(process: psutil.Process) -> bool:
    """Whether the process has ended; it may still be a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
