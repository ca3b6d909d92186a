"""What a report says, before it is Markdown or HTML: a section for each group of runs. Pure, but for the pictures that it is given."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from noria.bench.report import for_json
from noria.bench.reports.figures import figures_of
from noria.bench.reports.goals import Goal, goals_of
from noria.bench.reports.grid import Table
from noria.bench.reports.groups import Group
from noria.bench.reports.pictures import Picture
from noria.bench.reports.provenance import provenance_of, traffic_of
from noria.bench.reports.tables import performance, resources, the_articles
from noria.bench.runs import BenchRun


@dataclass(frozen=True)
class Section:
    """A group of runs, told."""

    title: str
    slug: str
    warnings: tuple[str, ...]
    traffic: tuple[str, ...]
    provenance: tuple[str, ...]
    goals: tuple[Goal, ...]
    tables: tuple[Table, ...]
    pictures: tuple[Picture, ...]
    settings: tuple[tuple[str, dict[str, Any]], ...]  # those of all rows, then what is each row's own


def section_of(group: Group, pictures: Sequence[Picture]) -> Section:
    """All that there is to say about it."""
    tables = (performance(group), the_articles(group), resources(group))
    return Section(
        title=group.title,
        slug=group.slug,
        warnings=tuple(_warnings(group)),
        traffic=tuple(traffic_of(group.runs)),
        provenance=tuple(provenance_of(group.runs)),
        goals=tuple(goals_of(group)),
        tables=tuple(table for table in tables if table),
        pictures=tuple(pictures),
        settings=tuple(_settings(group)),
    )


def raw_figures(runs: Sequence[BenchRun]) -> list[dict[str, Any]]:
    """Every figure of every run with where it comes from, for programs; without the requests, which the runs' own files have."""
    return [
        {
            "bench": run.bench,
            "variant": run.variant,
            "target": run.target,
            "complete": run.complete,
            "figures": for_json(asdict(figures_of(run))),
            "traffic": msgspec.to_builtins(run.traffic),
            "settings": run.settings,
            "model": run.model,
            "about": run.about,
        }
        for run in runs
    ]


def _settings(group: Group) -> list[tuple[str, dict[str, Any]]]:
    """Said once where they are the same in every row."""
    first, *others = (run.settings for run in group.runs)
    alike = {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}
    own = [(group.label(run), {k: v for k, v in run.settings.items() if k not in alike}) for run in group.runs]
    return [("All", alike), *((label, values) for label, values in own if values)]


def _warnings(group: Group) -> list[str]:
    found = []
    broken = [group.label(run) for run in group.runs if not run.complete]
    if broken:
        found.append(f"Interrupted, so that rates and quantiles are of a shorter time: {', '.join(broken)}.")
    for run in group.runs:
        wrong = [sample for sample in run.samples if sample.wrong]
        if wrong:
            found.append(f"{group.label(run)}: {len(wrong)} of {len(run.samples)} samples are wrong: {wrong[0].wrong}")
    return found
