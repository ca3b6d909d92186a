"""The runs of `noria bench contract` as pictures: attainment and goodput against load, latency at each load. SVG, by matplotlib."""

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from noria_bench.benches.deadline_options import DeadlineTarget
from noria_bench.measurement.run_metrics import attainment
from noria_bench.reports.deadlines_report import DeadlineRun

# Okabe and Ito's colours, which the colour-blind tell apart; line styles too, for paper.
_STYLES: dict[DeadlineTarget, dict[str, Any]] = {
    "least-slack": {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    "shortest-first": {"color": "#009E73", "linestyle": "--", "marker": "s"},
    "fcfs": {"color": "#E69F00", "linestyle": "-.", "marker": "^"},
    "seed": {"color": "#D55E00", "linestyle": ":", "marker": "D"},
}


def plot_runs(runs: Sequence[DeadlineRun], folder: pathlib.Path) -> list[pathlib.Path]:
    """Write the pictures into `folder`, which is made if it is not there; returns their names."""
    import matplotlib as mpl

    mpl.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(
        {"svg.hashsalt": "noria", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        return [
            _plot_against_load(
                runs, folder / "attainment.svg", "done by their deadline", lambda r: attainment(r.records), top=1.0
            ),
            _plot_against_load(
                runs, folder / "goodput.svg", "requests done by their deadline, per second", DeadlineRun.goodput
            ),
            _plot_latencies(runs, folder / "latency.svg"),
        ]


def _plot_against_load(
    runs: Sequence[DeadlineRun],
    file: pathlib.Path,
    label: str,
    value: Callable[[DeadlineRun], float],
    top: float | None = None,
) -> pathlib.Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for target, style in _STYLES.items():
        points = sorted((run.load_percent, value(run)) for run in runs if run.target == target)
        if points:
            axes.plot(*zip(*points, strict=True), label=target, **style)
    axes.axvline(100, color="0.75", linewidth=1, zorder=0)
    axes.set(xlabel="offered load, % of Noria's capacity", ylabel=label)
    axes.set_ylim(0, None if top is None else 1.03 * top)
    axes.legend(frameon=False)
    return _write(figure, file)


def _plot_latencies(runs: Sequence[DeadlineRun], file: pathlib.Path) -> pathlib.Path:
    """One small plot a load: the share of all requests that had their images within so many seconds."""
    from matplotlib import pyplot

    loads = sorted({run.load_percent for run in runs})
    columns = min(3, len(loads))
    figure, grid = pyplot.subplots(
        math.ceil(len(loads) / columns),
        columns,
        figsize=(1.2 + 2.8 * columns, 2.6 * math.ceil(len(loads) / columns)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, load in zip(grid.flat, loads, strict=False):
        for run in runs:
            if run.load_percent == load:
                style = {key: value for key, value in _STYLES[run.target].items() if key != "marker"}
                seconds = sorted(record.latency_s for record in run.records if math.isfinite(record.latency_s))
                shares = [(k + 1) / len(run.records) for k in range(len(seconds))]
                axes.step([0.0, *seconds], [0.0, *shares], where="post", label=run.target, **style)
        axes.set_title(f"{load} %", fontsize=10)
    for axes in list(grid.flat)[len(loads) :]:
        axes.set_axis_off()
    longest = max((r.latency_s for run in runs for r in run.records if math.isfinite(r.latency_s)), default=1.0)
    grid.flat[0].set(xlim=(0, 1.03 * longest), ylim=(0, 1.03))  # of all: they are shared
    grid.flat[0].legend(frameon=False, fontsize=8)
    figure.supxlabel("seconds from the intended start", fontsize=10)
    figure.supylabel("share of all requests", fontsize=10)
    return _write(figure, file)


def _write(figure: Any, file: pathlib.Path) -> pathlib.Path:
    from matplotlib import pyplot

    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file
