"""Compares simulations with measured runs of the real server, on the same requests.

A measured run is one of `noria bench mixed` or `deadlines`: its file has each request with its latency, and the costs
that the engine has measured. Nothing is fitted to the latencies: the costs are the engine's own, and what a request
took outside the engine is the mean of what its client measured beyond the stages that the server reported.
"""

import pathlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from noria_bench.measurement import runs
from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import BenchRun
from noria_bench.reports.plots.styles import report_style
from noria_bench.reports.plots.target_plots import Plot
from noria_bench.reports.table import Table, format_number, format_ratio, format_share
from noria_bench.simulator.devices import Device, check_device
from noria_bench.simulator.outcome import Outcome
from noria_bench.simulator.page import plot_lines, write_page
from noria_bench.simulator.workload import Arrival, SimulateError
from noria_bench.simulator.world import Settings, simulate

_SHARES = (0.5, 0.9, 0.99)
_BUSY_SHARE = 0.05  # share of the machine's CPU time, used by other processes: then a measured run means little


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured run and its simulation."""

    run: BenchRun
    device: Device
    measured: Outcome
    simulated: Outcome

    @property
    def name(self) -> str:
        """Its name in tables and plots."""
        return self.run.variant or self.run.bench


def calibrate(folder: pathlib.Path) -> list[Calibration]:
    """Simulate every measured run in `folder` of Noria in an open loop. Raises SimulateError."""
    try:
        found = runs.read_runs(folder)
    except (OSError, ValueError) as error:
        raise SimulateError(f"{error}") from error
    usable = [run for run in found if run.complete and run.engine_costs and any(map(_has_images, run.records))]
    if not usable:
        raise SimulateError(
            f"{folder} has no run of Noria with its engine's costs; `noria bench mixed --targets noria --out {folder}` "
            "makes one"
        )
    return [_calibrate(run) for run in usable]


def _calibrate(run: BenchRun) -> Calibration:
    try:
        device = check_device(msgspec.convert(run.engine_costs, Device, strict=False), run.file_name)
    except msgspec.ValidationError as error:
        raise SimulateError(f"{run.file_name}: engine_costs: {error}") from error
    outside_s = [
        record.done_s - record.sent_s - record.engine_s
        for record in run.records
        if record.done_s is not None and record.engine_s is not None
    ]
    device = msgspec.structs.replace(device, front_end_s=max(statistics.fmean(outside_s), 0.0) if outside_s else 0.0)
    measured = Outcome()
    for record in run.records:
        if _has_images(record):
            measured.latencies_s.append(record.latency_s)
        else:
            measured.unserved[f"status {record.status}"] += 1
    engine = run.settings
    settings = Settings(
        device,
        num_devices=1,
        policy=engine["policy"],
        queue_limit=engine["queue_limit"],
        queue_limit_s=engine["queue_limit_s"],
    )
    return Calibration(run, device, measured, simulate(settings, arrivals_of(run.records)))


def arrivals_of(records: Sequence[RequestRecord]) -> list[Arrival]:
    """Return the requests of a run, in the order of their intended starts. Raises SimulateError."""
    if any(not record.num_calls for record in records):
        raise SimulateError("a run has requests of unknown size; runs made before this version cannot be calibrated")
    return [
        Arrival(
            record.intended_s,
            "",
            record.width_px,
            record.height_px,
            record.num_calls,
            record.num_images,
            record.call_rows,
            deadline_s=record.deadline_s,
        )
        for record in sorted(records, key=lambda each: (each.intended_s, each.number))
    ]


def _has_images(record: RequestRecord) -> bool:
    return record.status == 200 and record.done_s is not None


def figures_of(calibration: Calibration) -> dict[str, Any]:
    """Return what is compared, JSON-ready: latencies in seconds, and the simulated over the measured ones."""
    run, measured, simulated = calibration.run, calibration.measured, calibration.simulated
    figures: dict[str, Any] = {
        "run": calibration.name,
        "load_percent": run.traffic.load_percent,
        "requests": measured.num_requests,
        "measured_served_share": measured.served_share,
        "simulated_served_share": simulated.served_share,
        "slowdown": calibration.device.slowdown,
        "front_end_s": calibration.device.front_end_s,
        "other_cpu_share": run.usage.other_cpu_share,
    }
    for share in _SHARES:
        known_s, found_s, name = measured.quantile_s(share), simulated.quantile_s(share), f"p{100 * share:g}"
        figures |= {f"measured_{name}_s": known_s, f"simulated_{name}_s": found_s, f"{name}_ratio": found_s / known_s}
    return figures


def table_of(calibrations: Sequence[Calibration]) -> Table:
    """Return the quantiles of both, and the simulated over the measured ones."""
    all_figures = [figures_of(each) for each in calibrations]
    rows = tuple(
        (
            figures["run"],
            str(figures["requests"]),
            *(
                cell
                for name in ("p50", "p99")
                for cell in (
                    format_number(figures[f"measured_{name}_s"], 3),
                    format_number(figures[f"simulated_{name}_s"], 3),
                    format_ratio(figures[f"{name}_ratio"]),
                )
            ),
            format_number(figures["slowdown"], 2),
            format_number(1000 * figures["front_end_s"], 1),
            format_share(figures["other_cpu_share"]),
        )
        for figures in all_figures
    )
    notes = [
        "Ratio: simulated over measured. Slowdown: how much longer the engine's calls took than without other work, "
        "which the simulated costs include. Outside: the mean time of a request outside the engine."
    ]
    if shares := [
        f"{figures['run']}: {format_share(figures['measured_served_share'])} of the requests were served, "
        f"{format_share(figures['simulated_served_share'])} in the simulation."
        for figures in all_figures
        if min(figures["measured_served_share"], figures["simulated_served_share"]) < 1.0
    ]:
        notes += shares
    if any(figures["other_cpu_share"] > _BUSY_SHARE for figures in all_figures):
        notes.append(
            f"Other processes used more than {100 * _BUSY_SHARE:g} % of the machine's CPU time during a run: measure "
            "it again, alone."
        )
    return Table(
        "Latency, measured and simulated",
        ("run", "requests", "p50 (s)", "simulated (s)", "ratio", "p99 (s)", "simulated (s)", "ratio", "slowdown",
         "outside (ms)", "CPU of others"),
        rows,
        tuple(notes),
    )  # fmt: skip


def write_report(folder: pathlib.Path, calibrations: Sequence[Calibration]) -> pathlib.Path:
    """Write `results.json`, the plots and `report.html` into `folder`; return the page."""
    with report_style():
        plots = [_plot(each, (folder / each.run.file_name).with_suffix(".svg")) for each in calibrations]
    lines = [
        "Each run of the real server, simulated with the same requests at the same times, and with the costs that its "
        "engine had measured."
    ]
    rows = [figures_of(each) for each in calibrations]
    return write_page(folder, "Noria simulation: calibration", lines, table_of(calibrations), plots, rows)


def _plot(calibration: Calibration, file: pathlib.Path) -> Plot:
    lines: list[tuple[str, Any, Any]] = []
    for name, outcome in (("measured", calibration.measured), ("simulated", calibration.simulated)):
        latencies_s = np.sort(np.asarray(outcome.latencies_s))
        lines.append((name, latencies_s, 100 * np.arange(1, len(latencies_s) + 1) / outcome.num_requests))
    plot_lines(lines, file, "latency (s)", "share of requests (%)", in_seconds=True)
    title = f"{calibration.name}: requests that had their images within a latency"
    return Plot(file, title, f"{title}, measured and simulated; the quantiles are in the table.")
