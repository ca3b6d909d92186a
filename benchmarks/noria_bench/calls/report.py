"""The report of `noria bench calls`: tables in Markdown, a plot, and a grid of images for each scheduler and steps."""

import functools
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from PIL import Image as PillowImage
from PIL import ImageDraw, ImageFont

from noria_bench.calls.results import CallsResult, CallsRun, Setting
from noria_bench.calls.similarity import Image
from noria_bench.reports.plots.styles import save_figure
from noria_bench.reports.result_report import conditions, heading, write_files
from noria_bench.reports.table import MISSING, Table, escape_markdown, format_number, format_share

_KINDS = {"skipped": ("skipped calls", "#0072B2", "o"), "fewer": ("fewer steps", "#D55E00", "s")}
_MAX_CELL_PX, _LABEL_PX = 256, 30
Pair = tuple[CallsRun, CallsRun]
Group = tuple[CallsRun, list[Pair]]
"""The full images, and for each share those with skipped calls and those with fewer steps."""


def write_report(
    result: CallsResult, pictures: Mapping[Setting, Sequence[Image]], folder: pathlib.Path
) -> list[pathlib.Path]:
    """Write `report.md`, the plot and the grids of the `pictures` into `folder`; returns the files."""
    groups = _groups(result)
    files = write_files(folder, _markdown(result, groups), calls=functools.partial(_plot, groups))
    return files + [_write_grid(each, pictures, folder / "images" / f"{_file_stem(each)}.png") for each in groups]


def _markdown(result: CallsResult, groups: Sequence[Group]) -> str:
    parts = heading("calls", result.failures, complete=result.complete)
    parts.append("![PSNR to the full image, by the calls that are made](plots/calls.svg)")
    for group in groups:
        table = _table(group)
        parts += [f"## {escape_markdown(table.title)}", table.markdown()]
        parts.append(f"![Full images, and with skipped calls and fewer steps](images/{_file_stem(group)}.png)")
    width_px, height_px = result.size_px
    text = (
        f"{len(result.prompts)} images of {result.model['name']}, {width_px} × {height_px} px, guidance "
        f"{result.guidance_scale:g}, seeds from {result.first_seed} on. PSNR is the median, in brackets that of the "
        "worst image; SSIM and LPIPS are means. Closer: how many images are nearer to the full one, by PSNR, with "
        f"skipped calls than with as many steps. {' '.join(f'{note}.' for note in result.notes)}"
    )
    return "\n\n".join([*parts, conditions(result.provenance, text.rstrip())])


def _groups(result: CallsResult) -> list[Group]:
    """The runs of each scheduler and number of steps; pairs that an interruption has left are left out."""
    groups: list[Group] = []
    by_full = itertools.groupby(result.runs, lambda run: (run.setting.scheduler, run.setting.full_steps))
    for _, (full, *others) in by_full:
        groups.append((full, list(zip(others[::2], others[1::2], strict=False))))
    return groups


def _title(group: Group) -> str:
    setting = group[0].setting
    return f"{setting.scheduler}, {setting.full_steps} steps"


def _file_stem(group: Group) -> str:
    setting = group[0].setting
    return f"{setting.scheduler.replace('+', 'p')}-{setting.full_steps}"


def _table(group: Group) -> Table:
    full, pairs = group
    num_calls = full.setting.num_calls
    right = "" if full.num_right is None else f" {full.num_right} of the full images are as their captions say."

    def both(write: Callable[[CallsRun], str], heading: str) -> Iterator[tuple[str, Callable[[Pair], str]]]:
        yield f"{heading}: skipped", lambda pair: write(pair[0])
        yield "fewer steps", lambda pair: write(pair[1])

    note = f"A full image took {full.seconds_per_image:.3g} s, in batches.{right}"
    return Table.of(
        _title(group),
        pairs,
        ("calls", lambda pair: f"{pair[0].setting.num_calls} of {num_calls}"),
        *both(lambda run: _psnr_text(run.psnrs_db), "PSNR, dB"),
        *both(lambda run: format_number(run.mean("ssim"), 4), "SSIM"),
        *both(lambda run: format_number(run.mean("lpips"), 4), "LPIPS"),
        ("closer", lambda pair: f"{_num_closer(*pair)} of {len(pair[0].similarities)}"),
        *both(lambda run: MISSING if run.num_right is None else str(run.num_right), "captions right"),
        ("time", lambda pair: format_share(pair[0].seconds_per_image / full.seconds_per_image)),
        notes=(note,),
    ).without_empty_columns()


def _psnr_text(psnrs_db: Sequence[float]) -> str:
    typical, worst = (
        "equal" if math.isinf(value) else format_number(value, 1)
        for value in (statistics.median(psnrs_db), min(psnrs_db))
    )
    return f"{typical} ({worst})"


def _num_closer(skipped: CallsRun, fewer: CallsRun) -> int:
    return sum(ours > theirs for ours, theirs in zip(skipped.psnrs_db, fewer.psnrs_db, strict=True))


def _plot(groups: Sequence[Group], file: pathlib.Path) -> pathlib.Path:
    """PSNR over the calls that are made: medians as a line, the images' range as bars; axes for each group."""
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    columns = min(3, max(1, len(groups)))
    shape = -(-max(1, len(groups)) // columns), columns
    figure, grid = pyplot.subplots(
        *shape, figsize=(3.0 * columns + 0.6, 2.6 * shape[0] + 0.4), layout="constrained", sharey=True, squeeze=False
    )
    for axes in grid.flat[len(groups) :]:
        axes.set_visible(False)
    for axes, group in zip(grid.flat, groups, strict=False):
        num_calls = group[0].setting.num_calls
        for number, (label, colour, marker) in enumerate(_KINDS.values()):
            runs = [pair[number] for pair in group[1]]
            calls = [run.setting.num_calls + (number - 0.5) * num_calls / 50 for run in runs]
            finite = [[value for value in run.psnrs_db if math.isfinite(value)] or [math.nan] for run in runs]
            middle = [statistics.median(values) for values in finite]
            axes.vlines(calls, [min(values) for values in finite], [max(values) for values in finite], color=colour)
            axes.plot(calls, middle, color=colour, marker=marker, label=label)
        axes.set(title=_title(group), xlabel=f"calls of {num_calls}", xlim=(0, num_calls))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for row in grid:
        row[0].set_ylabel("PSNR to the full image, dB")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return save_figure(figure, file)


def _write_grid(group: Group, pictures: Mapping[Setting, Sequence[Image]], file: pathlib.Path) -> pathlib.Path:
    """A column for each setting, under its calls and median PSNR; a row for each image."""
    full, pairs = group
    runs = [full, *itertools.chain.from_iterable(pairs)]
    columns = [[_cell(image) for image in pictures[run.setting]] for run in runs]
    width, height = columns[0][0].size
    sheet = PillowImage.new("RGB", (len(runs) * (width + 4), len(columns[0]) * (height + 4) + _LABEL_PX), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for column, (run, cells) in enumerate(zip(runs, columns, strict=True)):
        left = column * (width + 4)
        pen.multiline_text((left + 2, 2), _label(run), fill="black", font=font, spacing=2)
        for row, cell in enumerate(cells):
            sheet.paste(cell, (left + 2, _LABEL_PX + row * (height + 4) + 2))
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file, optimize=True)
    return file


def _cell(image: Image) -> PillowImage.Image:
    cell = PillowImage.fromarray(image)
    cell.thumbnail((_MAX_CELL_PX, _MAX_CELL_PX))
    return cell


def _label(run: CallsRun) -> str:
    setting = run.setting
    if setting.kind == "full":
        return f"full: {setting.num_calls} calls"
    number = f"{setting.num_calls} calls" if setting.kind == "skipped" else f"{setting.num_calls} steps"
    return f"{number}\n{_psnr_text(run.psnrs_db)} dB"
