"""A table as data, the format of its numbers, and its Markdown. Cells are plain text; the writers escape them."""

import html
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

# Not measured, or infinite.
MISSING = "–"


@dataclass(frozen=True)
class Table:
    """The first column names the row; the others hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, title: str, subjects: Iterable[T], *columns: tuple[str, Callable[[T], str]], notes: tuple[str, ...] = ()
    ) -> "Table":
        """A row for each subject; a column is its heading and what makes a cell of a subject."""
        rows = tuple(tuple(cell(subject) for _, cell in columns) for subject in subjects)
        return cls(title, tuple(heading for heading, _ in columns), rows, notes)

    def without_empty_columns(self) -> "Table":
        """Without the columns that are MISSING in every row, such as those of GPUs on a machine without any."""
        kept = [k for k in range(len(self.columns)) if k == 0 or any(row[k] != MISSING for row in self.rows)]
        columns, *rows = (tuple(cells[k] for k in kept) for cells in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=tuple(rows))

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


def format_with(unit: str, value: float | None, digits: int) -> str:
    """`value` with `digits` decimals and its unit; MISSING if it is None or not finite."""
    return f"{value:.{digits}f}{unit}" if value is not None and math.isfinite(value) else MISSING


def format_number(value: float | None, digits: int = 0) -> str:
    """`value` with `digits` decimals."""
    return format_with("", value, digits)


def format_rate(value: float) -> str:
    """A rate per second, with two decimals."""
    return format_with("", value, 2)


def format_share(value: float | None) -> str:
    """A share of 1 in per cent."""
    return MISSING if value is None else format_with(" %", 100 * value, 1)


def format_ratio(value: float) -> str:
    """A ratio with two decimals and ×."""
    return format_with(" ×", value, 2)


def format_gib(value: float) -> str:
    """Bytes in GiB."""
    return format_with(" GiB", value / 2**30, 2)


def _markdown_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(escape_markdown(cell) for cell in cells)} |"
