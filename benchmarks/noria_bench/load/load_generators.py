"""The client that loads a server: `trace_client`, a process that writes a line for every request as it ends.

It writes into a folder: `records.jsonl`, `samples/` with some of the replies, and `log`. After an interruption they
hold what was recorded. The client ends when the bench does, even if the bench is killed.
"""

import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.load.trace_client import TraceConfig
from noria_bench.load.workload import Arrival, Mix, RequestTemplate
from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import Traffic
from noria_bench.targets.catalog import Protocol

_PROGRESS_INTERVAL_S = 5.0
_WARM_UP_STEPS = 4
# For a client to start and to end.
_CLIENT_GRACE_S = 60.0
_SERVER_ENDED = "the server ended under load; its stderr is above"
# The part of a client's folder that has some of the replies.
SAMPLE_FOLDER = "samples"

Body = Mapping[str, Any]


@dataclass(frozen=True)
class LoadGenerator:
    """The requests to send to a server: an open loop of arrivals, or a closed one if the traffic has users."""

    traffic: Traffic
    arrivals: tuple[Arrival, ...]
    warm_up_bodies: list[Body]  # bodies of every kind that is sent
    grace_s: float  # from the end of the trace until requests count as unanswered

    @property
    def max_duration_s(self) -> float:
        """An upper bound on the seconds until the client ends: until no answer counts any more."""
        return self._config("", "t2i", None).end_s

    def body(self, number: int) -> Body:
        """Return the body of request `number`, as the trace has it."""
        return self.arrivals[number % len(self.arrivals)].body

    def start(self, url: str, protocol: Protocol, folder: pathlib.Path) -> "subprocess.Popen[bytes]":
        """Start the client, which ends when everything is answered; a terminal's Ctrl-C does not reach it."""
        config = msgspec.json.encode(self._config(url, protocol, str(folder / SAMPLE_FOLDER)))
        command = [sys.executable, "-m", "noria_bench.load.trace_client"]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log").open("wb") as log, (folder / "records.jsonl").open("ab") as output:
            client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=log, process_group=0)
        assert client.stdin is not None
        try:
            client.stdin.write(config)
            client.stdin.close()
        # Ctrl-C while the client starts, which takes a second; no caller can stop it yet.
        except BaseException:
            client.kill()
            client.wait()
            raise
        return client

    def _config(self, url: str, protocol: Protocol, sample_folder: str | None) -> TraceConfig:
        traffic = self.traffic
        return TraceConfig(
            url=url,
            arrivals=self.arrivals,
            protocol=protocol,
            grace_s=self.grace_s,
            sample_folder=sample_folder,
            num_users=traffic.num_users,
            users_s=0.0 if traffic.num_users is None else traffic.seconds,
            spawn_interval_s=traffic.spawn_interval_s or 0.0,
        )


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


def run_load(
    generator: LoadGenerator,
    url: str,
    protocol: Protocol,
    folder: pathlib.Path,
    server: psutil.Process,
    log_status: Callable[[str], None],
) -> None:
    """Load a server until the client ends, and report progress every few seconds. `read_records` returns the results.

    Raises:
        RuntimeError: the server, or the client, ended too early.

    """
    client, started = generator.start(url, protocol, folder), time.monotonic()
    reported_s = 0.0
    try:
        while client.poll() is None:
            elapsed_s = time.monotonic() - started
            if has_ended(server):
                raise RuntimeError(_SERVER_ENDED)
            if elapsed_s > generator.max_duration_s + _CLIENT_GRACE_S:
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
    """Return the records that a client has written so far, by the requests' ends; ignores an incomplete last line."""
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
