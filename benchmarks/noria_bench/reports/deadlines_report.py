"""What the runs of `noria bench contract` amount to: a summary for JSON, and tables for people. Pure."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from noria_bench.benches.deadline_options import DeadlineTarget
from noria_bench.measurement.run_metrics import (
    RequestRecord,
    attainment,
    goodput,
    percentile,
    prediction_errors,
    share_within,
)

STEADY_LOAD = 90  # per cent of capacity, up to which predictions are judged in the open loop
PREDICTION_BOUND = 0.15
_RAMP = 0.2  # of a run's length, until as much work is in flight as this load brings


class DeadlineRun(Struct, frozen=True):
    """One trace sent to one target."""

    target: DeadlineTarget
    load_percent: int  # per cent of Noria's capacity
    seconds: float  # over which the requests arrived
    records: tuple[RequestRecord, ...]
    memory_samples: tuple[tuple[float, int], ...]  # seconds, bytes
    other_cpu_share: float = 0.0  # of the machine's CPU time, that strangers took meanwhile

    def goodput(self, weight: Callable[[RequestRecord], float] = lambda _: 1.0) -> float:
        """Requests a second (or their `weight`) done by their deadline, ramp left out."""
        return goodput(self.records, _RAMP * self.seconds, self.seconds, weight)

    def memory_growth(self) -> float:
        """The median of the memory in the last fifth of the run over that in the first; NaN without samples."""
        fifth = self.seconds / 5
        first = [held for at, held in self.memory_samples if at <= fifth]
        last = [held for at, held in self.memory_samples if 4 * fifth <= at <= self.seconds]
        return statistics.median(last) / statistics.median(first) if first and last else math.nan


def summarise_run(run: DeadlineRun) -> dict[str, Any]:
    """Its numbers; what cannot be said is null."""
    records = run.records
    latencies = [record.latency_s for record in records]
    errors = prediction_errors(records)
    batches = [record.batch_size for record in records if record.batch_size]
    deadline_classes = sorted({record.deadline_class for record in records})
    found = {
        "requests": len(records),
        "attainment": attainment(records),
        "attainment_by_patience": {
            deadline_class: attainment([record for record in records if record.deadline_class == deadline_class])
            for deadline_class in deadline_classes
        },
        "refused": sum(record.status == 429 for record in records),
        "expired": sum(record.status == 504 for record in records),
        "other_failures": sum(record.status not in (200, 429, 504) for record in records if record.done_s is not None),
        "unanswered": sum(record.done_s is None for record in records),
        "goodput_requests_per_s": run.goodput(),
        "goodput_images_per_s": run.goodput(lambda record: record.num_images),
        "goodput_rows_per_s": run.goodput(lambda record: record.rows),
        "latency_s": {f"p{100 * share:.0f}": percentile(latencies, share) for share in (0.5, 0.9, 0.99)},
        "sent_late_s_p99": percentile([record.sent_s - record.intended_s for record in records], 0.99),
        "prediction_error": {f"p{100 * share:.0f}": percentile(errors, share) for share in (0.05, 0.5, 0.95)},
        "predictions_within_bound": share_within(errors, PREDICTION_BOUND),
        "memory_growth": run.memory_growth(),
        "others_share": run.other_cpu_share,
        "mean_batch": statistics.mean(batches) if batches else math.nan,
    }
    return finite_json(found)  # type: ignore[no-any-return]


def summarise_errors(errors: Sequence[float]) -> dict[str, Any]:
    """How good predictions were whose relative errors these are."""
    found = {
        "requests": len(errors),
        "within_bound": share_within(errors, PREDICTION_BOUND),
        **{f"p{100 * share:.0f}": percentile(errors, share) for share in (0.05, 0.5, 0.95)},
    }
    return finite_json(found)  # type: ignore[no-any-return]


def summarise(runs: Sequence[DeadlineRun], same_image: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Each run's numbers, and what the bench was made to ask; what was not measured is null."""
    by_key = {(run.target, run.load_percent): run for run in runs}
    targets, loads = _unique_in_order(run.target for run in runs), sorted({run.load_percent for run in runs})
    steady = [run for run in runs if run.load_percent <= STEADY_LOAD and run.target == "least-slack"]
    errors = [error for run in steady for error in prediction_errors(run.records)]
    found = {
        "runs": [{"target": run.target, "load": run.load_percent, **summarise_run(run)} for run in runs],
        "attainment_over_seed": {str(load): _ratio(by_key, load, "least-slack", "seed") for load in loads},
        "attainment_over_fcfs": {str(load): _ratio(by_key, load, "least-slack", "fcfs") for load in loads},
        "overload_goodput_over_peak": {
            target: {
                "requests": _over_peak(runs, target, lambda _: 1.0),
                "rows": _over_peak(runs, target, lambda record: record.rows),
            }
            for target in targets
        },
        "overload_memory_growth": {
            target: max(
                (run.memory_growth() for run in runs if run.target == target and run.load_percent > 100), default=None
            )
            for target in targets
        },
        "open_loop_prediction": summarise_errors(errors),
        "largest_channel_difference": {name: max(values) for name, values in same_image.items()},
        "equal_files": _equal_files_share(runs),
    }
    return finite_json(found)  # type: ignore[no-any-return]


def _ratio(
    by_key: Mapping[tuple[DeadlineTarget, int], DeadlineRun], load: int, ours: DeadlineTarget, theirs: DeadlineTarget
) -> float:
    if (ours, load) not in by_key or (theirs, load) not in by_key:
        return math.nan
    baseline = attainment(by_key[theirs, load].records)
    return attainment(by_key[ours, load].records) / baseline if baseline else math.inf


def _over_peak(runs: Sequence[DeadlineRun], target: DeadlineTarget, weight: Callable[[RequestRecord], float]) -> float:
    """The lowest goodput above 100 % over the highest at any load."""
    found = {run.load_percent: run.goodput(weight) for run in runs if run.target == target}
    over = [value for load, value in found.items() if load > 100]
    peak = max(found.values(), default=0.0)
    return min(over) / peak if over and peak else math.nan


def _equal_files_share(runs: Sequence[DeadlineRun]) -> float:
    """Of the requests that Noria drew in several runs, the share whose files were the same in all of them, byte for byte."""
    digests: dict[int, list[str]] = {}
    for run in runs:
        for record in run.records:
            if record.digest and run.target != "seed":
                digests.setdefault(record.number, []).append(record.digest)
    repeated = [found for found in digests.values() if len(found) > 1]
    return sum(len(set(found)) == 1 for found in repeated) / len(repeated) if repeated else math.nan


def finite_json(value: Any) -> Any:
    """`value` as JSON can say it: what is no number, or endless, is null; the rest is rounded to what can be measured."""
    match value:
        case float():
            return round(value, 4) if math.isfinite(value) else None
        case dict():
            return {key: finite_json(part) for key, part in value.items()}
        case list() | tuple():
            return [finite_json(part) for part in value]
        case _:
            return value


def run_line(run: DeadlineRun) -> str:
    """A run in a few words, for who is watching."""
    found = summarise_run(run)
    return (
        f"{run.load_percent} % {run.target}: attainment {found['attainment']:.2f} of {found['requests']} requests, "
        f"{found['refused']} refused, {found['expired']} expired, {found['unanswered']} unanswered"
    )


def tables(document: Mapping[str, Any]) -> str:
    """The document's summary as Markdown."""
    summary = document["summary"]
    rows = {(row["target"], row["load"]): row for row in summary["runs"]}
    targets, loads = _unique_in_order(target for target, _ in rows), sorted({load for _, load in rows})

    def by_load(title: str, cell: Callable[[Mapping[str, Any]], Any]) -> list[str]:
        lines = [f"| {title} | {' | '.join(f'{load} %' for load in loads)} |", f"|---|{'---|' * len(loads)}"]
        for target in targets:
            cells = [_format(cell(rows[target, load])) if (target, load) in rows else "–" for load in loads]
            lines.append(f"| {target} | {' | '.join(cells)} |")
        return [*lines, ""]

    ratios = [
        "| ratio of attainment | " + " | ".join(f"{load} %" for load in loads) + " |",
        f"|---|{'---|' * len(loads)}",
        *(
            f"| least-slack / {other} | {' | '.join(_format(summary[key].get(str(load))) for load in loads)} |"
            for other, key in (("seed", "attainment_over_seed"), ("fcfs", "attainment_over_fcfs"))
        ),
        "",
    ]
    parts = [
        by_load("attainment", lambda row: row["attainment"]),
        ratios,
        by_load("goodput, requests/s", lambda row: row["goodput_requests_per_s"]),
        by_load("goodput, images/s", lambda row: row["goodput_images_per_s"]),
        by_load("latency p50, s", lambda row: row["latency_s"]["p50"]),
        by_load("latency p90, s", lambda row: row["latency_s"]["p90"]),
        by_load("refused at once", lambda row: row["refused"] / row["requests"]),
        by_load("given up at the deadline", lambda row: row["expired"] / row["requests"]),
        by_load("memory, end / begin", lambda row: row["memory_growth"]),
        by_load("CPU time taken by others", lambda row: row["others_share"]),
        _findings(document),
    ]
    return "\n".join(itertools.chain.from_iterable(parts))


def _findings(document: Mapping[str, Any]) -> list[str]:
    """What the bench was made to ask, a line each."""
    summary, capacity = document["summary"], document["capacity"]
    machine = document["machine"]
    predictions = {
        "with 8 users": document["steady"],
        f"open loop, up to {STEADY_LOAD} %": summary["open_loop_prediction"],
    }
    lines = [
        f"Capacity of {name}: {found['rows_per_s']:.0f} rows/s, {found['images_per_s']:.2f} images/s, "
        f"{found['requests_per_s']:.2f} requests/s."
        for name, found in capacity.items()
    ]
    lines += [
        f"Above 100 %, {target}: goodput at least {_format(found['requests'])} of its peak in requests/s, {_format(found['rows'])} in "
        f"rows/s; memory at most × {_format(summary['overload_memory_growth'][target])}."
        for target, found in summary["overload_goodput_over_peak"].items()
    ]
    lines += [
        f"Predicted finish {when}: {_format(found['within_bound'])} of {found['requests']} within ± {PREDICTION_BOUND:.0%}; error p5 "
        f"{_format(found['p5'])}, median {_format(found['p50'])}, p95 {_format(found['p95'])}."
        for when, found in predictions.items()
    ]
    lines += [
        "Same seed alone and among 32 in flight, largest difference of a channel: "
        + ", ".join(f"{value}/255 ({name})" for name, value in summary["largest_channel_difference"].items())
        + ".",
        f"{document['model']['name']}, {document['options']['mix']} requests, {document['options']['arrivals']} arrivals, "
        f"{document['options']['seconds']:.0f} s a run, {machine['cores']} cores of {machine['cpu']}, noria {document['noria']} at "
        f"{document['commit']}, {document['date'][:10]}; load before {machine['load_average_before']:.1f}"
        + ("." if document["complete"] else "; incomplete."),
    ]
    return [text + "  " for text in lines]  # two spaces: a new line in Markdown


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _unique_in_order(targets: Iterable[DeadlineTarget]) -> list[DeadlineTarget]:
    return list(dict.fromkeys(targets))
