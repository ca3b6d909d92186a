"""The elements of a frame: lines of a fixed width, bars, numbers. Pure.

All text passes through `line`, which escapes it: what a server sends is untrusted.
"""

import math
from collections.abc import Sequence

from rich.text import Text

from noria.observe.terminal_text import escape_for_terminal

StyledText = tuple[str, str]
"""Text and its style. Styles use the terminal's named colours, which follow its theme."""

_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEVELS = " ▁▂▃▄▅▆▇█"
SEPARATOR: StyledText = (" · ", "dim")


def line(pieces: Sequence[StyledText], width: int) -> Text:
    """A line of exactly `width` cells; longer text is cut and ends with an ellipsis."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for content, style in pieces:
        text.append(escape_for_terminal(content).replace("\n", "\\n"), style)
    text.truncate(width, overflow="ellipsis", pad=True)
    return text


def flow(items: Sequence[Sequence[StyledText]], width: int, max_lines: int) -> list[Text]:
    """`items`, separated by dots, on at most `max_lines` lines; items that do not fit are omitted."""
    rows: list[list[StyledText]] = [[]]
    used = 0
    for item in items:
        needed = sum(len(text) for text, _ in item)
        if rows[-1] and used + 3 + needed > width:
            if len(rows) == max_lines:
                break
            rows.append([])
            used = 0
        if rows[-1]:
            rows[-1].append(SEPARATOR)
            used += 3
        rows[-1].extend(item)
        used += needed
    return [line(row, width) for row in rows]


def elide_middle(text: str, width: int) -> str:
    """`text` in at most `width` cells, without its middle: similar names mostly differ at their ends."""
    if len(text) <= width:
        return text
    head = width // 2
    return f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"


def bar(fraction: float, width: int) -> str:
    """A bar of `width` cells: `fraction` (0 to 1) of it is filled, in eighths of a cell; the rest is dotted."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width, "·")


def level(fraction: float) -> str:
    """A cell, filled from below by `fraction`; blank only for 0."""
    return _LEVELS[math.ceil(min(max(fraction, 0.0), 1.0) * 8)]


def sparkline(values: Sequence[float], max_value: float, width: int) -> str:
    """The last `width` of `values`, one cell each, the latest at the right; `max_value` fills a cell."""
    cells = (
        "".join(level(value / max_value) if max_value > 0 else " " for value in values[-width:]) if width > 0 else ""
    )
    return cells.rjust(width)


def format_seconds(value: float | None) -> str:
    """A duration in few characters; a dash if it is unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if value <= 0:
        return "now"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 99.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5970 else f"{value / 3600:.0f} h"


def format_number(value: float) -> str:
    """A rate or a mean with three digits."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
