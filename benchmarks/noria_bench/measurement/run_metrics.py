"""What a run's records amount to: shares, rates, quantiles. Pure; a record is one request's fate as its caller saw it.

Rules: a request counts from its *intended* start, so that a server which makes its callers wait to send pays for it; whatever is not
a complete answer by the deadline, a refusal too, is missed.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct


class RequestRecord(Struct, frozen=True, array_like=True):
    """One request; times are seconds from the trace's start. In JSON an array, in the order of the fields."""

    number: int
    intended_s: float
    sent_s: float
    done_s: float | None  # None: no answer while the run lasted
    status: int  # HTTP's; 0: the connection broke, or there was no answer
    deadline_s: float | None  # from intended_s; None: it had none
    deadline_class: str
    rows: float
    num_images: int
    predicted_s: float | None = None  # from its arrival, as the server told with the answer
    batch_size: float | None = None  # images that were drawn with it, where the server tells
    digest: str | None = None  # of the images' files
    queue_s: float | None = None  # that it waited before it was drawn, where the server tells

    @property
    def latency_s(self) -> float:
        """From the intended start; endless where there was no image."""
        return math.inf if self.done_s is None or self.status != 200 else self.done_s - self.intended_s

    @property
    def met_deadline(self) -> bool:
        """Whether its images were there in time."""
        return (
            self.latency_s <= (math.inf if self.deadline_s is None else self.deadline_s) and self.latency_s < math.inf
        )


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` (0 to 1) of them lie, interpolated linearly as numpy does; NaN of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    if ordered[low] == ordered[high]:  # also of two infinities
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def attainment(records: Sequence[RequestRecord]) -> float:
    """The share of requests that were done by their deadline; NaN of none."""
    return sum(record.met_deadline for record in records) / len(records) if records else math.nan


def goodput(
    records: Iterable[RequestRecord],
    start_s: float,
    end_s: float,
    weight: Callable[[RequestRecord], float] = lambda _: 1.0,
) -> float:
    """Requests a second (or their `weight`) that were done by their deadline, of those done between `start_s` and `end_s`.

    Counted by their end: a window inside the run has as much work in flight at its start as at its end.
    """
    done = (record for record in records if record.met_deadline and record.done_s is not None)
    return sum(weight(record) for record in done if start_s <= (record.done_s or 0.0) < end_s) / (end_s - start_s)


def prediction_errors(records: Iterable[RequestRecord]) -> list[float]:
    """For each request that was told when it would be done: by how much it took longer, as a share of what was told."""
    return [
        (record.done_s - record.sent_s) / record.predicted_s - 1.0
        for record in records
        if record.status == 200 and record.done_s is not None and record.predicted_s
    ]


def share_within(errors: Sequence[float], bound: float) -> float:
    """The share of `errors` of at most ± `bound`; NaN of none."""
    return sum(abs(error) <= bound for error in errors) / len(errors) if errors else math.nan
