"""A report as one self-contained HTML page: no script, no network; light and dark, printable, accessible to screen
readers. Pure.

All text from runs is escaped here. The page's Content-Security-Policy lets a browser load nothing.
"""

import base64
import html
import importlib.resources
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from noria_bench.reports.goals import Goal
from noria_bench.reports.plots.target_plots import Plot
from noria_bench.reports.sections import Section
from noria_bench.reports.table import Table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MARKS = {True: ("met", "✓"), False: ("missed", "✗"), None: ("unknown", "?")}


def html_page(sections: Sequence[Section], overview: Table, summaries: list[dict[str, Any]]) -> str:
    """The page of a report; `overview` comes first, and `summaries` can be downloaded from it as JSON."""
    figure_numbers = itertools.count()
    links = "".join(f'<li><a href="#{_escape(part.slug)}">{_escape(part.title)}</a></li>' for part in sections)
    return html_document(
        "Noria bench report",
        [
            *([html_table(overview, "Report", "h2")] if overview.rows else []),
            *(_section(part, figure_numbers) for part in sections),
            _download(summaries),
        ],
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
    )


def html_document(title: str, parts: Sequence[str], navigation: str = "") -> str:
    """A page of `parts`, which are HTML, beneath its title and `navigation`."""
    style = importlib.resources.files(__package__).joinpath("html_page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            '<a class="skip" href="#report">Skip to the report</a>',
            f"<header><h1>{_escape(title)}</h1>{navigation}</header>",
            '<main id="report">',
            *parts,
            "</main>\n</body>\n</html>\n",
        ]
    )


def _section(section: Section, figure_numbers: Iterable[int]) -> str:
    slug = _escape(section.slug)
    parts = [
        f'<section aria-labelledby="{slug}"><h2 id="{slug}">{_escape(section.title)}</h2>',
        *(f'<p class="warning" role="note"><strong>Note.</strong> {_escape(line)}</p>' for line in section.warnings),
        *(f'<p class="traffic">{_escape(line)}</p>' for line in section.traffic),
        _goals(section.goals),
        *(html_table(table, section.title) for table in section.tables),
        *(html_figure(plot, number) for plot, number in zip(section.plots, figure_numbers, strict=False)),
        _settings(section.settings),
        *(f'<p class="provenance">{_escape(line)}</p>' for line in section.provenance),
        "</section>",
    ]
    return "\n".join(filter(None, parts))


def _goals(goals: Sequence[Goal]) -> str:
    if not goals:
        return ""
    items = []
    for goal in goals:
        kind, mark = _MARKS[goal.met]
        verdict = f'<b><span aria-hidden="true">{mark}</span> {goal.verdict}</b>'
        items.append(f'<li class="{kind}">{verdict} <span>{_escape(goal.text)}</span></li>')
    return f'<h3>Goals</h3>\n<ul class="goals">{"".join(items)}</ul>'


def html_table(table: Table, of: str, heading: str = "h3") -> str:
    """A table under its title.

    The first column holds row headings; the scrolling region can be reached with the keyboard.
    """
    head = "".join(f'<th scope="col">{_escape(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{_escape(row[0])}</th>'
        + "".join(f"<td>{_escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    notes = "".join(f'<p class="note">{_escape(note)}</p>' for note in table.notes)
    title = _escape(table.title)
    return (
        f"<{heading}>{title}</{heading}>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_escape(of)}: {title}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n{notes}"
    )


def html_figure(plot: Plot, number: int) -> str:
    """A plot with its SVG inline. Its ids get `number` as a prefix, since matplotlib repeats them in every picture."""
    svg = plot.file.read_text(encoding="utf-8")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="f{number}-', svg)
    svg = re.sub(r'href="#', f'href="#f{number}-', svg)
    svg = svg.replace("url(#", f"url(#f{number}-")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{_escape(plot.alt)}" ', 1)
    return f"<figure>\n{svg}\n<figcaption>{_escape(plot.title)}</figcaption></figure>"


def _settings(settings: Sequence[tuple[str, dict[str, Any]]]) -> str:
    terms = "".join(
        f"<dt>{_escape(name)}</dt><dd><code>{_escape(json.dumps(values, ensure_ascii=False))}</code></dd>"
        for name, values in settings
    )
    return f"<details><summary>Settings</summary><dl>{terms}</dl></details>"


def _download(summaries: list[dict[str, Any]]) -> str:
    """A link that contains the JSON, and the JSON itself, folded."""
    text = json.dumps(summaries, indent=1, ensure_ascii=False)
    encoded = base64.b64encode(text.encode()).decode()
    return (
        '<section aria-labelledby="raw"><h2 id="raw">Raw summaries</h2>\n'
        "<p>Every summary with its run’s settings, machine, commit and versions; the requests are in the runs’ own "
        "files.</p>\n"
        f'<p><a download="summaries.json" href="data:application/json;base64,{encoded}">'
        "Download summaries.json</a></p>\n"
        f'<details><summary>Show them</summary><pre tabindex="0">{_escape(text)}</pre></details></section>'
    )


def _escape(value: object) -> str:
    return html.escape(str(value), quote=True)
