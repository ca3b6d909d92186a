"""Metrics of a run's records: shares, rates, quantiles. Pure. A record is the outcome of one request as its client saw
it.

A latency counts from the *intended* start, so that delays in sending count against the server. Any request without a
complete answer by its deadline has missed it, including one that was rejected.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

# Share of the predicted duration by which a good prediction may be wrong.
PREDICTION_BOUND = 0.15


class RequestRecord(Struct, frozen=True, array_like=True):
    """A request's record; times are seconds from the trace's start. In JSON, an array in the order of the fields."""

    number: int
    intended_s: float
    sent_s: float
    done_s: float | None  # None: no answer during the run
    status: int  # HTTP status; 0: the connection broke, or there was no answer
    deadline_s: float | None  # from intended_s
    deadline_class: str
    rows: float
    num_images: int
    predicted_s: float | None = None  # the server's prediction at admission, from the request's arrival
    batch_size: float | None = None  # as the server reports it: images generated together
    digest: str | None = None  # digest of the image files
    queue_s: float | None = None  # as the server reports it: until generation started
    engine_s: float | None = None  # as Noria reports it: from the request's arrival at the engine to its last pixels
    # For each of its images: its size, its model calls, and its rows in one. 0: not known, in a scenario.
    width_px: int = 0
    height_px: int = 0
    num_calls: int = 0
    call_rows: int = 0

    @property
    def latency_s(self) -> float:
        """Seconds from the intended start; infinite without images."""
        return math.inf if self.done_s is None or self.status != 200 else self.done_s - self.intended_s

    @property
    def met_deadline(self) -> bool:
        """Whether its images arrived by its deadline."""
        deadline_s = math.inf if self.deadline_s is None else self.deadline_s
        return self.latency_s <= deadline_s and self.latency_s < math.inf


def percentile(values: Iterable[float], share: float) -> float:
    """The quantile `share` (0 to 1), interpolated linearly as numpy does; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    # Also for two infinities.
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def attainment(records: Sequence[RequestRecord]) -> float:
    """The share of requests that met their deadline; NaN without requests."""
    return sum(record.met_deadline for record in records) / len(records) if records else math.nan


def goodput(
    records: Iterable[RequestRecord],
    start_s: float,
    end_s: float,
    weight: Callable[[RequestRecord], float] = lambda _: 1.0,
) -> float:
    """Requests (or their `weight`) per second that met their deadline, of those that ended between `start_s` and
    `end_s`.

    Requests are counted by their end: a window inside the run has about as much work in flight at its start as at its
    end.
    """
    done = (record for record in records if record.met_deadline and record.done_s is not None)
    return sum(weight(record) for record in done if start_s <= (record.done_s or 0.0) < end_s) / (end_s - start_s)


def prediction_errors(records: Iterable[RequestRecord]) -> list[float]:
    """(actual / predicted - 1) of each answered request with a prediction."""
    return [
        (record.done_s - record.sent_s) / record.predicted_s - 1.0
        for record in records
        if record.status == 200 and record.done_s is not None and record.predicted_s
    ]


def prediction_summary(errors: Sequence[float]) -> dict[str, Any]:
    """JSON-ready: the number of `errors`, the share within ± PREDICTION_BOUND, quantiles; None without errors."""
    shares = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
    return {
        "num_requests": len(errors),
        "within_bound": round(share_within(errors, PREDICTION_BOUND), 4) if errors else None,
        **{name: round(percentile(errors, share), 4) if errors else None for name, share in shares.items()},
    }


def share_within(errors: Sequence[float], bound: float) -> float:
    """The share of `errors` within ± `bound`; NaN without errors."""
    return sum(abs(error) <= bound for error in errors) / len(errors) if errors else math.nan
