"""Parts of the reports of benches whose result is one document, a report in Markdown and plots. Pure."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


def median(values: Iterable[float | None]) -> float:
    """The median of what was measured; NaN of nothing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else math.nan
