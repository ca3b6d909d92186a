"""The results of the device bench so far: as JSON, and as a table of at most 60 lines. Pure, except for `write`."""

import dataclasses
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from noria_bench.reports.table import MISSING, Table
from noria_bench.running import write_json

if TYPE_CHECKING:
    from noria_bench.device.serving import ServingResult
    from noria_bench.device.step_timing import MixedSizesTime, StepTime

MAX_TABLE_LINES = 60

_MODE_COLUMNS = ("eager", "channels last", "graphs", "compiled", "compiled graphs")


@dataclass(frozen=True)
class Omission:
    """A measurement without a result, and why."""

    measurement: dict[str, Any]  # its fields, and its `kind`
    reason: str


@dataclass
class DeviceReport:
    """The runner fills it, one measurement after the other."""

    provenance: dict[str, Any]  # result of `collect_provenance`
    device: dict[str, Any]
    dtype: str
    budget_s: float
    seconds: float = 0.0
    complete: bool = False  # False: it was interrupted
    peak_flops_per_s: float | None = None
    steps: "list[StepTime]" = field(default_factory=list)
    mixed_sizes: "list[MixedSizesTime]" = field(default_factory=list)
    serving: "list[ServingResult]" = field(default_factory=list)
    omitted: list[Omission] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write(report: DeviceReport, file: pathlib.Path) -> None:
    """Write the report atomically as JSON."""
    document = {"bench": "device", **report.provenance, **dataclasses.asdict(report)}
    del document["provenance"]
    write_json(document, file)


def table(report: DeviceReport) -> str:
    """The short form: a line of steps for each number of rows, then serving, then notes and omissions."""
    device = report.device
    lines = [
        f"{device['name']}, {device['memory_bytes'] / 2**30:.0f} GiB, {report.dtype}, torch {device['torch']}, "
        f"driver {device['driver'] or '–'}; {report.seconds:.0f} s of {report.budget_s:.0f} s"
    ]
    if report.peak_flops_per_s:
        lines.append(f"measured matrix peak: {report.peak_flops_per_s / 1e12:.3g} TFLOP/s")
    tail = [
        *_knee_lines(report.steps),
        *_mixed_sizes_lines(report.mixed_sizes),
        *_serving_lines(report.serving),
        *_closing_lines(report),
    ]
    if report.steps:
        lines += _step_lines(report.steps, MAX_TABLE_LINES - len(lines) - len(tail))
    return "\n".join([*lines, *tail])


def _step_lines(steps: "Sequence[StepTime]", max_lines: int) -> list[str]:
    """Milliseconds of a step in each mode, and the rate of the fastest mode.

    The first measured lines are kept if room is short.
    """
    columns = [mode for mode in _MODE_COLUMNS if any(step.mode == mode for step in steps)]
    cells: dict[tuple[str, int, int], dict[str, StepTime]] = {}
    for step in steps:
        cells.setdefault((step.model, step.side_px, step.rows), {})[step.mode] = step
    groups = list(dict.fromkeys((model, side_px) for model, side_px, _ in cells))
    kept = list(cells)[: max_lines - 2]
    rows = []
    for model, side_px, count in sorted(kept, key=lambda key: (groups.index(key[:2]), key[2])):
        modes = cells[model, side_px, count]
        best = min(modes.values(), key=lambda step: step.step_s)
        share = MISSING if best.peak_share is None else f"{100 * best.peak_share:.0f} %"
        times = [f"{1000 * modes[mode].step_s:.4g}" if mode in modes else MISSING for mode in columns]
        memory = f"{best.peak_bytes / 2**30:.1f}"
        rows.append((f"{model} {side_px}², {count}", *times, f"{best.images_per_s:.3g}", share, memory))
    head = ("denoiser, rows", *(f"{mode}, ms" for mode in columns), "images/s¹", "of peak", "GiB")
    return Table("Steps", head, tuple(rows)).markdown().splitlines()


def knees(steps: "Sequence[StepTime]") -> dict[tuple[str, int], int]:
    """The fewest rows, by model and side, at which the rate is at least 90 % of the best one measured.

    Of numbers of rows that were timed in eager mode, and each in its fastest mode that is not compiled.
    """
    rates: dict[tuple[str, int], dict[int, float]] = {}
    for step in steps:
        if "compiled" not in step.mode:
            of_rows = rates.setdefault((step.model, step.side_px), {})
            of_rows[step.rows] = max(step.rows_per_s, of_rows.get(step.rows, 0.0))
    return {
        key: min(rows for rows, rate in of_rows.items() if rate >= 0.9 * max(of_rows.values()))
        for key, of_rows in rates.items()
    }


def _knee_lines(steps: "Sequence[StepTime]") -> list[str]:
    texts = [f"{model} {side_px}² {rows}" for (model, side_px), rows in knees(steps).items()]
    return ["rows that reach 90 % of the best rate:", f"  {', '.join(texts)}"] if texts else []


def _mixed_sizes_lines(times: "Sequence[MixedSizesTime]") -> list[str]:
    return [
        f"{each.model}, {each.rows} × {each.sides_px[0]}² + {each.rows} × {each.sides_px[1]}²: one call "
        f"{1000 * each.together_s:.4g} ms, two calls {1000 * each.apart_s:.4g} ms"
        for each in times
    ]


def _serving_lines(results: "Sequence[ServingResult]") -> list[str]:
    rows = []
    for each in results:
        numbers = (each.images_per_s, each.p50_s, each.p99_s, each.mean_batch)
        texts = (MISSING if number is None else f"{number:.3g}" for number in numbers)
        rows.append((f"{each.model}, {each.traffic}, {each.server}", *texts))
    columns = ("8 users in this process", "images/s", "p50, s", "p99, s", "images/call")
    return ["", *Table("Serving", columns, tuple(rows)).markdown().splitlines(), ""] if rows else []


def _closing_lines(report: DeviceReport) -> list[str]:
    lines = [
        "¹ in the fastest mode, without text encoders and VAE; guided at 20 steps (sd15) and 30 (sdxl),",
        "  in one row an image at 28 (flux) and 8 (z-image)",
    ]
    lines = lines if report.steps else []
    lines += report.notes
    if report.omitted:
        reasons = list(dict.fromkeys(omission.reason for omission in report.omitted))
        more = f" and {len(reasons) - 2} other reasons" if len(reasons) > 2 else ""
        lines.append(
            f"omitted: {len(report.omitted)} measurements ({'; '.join(reason[:120] for reason in reasons[:2])}{more})"
        )
    if not report.complete:
        lines.append("INTERRUPTED: the following measurements are missing")
    return lines
