"""A run: one target under one traffic, stored as a JSON file from which all tables and plots are made."""

import pathlib
import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria_bench.measurement.run_metrics import RequestRecord


class Traffic(Struct, frozen=True, forbid_unknown_fields=True):
    """The traffic that was sent.

    Closed: users who each send a request when the previous one is answered. Open: requests at intended times.
    """

    kind: Literal["closed", "open"]
    seconds: float  # its duration
    mix: str  # the name of a function in `load/workload.py`
    num_users: int | None = None
    spawn_interval_s: float | None = None  # between the starts of two users
    arrivals: str | None = None  # `poisson` or `bursty`
    rows_per_s: float | None = None  # arriving work
    load_percent: int | None = None  # arriving work over Noria's capacity, where a bench measures that
    seed: int = 1


class ResourceUsage(Struct, frozen=True, forbid_unknown_fields=True):
    """The resources that the server's processes and the device used.

    The tuples have a value for each moment of `at_s`.
    """

    at_s: tuple[float, ...] = ()
    cpu_cores: tuple[float, ...] = ()  # CPU seconds per second
    resident_bytes: tuple[int, ...] = ()
    gpu_utilisation: tuple[float, ...] = ()  # 0 to 1; empty without NVML
    gpu_bytes: tuple[int, ...] = ()  # beyond those in use before the server's start
    energy_j: float | None = None  # energy of the device (NVML) or the CPU packages (RAPL), over the run
    other_cpu_share: float = 0.0  # share of the machine's CPU time, used by other processes
    matrix_gflops: tuple[float, ...] = ()  # the idle machine's CPUs, before the server's start and after its end


class ImageCheck(Struct, frozen=True, forbid_unknown_fields=True):
    """The comparison of a reply with what diffusers' pipeline generates for the same body alone."""

    number: int  # number of the request
    psnr_db: float | None  # peak signal-to-noise ratio of the worst image; None: identical, or not comparable
    problem: str = ""  # why the reply is incorrect; empty: it is correct


class BenchRun(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a run.

    `provenance` is of `provenance.collect_provenance`, with `framework_versions` of a framework's environment. `model`
    has name, fingerprint and unet_parameters. `settings` are the target's. `calibration` is what `noria bench
    deadlines` measured before its runs.
    """

    bench: str  # scenario1, scenario2, mixed, deadlines, or sweep-NAME
    target: str
    traffic: Traffic
    provenance: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]
    records: tuple[RequestRecord, ...] = ()
    usage: ResourceUsage = ResourceUsage()
    image_checks: tuple[ImageCheck, ...] = ()
    # The variant in a sweep, such as "250 ms, 8"; in `mixed` the arrivals, in `deadlines` the load and the policy.
    variant: str = ""
    complete: bool = True  # False: it was interrupted
    seconds_to_ready: float | None = None  # from the start of the server's process
    calibration: dict[str, Any] = {}
    engine_costs: dict[str, Any] = {}  # costs of Noria in an open loop, as `simulator.devices.Device`

    @property
    def duration_s(self) -> float:
        """Seconds that the traffic lasted: for an interrupted run, until its last event."""
        if self.complete:
            return self.traffic.seconds
        moments = [moment for record in self.records for moment in (record.sent_s, record.done_s) if moment is not None]
        return min(self.traffic.seconds, max(moments, default=0.0))

    @property
    def file_name(self) -> str:
        """Unique within a folder of runs."""
        stem = "-".join(filter(None, (self.bench, self.target, self.variant)))
        return re.sub(r"[^a-z0-9.]+", "-", stem.lower()).strip("-") + ".json"


def write_run(run: BenchRun, folder: pathlib.Path) -> pathlib.Path:
    """Write the run atomically; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / run.file_name
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(run) + b"\n")
    return partial.replace(file)


def read_runs(folder: pathlib.Path) -> list[BenchRun]:
    """The runs in `folder`, in the order in which they were started.

    Raises:
        OSError: a file cannot be read.
        ValueError: a JSON file is not a run; the message names it.

    """
    runs = []
    for file in sorted(folder.glob("*.json")):
        try:
            runs.append(msgspec.json.decode(file.read_bytes(), type=BenchRun))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file} is not a run of a bench: {error}") from error
    return sorted(runs, key=lambda run: run.provenance.get("date", ""))
