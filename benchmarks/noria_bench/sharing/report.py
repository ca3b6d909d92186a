"""The report of `noria bench sharing`: tables in Markdown, and a plot."""

import functools
import math
import pathlib

from noria_bench.encoders.results import Load
from noria_bench.reports.plots.styles import save_figure
from noria_bench.reports.result_report import conditions, heading, median, write_files
from noria_bench.reports.table import Table, escape_markdown, format_number, format_ratio
from noria_bench.sharing.results import SharingResult, SharingRun

_COLOURS = {False: "#56B4E9", True: "#D55E00"}
_PLACES = {False: "texts alone", True: "beside images"}


def write_report(result: SharingResult, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write `report.md` and the plot into `folder`; returns the files."""
    return write_files(folder, markdown(result), sharing=functools.partial(_plot, result))


def markdown(result: SharingResult) -> str:
    """The report, which links the plot beside it."""
    parts = heading("sharing", result.failures, complete=result.complete)
    parts.append("![An embedding, and images per second, alone and beside each other](plots/sharing.svg)")
    for table in (*(_texts(result, load) for load in _loads(result)), _images(result), _cores(result)):
        parts += [f"## {escape_markdown(table.title)}", table.markdown()]
    others = max((run.cores.get("others", 0.0) for run in result.runs), default=0.0)
    text = (
        f"Images of {result.models['images']}, by {result.options['num_users']} users in a closed loop; embeddings of "
        f"{result.models['texts']} of one sentence: “{escape_markdown(result.text)}” Other processes used up to "
        f"{others:.2f} cores during a load: figures of a machine that others use cannot be compared."
    )
    return "\n\n".join([*parts, conditions(result.provenance, text)])


def _texts(result: SharingResult, load: Load) -> Table:
    rows = []
    for value in _values(result):
        for has_images in (False, True):
            runs = _select(result, value, load, has_images=has_images)
            found = [run.texts for run in runs if run.texts is not None]
            if not found:
                continue
            rows.append(
                (
                    f"{value}, {_PLACES[has_images]}",
                    format_number(median(each.requests_per_s for each in found), 1),
                    *(
                        format_number(median(getattr(each, name) for each in found), 1)
                        for name in ("p50_ms", "p95_ms", "p99_ms")
                    ),
                    format_number(median(run.images_per_s for run in runs), 2),
                    str(sum(each.num_failed for each in found)),
                    f"{sum(each.num_wrong for each in found)} of {sum(each.num_compared for each in found)}",
                )
            )
    columns = ("encoder_cores", "texts/s", "p50, ms", "p95, ms", "p99, ms", "images/s", "failed", "wrong")
    return Table(f"Embeddings: {_short(load)}", columns, tuple(rows), ("Medians of the rounds.",))


def _images(result: SharingResult) -> Table:
    loads = _loads(result)
    rows = []
    for value in _values(result):
        alone = median(run.images_per_s for run in _select(result, value, None))
        beside = [median(run.images_per_s for run in _select(result, value, load, has_images=True)) for load in loads]
        cells = (f"{format_number(rate, 2)}, {format_ratio(rate / alone if alone else math.nan)}" for rate in beside)
        runs = [run for run in result.runs if run.encoder_cores == value]
        rows.append((value, format_number(alone, 2), *cells, str(sum(run.num_images_failed for run in runs))))
    columns = ("encoder_cores", "alone", *(f"beside {_short(load)}" for load in loads), "failed")
    return Table("Images per second", columns, tuple(rows), ("Each with its ratio to images alone.",))


def _cores(result: SharingResult) -> Table:
    names = list(dict.fromkeys(name for run in result.runs for name in run.cores))
    rows = []
    for value in _values(result):
        for load in (None, *_loads(result)):
            runs = _select(result, value, load, has_images=True)
            cells = (format_number(median(run.cores.get(name) for run in runs), 2) for name in names)
            rows.append((f"{value}, {'no texts' if load is None else _short(load)}", *cells))
    note = "CPU seconds per second while images are generated, of all processes of each kind."
    return Table("Cores in use", ("encoder_cores", *names), tuple(rows), (note,))


def _plot(result: SharingResult, file: pathlib.Path) -> pathlib.Path:
    """The p99 of the open loop, with p50 as a line in each bar, and images per second; a group for each value."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8.0, 3.2), layout="constrained")
    values = _values(result)
    loads = _loads(result)
    opened = next((load for load in loads if load.loop == "open"), None)
    for axes, label in ((left, "milliseconds, p99 (line: p50)"), (right, "images per second")):
        axes.set(ylabel=label)
        axes.set_xticks(range(len(values)), [f"encoder_cores\n{value}" for value in values])
    left.set(title="an embedding" if opened is None else f"an embedding, {_short(opened)}")
    right.set(title="images")
    for has_images, offset in ((False, -0.2), (True, 0.2)):
        places = [place + offset for place in range(len(values))]
        runs = [_select(result, value, opened, has_images=has_images) for value in values]
        p50_ms, p99_ms = (
            [median(getattr(run.texts, name, None) for run in each) for each in runs] for name in ("p50_ms", "p99_ms")
        )
        rates = [
            median(run.images_per_s for run in _select(result, value, opened if has_images else None))
            for value in values
        ]
        style = {"color": _COLOURS[has_images], "label": "beside the other" if has_images else "alone"}
        left.bar(places, p99_ms, 0.38, **style)
        left.hlines(p50_ms, [place - 0.19 for place in places], [place + 0.19 for place in places], color="black")
        right.bar(places, rates, 0.38, color=style["color"])
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return save_figure(figure, file)


def _values(result: SharingResult) -> list[str]:
    return list(dict.fromkeys(run.encoder_cores for run in result.runs))


def _loads(result: SharingResult) -> list[Load]:
    return list(dict.fromkeys(run.texts.load for run in result.runs if run.texts is not None))


def _select(result: SharingResult, value: str, load: Load | None, *, has_images: bool = True) -> list[SharingRun]:
    """The runs of a value with a load of texts, or with none, beside images or not."""
    return [
        run
        for run in result.runs
        if run.encoder_cores == value
        and (None if run.texts is None else run.texts.load) == load
        and (run.images_per_s is not None) == has_images
    ]


def _short(load: Load) -> str:
    if load.loop == "open":
        return f"{load.rate:g} texts/s, open loop"
    return f"{load.connections} connection{'s' * (load.connections != 1)}, closed loop"
