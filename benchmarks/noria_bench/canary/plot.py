"""The plot of simulated canaries: their evidence over time, and when bad ones were rolled back."""

import pathlib
from collections.abc import Mapping
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
            responses, evidence = zip(*trajectory[::4], strict=True)
            left.plot(responses, [max(_MIN_E, e) for e in evidence], color=WAITING_COLOUR, linewidth=0.6)
        for name, scenario in {each["name"].split()[0]: each for each in reversed(harmful)}.items():
            trajectory = [point for point in scenario["trajectories"][0] if point[0] <= 4 * _MAX_RESPONSES]
            responses, evidence = zip(*trajectory, strict=True)
            left.plot(responses, [max(_MIN_E, e) for e in evidence], color=_COLOURS[name], label=scenario["name"])
        left.axhline(1 / settings["alpha"], color=FAILED_COLOUR, linewidth=0.8)
        left.set(xscale="log", yscale="log", xlabel="canary responses", ylabel="E", title="evidence (grey: A/A)")
        left.legend(frameon=False, fontsize=8)
        styles = dict.fromkeys(_COLOURS, 0)
        for scenario in harmful:
            kind, found = scenario["name"].split()[0], scenario["responses_until_rolled_back"]
            shares = [(k + 1) / scenario["runs"] for k in range(len(found))]
            line = _LINES[styles[kind] % len(_LINES)]
            styles[kind] += 1
            right.step(found, shares, color=_COLOURS[kind], linestyle=line, where="post", label=scenario["name"])
        right.axvline(settings["min_responses"], color=WAITING_COLOUR, linewidth=0.8)
        right.set(xlim=(0, _MAX_RESPONSES), ylim=(0, 1.02), xlabel="canary responses", title="share rolled back")
        right.legend(frameon=False, fontsize=8, loc="center right")
        return save_figure(figure, file)
