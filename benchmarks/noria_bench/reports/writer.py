"""`noria bench report FOLDER`: the report of the runs in a folder, as Markdown, as a page, and its pictures."""

import pathlib
from collections.abc import Sequence

from noria.errors import RunsError
from noria_bench.measurement import runs as kept
from noria_bench.measurement.runs import BenchRun
from noria_bench.reports import markdown
from noria_bench.reports.comparison_tables import overview_table
from noria_bench.reports.html_page import html_page
from noria_bench.reports.plots.target_plots import plot_group
from noria_bench.reports.run_groups import group_runs
from noria_bench.reports.sections import build_section, raw_summaries


def write_report(folder: pathlib.Path, runs: Sequence[BenchRun]) -> list[pathlib.Path]:
    """Write `report.md`, `report.html` and `plots/*.svg` into `folder`, over what was there; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = folder / "plots"
    sections = [build_section(group, plot_group(group, plots)) for group in group_runs(runs)]
    overview = overview_table(runs)
    report, html = folder / "report.md", folder / "report.html"
    report.write_text(markdown.markdown_report(sections, overview, folder), encoding="utf-8")
    html.write_text(html_page(sections, overview, raw_summaries(runs)), encoding="utf-8")
    return [report, html, *(plot.file for section in sections for plot in section.plots)]


def main(folder: pathlib.Path) -> int:
    """Make the report anew from the runs in `folder` and in the folders in it, and print it.

    Raises:
        RunsError: there is no such folder, it holds no runs, or a file of it is no run.

    """
    files = write_report(folder, read_runs(folder))
    print(files[0].read_text(encoding="utf-8"))
    print(f"{files[1]} is the same as a page; {len(files) - 2} pictures are beside it.")
    return 0


def read_runs(folder: pathlib.Path) -> list[BenchRun]:
    """The runs in `folder` and one level below, in the order in which they were begun; see `main` for what it raises."""
    if not folder.is_dir():
        raise RunsError(f"{folder} is no folder; name the one that `noria bench … --out FOLDER` wrote.")
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    try:
        found = [run for subfolder in (folder, *subfolders) for run in kept.read_runs(subfolder)]
    except (OSError, ValueError) as error:
        raise RunsError(f"{error}. Move what is no run out of the folder, or run its bench again.") from error
    if not found:
        raise RunsError(
            f"{folder} holds no runs, which are JSON files; `noria bench scenario2 --out {folder}` makes some."
        )
    return sorted(found, key=lambda run: str(run.provenance.get("date", "")))
