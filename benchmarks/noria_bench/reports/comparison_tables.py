"""The tables that compare targets or settings, in the form of the reference article, with the article's own results.

Our runs and the article's have different machines and models, so absolute numbers are not comparable. Ratios within
each are: requests per second relative to the microbatched endpoint on the same machine.
"""

import math
from collections.abc import Mapping, Sequence

from noria_bench.measurement.runs import BenchRun
from noria_bench.reports import reference_results
from noria_bench.reports.run_groups import Group, group_runs
from noria_bench.reports.run_summary import RunSummary, finite_ratio, summarise_run
from noria_bench.reports.table import MISSING, Table, format_gib, format_number, format_rate, format_ratio, format_share

BASELINE = "reference-batched"
# The article's default timeout and size.
_REFERENCE_BATCHING = "500 ms, 8"
_REFERENCE_COLUMNS = ("Requests", "Avg (ms)", "RPS", "p50 (ms)", "p90 (ms)", "p95 (ms)", "p99 (ms)")


def performance_table(group: Group) -> Table:
    """Throughput and latency; a row for each run."""
    relative_to = _baseline_label(group)
    rows = []
    for run in group.runs:
        summary, baseline = summarise_run(run), _baseline_run(group, run)
        relative = format_ratio(
            finite_ratio(summary.requests_per_s, summarise_run(baseline).requests_per_s) if baseline else math.nan
        )
        cells = [
            _row_name(group, run),
            *_reference_cells(summary),
            str(summary.num_failures),
            format_rate(summary.images_per_s),
            format_number(summary.rows_per_s, 1),
            _uniform_ratio(group, run),
        ]
        rows.append((*cells, format_number(summary.mean_batch, 1), relative, _reference_ratio(group, run)))
    columns = (
        "Settings" if group.is_sweep else "Implementation",
        *_REFERENCE_COLUMNS,
        "Failures",
        "Images/s",
        "Rows/s",
        "Rows/s / uniform",
        "Mean batch",
    )
    ratios = (f"RPS / {relative_to}", f"Reference: RPS / {relative_to}")
    notes = (_FAILURE_NOTE,) if any(summarise_run(run).num_failures for run in group.runs) else ()
    table = Table("Requests", (*columns, *ratios), tuple(rows), (_RATE_NOTE, *notes))
    return table.without_empty_columns()


_RATE_NOTE = (
    "RPS and Images/s count what ended while the traffic lasted, its ramp included. Rows/s is the work done meanwhile, "
    "in inputs of the UNet: rows × steps. Latency counts from the intended start. "
    "Mean batch: images generated together, as the server reports it, averaged over requests."
)
_FAILURE_NOTE = (
    "Percentiles are over all requests sent; – says that it falls on a request without images, whose latency is "
    "infinite. The average is over the answered requests."
)


def resource_table(group: Group) -> Table:
    """Resources used, with the article's GPU."""
    reference_rows = {} if group.is_sweep else reference_results.scenario_rows(group.bench)
    rows = []
    for run in group.runs:
        summary, row = summarise_run(run), reference_rows.get(run.target)
        rows.append(
            (
                _row_name(group, run),
                format_number(summary.cpu_cores, 2),
                format_gib(summary.max_resident_bytes),
                format_gib(summary.gpu_bytes),
                format_share(summary.gpu_utilisation),
                f"{format_number(summary.energy_per_image_j, 1)} J"
                if math.isfinite(summary.energy_per_image_j)
                else MISSING,
                format_share(summary.other_cpu_share),
                " → ".join(format_number(speed) for speed in run.usage.matrix_gflops) or MISSING,
                format_number(summary.sent_late_p99_ms),
                f"{summary.num_wrong} of {summary.num_compared}" if summary.num_compared else MISSING,
                MISSING if run.seconds_to_ready is None else f"{run.seconds_to_ready:.1f} s",
                format_share(row.gpu_memory if row else None),
                format_share(row.gpu_utilisation if row else None),
            )
        )
    columns = (
        "Settings" if group.is_sweep else "Implementation",
        "CPU cores, mean",
        "Memory, max",
        "GPU memory, mean",
        "GPU utilisation, mean",
        "Energy/image",
        "CPU used by other processes",
        "Machine, GFLOP/s",
        "Sent late, p99 (ms)",
        "Incorrect images",
        "Time to ready",
        "Reference: GPU VRAM",
        "Reference: GPU utilisation",
    )
    return Table("Resources", columns, tuple(rows), (_RESOURCE_NOTE,)).without_empty_columns()


_RESOURCE_NOTE = (
    "Cores and memory are of all processes of the server together. Other processes are neither the server’s nor the "
    "bench’s; rows in which their share differs are not comparable. Incorrect images: of the replies that were "
    "compared with their solo runs."
)


def reference_table(group: Group) -> Table | None:
    """The article's table on the same subject; None without one."""
    rows = reference_results.sweep_rows(group.bench) if group.is_sweep else reference_results.scenario_rows(group.bench)
    if not rows:
        return None
    baseline = _reference_baseline(group, rows)
    cells = tuple(
        (
            name,
            str(row.num_requests),
            format_number(row.avg_ms),
            format_number(row.requests_per_s, 1),
            *(format_number(value) for value in (row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms)),
            format_share(row.gpu_memory),
            format_share(row.gpu_utilisation),
            format_ratio(row.num_requests / rows[baseline].num_requests),
        )
        for name, row in rows.items()
    )
    name = "Settings" if group.is_sweep else "Implementation"
    columns = (name, *_REFERENCE_COLUMNS, "GPU VRAM", "GPU utilisation", f"RPS / {baseline}")
    notes = [f"{reference_results.CITATION}. The ratio is of its requests: all runs are equally long."]
    if rows is reference_results.ATTENTION:
        notes.append(
            "Check marks, which only the article’s Spanish version has, say which row is which. "
            "With today’s diffusers, slicing replaces the attention processor, so that its first row "
            "cannot be reproduced."
        )
    return Table("Results of the reference article", columns, cells, tuple(notes)).without_empty_columns()


def overview_table(runs: Sequence[BenchRun]) -> Table:
    """A row for each target, three columns each for scenario 2 and mixed traffic, failures in a note."""
    groups = [group for group in group_runs(runs) if group.bench in ("scenario2", "mixed")]
    named = [(group, " ".join(filter(None, (group.bench, group.variant)))) for group in groups]
    rows, failure_notes = [], []
    for target in dict.fromkeys(run.target for group in groups for run in group.runs):
        cells = [target]
        for group, name in named:
            run = group.last_run_of(target)
            summary = summarise_run(run) if run else None
            cells += (
                [format_rate(summary.requests_per_s), format_number(summary.p50_ms), format_number(summary.p99_ms)]
                if summary
                else [MISSING] * 3
            )
            if summary and summary.num_failures:
                failure_notes.append(f"{target} {summary.num_failures} of {summary.num_requests} in {name}")
        rows.append(tuple(cells))
    headings = [f"{name}: {column}" for _, name in named for column in ("RPS", "p50 (ms)", "p99 (ms)")]
    notes = (f"Failures: {'; '.join(failure_notes)}. {_FAILURE_NOTE}",) if failure_notes else ()
    return Table("Overview", ("Implementation", *headings), tuple(rows), notes)


def _uniform_ratio(group: Group, run: BenchRun) -> str:
    """The rows per second of a mixed closed loop over those of the same target with uniform requests."""
    uniform = (other for other in group.runs if other.target == run.target and other.traffic.mix == "uniform")
    if run.traffic.mix == "uniform" or (other := next(uniform, None)) is None:
        return MISSING
    return format_ratio(finite_ratio(summarise_run(run).rows_per_s, summarise_run(other).rows_per_s))


def _baseline_run(group: Group, run: BenchRun) -> BenchRun | None:
    """The run that this one is compared with: in a sweep its target's first, or the one with the article's defaults."""
    if not group.is_sweep:
        same_mix = (other for other in reversed(group.runs) if other.traffic.mix == run.traffic.mix)
        return next((other for other in same_mix if other.target == BASELINE), None)
    runs_of_target = [other for other in group.runs if other.target == run.target]
    return next(
        (other for other in runs_of_target if "batch" in group.bench and other.variant == _REFERENCE_BATCHING),
        runs_of_target[0],
    )


def _baseline_label(group: Group) -> str:
    """The name of the baseline in headings."""
    if not group.is_sweep:
        return BASELINE
    baselines = [baseline for run in group.runs if (baseline := _baseline_run(group, run))]
    return group.label(baselines[0]) if len({baseline.target for baseline in baselines}) == 1 else "first of the target"


def _reference_baseline(group: Group, rows: Mapping[str, reference_results.ReferenceRow]) -> str:
    """The article's row that its others are compared with: that of our baseline, if it has one."""
    if not group.is_sweep:
        return BASELINE
    variants = (
        baseline.variant for run in group.runs if run.target == BASELINE and (baseline := _baseline_run(group, run))
    )
    return next((name for name in variants if name in rows), next(iter(rows)))


def _reference_ratio(group: Group, run: BenchRun) -> str:
    """The article's ratio for the same target or settings."""
    if not group.is_sweep:
        rows, own, baseline_name = reference_results.scenario_rows(group.bench), run.target, BASELINE
    elif run.target == BASELINE and (first := _baseline_run(group, run)):
        rows, own, baseline_name = reference_results.sweep_rows(group.bench), run.variant, first.variant
    else:
        return MISSING
    return (
        format_ratio(rows[own].num_requests / rows[baseline_name].num_requests)
        if own in rows and baseline_name in rows
        else MISSING
    )


def _row_name(group: Group, run: BenchRun) -> str:
    return group.label(run) + ("" if run.complete else " (interrupted)")


def _reference_cells(summary: RunSummary) -> tuple[str, ...]:
    milliseconds = (summary.p50_ms, summary.p90_ms, summary.p95_ms, summary.p99_ms)
    return (
        str(summary.num_requests),
        format_number(summary.avg_ms),
        format_rate(summary.requests_per_s),
        *(format_number(value) for value in milliseconds),
    )
