"""Every metric that Noria exports, declared once; docs/metrics.md lists the same ones, and a test compares the two.

Front ends and engines are processes of their own, so the supervisor sets PROMETHEUS_MULTIPROC_DIR to an empty folder before it
starts them: prometheus_client then keeps each process's values in a file there, and `exposition` sums them, whichever front end is
asked. What a process that has ended counted still counts, so its files stay: two of 64 kB, a few kB of it written, for each restart,
until the folder goes with the server. Without the variable (tests, one process) the values live in memory.

Labels are bounded: a path is a route's template or "other", a model is one that is served, an outcome is "ok" or one of the codes of
`noria.errors`.
"""

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REGISTRY = CollectorRegistry()

# From a cached 1-step turbo image on a GPU to the default request_timeout_s.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
_IMAGES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # the last is the most slots that can be set

# Counted by the front ends: a request is one wish for images, whichever route it came by.
REQUESTS = Counter(
    "noria_requests", "Image requests answered, refused ones too.", ["model", "outcome"], registry=REGISTRY
)
IMAGES = Counter("noria_images", "Images sent to clients.", ["model"], registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "noria_request_seconds",
    "Time from a request's admission to its encoded images; successful ones only.",
    ["model"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
STAGE_SECONDS = Histogram(
    "noria_stage_seconds",
    "Time of a request in one stage: queue, encode, denoise, decode or postprocess.",
    ["stage"],
    buckets=(0.001, *_SECONDS),
    registry=REGISTRY,
)
INFLIGHT = Gauge("noria_inflight", "Image requests being worked on.", multiprocess_mode="livesum", registry=REGISTRY)
HTTP_REQUESTS = Counter(
    "noria_http_requests", "HTTP requests answered.", ["method", "path", "status"], registry=REGISTRY
)
HTTP_REQUEST_SECONDS = Histogram(
    "noria_http_request_seconds",
    "Time from an HTTP request's head to the end of its response.",
    ["method", "path"],
    buckets=(0.001, *_SECONDS),
    registry=REGISTRY,
)

# Counted by the engines.
ENGINE_UP = Gauge("noria_engine_up", "Engines that are ready.", multiprocess_mode="livesum", registry=REGISTRY)
ENGINE_BUSY_SECONDS = Counter(
    "noria_engine_busy_seconds", "Time that engines spent in turns, encoding or decoding.", registry=REGISTRY
)
TURNS = Counter("noria_turns", "Turns of the wheel: batched denoising steps.", registry=REGISTRY)
DENOISE_STEPS = Counter("noria_denoise_steps", "Denoising steps, one for each image in each turn.", registry=REGISTRY)
BATCH_SIZE = Histogram("noria_batch_size", "Images in a turn.", buckets=_IMAGES, registry=REGISTRY)
SLOTS = Gauge("noria_slots", "Images that can be in the batch.", multiprocess_mode="livesum", registry=REGISTRY)
SLOTS_USED = Gauge("noria_slots_used", "Images that are in the batch.", multiprocess_mode="livesum", registry=REGISTRY)
QUEUE_DEPTH = Gauge("noria_queue_depth", "Images waiting for a slot.", multiprocess_mode="livesum", registry=REGISTRY)
JOINS = Counter("noria_joins", "Images that boarded the batch.", registry=REGISTRY)
LEAVES = Counter(
    "noria_leaves", "Images that left the batch: finished, cancelled or failed.", ["outcome"], registry=REGISTRY
)


def exposition() -> bytes:
    """All values in Prometheus' text format: of every process, or of this one where PROMETHEUS_MULTIPROC_DIR is not set."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest(REGISTRY)
    everybody = CollectorRegistry()
    MultiProcessCollector(everybody)  # type: ignore[no-untyped-call]
    return generate_latest(everybody)
