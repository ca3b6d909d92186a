"""The plot of `noria bench deadlines`: attainment and goodput against load, a curve for each policy."""

import pathlib

from noria_bench.measurement.run_metrics import attainment
from noria_bench.reports.deadlines import load_of, run_goodput, series_names, series_of
from noria_bench.reports.plots.styles import save_figure, style_of
from noria_bench.reports.run_groups import Group


def plot_load_curves(group: Group, file: pathlib.Path) -> pathlib.Path:
    """Attainment to the left, goodput to the right; a line marks 100 % of Noria's capacity."""
    from matplotlib import pyplot

    figure, (shares, rates) = pyplot.subplots(1, 2, figsize=(8.4, 3.6), layout="constrained")
    for name in series_names(group):
        runs = sorted((run for run in group.runs if series_of(run) == name), key=load_of)
        loads, style = [load_of(run) for run in runs], style_of(name)
        shares.plot(loads, [attainment(run.records) for run in runs], label=name, **style)
        rates.plot(loads, [run_goodput(run) for run in runs], **style)
    for axes, label in ((shares, "share within the deadline"), (rates, "requests per second within the deadline")):
        axes.axvline(100, color="0.75", linewidth=1, zorder=0)
        axes.set(xlabel="load, % of Noria's capacity", ylabel=label)
        axes.set_ylim(bottom=0)
    shares.set_ylim(0, 1.03)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return save_figure(figure, file)
