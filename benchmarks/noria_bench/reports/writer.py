"""`noria bench report FOLDER`: writes the report of a folder of runs as Markdown, an HTML page and plots."""

import pathlib
from collections.abc import Sequence

from noria_bench.errors import RunsError
from noria_bench.measurement import runs as bench_runs
from noria_bench.measurement.runs import BenchRun
from noria_bench.reports import markdown
from noria_bench.reports.comparison_tables import overview_table
from noria_bench.reports.html_page import html_page
from noria_bench.reports.plots.target_plots import plot_group
from noria_bench.reports.run_groups import group_runs
from noria_bench.reports.sections import build_section, raw_summaries


def write_report(folder: pathlib.Path, runs: Sequence[BenchRun]) -> list[pathlib.Path]:
    """Write `report.md`, `report.html` and `plots/*.svg` into `folder`, replacing old ones; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = folder / "plots"
    sections = [build_section(group, plot_group(group, plots)) for group in group_runs(runs)]
    overview = overview_table(runs)
    report, html = folder / "report.md", folder / "report.html"
    report.write_text(markdown.markdown_report(sections, overview, folder), encoding="utf-8")
    html.write_text(html_page(sections, overview, raw_summaries(runs)), encoding="utf-8")
    return [report, html, *(plot.file for section in sections for plot in section.plots)]


def main(folder: pathlib.Path) -> int:
    """Write the report of the runs in `folder` and in its direct subfolders, and print it; returns the exit status.

    Raises:
        RunsError: the folder does not exist, holds no runs, or holds a JSON file that is not a run.

    """
    files = write_report(folder, read_runs(folder))
    print(files[0].read_text(encoding="utf-8"))
    print(f"{files[1]} is the same as an HTML page; plots: {len(files) - 2}.")
    return 0


def read_runs(folder: pathlib.Path) -> list[BenchRun]:
    """The runs in `folder` and its direct subfolders, in the order of their start; raises as `main` does."""
    if not folder.is_dir():
        raise RunsError(f"{folder} is not a folder; name one that `noria bench … --out FOLDER` wrote.")
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir())
    try:
        found = [run for subfolder in (folder, *subfolders) for run in bench_runs.read_runs(subfolder)]
    except (OSError, ValueError) as error:
        raise RunsError(f"{error}. Move files that are not runs out of the folder, or run the bench again.") from error
    if not found:
        raise RunsError(
            f"{folder} holds no runs, which are JSON files; `noria bench scenario2 --out {folder}` writes some."
        )
    return sorted(found, key=lambda run: str(run.provenance.get("date", "")))
