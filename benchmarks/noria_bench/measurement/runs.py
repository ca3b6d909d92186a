"""One run of one target under one traffic, as it is kept: a JSON file of its own, from which every table and picture is made."""

import pathlib
import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria_bench.measurement.run_metrics import RequestRecord


class Traffic(Struct, frozen=True):
    """What was sent. Closed: `users` who each ask again when answered. Open: requests that come whatever became of the others."""

    kind: Literal["closed", "open"]
    seconds: float  # that it lasts
    mix: str  # a name of `workload.MIXES`
    num_users: int | None = None
    spawn_interval_s: float | None = None  # a user more, until all are there
    arrivals: str | None = None  # `poisson` or `bursty`
    rows_per_s: float | None = None  # work that arrives
    seed: int = 1


class ResourceUsage(Struct, frozen=True):
    """What the server's processes, and the device, were seen to use; the lists have a value for each moment of `at_s`."""

    at_s: tuple[float, ...] = ()
    cpu_cores: tuple[float, ...] = ()  # CPU seconds a second
    resident_bytes: tuple[int, ...] = ()
    gpu_utilisation: tuple[float, ...] = ()  # utilisation, 0 to 1; empty without NVML
    gpu_bytes: tuple[int, ...] = ()  # more than before the server's start
    energy_j: float | None = None  # of the device (NVML), or of the CPU packages (RAPL), over the run
    other_cpu_share: float = 0.0  # of the machine's CPU time, that strangers took
    matrix_gflops: tuple[float, ...] = ()  # of the idle machine's CPUs, before the server's start and after its end


class ImageCheck(Struct, frozen=True):
    """A reply that was decoded and compared with what diffusers' pipeline draws of the same body alone."""

    number: int  # its record's
    psnr_db: float | None  # peak signal-to-noise ratio of the worst image; None: the same, or nothing to compare
    problem: str = ""  # why it is; empty: it is right


class BenchRun(Struct, frozen=True):
    """All of it. `about` is `machine.provenance()`, of a peer with `peer_versions`, what pip installed for it.

    `model` has name, fingerprint, unet_parameters; `settings` are the target's.
    """

    bench: str  # scenario1, scenario2, mixed, or the name of a sweep
    target: str
    traffic: Traffic
    provenance: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]
    records: tuple[RequestRecord, ...] = ()
    usage: ResourceUsage = ResourceUsage()
    image_checks: tuple[ImageCheck, ...] = ()
    variant: str = ""  # of a sweep, such as "250 ms, 8"; and "poisson" or "bursty" in `mixed`
    complete: bool = True  # False: it was interrupted
    seconds_to_ready: float | None = None  # from the start of the server's process

    @property
    def duration_s(self) -> float:
        """Seconds that its traffic lasted: until its last sign of life, where it was interrupted."""
        if self.complete:
            return self.traffic.seconds
        moments = [moment for record in self.records for moment in (record.sent_s, record.done_s) if moment is not None]
        return min(self.traffic.seconds, max(moments, default=0.0))

    @property
    def file_name(self) -> str:
        """Its own in a folder of runs."""
        stem = "-".join(filter(None, (self.bench, self.target, self.variant)))
        return re.sub(r"[^a-z0-9.]+", "-", stem.lower()) + ".json"


def write_run(run: BenchRun, folder: pathlib.Path) -> pathlib.Path:
    """Write it whole, or leave what was there; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / run.file_name
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(run) + b"\n")
    return partial.replace(file)


def read_runs(folder: pathlib.Path) -> list[BenchRun]:
    """Every run in `folder`, by bench, variant and target as they were begun.

    Raises:
        OSError: it cannot be read.
        ValueError: a file is no run; it is named.

    """
    runs = []
    for file in sorted(folder.glob("*.json")):
        try:
            runs.append(msgspec.json.decode(file.read_bytes(), type=BenchRun))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file} is no run of a bench: {error}") from error
    return sorted(runs, key=lambda run: run.provenance.get("date", ""))
