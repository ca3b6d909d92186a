"""Exports a frame as an SVG for the documentation, without the web font that Rich would add."""

import io
import re

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME


def svg_of(rows, width):
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="standard")
    for row in rows:
        console.print(row)
    text = console.export_svg(title="noria top", theme=SVG_EXPORT_THEME, unique_id="noria-top")
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)
    return text.replace("Fira Code, monospace", "'Fira Code', 'DejaVu Sans Mono', Menlo, Consolas, monospace")
