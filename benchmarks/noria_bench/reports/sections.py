"""The content of a report before it becomes Markdown or HTML: a section for each group of runs. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from noria_bench.measurement.runs import BenchRun
from noria_bench.reports.comparison_tables import performance_table, reference_table, resource_table
from noria_bench.reports.deadlines import deadline_summary, deadline_tables
from noria_bench.reports.goals import Goal, goals_of
from noria_bench.reports.plots.target_plots import Plot
from noria_bench.reports.provenance_text import provenance_lines, traffic_lines
from noria_bench.reports.run_groups import DEADLINES, Group
from noria_bench.reports.run_summary import finite_json, summarise_run
from noria_bench.reports.table import Table


@dataclass(frozen=True)
class Section:
    """The content of the section on one group of runs."""

    title: str
    slug: str
    warnings: tuple[str, ...]
    traffic: tuple[str, ...]
    provenance: tuple[str, ...]
    goals: tuple[Goal, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...]
    settings: tuple[tuple[str, dict[str, Any]], ...]  # shared by all rows, then each row's own


def build_section(group: Group, plots: Sequence[Plot]) -> Section:
    """Collect the tables, goals, warnings and provenance of a group."""
    tables: Sequence[Table | None] = (performance_table(group), reference_table(group), resource_table(group))
    if group.bench == DEADLINES:
        tables = deadline_tables(group)
    return Section(
        title=group.title,
        slug=group.slug,
        warnings=tuple(_warnings(group)),
        traffic=tuple(traffic_lines(group.runs)),
        provenance=tuple(provenance_lines(group.runs)),
        goals=tuple(goals_of(group)),
        tables=tuple(table for table in tables if table),
        plots=tuple(plots),
        settings=tuple(_settings(group)),
    )


def raw_summaries(runs: Sequence[BenchRun]) -> list[dict[str, Any]]:
    """Every summary with its run's provenance and settings, JSON-ready; the requests are in the runs' own files."""
    return [
        {
            "bench": run.bench,
            "variant": run.variant,
            "target": run.target,
            "complete": run.complete,
            "summary": finite_json(
                asdict(summarise_run(run)) | (deadline_summary(run) if run.bench == DEADLINES else {})
            ),
            "traffic": msgspec.to_builtins(run.traffic),
            "settings": run.settings,
            "model": run.model,
            "provenance": run.provenance,
        }
        for run in runs
    ]


def _settings(group: Group) -> list[tuple[str, dict[str, Any]]]:
    """Settings that all rows share come once, first."""
    first, *others = (run.settings for run in group.runs)
    shared = {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}
    own = [(group.label(run), {k: v for k, v in run.settings.items() if k not in shared}) for run in group.runs]
    return [("All", shared), *((label, values) for label, values in own if values)]


def _warnings(group: Group) -> list[str]:
    found = []
    interrupted = [group.label(run) for run in group.runs if not run.complete]
    if interrupted:
        found.append(f"Interrupted, so that rates and quantiles cover a shorter time: {', '.join(interrupted)}.")
    for run in group.runs:
        wrong = [check for check in run.image_checks if check.problem]
        if wrong:
            found.append(
                f"{group.label(run)}: {len(wrong)} of {len(run.image_checks)} checked images are incorrect: "
                f"{wrong[0].problem}"
            )
    return found
