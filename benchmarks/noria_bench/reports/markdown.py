"""A report as Markdown. Pure."""

import json
import pathlib
from collections.abc import Sequence

from noria_bench.reports.sections import Section
from noria_bench.reports.table import Table, escape_markdown


def markdown_report(sections: Sequence[Section], overview: Table, folder: pathlib.Path) -> str:
    """The Markdown, `overview` first; plots are linked relative to `folder`, where the report is written."""
    overview_parts = [f"## {escape_markdown(overview.title)}", overview.markdown()] if overview.rows else []
    return (
        "\n\n".join(["# Noria bench report", *overview_parts, *(_section(section, folder) for section in sections)])
        + "\n"
    )


def _section(section: Section, folder: pathlib.Path) -> str:
    parts = [f"## {escape_markdown(section.title)}"]
    parts += [f"**{escape_markdown(warning)}**" for warning in section.warnings]
    parts += [escape_markdown(line) for line in section.traffic]
    if section.goals:
        parts.append("\n".join(f"- **{goal.verdict}.** {escape_markdown(goal.text)}" for goal in section.goals))
    for table in section.tables:
        parts += [f"### {escape_markdown(table.title)}", table.markdown()]
    for plot in section.plots:
        parts.append(f"![{escape_markdown(plot.alt)}]({plot.file.relative_to(folder).as_posix()})")
    parts += [f"*{escape_markdown(line)}*" for line in section.provenance]
    settings = [f"- {escape_markdown(name)}: {escape_markdown(_settings(values))}" for name, values in section.settings]
    return "\n\n".join([*parts, "### Settings", "\n".join(settings)])


def _settings(values: dict[str, object]) -> str:
    return (
        ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
        or "none reported"
    )
