"""The tables of a group of runs: the seed article's form, and its own figures beside ours.

Ours and the article's are of different machines and models, so no absolute number of one can be held against the other's. What can is a
ratio within each: requests a second, relative to the microbatched endpoint on the same machine.
"""

import math
from collections.abc import Mapping, Sequence

from noria.bench.reports import article
from noria.bench.reports.figures import Figures, figures_of, ratio
from noria.bench.reports.grid import NOTHING, Table, gib, number, rate, share, times
from noria.bench.reports.groups import Group, groups_of
from noria.bench.runs import BenchRun

BASE = "seed-batched"
_DEFAULTS = "500 ms, 8"  # the article's timeout and size, in the sweep of both
_SEEDS_FORM = ("Requests", "Avg (ms)", "RPS", "p50 (ms)", "p90 (ms)", "p95 (ms)", "p99 (ms)")


def performance(group: Group) -> Table:
    """Who answered how much, how fast; a row for each run."""
    relative_to = _relative_to(group)
    rows = []
    for run in group.runs:
        found, base = figures_of(run), _base(group, run)
        relative = times(ratio(found.requests_per_s, figures_of(base).requests_per_s) if base else math.nan)
        cells = [_name(group, run), *_seeds_form(found), str(found.failures), rate(found.images_per_s)]
        rows.append((*cells, number(found.mean_batch, 1), relative, _articles_ratio(group, run)))
    columns = ("Settings" if group.is_sweep else "Implementation", *_SEEDS_FORM, "Failures", "Images/s", "Mean batch")
    ratios = (f"RPS / {relative_to}", f"Article: RPS / {relative_to}")
    notes = (_FAILURES,) if any(figures_of(run).failures for run in group.runs) else ()
    table = Table("Requests", (*columns, *ratios), tuple(rows), (_COUNTED, *notes))
    return table.without_empty_columns()


_COUNTED = (
    "RPS and Images/s: what was done while the traffic lasted, its ramp included. Latency counts from the intended start. "
    "Mean batch: how many images a request was drawn with, its own included."
)
_FAILURES = (
    "A percentile is of all requests sent; – says that it falls on one without images, which took for ever. "
    "The average is of those answered."
)


def resources(group: Group) -> Table:
    """What the machine was seen to do meanwhile; beside it the article's GPU."""
    theirs = {} if group.is_sweep else article.of_scenario(group.bench)
    rows = []
    for run in group.runs:
        found, row = figures_of(run), theirs.get(run.target)
        rows.append(
            (
                _name(group, run),
                number(found.cpu_cores, 2),
                gib(found.resident_bytes),
                gib(found.gpu_bytes),
                share(found.gpu_share),
                f"{number(found.energy_per_image_j, 1)} J" if math.isfinite(found.energy_per_image_j) else NOTHING,
                share(found.others_share),
                " → ".join(number(speed) for speed in run.usage.matrix_gflops) or NOTHING,
                number(found.sent_late_p99_ms),
                f"{found.wrong} of {found.compared}" if found.compared else NOTHING,
                NOTHING if run.seconds_to_ready is None else f"{run.seconds_to_ready:.1f} s",
                share(row.gpu_memory if row else None),
                share(row.gpu_utilisation if row else None),
            )
        )
    columns = (
        "Settings" if group.is_sweep else "Implementation",
        "CPU cores, mean",
        "Memory, max",
        "GPU memory, mean",
        "GPU utilisation, mean",
        "Energy/image",
        "CPU taken by others",
        "Machine, GFLOP/s",
        "Sent late, p99 (ms)",
        "Wrong images",
        "Ready after",
        "Article: GPU VRAM",
        "Article: GPU utilisation",
    )
    return Table("Resources", columns, tuple(rows), (_WATCHED,)).without_empty_columns()


_WATCHED = (
    "Cores and memory are of all processes of the server together. Others are processes that are neither the server’s nor the bench’s; "
    "rows in which they differ cannot be compared. Wrong images: of the replies that were compared with their solo runs."
)


def the_articles(group: Group) -> Table | None:
    """The article's table on the same subject, whole; None where it has none."""
    rows = article.of_sweep(group.bench) if group.is_sweep else article.of_scenario(group.bench)
    if not rows:
        return None
    base = _articles_base(group, rows)
    cells = tuple(
        (
            name,
            str(row.requests),
            number(row.avg_ms),
            number(row.requests_per_s, 1),
            *(number(value) for value in (row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms)),
            share(row.gpu_memory),
            share(row.gpu_utilisation),
            times(row.requests / rows[base].requests),
        )
        for name, row in rows.items()
    )
    name = "Settings" if group.is_sweep else "Implementation"
    columns = (name, *_SEEDS_FORM, "GPU VRAM", "GPU utilisation", f"RPS / {base}")
    notes = [f"{article.CITATION}. The ratio is of its requests, all runs being as long."]
    if rows is article.ATTENTION:
        notes.append(
            "Which row is which is told by check marks, which only the article’s Spanish version has kept. With today’s diffusers slicing "
            "replaces the attention processor, so that its first row cannot be made again."
        )
    return Table("The article’s own figures", columns, cells, tuple(notes)).without_empty_columns()


def compact(runs: Sequence[BenchRun]) -> Table:
    """For a README: each target a row, scenario 2 and mixed traffic three columns each; failures in a note."""
    groups = [group for group in groups_of(runs) if group.bench in ("scenario2", "mixed")]
    named = [(group, " ".join(filter(None, (group.bench, group.variant)))) for group in groups]
    rows, failed = [], []
    for target in dict.fromkeys(run.target for group in groups for run in group.runs):
        cells = [target]
        for group, name in named:
            run = group.of(target)
            found = figures_of(run) if run else None
            cells += (
                [rate(found.requests_per_s), number(found.p50_ms), number(found.p99_ms)] if found else [NOTHING] * 3
            )
            if found and found.failures:
                failed.append(f"{target} {found.failures} of {found.requests} in {name}")
        rows.append(tuple(cells))
    headings = [f"{name}: {column}" for _, name in named for column in ("RPS", "p50 (ms)", "p99 (ms)")]
    notes = (f"Failures: {'; '.join(failed)}. {_FAILURES}",) if failed else ()
    return Table("At a glance", ("Implementation", *headings), tuple(rows), notes)


def _base(group: Group, run: BenchRun) -> BenchRun | None:
    """The run that this one is held against: in a sweep its target's first, or the one that has the article's defaults."""
    if not group.is_sweep:
        return group.of(BASE)
    own = [other for other in group.runs if other.target == run.target]
    return next((other for other in own if "batch" in group.bench and other.variant == _DEFAULTS), own[0])


def _relative_to(group: Group) -> str:
    """What a table calls it."""
    if not group.is_sweep:
        return BASE
    bases = [base for run in group.runs if (base := _base(group, run))]
    return group.label(bases[0]) if len({base.target for base in bases}) == 1 else "its target’s first"


def _articles_base(group: Group, rows: Mapping[str, article.Row]) -> str:
    """The article's row that its others are held against: that of ours, where it has one."""
    if not group.is_sweep:
        return BASE
    bases = (base.variant for run in group.runs if run.target == BASE and (base := _base(group, run)))
    return next((name for name in bases if name in rows), next(iter(rows)))


def _articles_ratio(group: Group, run: BenchRun) -> str:
    """The article's own, of the same target or settings."""
    if not group.is_sweep:
        rows, own, base = article.of_scenario(group.bench), run.target, BASE
    elif run.target == BASE and (first := _base(group, run)):
        rows, own, base = article.of_sweep(group.bench), run.variant, first.variant
    else:
        return NOTHING
    return times(rows[own].requests / rows[base].requests) if own in rows and base in rows else NOTHING


def _name(group: Group, run: BenchRun) -> str:
    return group.label(run) + ("" if run.complete else " (interrupted)")


def _seeds_form(found: Figures) -> tuple[str, ...]:
    milliseconds = (found.p50_ms, found.p90_ms, found.p95_ms, found.p99_ms)
    return (
        str(found.requests),
        number(found.avg_ms),
        rate(found.requests_per_s),
        *(number(value) for value in milliseconds),
    )
