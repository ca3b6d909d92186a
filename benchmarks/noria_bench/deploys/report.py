"""The report of `noria bench deploys`: tables in Markdown, and a plot."""

import functools
import pathlib

from noria_bench.deploys.results import KINDS, DeploysResult, DeploysRun, Kind, num_failed
from noria_bench.reports.plots.styles import save_figure
from noria_bench.reports.result_report import conditions, heading, median, write_files
from noria_bench.reports.table import Table, format_number, format_ratio

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # a colour for each niceness; Okabe and Ito's


def write_report(result: DeploysResult, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write `report.md` and the plot into `folder`; returns the files."""
    return write_files(folder, markdown(result), deploys=functools.partial(_plot, result))


def markdown(result: DeploysResult) -> str:
    """The report, which links the plot beside it."""
    parts = heading("deploys", result.failures, complete=result.complete)
    failed = num_failed(result.runs)
    parts.append(f"{failed} requests failed." if failed else "No request failed.")
    parts.append("![Latencies before, while and after versions are deployed](plots/deploys.svg)")
    for kind in KINDS:
        parts += [f"## {kind.capitalize()}", _table(result, kind).markdown()]
    options = result.options
    text = (
        f"{options['image_users']} users of {result.models['images']} and {options['text_users']} of "
        f"{result.models['texts']}, each of whom pauses {options['pause_s']:g} s after an answer."
    )
    return "\n\n".join([*parts, conditions(result.provenance, text)])


def _table(result: DeploysResult, kind: Kind) -> Table:
    rows = []
    for niceness in _niceness(result):
        runs = [run for run in result.runs if run.niceness == niceness]
        for name in _phase_names(result):
            phases = [phase for run in runs for phase in run.phases if phase.name == name]
            of_kind = [phase.by_kind[kind] for phase in phases]
            rows.append(
                (
                    f"niceness {niceness}, {name}",
                    format_number(median(phase.seconds for phase in phases), 1),
                    str(sum(each.num_ok for each in of_kind)),
                    str(sum(each.num_failed for each in of_kind)),
                    format_number(median(each.p50_ms for each in of_kind), 1),
                    format_number(median(each.p99_ms for each in of_kind), 1),
                    format_ratio(median(_p99_ratio(run, name, kind) for run in runs)),
                )
            )
    columns = ("loading at, phase", "seconds", "answered", "failed", "p50, ms", "p99, ms", "p99 over before")
    note = "Medians of the rounds; each ratio is of two phases of the same server. Answered and failed are sums."
    return Table(kind.capitalize(), columns, tuple(rows), (note,))


def _p99_ratio(run: DeploysRun, name: str, kind: Kind) -> float | None:
    """The p99 in a phase over that before, of the same server."""
    p99_ms = {phase.name: phase.by_kind[kind].p99_ms for phase in run.phases}
    before, now = p99_ms.get("before"), p99_ms.get(name)
    return now / before if before and now else None


def _plot(result: DeploysResult, file: pathlib.Path) -> pathlib.Path:
    """The p99 of each phase, with p50 as a line in each bar; a group for each phase, a bar for each niceness."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(9.6, 3.4), layout="constrained")
    names, all_niceness = _phase_names(result), _niceness(result)
    width = 0.8 / len(all_niceness)
    for kind, axis in zip(KINDS, axes, strict=True):
        axis.set(title=kind, ylabel="milliseconds, p99 (line: p50)")
        axis.set_xticks(range(len(names)), [name.replace(": ", "\n") for name in names])
        for index, niceness in enumerate(all_niceness):
            left = [place - 0.4 + (index + 0.5) * width for place in range(len(names))]
            runs = [run for run in result.runs if run.niceness == niceness]
            phases = [[phase for run in runs for phase in run.phases if phase.name == name] for name in names]
            p50_ms, p99_ms = (
                [median(getattr(phase.by_kind[kind], key) for phase in each) for each in phases]
                for key in ("p50_ms", "p99_ms")
            )
            label = f"loading at niceness {niceness}" if kind == KINDS[0] else None
            axis.bar(left, p99_ms, 0.95 * width, color=_COLOURS[index % len(_COLOURS)], label=label)
            axis.hlines(p50_ms, [x - width / 2 for x in left], [x + width / 2 for x in left], color="black")
    figure.legend(loc="outside upper center", ncols=len(all_niceness), frameon=False, fontsize=9)
    return save_figure(figure, file)


def _niceness(result: DeploysResult) -> list[int]:
    return list(dict.fromkeys(run.niceness for run in result.runs))


def _phase_names(result: DeploysResult) -> list[str]:
    return list(dict.fromkeys(phase.name for run in result.runs for phase in run.phases))
