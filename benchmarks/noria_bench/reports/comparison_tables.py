"""The tables that compare targets or settings, in the form of the reference article, with the article's own results.

Our runs and the article's have different machines and models, so absolute numbers are not comparable. Ratios within
each are: requests per second relative to the microbatched endpoint on the same machine.
"""

from collections.abc import Mapping, Sequence

from noria_bench.measurement.runs import BenchRun
from noria_bench.reports import reference_results
from noria_bench.reports.run_groups import Group, group_runs
from noria_bench.reports.run_summary import RunSummary, finite_ratio, summarise_run
from noria_bench.reports.table import (
    MISSING,
    Table,
    format_gib,
    format_number,
    format_rate,
    format_ratio,
    format_share,
    format_with,
)

BASELINE = "reference-batched"
# The article's default timeout and size.
_REFERENCE_BATCHING = "500 ms, 8"


def performance_table(group: Group) -> Table:
    """Throughput and latency; a row for each run."""
    relative_to = _baseline_label(group)
    summaries = [(run, summarise_run(run)) for run in group.runs]
    notes = (_FAILURE_NOTE,) if any(summary.num_failures for _, summary in summaries) else ()
    return Table.of(
        "Requests",
        summaries,
        (_first_column(group), lambda each: _row_name(group, each[0])),
        ("Requests", lambda each: str(each[1].num_requests)),
        ("Avg (ms)", lambda each: format_number(each[1].avg_ms)),
        ("RPS", lambda each: format_rate(each[1].requests_per_s)),
        ("p50 (ms)", lambda each: format_number(each[1].p50_ms)),
        ("p90 (ms)", lambda each: format_number(each[1].p90_ms)),
        ("p95 (ms)", lambda each: format_number(each[1].p95_ms)),
        ("p99 (ms)", lambda each: format_number(each[1].p99_ms)),
        ("Failures", lambda each: str(each[1].num_failures)),
        ("Images/s", lambda each: format_rate(each[1].images_per_s)),
        ("Rows/s", lambda each: format_number(each[1].rows_per_s, 1)),
        ("Rows/s / uniform", lambda each: _uniform_ratio(group, each[0])),
        ("Mean batch", lambda each: format_number(each[1].mean_batch, 1)),
        (f"RPS / {relative_to}", lambda each: _baseline_ratio(group, *each)),
        (f"Reference: RPS / {relative_to}", lambda each: _reference_ratio(group, each[0])),
        notes=(_RATE_NOTE, *notes),
    ).without_empty_columns()


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

    def reference_share(run: BenchRun, name: str) -> str:
        return format_share(getattr(reference_rows.get(run.target), name, None))

    def wrong(summary: RunSummary) -> str:
        return f"{summary.num_wrong} of {summary.num_compared}" if summary.num_compared else MISSING

    return Table.of(
        "Resources",
        [(run, summarise_run(run)) for run in group.runs],
        (_first_column(group), lambda each: _row_name(group, each[0])),
        ("CPU cores, mean", lambda each: format_number(each[1].cpu_cores, 2)),
        ("Memory, max", lambda each: format_gib(each[1].max_resident_bytes)),
        ("GPU memory, mean", lambda each: format_gib(each[1].gpu_bytes)),
        ("GPU utilisation, mean", lambda each: format_share(each[1].gpu_utilisation)),
        ("Energy/image", lambda each: format_with(" J", each[1].energy_per_image_j, 1)),
        ("CPU used by other processes", lambda each: format_share(each[1].other_cpu_share)),
        ("Machine, GFLOP/s", lambda each: " → ".join(map(format_number, each[0].usage.matrix_gflops)) or MISSING),
        ("Sent late, p99 (ms)", lambda each: format_number(each[1].sent_late_p99_ms)),
        ("Incorrect images", lambda each: wrong(each[1])),
        ("Time to ready", lambda each: format_with(" s", each[0].seconds_to_ready, 1)),
        ("Reference: GPU VRAM", lambda each: reference_share(each[0], "gpu_memory")),
        ("Reference: GPU utilisation", lambda each: reference_share(each[0], "gpu_utilisation")),
        notes=(_RESOURCE_NOTE,),
    ).without_empty_columns()


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
    notes = [f"{reference_results.CITATION}. The ratio is of its requests: all runs are equally long."]
    if rows is reference_results.ATTENTION:
        notes.append(
            "Check marks, which only the article’s Spanish version has, say which row is which. "
            "With today’s diffusers, slicing replaces the attention processor, so that its first row "
            "cannot be reproduced."
        )
    return Table.of(
        "Results of the reference article",
        rows.items(),
        (_first_column(group), lambda each: each[0]),
        ("Requests", lambda each: str(each[1].num_requests)),
        ("Avg (ms)", lambda each: format_number(each[1].avg_ms)),
        ("RPS", lambda each: format_number(each[1].requests_per_s, 1)),
        ("p50 (ms)", lambda each: format_number(each[1].p50_ms)),
        ("p90 (ms)", lambda each: format_number(each[1].p90_ms)),
        ("p95 (ms)", lambda each: format_number(each[1].p95_ms)),
        ("p99 (ms)", lambda each: format_number(each[1].p99_ms)),
        ("GPU VRAM", lambda each: format_share(each[1].gpu_memory)),
        ("GPU utilisation", lambda each: format_share(each[1].gpu_utilisation)),
        (f"RPS / {baseline}", lambda each: format_ratio(each[1].num_requests / rows[baseline].num_requests)),
        notes=tuple(notes),
    ).without_empty_columns()


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


def _first_column(group: Group) -> str:
    return "Settings" if group.is_sweep else "Implementation"


def _baseline_ratio(group: Group, run: BenchRun, summary: RunSummary) -> str:
    """The requests per second over those of the run that this one is compared with."""
    if (baseline := _baseline_run(group, run)) is None:
        return MISSING
    return format_ratio(finite_ratio(summary.requests_per_s, summarise_run(baseline).requests_per_s))


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
