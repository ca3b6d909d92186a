"""The tables of `noria bench deadlines`: one row for each policy, one column for each load. Pure.

A row is named after Noria's policy, or after the target for other servers. Rates leave out the ramp of a run.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from noria_bench.benches.deadline_options import DEADLINE_TARGETS
from noria_bench.measurement.run_metrics import (
    PREDICTION_BOUND,
    RequestRecord,
    attainment,
    goodput,
    prediction_errors,
    prediction_summary,
)
from noria_bench.measurement.runs import BenchRun
from noria_bench.reports.comparison_tables import BASELINE
from noria_bench.reports.run_groups import Group
from noria_bench.reports.run_summary import summarise_run
from noria_bench.reports.table import MISSING, Table, format_number

# Noria's default policy, which is compared with the others.
DEFAULT_POLICY = "least-slack"
# Per cent of capacity up to which predictions are judged in the open loop.
STEADY_LOAD_PERCENT = 90
# Share of a run until as much work is in flight as its load brings.
_RAMP_SHARE = 0.2
_LOAD_NOTE = (
    "Loads are per cents of Noria's capacity. – says that nothing was measured, or that a quantile falls on a failed "
    "request."
)

Weight = Callable[[RequestRecord], float]


def deadline_tables(group: Group) -> list[Table]:
    """All tables of the group."""
    return [*_load_tables(group), _overload_table(group), _prediction_table(group), *_calibration_tables(group)]


def deadline_summary(run: BenchRun) -> dict[str, Any]:
    """The figures of one run that concern deadlines; not finite where nothing was measured."""
    records = run.records
    classes = sorted({record.deadline_class for record in records})
    return {
        "attainment": attainment(records),
        "attainment_by_deadline_class": {
            name: attainment([record for record in records if record.deadline_class == name]) for name in classes
        },
        "num_rejected": sum(record.status == 429 for record in records),
        "num_expired": sum(record.status == 504 for record in records),
        "goodput_requests_per_s": run_goodput(run),
        "goodput_images_per_s": run_goodput(run, lambda record: record.num_images),
        "goodput_rows_per_s": run_goodput(run, lambda record: record.rows),
        "predictions": prediction_summary(prediction_errors(records)),
        "memory_growth": memory_growth(run),
    }


def run_goodput(run: BenchRun, weight: Weight = lambda _: 1.0) -> float:
    """Requests (or their `weight`) per second that met their deadline, without the ramp."""
    seconds = run.traffic.seconds
    return goodput(run.records, _RAMP_SHARE * seconds, seconds, weight)


def memory_growth(run: BenchRun) -> float:
    """Median resident memory in the last fifth of the run over that in the first; NaN without samples."""
    fifth = run.traffic.seconds / 5
    samples = list(zip(run.usage.at_s, run.usage.resident_bytes, strict=True))
    first = [held for at_s, held in samples if at_s <= fifth]
    last = [held for at_s, held in samples if 4 * fifth <= at_s <= run.traffic.seconds]
    return statistics.median(last) / statistics.median(first) if first and last else math.nan


def series_of(run: BenchRun) -> str:
    """The row of a run: Noria's policy, or another target's name."""
    return str(run.settings["policy"]) if run.target == "noria" else run.target


def load_of(run: BenchRun) -> int:
    """The run's load in per cent of Noria's capacity."""
    return run.traffic.load_percent or 0


def series_names(group: Group) -> list[str]:
    """The rows: Noria's policies in the order of the options, then other targets."""
    found = dict.fromkeys(series_of(run) for run in group.runs)
    return [
        *(name for name in DEADLINE_TARGETS if name in found),
        *(name for name in found if name not in DEADLINE_TARGETS),
    ]


def equal_files_share(runs: Sequence[BenchRun]) -> float:
    """Of the requests that Noria answered in several runs, the share whose files were equal in all; NaN without any."""
    digests: dict[int, list[str]] = {}
    for run in runs:
        for record in run.records:
            if record.digest and run.target == "noria":
                digests.setdefault(record.number, []).append(record.digest)
    repeated = [found for found in digests.values() if len(found) > 1]
    return sum(len(set(found)) == 1 for found in repeated) / len(repeated) if repeated else math.nan


def overload_ratio(group: Group, series: str, weight: Weight = lambda _: 1.0) -> float:
    """The lowest goodput above 100 % load over the highest at any load; NaN without a run above 100 %."""
    found = {load_of(run): run_goodput(run, weight) for run in group.runs if series_of(run) == series}
    over = [value for load, value in found.items() if load > 100]
    peak = max(found.values(), default=0.0)
    return min(over) / peak if over and peak else math.nan


def open_loop_errors(group: Group) -> list[float]:
    """The relative prediction errors of the default policy's runs at loads up to STEADY_LOAD_PERCENT."""
    return [
        error
        for run in group.runs
        if series_of(run) == DEFAULT_POLICY and load_of(run) <= STEADY_LOAD_PERCENT
        for error in prediction_errors(run.records)
    ]


def attainment_ratio(group: Group, load: int, other: str) -> float:
    """Attainment of the default policy over that of `other` at one load; NaN if either is missing, infinite over 0."""
    runs = {series_of(run): run for run in group.runs if load_of(run) == load}
    if DEFAULT_POLICY not in runs or other not in runs:
        return math.nan
    baseline = attainment(runs[other].records)
    return attainment(runs[DEFAULT_POLICY].records) / baseline if baseline else math.inf


def _load_tables(group: Group) -> list[Table]:
    loads = sorted({load_of(run) for run in group.runs})
    runs = {(series_of(run), load_of(run)): run for run in group.runs}
    columns = ("Policy", *(f"{load} %" for load in loads))

    def by_load(title: str, value: Callable[[BenchRun], float], *notes: str) -> Table:
        rows = [
            (name, *(_format(value(runs[name, load])) if (name, load) in runs else MISSING for load in loads))
            for name in series_names(group)
        ]
        return Table(title, columns, tuple(rows), notes)

    ratios = [
        (f"{DEFAULT_POLICY} / {other}", *(_format(attainment_ratio(group, load, other)) for load in loads))
        for other in (BASELINE, "fcfs")
    ]
    return [
        by_load("Attainment", lambda run: attainment(run.records), _LOAD_NOTE),
        Table("Ratio of attainment", ("Policies", *columns[1:]), tuple(ratios)),
        by_load("Goodput, requests/s", run_goodput),
        by_load("Goodput, images/s", lambda run: run_goodput(run, lambda record: record.num_images)),
        by_load("Latency p50, s", lambda run: summarise_run(run).p50_ms / 1000),
        by_load("Latency p90, s", lambda run: summarise_run(run).p90_ms / 1000),
        by_load("Rejected at once", lambda run: _status_share(run, 429)),
        by_load("Expired at the deadline", lambda run: _status_share(run, 504)),
        by_load("Memory, end / start", memory_growth),
        by_load("CPU used by other processes", lambda run: run.usage.other_cpu_share),
    ]


def _overload_table(group: Group) -> Table:
    rows = []
    for name in series_names(group):
        overloaded = [run for run in group.runs if series_of(run) == name and load_of(run) > 100]
        growth = max((memory_growth(run) for run in overloaded), default=math.nan)
        ratios = (overload_ratio(group, name), overload_ratio(group, name, lambda record: record.rows))
        rows.append((name, *(_format(ratio) for ratio in ratios), _format(growth)))
    columns = ("Policy", "Lowest goodput / peak, requests/s", "Lowest goodput / peak, rows/s", "Memory growth, max")
    return Table("Above 100 %", columns, tuple(rows))


def _prediction_table(group: Group) -> Table:
    cases: dict[str, Mapping[str, Any]] = {
        "8 users": group.runs[0].calibration.get("steady_predictions") or prediction_summary(()),
        f"open loop, up to {STEADY_LOAD_PERCENT} %": prediction_summary(open_loop_errors(group)),
    }
    rows = [
        (name, str(found["num_requests"]), *(_format(found[key]) for key in ("within_bound", "p5", "p50", "p95")))
        for name, found in cases.items()
    ]
    columns = ("Load", "Requests", f"Within ± {PREDICTION_BOUND:.0%}", "Error p5", "Error median", "Error p95")
    note = "Errors of the finish time that the server predicts at admission, as shares of the predicted duration."
    return Table("Predictions", columns, tuple(rows), (note,))


def _calibration_tables(group: Group) -> list[Table]:
    calibration = group.runs[0].calibration
    capacities: Mapping[str, Mapping[str, float]] = calibration.get("capacity", {})
    capacity_rows = [
        (name, format_number(found["rows_per_s"]), *(_format(found[key]) for key in ("images_per_s", "requests_per_s")))
        for name, found in capacities.items()
    ]
    differences: Mapping[str, Sequence[int]] = calibration.get("max_channel_differences", {})
    difference_rows = [(name.replace("_", " "), f"{max(values)}/255") for name, values in differences.items()]
    equal_files = _format(equal_files_share(group.runs))
    tables = [
        Table("Capacity", ("Server", "Rows/s", "Images/s", "Requests/s"), tuple(capacity_rows)),
        Table(
            "Same seed alone and among 32 requests",
            ("Buckets", "Largest channel difference"),
            tuple(difference_rows),
            (f"Of the requests that Noria answered in several runs, {equal_files} had equal files in all of them.",),
        ),
    ]
    return [table for table in tables if table.rows]


def _status_share(run: BenchRun, status: int) -> float:
    return sum(record.status == status for record in run.records) / len(run.records) if run.records else math.nan


def _format(value: float | None) -> str:
    return MISSING if value is None else format_number(value, 2)
