"""The plot of simulated canaries: their evidence over time, and when bad ones were rolled back."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from noria_bench.reports.plots.styles import FAILED_COLOUR, WAITING_COLOUR, report_style, save_figure

# Okabe and Ito's colours, by the first word of the scenario; line styles by severity.
_COLOURS = {"errors": "#D55E00", "slower": "#0072B2", "output": "#009E73"}
_LINES = ("-", "--", ":")
_MAX_RESPONSES = 400
_MIN_E = 1e-3


def plot_canaries(result: Mapping[str, Any], file: pathlib.Path) -> pathlib.Path:
    """Write the plot of the document of `bench.py`; returns `file`."""
    from matplotlib import pyplot

    settings = result["settings"]
    harmless = result["scenarios"][0]
    harmful = [each for each in result["scenarios"] if each["name"].split()[0] in _COLOURS]
    with report_style():
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
        for trajectory in harmless["trajectories"]:
            left.plot(*_thinned(trajectory), color=WAITING_COLOUR, linewidth=0.6)
        for name, scenario in {each["name"].split()[0]: each for each in reversed(harmful)}.items():
            left.plot(*_thinned(scenario["trajectories"][0]), color=_COLOURS[name], label=scenario["name"])
        left.axhline(1 / settings["alpha"], color=FAILED_COLOUR, linewidth=0.8)
        left.set(xscale="log", yscale="log", xlabel="canary responses", ylabel="E", title="evidence (grey: A/A)")
        left.minorticks_off()
        for axis in (left.xaxis, left.yaxis):  # as text: the style has no formulas
            axis.set_major_formatter("{x:g}")
        left.legend(frameon=False, fontsize=8)
        styles = dict.fromkeys(_COLOURS, 0)
        for scenario in harmful:
            kind, found = scenario["name"].split()[0], scenario["responses_until_rolled_back"]
            shares = {responses: (k + 1) / scenario["runs"] for k, responses in enumerate(found)}
            line = _LINES[styles[kind] % len(_LINES)]
            styles[kind] += 1
            right.step(
                [0, *shares],
                [0.0, *shares.values()],
                color=_COLOURS[kind],
                linestyle=line,
                where="post",
                label=scenario["name"],
            )
        right.axvline(settings["min_responses"], color=WAITING_COLOUR, linewidth=0.8)
        right.set(xlim=(0, _MAX_RESPONSES), ylim=(0, 1.02), xlabel="canary responses", title="share rolled back")
        right.legend(frameon=False, fontsize=8, loc="center right")
        return save_figure(figure, file)


def _thinned(trajectory: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Points of a trajectory that are 3 % apart, and the last one; evidence below the axis is on it."""
    kept = [trajectory[0]]
    for point in trajectory:
        if point[0] > 1.03 * kept[-1][0] or point is trajectory[-1]:
            kept.append(point)
    return [point[0] for point in kept], [max(_MIN_E, point[1]) for point in kept]
