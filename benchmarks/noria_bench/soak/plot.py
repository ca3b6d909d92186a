"""The plot of a soak: what the server held over time, with its kills and attacks."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from noria_bench.reports.plots.styles import FAILED_COLOUR, report_style, save_figure

_COLOURS = {
    "supervisor": "#009E73",
    "frontend": "#0072B2",
    "engine": "#E69F00",
    "data": "#CC79A7",
    "database": "#000000",
}
_ROWS = (("PSS", "memory (PSS), MiB", 2**20), ("files", "open files", 1), ("threads", "threads", 1))
_LAST_ROWS = (("connections", "connections", 1), ("bytes", "stored, MiB", 2**20))


def plot_soak(result: Mapping[str, Any], file: pathlib.Path) -> pathlib.Path:
    """Write the plot of the document of `bench.py`; returns `file`."""
    from matplotlib import pyplot

    minutes = [at / 60 for at in result["at_s"]]
    with report_style():
        figure, grid = pyplot.subplots(
            len(_ROWS + _LAST_ROWS), 1, figsize=(8.4, 7.0), sharex=True, squeeze=False, layout="constrained"
        )
        for axes, (word, label, unit) in zip(grid[:, 0], _ROWS + _LAST_ROWS, strict=True):
            _plot_series(axes, minutes, result["series"], word, unit)
            axes.set_ylabel(label, fontsize=9)
            axes.set_ylim(bottom=0)
            for at in result["killed_at_s"]:
                axes.axvline(at / 60, color=FAILED_COLOUR, linewidth=0.5, alpha=0.6)
            axes.axvspan(minutes[-1] / 2, minutes[-1], color="0.94", zorder=-1)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
        grid[0, 0].set_title("red lines: kills; grey: the half whose growth is judged")
        grid[-1, 0].set_xlabel("minutes")
        return save_figure(figure, file)


def _plot_series(
    axes: Any, minutes: Sequence[float], series: Mapping[str, Sequence[float | None]], word: str, unit: int
) -> None:
    for name, values in sorted(series.items()):
        role, _, last = name.rpartition(" ")
        if last == word:
            shown = [float("nan") if value is None else value / unit for value in values]
            axes.plot(minutes, shown, color=_COLOURS[role], linewidth=1, label=role)
