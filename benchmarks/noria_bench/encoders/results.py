"""The measurements of `noria bench encoders`, as its JSON file has them."""

import pathlib
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria_bench.encoders.options import Corpus

FILE_NAME = "encoders.json"
TOLERANCE = 1e-4
"""Of a number of an embedding of length 1 in float32."""
MIN_COSINE = 0.999
"""Of an embedding in a faster precision."""


class Load(Struct, frozen=True):
    """The traffic that was sent."""

    corpus: Corpus
    loop: Literal["closed", "open"]
    client: Literal["ab", "wrk", "own", "none"]  # none: the loop without a server
    connections: int | None = None  # number in a closed loop
    percent: int | None = None  # rate of an open loop, in % of the raw loop's texts per second
    rate: float | None = None  # rate of an open loop, in requests per second


class Measurement(Struct, frozen=True):
    """The result of one load. None is what was not measured; a percentile that is not finite is None, too."""

    load: Load
    requests_per_s: float
    num_ok: int
    num_failed: int
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    cpu_s: float | None = None  # CPU time of all the server's processes
    cpu_s_by_process: dict[str, float] = {}  # the same by their names
    mean_batch: float | None = None  # texts
    padding: float | None = None  # share of the computed tokens
    other_cpu_share: float | None = None  # share of the machine's CPU time, used by neither the server nor this bench
    num_compared: int = 0
    num_wrong: int = 0
    max_difference: float | None = None
    min_cosine: float | None = None

    @property
    def cpu_ms_per_request(self) -> float | None:
        """CPU milliseconds of the server for each request."""
        num = self.num_ok + self.num_failed
        return None if self.cpu_s is None or not num else 1000 * self.cpu_s / num

    def process_ms_per_request(self, name: str) -> float:
        """Return the CPU milliseconds of the processes of this name for each request."""
        return 1000 * self.cpu_s_by_process.get(name, 0.0) / max(self.num_ok + self.num_failed, 1)


class TargetRun(Struct, frozen=True):
    """A target in one round: a fresh server."""

    target: str
    round: int
    settings: dict[str, Any]
    measurements: list[Measurement] = []
    seconds_to_ready: float | None = None
    check: Measurement | None = None  # the first requests, all of which are compared
    framework_versions: dict[str, str] = {}


class SweepRow(Struct, frozen=True):
    """The rate of one candidate of a sweep."""

    target: str
    settings: dict[str, Any]
    requests_per_s: float  # 0: it failed
    chosen: bool = False


class EncodersResult(Struct, frozen=True):
    """The whole document."""

    provenance: dict[str, Any]
    model: dict[str, Any]
    options: dict[str, Any]
    corpus: dict[str, Any]
    threads: int
    raw_texts_per_s: float  # 0: not measured, since there is no open loop
    device: str = "cpu"
    device_name: str = ""
    backend: Literal["onnxruntime", "torch"] = "onnxruntime"
    precision: str = "float32"
    sweep: list[SweepRow] = []
    runs: list[TargetRun] = []
    left_out: list[str] = []  # targets that cannot run here, and why
    failures: list[str] = []
    complete: bool = False


def read_result(file: pathlib.Path) -> EncodersResult:
    """Read a document. Raises ValueError if it is none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=EncodersResult)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is not a result of noria bench encoders: {error}") from error
