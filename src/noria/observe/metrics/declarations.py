"""Every metric that Noria exports, declared once; docs/metrics.md is written from here by `make docs`, and dashboards may name no other.

Front ends and engines are processes of their own, so the supervisor sets PROMETHEUS_MULTIPROC_DIR to an empty folder before it
starts them: prometheus_client then keeps each process's values in a file there, and `exposition.py` sums them, whichever front end is
asked. What a process that has ended counted still counts: the supervisor folds it into one file of each kind (`ended.py`), so that
neither the folder nor a scrape grows with restarts. Without the variable (tests, one process) the values live in memory.

Labels are bounded: a path is a route's template or "other", a model is one that is served or "other", an outcome or reason is "ok" or one
of the codes of `noria.errors` (`outcomes.py`), a shape is one of the first `MOST_SHAPES` sizes drawn or "other", an engine is one for each
device. What an engine counts says which engine it was, so that one that is idle, slow or ill is seen among others; its next life goes on
with its counts. A turn's time alone does not: by shape and by engine it would be 600 series for each of them, and an engine's busy time
over its turns says as much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from noria.protocol.messages import ExitCause

MetricKind = Literal["counter", "gauge", "histogram"]

REGISTRY = CollectorRegistry()
MAX_SHAPES = 32

# From a cached 1-step turbo image on a GPU to the default request_timeout_s.
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
_ITERATION_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BATCH_SIZE_BUCKETS = (
    1,
    2,
    4,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
)  # the last is the most slots that can be set


@dataclass(frozen=True)
class Declaration:
    """A metric, as Prometheus sees it."""

    name: str  # with `_total`, if it is a counter
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]  # of a histogram
    section: str  # of the page

    @property
    def unit(self) -> str:
        """What a value is counted in."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes", "ratio") if stem.endswith(unit)), "")

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query may use."""
        return (
            tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))
            if self.kind == "histogram"
            else (self.name,)
        )


DECLARATIONS: dict[str, Declaration] = {}
"""All of them by name, in the order of the page."""


def declare(
    name: str, kind: MetricKind, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = (), *, section: str
) -> Declaration:
    """Note a metric; those whose values are read at the scrape (`exposition.py`) have nothing else."""
    assert name not in DECLARATIONS, name
    declaration = DECLARATIONS[name] = Declaration(name, kind, text, tuple(labels), tuple(buckets), section)
    return declaration


def _counter(section: str, name: str, text: str, *labels: str, values: Sequence[str] = ()) -> Counter:
    """`values`: all that its one label can have. They count from 0 on: in a series that begins with 1 Prometheus sees no increase."""
    declare(f"{name}_total", "counter", text, labels, section=section)
    counter = Counter(name, text, labels, registry=REGISTRY)
    for value in values:
        counter.labels(value)
    return counter


def _gauge(section: str, name: str, text: str, *labels: str, mode: Literal["livesum", "livemax"] = "livesum") -> Gauge:
    """`mode`: what several processes' values amount to."""
    declare(name, "gauge", text, labels, section=section)
    return Gauge(name, text, labels, multiprocess_mode=mode, registry=REGISTRY)


def _histogram(
    section: str, name: str, text: str, *labels: str, buckets: Sequence[float] = DURATION_BUCKETS_S
) -> Histogram:
    declare(name, "histogram", text, labels, buckets, section=section)
    return Histogram(name, text, labels, buckets=buckets, registry=REGISTRY)


_SECTION = "Requests, counted by the front ends"

# A request is one wish for images, whichever route it came by.
REQUESTS = _counter(
    _SECTION,
    "noria_requests",
    "Image requests answered, refused ones too; a job counts once, when it has ended. Bodies that cannot be read count only as HTTP requests.",
    "model",
    "outcome",
)
REJECTED = _counter(
    _SECTION, "noria_rejected", "Image requests refused before anything was drawn of them, by why.", "model", "reason"
)
IMAGES = _counter(_SECTION, "noria_images", "Images sent to clients.", "model")
REQUEST_SECONDS = _histogram(
    _SECTION,
    "noria_request_seconds",
    "Time from a request's admission to its encoded images; successful ones only.",
    "model",
    buckets=DURATION_BUCKETS_S,
)
QUEUE_SECONDS = _histogram(
    _SECTION,
    "noria_queue_seconds",
    "Time until the image of a request that ended last had its slot; successful requests only.",
    "model",
)
STAGE_SECONDS = _histogram(
    _SECTION,
    "noria_stage_seconds",
    "Time of a request in one stage: `queue`, `encode` (the prompt), `denoise`, `decode` (latents to pixels), `postprocess` "
    "(pixels to files).",
    "stage",
    buckets=(0.001, *DURATION_BUCKETS_S),
)
DEADLINES_MISSED = _counter(
    _SECTION,
    "noria_deadline_missed",
    "Accepted requests with a `deadline_ms` that were not answered by it: given up, or late.",
    "model",
)
REQUESTS_IN_FLIGHT = _gauge(_SECTION, "noria_inflight", "Image requests being worked on.")
LIVE_SUBSCRIBERS = _gauge(_SECTION, "noria_live_watchers", "Clients that watch the wheels turn, by `GET /v1/live`.")
HTTP_REQUESTS = _counter(
    _SECTION,
    "noria_http_requests",
    "HTTP requests answered. Status 499: the client left first.",
    "method",
    "path",
    "status",
)
HTTP_REQUEST_SECONDS = _histogram(
    _SECTION,
    "noria_http_request_seconds",
    "Time from an HTTP request's head to the end of its response.",
    "method",
    "path",
    buckets=(0.001, *DURATION_BUCKETS_S),
)
EVENT_LOOP_LAG_SECONDS = _histogram(
    _SECTION,
    "noria_event_loop_lag_seconds",
    "How much later than asked a front end's event loop woke; looked at twice a second.",
    buckets=_LAG_BUCKETS_S,
)

FRONTEND_STARTS = _counter(
    _SECTION,
    "noria_frontend_starts",
    "Front-end processes started, by name. In the life of a server each starts once, unless it ended.",
    "process",
)

_SECTION = "Jobs, counted by the front ends"

JOBS = _counter(
    _SECTION,
    "noria_jobs",
    "Jobs that ended, by the status they ended in.",
    "status",
    values=("succeeded", "failed", "canceled"),
)
JOBS_ACCEPTED = _counter(_SECTION, "noria_jobs_accepted", "Jobs that were taken on.")
WEBHOOK_ATTEMPTS = _counter(
    _SECTION,
    "noria_webhooks",
    "Attempts to deliver a webhook: `delivered`, or `failed`, which is tried again.",
    "outcome",
    values=("delivered", "failed"),
)

_SECTION = "The wheel, counted by the engines"

ENGINE_UP = _gauge(
    _SECTION,
    "noria_engine_up",
    "1 of an engine that is ready; 0 of one that loads, has ended or never came: front ends tell of each that there should be.",
    "engine",
)
ENGINES_CONFIGURED = _gauge(
    _SECTION,
    "noria_engines_configured",
    "Engines that there should be, one for each device; told by the front ends.",
    mode="livemax",
)
ENGINE_STARTS = _counter(
    _SECTION,
    "noria_engine_starts",
    "Engine processes started, by how the life before ended: `none` (there was none), `crashed`, `killed`.",
    "engine",
    "previous_end",
)
ENGINE_BUSY_SECONDS = _counter(
    _SECTION, "noria_engine_busy_seconds", "Time that an engine spent in turns, encoding or decoding.", "engine"
)
ITERATIONS = _counter(
    _SECTION,
    "noria_turns",
    "Turns of the wheel, nearly all of them batched denoising steps; those are counted by `noria_batch_size_count`.",
    "engine",
)
DENOISE_STEPS = _counter(
    _SECTION, "noria_denoise_steps", "Denoising steps, one for each image in each turn.", "engine", "model"
)
ITERATION_SECONDS = _histogram(
    _SECTION,
    "noria_step_seconds",
    "Time of a turn that stepped, by the size of its images (`WIDTHxHEIGHT`); with what it encoded and decoded.",
    "shape",
    buckets=_ITERATION_BUCKETS_S,
)
BATCH_SIZE = _histogram(_SECTION, "noria_batch_size", "Images in a turn.", "engine", buckets=_BATCH_SIZE_BUCKETS)
SLOTS = _gauge(_SECTION, "noria_slots", "Images that can be in the batch.", "engine")
SLOTS_USED = _gauge(_SECTION, "noria_slots_used", "Images that are in the batch.", "engine")
QUEUE_DEPTH = _gauge(_SECTION, "noria_queue_depth", "Images waiting for a slot.", "engine")
BACKLOG_SECONDS = _gauge(
    _SECTION,
    "noria_queue_drain_seconds",
    "Predicted time until all that was accepted is done, if nobody else comes; told by engines that are ready.",
    "engine",
)
QUEUE_OLDEST_AGE_SECONDS = _gauge(
    _SECTION,
    "noria_oldest_age_seconds",
    "How long ago the oldest request that still waits for a slot came; 0 if none does.",
    "engine",
)
JOINS = _counter(_SECTION, "noria_joins", "Images that boarded the batch.", "engine")
DEPARTURES = _counter(
    _SECTION,
    "noria_leaves",
    "Images that left the batch: finished, cancelled or failed. Those aboard an engine that was killed never left it.",
    "engine",
    "outcome",
)
_OOM_PHASES = ("boards", "steps", "decodes")
OUT_OF_MEMORY = _counter(
    _SECTION,
    "noria_out_of_memory",
    "Turns that did not fit the device's memory, by what did not: `boards`, `steps` or `decodes`. They are run again, smaller.",
    "engine",
    "part",
)
DEVICE_MEMORY_BYTES = _gauge(
    _SECTION,
    "noria_device_memory_bytes",
    "Memory that an engine holds on its device; of a CPU, the engine's resident memory.",
    "engine",
)


def init_engine_series(names: Sequence[str]) -> None:
    """Tell of the engines that there should be, as front ends do: none is up until it says so itself, and what it counts begins with 0."""
    ENGINES_CONFIGURED.set(len(names))
    for name in names:
        ENGINE_UP.labels(name).set(0)
        for counter in (ENGINE_BUSY_SECONDS, ITERATIONS, JOINS):
            counter.labels(name)
        for exit_cause in get_args(ExitCause):
            ENGINE_STARTS.labels(name, exit_cause)
        for phase in _OOM_PHASES:
            OUT_OF_MEMORY.labels(name, phase)


_SECTION = "Processes and devices, read by the front end that is asked"

PROCESS_CPU_SECONDS = declare(
    "noria_process_cpu_seconds_total",
    "counter",
    "CPU time of a process of the server; a process that was started anew begins at 0.",
    ["process"],
    section=_SECTION,
)
PROCESS_MEMORY_BYTES = declare(
    "noria_process_resident_memory_bytes",
    "gauge",
    "Memory that a process of the server holds.",
    ["process"],
    section=_SECTION,
)
PROCESS_START_SECONDS = declare(
    "noria_process_start_time_seconds",
    "gauge",
    "When a process of the server started, in Unix time.",
    ["process"],
    section=_SECTION,
)
MACHINE_CORES = declare("noria_machine_cores", "gauge", "CPU cores that the server may use.", section=_SECTION)
MACHINE_MEMORY_BYTES = declare(
    "noria_machine_memory_bytes",
    "gauge",
    "Memory that the server may use: its control group's limit, or the machine's.",
    section=_SECTION,
)

# The energy too: dcgm-exporter's counter has no `_total`, which a counter must have here.
_GPU_LABELS = ("gpu", "UUID", "modelName")
GPU_METRICS = {
    name: declare(
        name,
        "gauge",
        text,
        _GPU_LABELS,
        section="Devices, under dcgm-exporter's names, where the machine has an NVIDIA GPU",
    )
    for name, text in (
        ("DCGM_FI_DEV_GPU_UTIL", "Share of time in which a kernel ran, in per cent."),
        ("DCGM_FI_DEV_MEM_COPY_UTIL", "Share of time in which memory was read or written, in per cent."),
        ("DCGM_FI_DEV_FB_USED", "Framebuffer memory in use, in MiB."),
        ("DCGM_FI_DEV_FB_FREE", "Framebuffer memory that is free, in MiB."),
        ("DCGM_FI_DEV_GPU_TEMP", "Temperature, in °C."),
        ("DCGM_FI_DEV_POWER_USAGE", "Power draw, in W."),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded, in mJ."),
        ("DCGM_FI_DEV_SM_CLOCK", "Clock of the streaming multiprocessors, in MHz."),
    )
}
