"""Runs with given records; `full_suite()` simulates those of a whole suite."""

import random

from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import BenchRun, ImageCheck, ResourceUsage, Traffic

PROVENANCE = {
    "date": "2026-11-21T12:00:00+00:00",
    "command": "noria bench scenario2 --targets all",
    "noria": "0.1.0",
    "commit": "0123456789ab",
    "python": "3.11.2",
    "versions": {"torch": "2.13.0", "diffusers": "0.42.1"},
    "machine": {"cpu": "A CPU", "cores": 2, "memory_bytes": 8 * 2**30, "load_average_before": 0.25},
}
MODEL = {"name": "bundled", "fingerprint": "f00d", "unet_parameters": 1_300_000}
CLOSED = Traffic("closed", 10.0, "uniform", num_users=8, spawn_interval_s=1.0)


def record(
    number,
    latency_s=1.0,
    *,
    start_s=None,
    status=200,
    answered=True,
    num_images=1,
    batch_size=4,
    queue_s=0.25,
    late_s=0.0,
):
    """A request that starts `number` tenths of a second into the run, or at `start_s`."""
    start = number / 10 if start_s is None else start_s
    done_s = start + latency_s if answered else None
    return RequestRecord(
        number,
        start,
        start + late_s,
        done_s,
        status if answered else 0,
        None,
        "",
        40.0,
        num_images,
        batch_size=batch_size,
        queue_s=queue_s,
    )


def run(target="noria", records=None, bench="scenario2", **fields):
    """A run of `records`, or of ten requests of a second each."""
    found = tuple(record(k) for k in range(10)) if records is None else tuple(records)
    defaults = {"traffic": CLOSED, "provenance": PROVENANCE, "model": MODEL, "settings": {"slots": 8}}
    return BenchRun(bench, target, **(defaults | fields), records=found)


# Seconds of one image, maximum batch, and seconds that each further image of a batch adds.
_SIMULATED_SERVERS = {
    "noria": (0.8, 8, 0.12),
    "reference-stream-async": (1.0, 1, 0.0),
    "reference-response-async": (0.95, 1, 0.0),
    "reference-stream-sync": (1.0, 1, 0.0),
    "reference-response-sync": (0.97, 1, 0.0),
    "reference-batched": (0.85, 8, 0.3),
    "litserve": (0.85, 8, 0.28),
    "bentoml": (0.9, 8, 0.3),
    "ray": (0.9, 8, 0.33),
}


def _simulate(target, arrivals, rng, seconds):
    solo_s, max_batch, extra_s_per_image = _SIMULATED_SERVERS[target]
    free_s, records, waiting = 0.0, [], list(enumerate(arrivals))
    while waiting:
        start = max(free_s, waiting[0][1])
        batch = [pair for pair in waiting if pair[1] <= start][:max_batch]
        waiting = waiting[len(batch) :]
        free_s = start + (solo_s + extra_s_per_image * (len(batch) - 1)) * rng.uniform(0.9, 1.2)
        for number, arrival_s in batch:
            answered = free_s < seconds + 20
            records.append(
                record(
                    number, free_s - arrival_s, start_s=arrival_s, batch_size=len(batch), queue_s=start - arrival_s,
                    answered=answered, num_images=1,
                    status=200 if rng.random() > 0.002 else 503,
                )
            )  # fmt: skip
    return records


def _simulate_usage(rng, seconds):
    at_s = tuple(range(int(seconds)))
    return ResourceUsage(
        at_s, tuple(rng.uniform(1.6, 2.0) for _ in at_s), tuple(int(2**30 * rng.uniform(1.1, 1.3)) for _ in at_s)
    )


def full_suite(seconds=60.0):
    """Two scenarios, mixed traffic, and four sweeps."""
    rng, runs = random.Random(7), []
    for target in _SIMULATED_SERVERS:
        rate = 2.2 if target in ("noria", "reference-batched", "litserve", "bentoml", "ray") else 1.0
        for bench, per_s, variant in (
            ("scenario1", rate / 4, ""),
            ("scenario2", rate, ""),
            ("mixed", 2.5, "poisson"),
            ("mixed", 2.5, "bursty"),
        ):
            arrivals, now = [], 0.0
            while now < seconds:
                arrivals.append(now)
                shape = 0.25 if variant == "bursty" else 1.0
                now += rng.gammavariate(shape, 1 / (shape * per_s))
            traffic = (
                Traffic("open", seconds, "mixed", arrivals=variant, rows_per_s=80.0)
                if variant
                else Traffic(
                    "closed", seconds, "uniform", num_users=1 if bench == "scenario1" else 8, spawn_interval_s=3.0
                )
            )
            provenance = PROVENANCE | {"command": f"noria bench {bench} --targets all --duration 60"}
            runs.append(
                run(target, _simulate(target, arrivals, rng, seconds), bench, traffic=traffic, variant=variant,
                    provenance=provenance, usage=_simulate_usage(rng, seconds),
                    image_checks=(ImageCheck(0, None), ImageCheck(1, 48.0)), seconds_to_ready=6.1)
            )  # fmt: skip
    pairs = ((500, 8), (250, 8), (1000, 8), (500, 4), (500, 16))
    batching = [f"{timeout_ms} ms, {size}" for timeout_ms, size in pairs]
    attention = ["memory-efficient", "sliced", "neither"]
    runs += [_sweep_run("sweep-batching", name, rng, seconds, "reference-batched") for name in batching]
    runs += [_sweep_run("sweep-attention", name, rng, seconds, "reference-batched") for name in attention]
    for target in ("reference-batched", "noria"):
        runs += [_sweep_run("sweep-channels-last", name, rng, seconds, target) for name in ("off", "on")]
    runs += [_sweep_run("sweep-slots", f"{slots} slots", rng, seconds, "noria") for slots in (4, 8, 16)]
    return runs


def _sweep_run(bench, variant, rng, seconds, target):
    arrivals = sorted(rng.uniform(0, seconds) for _ in range(rng.randrange(80, 160)))
    return run(target, _simulate(target, arrivals, rng, seconds), bench, variant=variant,
               usage=_simulate_usage(rng, seconds),
               traffic=Traffic("closed", seconds, "uniform", num_users=8, spawn_interval_s=3.0))  # fmt: skip
