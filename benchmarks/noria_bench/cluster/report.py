"""The report of `noria bench cluster`: tables in Markdown, and a plot."""

import functools
import math
import pathlib
from collections.abc import Sequence

from noria_bench.cluster.results import SERVINGS, ClusterResult, ClusterRun, Serving, Steps, num_failed
from noria_bench.cluster.servings import ROLES
from noria_bench.reports.plots.styles import save_figure
from noria_bench.reports.result_report import conditions, heading, median, write_files
from noria_bench.reports.table import Table, format_number, format_ratio, format_share

GOAL = 0.95
"""Of the ratio of both servers' images per second, and of the share of linear scaling."""

_NAMES: dict[Serving, str] = {"plain": "noria serve", "ray": "on Ray"}
_COLOURS: dict[Serving, str] = {"plain": "#0072B2", "ray": "#D55E00"}
_MARKERS: dict[Serving, str] = {"plain": "o", "ray": "X"}


def write_report(result: ClusterResult, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write `report.md` and the plot into `folder`; returns the files."""
    return write_files(folder, markdown(result), cluster=functools.partial(_plot, result))


def markdown(result: ClusterResult) -> str:
    """The report, which links the plot beside it."""
    parts = heading("cluster", result.failures, complete=result.complete)
    failed = num_failed(result.runs)
    parts.append(f"{failed} requests failed." if failed else "No request failed.")
    parts.append("![Throughput on Ray over that of the plain server, and scaling](plots/cluster.svg)")
    for table in (_throughput(result), _scaling(result), _cpu(result)):
        parts += [f"## {table.title}", table.markdown()]
    options = result.options
    others = max((run.cpu_s.get("others", 0.0) / run.seconds for run in result.runs), default=0.0)
    text = (
        f"Both servers in the environment of ray {result.versions.get('ray', '?')}, HAProxy before the front end on "
        f"Ray, one front end each. {options['slots']} slots and {options['users_per_engine']} users an engine, in a "
        "closed loop; an image has 10 steps on average. All else on the machine, the other server included, used up to "
        f"{others:.2f} cores."
    )
    return "\n\n".join([*parts, conditions(result.provenance, text)])


def _throughput(result: ClusterResult) -> Table:
    rows = []
    for num_engines in _numbers(result, "short"):
        plain, ray = (_select(result, serving, "short", num_engines) for serving in SERVINGS)
        ratios = pair_ratios(plain, ray)
        rows.append(
            (
                str(num_engines),
                *(format_number(median(run.images_per_s for run in runs), 1) for runs in (plain, ray)),
                format_ratio(median(ratios)),
                f"{format_number(min(ratios), 2)} to {format_number(max(ratios), 2)}" if ratios else "–",
                *(format_number(median(run.p50_ms for run in runs)) for runs in (plain, ray)),
                *(format_number(median(run.p99_ms for run in runs)) for runs in (plain, ray)),
            )
        )
    rates, latencies = ("plain, images/s", "Ray, images/s"), ("plain, p50, ms", "Ray, p50", "plain, p99", "Ray, p99")
    columns = ("engines", *rates, "ratio", "of single pairs", *latencies)
    note = (
        f"A step takes {result.options['step_ms']:g} ms: an engine has at most {result.ideal['short']:.1f} images/s. "
        f"Medians of the rounds. Goal: a ratio of {GOAL} or more."
    )
    return Table("Throughput", columns, tuple(rows), (note,))


def _scaling(result: ClusterResult) -> Table:
    rows = []
    for num_engines in _numbers(result, "long"):
        cells = [str(num_engines)]
        for serving in SERVINGS:
            runs = _select(result, serving, "long", num_engines)
            cells += [
                format_number(median(run.images_per_s for run in runs), 1),
                format_share(linear_share(result, serving, num_engines)),
                format_number(median(run.p50_ms for run in runs)),
                format_number(median(run.p99_ms for run in runs)),
            ]
        rows.append(tuple(cells))
    figures = ("images/s", "of linear", "p50, ms", "p99")
    columns = ("engines", *(f"{name}, {figure}" for name in ("plain", "Ray") for figure in figures))
    note = (
        f"A step takes {result.options['long_step_ms']:g} ms: an engine has at most {result.ideal['long']:.1f} "
        f"images/s. Linear is the number of engines times what the fewest have each. Goal: {GOAL:.0%} or more."
    )
    return Table("Scaling", columns, tuple(rows), (note,))


def _cpu(result: ClusterResult) -> Table:
    names = (*ROLES, "bench")
    rows = []
    loads: list[tuple[Steps, int]] = [("short", number) for number in _numbers(result, "short")]
    for steps, num_engines in [*loads, *(("long", number) for number in _numbers(result, "long")[-1:])]:
        for serving in SERVINGS:
            runs = _select(result, serving, steps, num_engines)
            cells = (format_number(median(cpu_ms(run, name) for run in runs), 2) for name in names)
            rows.append((f"{_NAMES[serving]}, {num_engines} engines, {steps} steps", *cells))
    note = (
        "CPU milliseconds an image, of all processes of each kind. What is used without requests counts, too, so that "
        "the figures of few images a second are higher; of long steps only the most engines are shown."
    )
    return Table("CPU time of a request", ("server", *names), tuple(rows), (note,))


def cpu_ms(run: ClusterRun, role: str) -> float:
    """CPU milliseconds an image."""
    return 1000 * run.cpu_s[role] / run.num_images


def pair_ratios(plain: Sequence[ClusterRun], ray: Sequence[ClusterRun]) -> list[float]:
    """Images per second on Ray over those of the plain server, of each round that both have."""
    by_round = {run.round: run.images_per_s for run in plain}
    return [run.images_per_s / by_round[run.round] for run in ray if run.round in by_round]


def linear_share(result: ClusterResult, serving: Serving, num_engines: int) -> float:
    """Images per second of an engine with long steps, over those with the fewest engines; NaN if not measured."""
    rates = {
        number: median(run.images_per_s for run in _select(result, serving, "long", number)) / number
        for number in _numbers(result, "long")
    }
    return rates.get(num_engines, math.nan) / rates[min(rates)] if rates else math.nan


def _plot(result: ClusterResult, file: pathlib.Path) -> pathlib.Path:
    """The ratio of each pair by the number of engines, and each server's share of linear scaling."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.0, 3.0), layout="constrained", sharey=True)
    short, long = _numbers(result, "short"), _numbers(result, "long")
    for num_engines in short:
        ratios = pair_ratios(*(_select(result, serving, "short", num_engines) for serving in SERVINGS))
        left.plot([num_engines] * len(ratios), ratios, linestyle="", marker="X", color=_COLOURS["ray"], markersize=5)
    for serving in SERVINGS:
        shares = [linear_share(result, serving, number) for number in long]
        right.plot(long, shares, color=_COLOURS[serving], marker=_MARKERS[serving], label=_NAMES[serving])
    left.set(title="images per second on Ray, over noria serve")
    right.set(title="images per second, share of linear")
    for axes, numbers in ((left, short), (right, long)):
        axes.axhline(GOAL, color="#B00020", linewidth=0.8, linestyle="--")
        axes.set(xlabel="engines", xscale="log", ylim=(0, 1.15))
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.minorticks_off()
    right.legend(frameon=False, fontsize=9, loc="lower left")
    return save_figure(figure, file)


def _numbers(result: ClusterResult, steps: Steps) -> list[int]:
    return sorted({run.num_engines for run in result.runs if run.steps == steps})


def _select(result: ClusterResult, serving: Serving, steps: Steps, num_engines: int) -> list[ClusterRun]:
    return [run for run in result.runs if (run.serving, run.steps, run.num_engines) == (serving, steps, num_engines)]
