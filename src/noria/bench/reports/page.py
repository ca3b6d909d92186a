"""A report as one HTML page that needs nothing else: no script, no network, light and dark, on paper and read aloud. Pure.

Whatever comes from a run is escaped here, and only here; and the page's own policy lets a browser load nothing at all.
"""

import base64
import html
import importlib.resources
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from noria.bench.reports.goals import Goal
from noria.bench.reports.grid import Table
from noria.bench.reports.pictures import Picture
from noria.bench.reports.sections import Section

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MARKS = {True: ("met", "✓"), False: ("missed", "✗"), None: ("unknown", "?")}


def page(sections: Sequence[Section], glance: Table, figures: list[dict[str, Any]]) -> str:
    """The whole file; `glance` goes first, `figures` can be downloaded from it as JSON."""
    style = importlib.resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    numbers = itertools.count()
    links = "".join(f'<li><a href="#{_text(part.slug)}">{_text(part.title)}</a></li>' for part in sections)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>Noria bench report</title>\n<style>\n{style}</style>\n</head>\n<body>",
            '<a class="skip" href="#report">Skip to the report</a>',
            "<header><h1>Noria bench report</h1>",
            f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>',
            '<main id="report">',
            *([_table(glance, "Report", "h2")] if glance.rows else []),
            *(_section(part, numbers) for part in sections),
            _download(figures),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _section(section: Section, numbers: Iterable[int]) -> str:
    slug = _text(section.slug)
    parts = [
        f'<section aria-labelledby="{slug}"><h2 id="{slug}">{_text(section.title)}</h2>',
        *(f'<p class="warning" role="note"><strong>Note.</strong> {_text(line)}</p>' for line in section.warnings),
        *(f'<p class="traffic">{_text(line)}</p>' for line in section.traffic),
        _goals(section.goals),
        *(_table(table, section.title) for table in section.tables),
        *(_figure(picture, number) for picture, number in zip(section.pictures, numbers, strict=False)),
        _settings(section.settings),
        *(f'<p class="provenance">{_text(line)}</p>' for line in section.provenance),
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
        items.append(f'<li class="{kind}">{verdict} <span>{_text(goal.text)}</span></li>')
    return f'<h3>Goals</h3>\n<ul class="goals">{"".join(items)}</ul>'


def _table(table: Table, of: str, heading: str = "h3") -> str:
    """The first column holds the rows' headings; a region that scrolls sideways can be reached with the keyboard."""
    head = "".join(f'<th scope="col">{_text(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in table.rows
    )
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in table.notes)
    title = _text(table.title)
    return (
        f'<{heading}>{title}</{heading}>\n<div class="scroll" tabindex="0" role="region" aria-label="{_text(of)}: {title}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n{notes}"
    )


def _figure(picture: Picture, number: int) -> str:
    """The SVG itself, so that the page is one file; its ids are made its own, since matplotlib's are the same in every picture."""
    image = picture.file.read_text(encoding="utf-8")
    image = re.sub(r"<metadata>.*?</metadata>", "", image[image.index("<svg") :], flags=re.DOTALL)
    image = re.sub(r'\bid="', f'id="f{number}-', image)
    image = re.sub(r'href="#', f'href="#f{number}-', image)
    image = image.replace("url(#", f"url(#f{number}-")
    image = image.replace("<svg ", f'<svg role="img" aria-label="{_text(picture.alt)}" ', 1)
    return f"<figure>\n{image}\n<figcaption>{_text(picture.title)}</figcaption></figure>"


def _settings(settings: Sequence[tuple[str, dict[str, Any]]]) -> str:
    terms = "".join(
        f"<dt>{_text(name)}</dt><dd><code>{_text(json.dumps(values, ensure_ascii=False))}</code></dd>"
        for name, values in settings
    )
    return f"<details><summary>Settings</summary><dl>{terms}</dl></details>"


def _download(figures: list[dict[str, Any]]) -> str:
    """A link that holds the JSON, and the same to be read in place."""
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    coded = base64.b64encode(text.encode()).decode()
    return (
        '<section aria-labelledby="raw"><h2 id="raw">Raw figures</h2>\n'
        "<p>Every figure with its run’s settings, machine, commit and versions; each request is in the runs’ own files.</p>\n"
        f'<p><a download="figures.json" href="data:application/json;base64,{coded}">Download figures.json</a></p>\n'
        f'<details><summary>Show them</summary><pre tabindex="0">{_text(text)}</pre></details></section>'
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
