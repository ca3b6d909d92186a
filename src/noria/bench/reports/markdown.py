"""A report as Markdown. Pure."""

import json
import pathlib
from collections.abc import Sequence

from noria.bench.reports.grid import Table, markdown_text
from noria.bench.reports.sections import Section


def report(sections: Sequence[Section], glance: Table, folder: pathlib.Path) -> str:
    """All of it, `glance` first; pictures are linked relative to `folder`, where it will lie."""
    first = [f"## {markdown_text(glance.title)}", glance.markdown()] if glance.rows else []
    return "\n\n".join(["# Noria bench report", *first, *(_section(section, folder) for section in sections)]) + "\n"


def _section(section: Section, folder: pathlib.Path) -> str:
    parts = [f"## {markdown_text(section.title)}"]
    parts += [f"**{markdown_text(warning)}**" for warning in section.warnings]
    parts += [markdown_text(line) for line in section.traffic]
    if section.goals:
        parts.append("\n".join(f"- **{goal.verdict}.** {markdown_text(goal.text)}" for goal in section.goals))
    for table in section.tables:
        parts += [f"### {markdown_text(table.title)}", table.markdown()]
    for picture in section.pictures:
        parts.append(f"![{markdown_text(picture.alt)}]({picture.file.relative_to(folder).as_posix()})")
    parts += [f"*{markdown_text(line)}*" for line in section.provenance]
    settings = [f"- {markdown_text(name)}: {markdown_text(_settings(values))}" for name, values in section.settings]
    return "\n\n".join([*parts, "### Settings", "\n".join(settings)])


def _settings(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()) or "none told"
