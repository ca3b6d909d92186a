"""The summary of one run. Pure.

A latency counts from the *intended* start. A request without images has an infinite latency: percentiles are over all
requests, so an infinite one says that too many failed. The average is over the requests with images only. A rate counts
requests, or images, that ended while the traffic lasted, over that time with its ramp, as in the reference article.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noria_bench.measurement.run_metrics import RequestRecord, percentile
from noria_bench.measurement.runs import BenchRun

_SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class RunSummary:
    """NaN where nothing was measured; `math.inf` for a percentile that falls on a request without images."""

    num_requests: int
    num_http_failures: int  # answered, but not with images
    num_unanswered: int  # the connection broke, or no answer arrived during the run
    num_wrong: int  # replies, among `num_compared`, that are not the image that the request gives alone
    num_compared: int
    seconds: float  # over which rates are taken
    avg_ms: float
    requests_per_s: float
    images_per_s: float
    rows_per_s: float  # work done while the traffic lasted; of a request that overlaps its end, the share before it
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    mean_batch: float  # mean over requests of the batch size that the server reports
    sent_late_p99_ms: float  # how far the client fell behind its trace; NaN in a closed loop
    cpu_cores: float
    max_resident_bytes: float
    gpu_utilisation: float  # mean, 0 to 1
    gpu_bytes: float  # mean
    energy_per_image_j: float
    other_cpu_share: float  # share of the machine's CPU time, used by other processes

    @property
    def num_failures(self) -> int:
        """Failures of every kind."""
        return self.num_http_failures + self.num_unanswered + self.num_wrong


def summarise_run(run: BenchRun) -> RunSummary:
    """Summarise a run."""
    records, usage = run.records, run.usage
    latencies_ms = [1000 * record.latency_s for record in records]
    seconds = run.duration_s
    in_time = [record for record in records if _has_images(record) and (record.done_s or 0.0) <= seconds]
    num_images = sum(record.num_images for record in records if _has_images(record))
    late_ms = [1000 * (record.sent_s - record.intended_s) for record in records if run.traffic.kind == "open"]
    p50, p90, p95, p99 = (percentile(latencies_ms, share) for share in _SHARES)
    unanswered = sum(_is_unanswered(record) for record in records)
    return RunSummary(
        num_requests=len(records),
        num_http_failures=sum(record.status != 200 for record in records if not _is_unanswered(record)),
        num_unanswered=unanswered,
        num_wrong=sum(bool(check.problem) for check in run.image_checks),
        num_compared=len(run.image_checks),
        seconds=seconds,
        avg_ms=_mean([latency for latency in latencies_ms if math.isfinite(latency)]),
        requests_per_s=len(in_time) / seconds if seconds else math.nan,
        images_per_s=sum(record.num_images for record in in_time) / seconds if seconds else math.nan,
        rows_per_s=sum(_rows_within(record, seconds) for record in records) / seconds if seconds else math.nan,
        p50_ms=p50,
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        mean_batch=_mean([record.batch_size for record in records if record.batch_size]),
        sent_late_p99_ms=percentile(late_ms, 0.99),
        cpu_cores=_mean(usage.cpu_cores),
        max_resident_bytes=float(max(usage.resident_bytes, default=math.nan)),
        gpu_utilisation=_mean(usage.gpu_utilisation),
        gpu_bytes=_mean(usage.gpu_bytes),
        energy_per_image_j=math.nan if usage.energy_j is None or not num_images else usage.energy_j / num_images,
        other_cpu_share=usage.other_cpu_share,
    )


def finite_ratio(part: float, whole: float) -> float:
    """`part` over `whole`; NaN if either is not finite, or `whole` is 0."""
    return part / whole if whole and math.isfinite(part) and math.isfinite(whole) else math.nan


def finite_json(value: Any) -> Any:
    """`value` for JSON: numbers that are not finite become None, floats are rounded to four digits."""
    match value:
        case float():
            return round(value, 4) if math.isfinite(value) else None
        case dict():
            return {key: finite_json(part) for key, part in value.items()}
        case list() | tuple():
            return [finite_json(part) for part in value]
        case _:
            return value


def _rows_within(record: RequestRecord, seconds: float) -> float:
    """The work of a request in the first `seconds`, as if it were done evenly from its sending to its end."""
    if not _has_images(record) or record.done_s is None or record.done_s <= record.sent_s:
        return 0.0
    return record.rows * min(1.0, max(0.0, seconds - record.sent_s) / (record.done_s - record.sent_s))


def _has_images(record: RequestRecord) -> bool:
    return math.isfinite(record.latency_s)


def _is_unanswered(record: RequestRecord) -> bool:
    return record.done_s is None or record.status == 0


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
