"""Measurements, made of the results of the bench's own client and of a server's counters. Pure."""

from noria_bench.encoders.client import ClientResult
from noria_bench.encoders.results import MIN_COSINE, TOLERANCE, Load, Measurement
from noria_bench.measurement.run_metrics import percentile


def make_measurement(load: Load, found: ClientResult, precision: str) -> Measurement:
    """Return the client's result as a measurement; vectors of another `precision` than float32 may differ more."""
    latencies_s = [*found.latencies_s, *[float("inf")] * found.num_failed]
    p50_ms, p95_ms, p99_ms = (_milliseconds(percentile(latencies_s, share)) for share in (0.5, 0.95, 0.99))
    wrong = [
        difference > TOLERANCE if precision == "float32" else cosine < MIN_COSINE
        for difference, cosine in zip(found.differences, found.cosines, strict=True)
    ]
    return Measurement(
        load=load,
        requests_per_s=found.requests_per_s,
        num_ok=len(found.latencies_s),
        num_failed=found.num_failed,
        p50_ms=p50_ms,
        p95_ms=p95_ms,
        p99_ms=p99_ms,
        num_compared=len(wrong),
        num_wrong=sum(wrong),
        max_difference=max(found.differences, default=None),
        min_cosine=min(found.cosines, default=None),
    )


def sum_series(text: str, name: str) -> float:
    """The sum of all series of a metric in Prometheus' text format."""
    lines = (line for line in text.splitlines() if line.startswith((name + " ", name + "{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _milliseconds(seconds: float) -> float | None:
    return 1000 * seconds if seconds < float("inf") else None
