"""Reports of benches whose result is one document: their parts, and the files."""

import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from noria_bench.reports.plots.styles import report_style
from noria_bench.reports.provenance_text import result_line
from noria_bench.reports.table import escape_markdown


def heading(bench: str, failures: Sequence[str], *, complete: bool) -> list[str]:
    """The title, and what keeps the result from being complete."""
    parts = [f"# Noria bench {bench}"]
    if not complete:
        parts.append("**Interrupted or incomplete: some runs are missing.**")
    return parts + [f"**{escape_markdown(failure)}**" for failure in failures]


def conditions(provenance: Mapping[str, Any], text: str) -> str:
    """The last section: machine and command, then `text`."""
    command = escape_markdown(provenance["command"])
    return f"## Conditions\n\n{result_line(provenance)} Command: `{command}`. {text}\n"


def write_files(
    folder: pathlib.Path, markdown: str, **plots: Callable[[pathlib.Path], pathlib.Path]
) -> list[pathlib.Path]:
    """Write `report.md` into `folder`, and `plots/NAME.svg` by what draws each; returns the files."""
    report = folder / "report.md"
    report.write_text(markdown, encoding="utf-8")
    with report_style():
        return [report, *(draw(folder / "plots" / f"{name}.svg") for name, draw in plots.items())]


def median(values: Iterable[float | None]) -> float:
    """The median of what was measured; NaN of nothing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else math.nan
