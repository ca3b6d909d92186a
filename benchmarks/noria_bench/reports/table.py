"""A table as data, the format of its numbers, and its Markdown. Cells are plain text; the writers escape them."""

import html
import math
import re
from dataclasses import dataclass

# Not measured, or infinite.
MISSING = "–"


@dataclass(frozen=True)
class Table:
    """The first column names the row; the others hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def without_empty_columns(self) -> "Table":
        """Without the columns that are MISSING in every row, such as those of GPUs on a machine without any."""
        kept = [k for k in range(len(self.columns)) if k == 0 or any(row[k] != MISSING for row in self.rows)]
        return Table(
            self.title,
            tuple(self.columns[k] for k in kept),
            tuple(tuple(row[k] for k in kept) for row in self.rows),
            self.notes,
        )

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with its notes below."""
        lines = [
            _markdown_row(self.columns),
            "|---|" + "---:|" * (len(self.columns) - 1),
            *(_markdown_row(row) for row in self.rows),
        ]
        return "\n".join([*lines, *(f"\n{escape_markdown(note)}" for note in self.notes)])


def escape_markdown(text: str) -> str:
    """Escape `text`, so that nothing from a run is markup."""
    safe = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`|\[\]*]", r"\\\g<0>", safe)


def format_number(value: float, digits: int = 0) -> str:
    """`value` with `digits` decimals."""
    return f"{value:.{digits}f}" if math.isfinite(value) else MISSING


def format_rate(value: float) -> str:
    """A rate per second, with two decimals."""
    return format_number(value, 2)


def format_share(value: float | None) -> str:
    """A share of 1 in per cent."""
    return f"{format_number(100 * value, 1)} %" if value is not None and math.isfinite(value) else MISSING


def format_ratio(value: float) -> str:
    """A ratio with two decimals and ×."""
    return f"{format_number(value, 2)} ×" if math.isfinite(value) else MISSING


def format_gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{format_number(value / 2**30, 2)} GiB" if math.isfinite(value) else MISSING


def _markdown_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(escape_markdown(cell) for cell in cells)} |"
