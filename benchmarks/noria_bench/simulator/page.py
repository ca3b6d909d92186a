"""The report of `noria simulate`: a table, plots as SVG, and one HTML page without scripts."""

import html
import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from noria_bench.measurement.provenance import collect_provenance
from noria_bench.simulator.study import Result

_COLUMNS = (
    ("scenario", "scenario"), ("engine", "engine"), ("devices", "devices"), ("p50_s", "p50 (s)"), ("p90_s", "p90 (s)"),
    ("p99_s", "p99 (s)"), ("served_share", "served"), ("cost", "cost"), ("cost_per_1000_images", "per 1,000 images"),
    ("restarted", "restarted"),
)  # fmt: skip
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = (
    ":root{color-scheme:light dark}body{font:1rem/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem}"
    "table{border-collapse:collapse}th,td{padding:.3rem .6rem;border-bottom:1px solid #8888;text-align:right}"
    "th:first-child,td:first-child{text-align:left}figure{margin:1rem 0;background:#fff}svg{max-width:100%;height:auto}"
)


def rows_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row of figures for each result."""
    return [
        {"scenario": result.scenario.name, "engine": result.engine, "devices": result.num_devices}
        | result.outcome.as_dict(result.scenario.price_per_hour)
        for result in results
    ]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = ["| " + " | ".join(title for _, title in _COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(_text(row[key]) for key, _ in _COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def write_report(folder: pathlib.Path, question: str, results: Sequence[Result]) -> pathlib.Path:
    """Write `results.json`, the plots and `report.html` into `folder`; return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(results)
    contents = collect_provenance() | {"question": question, "rows": rows}
    (folder / "results.json").write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    plots = {"latencies": _plot_latencies(results)}
    if any(result.tried for result in results):
        plots["devices"] = _plot_devices(results)
    for name, svg in plots.items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    heads = "".join(f'<th scope="col">{title}</th>' for _, title in _COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(row[key]))}</td>" for key, _ in _COLUMNS) + "</tr>" for row in rows
    )
    figures = "".join(f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in plots.values())
    provenance = html.escape(f"noria {contents['noria']}, commit {contents['commit']}, {contents['date']}")
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Noria simulation</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><main><h1>Noria simulation</h1><p>{html.escape(question)}</p>\n"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>\n{figures}\n"
        f"<p>{provenance}</p></main></body></html>\n"
    )
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def _plot_latencies(results: Sequence[Result]) -> str:
    shares = np.concatenate([np.linspace(0, 0.9, 60), np.linspace(0.9, 0.999, 60)])
    lines = [
        (result.scenario.name, 100 * shares, [result.outcome.quantile_s(share) for share in shares])
        for result in results
    ]
    return _plot(lines, "share of requests (%)", "latency (s)", is_log=True)


def _plot_devices(results: Sequence[Result]) -> str:
    lines = [
        (result.scenario.name, sorted(result.tried), [100 * result.tried[num] for num in sorted(result.tried)])
        for result in results
    ]
    return _plot(lines, "devices", "requests within the target (%)", is_log=False)


def _plot(lines: Sequence[tuple[str, Any, Any]], x_label: str, y_label: str, *, is_log: bool) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, x, y in lines:
        axes.plot(x, y, label=name, linewidth=1.5, marker=None if is_log else ".")
    if is_log:
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    output = io.StringIO()
    figure.savefig(output, format="svg", metadata={"Date": None})
    return output.getvalue()
