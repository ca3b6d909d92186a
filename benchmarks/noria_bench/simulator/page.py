"""The report of `noria simulate`: a table, plots as SVG, and one HTML page without scripts."""

import html
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from noria_bench.measurement.provenance import collect_provenance
from noria_bench.reports.html_page import html_document, html_figure, html_table
from noria_bench.reports.plots.styles import report_style, save_figure
from noria_bench.reports.plots.target_plots import Plot, set_plain_second_ticks
from noria_bench.reports.provenance_text import noria_text
from noria_bench.reports.table import MISSING, Table, format_share
from noria_bench.running import write_json
from noria_bench.simulator.study import Result


def _format_seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("scenario", "scenario", str),
    ("engine", "engine", str),
    ("devices", "devices", "{:,}".format),
    ("p50_s", "p50 (s)", _format_seconds),
    ("p90_s", "p90 (s)", _format_seconds),
    ("p99_s", "p99 (s)", _format_seconds),
    ("served_share", "served", format_share),
    ("cost", "cost", "{:,.2f}".format),
    ("cost_per_1000_images", "per 1,000 images", "{:,.3f}".format),
    ("restarted", "restarted", "{:,}".format),
)
_NOTES = (
    "Latencies are of the requests that finished; served is their share of all. Requests of the first twentieth of the "
    "time are a warm-up and count in neither.",
    "Cost is in the unit of the device's price_per_hour, for all devices from the first arrival to the last answer. "
    "Restarted are requests whose device was lost.",
)
# Okabe and Ito's colours; line styles for print.
_LINES = (
    ("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#E69F00", ":"), ("#CC79A7", "-"), ("#56B4E9", "--"),
    ("#000000", ":"),
)  # fmt: skip


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row of figures for each result."""
    return [
        {"scenario": result.scenario.name, "engine": result.engine}
        | result.devices
        | result.outcome.as_dict(result.scenario.price_per_hour)
        for result in results
    ]


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table, with notes on what they do not show."""
    cells = tuple(tuple(write(row[key]) for key, _, write in _COLUMNS) for row in rows)
    notes = []
    for row in rows:
        if row["unserved"]:
            reasons = ", ".join(f"{num:,} {reason}" for reason, num in row["unserved"].items())
            notes.append(f"{row['scenario']}: not served of {row['requests']:,} requests: {reasons}.")
        if "max_devices" in row:
            notes.append(f"{row['scenario']}: devices are their mean number; there were {row['max_devices']} at most.")
    return Table("Results", tuple(title for _, title, _ in _COLUMNS), cells, tuple(notes))


def write_report(
    folder: pathlib.Path, results: Sequence[Result], lines: Sequence[str], target_p99_s: float | None
) -> pathlib.Path:
    """Write `results.json`, plots and `report.html` into `folder`; return the page. `lines` say what was run."""
    rows = rows_of(results)
    with report_style():
        plots = [_plot_latencies(results, folder / "latencies.svg")]
        if any(result.tried for result in results):
            plots.append(_plot_devices(results, folder / "devices.svg"))
    if target_p99_s is not None:
        lines = [*lines, f"Searched: the fewest devices that serve 99 % of the requests within {target_p99_s:g} s."]
    table = table_of(rows)
    table = replace(table, notes=(*table.notes, *_NOTES))
    return write_page(folder, "Noria simulation", lines, table, plots, rows)


def write_page(
    folder: pathlib.Path, title: str, lines: Sequence[str], table: Table, plots: Sequence[Plot], rows: Any
) -> pathlib.Path:
    """Write `results.json` with `rows`, and `report.html`, into `folder`; return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = collect_provenance() | {"rows": rows}
    write_json(contents, folder / "results.json")
    origin = f"{contents['command']}; {noria_text(contents)}; {contents['date']}"
    parts = [
        *(f'<p class="traffic">{html.escape(line)}</p>' for line in lines),
        html_table(table, title, "h2"),
        *(html_figure(plot, number) for number, plot in enumerate(plots)),
        f'<p class="provenance">{html.escape(origin)}</p>',
    ]
    file = folder / "report.html"
    file.write_text(html_document(title, parts), encoding="utf-8")
    return file


def _plot_latencies(results: Sequence[Result], file: pathlib.Path) -> Plot:
    shares = np.concatenate([np.linspace(0, 0.9, 60), np.linspace(0.9, 0.999, 60)])
    lines = [
        (result.scenario.name, [result.outcome.quantile_s(share) for share in shares], 100 * shares)
        for result in results
    ]
    plot_lines(lines, file, "latency (s)", "share of requests (%)", in_seconds=True)
    return Plot(
        file,
        "Requests that had their images within a latency: upper left is better",
        "For each scenario, the share of finished requests by latency; the quantiles are in the table.",
    )


def _plot_devices(results: Sequence[Result], file: pathlib.Path) -> Plot:
    lines = [
        (result.scenario.name, sorted(result.tried), [100 * result.tried[num] for num in sorted(result.tried)])
        for result in results
    ]
    plot_lines(lines, file, "devices", "requests within the target (%)", marker=".")
    return Plot(
        file,
        "Requests within the target, by the number of devices that was tried",
        "For each scenario, the share of all requests that were done within the target, by the number of devices.",
    )


def plot_lines(
    lines: Sequence[tuple[str, Any, Any]],
    file: pathlib.Path,
    x_label: str,
    y_label: str,
    *,
    in_seconds: bool = False,
    marker: str = "",
) -> None:
    """Write a plot of (name, x, y); inside `report_style`.

    `in_seconds` says that x are seconds, which have a logarithmic axis if the largest is five times the smallest.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.8, 3.6), layout="constrained")
    for number, (name, x, y) in enumerate(lines):
        colour, style = _LINES[number % len(_LINES)]
        axes.plot(x, y, label=name, linewidth=1.6, color=colour, linestyle=style, marker=marker)
    if in_seconds and max(max(x) for _, x, _ in lines) > 5.0 * min(min(x) for _, x, _ in lines) > 0.0:
        axes.set_xscale("log")
        set_plain_second_ticks(axes.xaxis)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(color="0.92")
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, file)
