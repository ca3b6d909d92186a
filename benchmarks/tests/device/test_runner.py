"""Measurements are made, skipped or fail; each is saved at once, and the table stays short."""

import json
import time

import pytest
import torch

from noria_bench.device.device_report import MAX_TABLE_LINES, DeviceReport, Omission, knees, table, write
from noria_bench.device.runner import DeviceBench
from noria_bench.device.schedule import (
    CPU_ESTIMATE,
    PeakMeasurement,
    ServingMeasurement,
    StepMeasurement,
    gpu_measurements,
)
from noria_bench.device.serving import ServingResult
from noria_bench.device.step_timing import MixedSizesTime, StepTime

DEVICE = {"type": "cpu", "name": "A CPU", "memory_bytes": 2**33, "torch": "2", "driver": None}
STEP = StepMeasurement("tiny", 64, 2, "eager")


def empty_report():
    return DeviceReport({"date": "2026-01-01", "command": "noria bench device"}, DEVICE, "float32", 100.0)


@pytest.fixture
def bench(tiny, monkeypatch):
    """A bench, its report, and the number of steps at each save; the matrix peak is fixed."""
    monkeypatch.setattr("noria_bench.device.runner.measure_matrix_peak", lambda _device, _dtype: 1e12)
    report, saved = empty_report(), []
    end_s = time.monotonic() + 600
    save = lambda: saved.append(len(report.steps))  # noqa: E731
    return (
        DeviceBench(torch.device("cpu"), {"tiny": tiny}, CPU_ESTIMATE, report, save, lambda _: None, end_s),
        report,
        saved,
    )


def test_measurements_are_made_in_order_and_saved_one_by_one(bench):
    device_bench, report, saved = bench
    device_bench.run([PeakMeasurement(), STEP, StepMeasurement("tiny", 64, 2, "channels last")])
    assert [step.mode for step in report.steps] == ["eager", "channels last"]
    assert report.peak_flops_per_s == 1e12 and report.steps[0].peak_share is not None
    assert saved == [0, 1, 2, 2] and not report.omitted


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "tiny 64², 2 rows, eager: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "tiny 64², 2 rows, eager: out of memory"),
        (RuntimeError("no compiler\nmore"), "tiny 64², 2 rows, eager: RuntimeError: no compiler"),
        (ModuleNotFoundError(name="msgspec"), "it needs msgspec, which is not installed: pip install msgspec"),
    ],
)
def test_a_failure_is_recorded_and_the_next_measurement_is_made(bench, monkeypatch, error, reason):
    device_bench, report, _ = bench
    measure = device_bench._steps.measure

    def fail(measurement, peak):
        if measurement == STEP:
            raise error
        return measure(measurement, peak)

    monkeypatch.setattr(device_bench._steps, "measure", fail)
    device_bench.run([STEP, StepMeasurement("tiny", 64, 2, "channels last")])
    assert [omission.reason for omission in report.omitted] == [reason]
    assert [step.mode for step in report.steps] == ["channels last"]


def test_measurements_that_would_not_fit_the_time_are_omitted(tiny):
    report = empty_report()
    bench = DeviceBench(
        torch.device("cpu"), {"tiny": tiny}, CPU_ESTIMATE, report, lambda: None, lambda _: None, time.monotonic() + 3
    )
    bench.run([STEP, ServingMeasurement("uniform", 20.0)])
    assert not report.steps
    assert [omission.measurement["kind"] for omission in report.omitted] == ["step", "serving"]
    assert all("predicted to take" in omission.reason for omission in report.omitted)


def test_an_interruption_propagates_and_keeps_the_report(bench, monkeypatch):
    device_bench, report, _ = bench

    def interrupt(_measurement, _peak):
        raise KeyboardInterrupt

    device_bench.run([STEP])
    monkeypatch.setattr(device_bench._steps, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        device_bench.run([STEP])
    assert len(report.steps) == 1


def full_report():
    report = empty_report()
    report.peak_flops_per_s, report.complete = 7e14, True
    for each in gpu_measurements(quick=False):
        if isinstance(each, StepMeasurement):
            report.steps.append(
                StepTime(each.model, each.side_px, each.rows, each.mode, 1.0, 0.1, 160.0, 4.0, 1e14, 0.14, 2**31, 0.001)
            )
    report.mixed_sizes = [MixedSizesTime("z-image", (512, 1024), rows, 0.2, 0.3) for rows in (1, 4)]
    report.serving = [
        ServingResult(s, t, "sd15-random", 20.0, 9, 3.5, 160.0, 1.0, None, 8.0) for s in "ab" for t in "cd"
    ]
    report.omitted = [Omission({}, f"reason {k}") for k in range(5)]
    report.notes = ["a note"]
    return report


def test_the_table_of_a_full_report_is_short_and_has_every_size():
    lines = table(full_report()).splitlines()
    assert len(lines) <= MAX_TABLE_LINES
    for label in ("| sd15 512², 32 ", "| sd15 1024², 1 ", "| sdxl 512², 8 ", "| sdxl 1024², 16 "):
        assert sum(line.startswith(label) for line in lines) == 1, label
    assert "z-image, 4 × 512² + 4 × 1024²: one call 200 ms, two calls 300 ms" in lines
    assert "omitted: 5 measurements (reason 0; reason 1 and 3 other reasons)" in lines
    assert max(map(len, lines)) < 130


def test_the_knee_is_the_fewest_rows_near_the_best_rate():
    rates = {("eager", 1): 50.0, ("eager", 4): 80.0, ("graphs", 4): 91.0, ("eager", 8): 100.0, ("compiled", 2): 120.0}
    steps = [
        StepTime("sdxl", 1024, rows, mode, 1.0, 0.1, rate, 4.0, 1e14, 0.14, 2**31, 0.001)
        for (mode, rows), rate in rates.items()
    ]
    assert knees(steps) == {("sdxl", 1024): 4}


def test_the_table_of_an_incomplete_report_says_so():
    assert table(empty_report()).splitlines()[-1].startswith("INTERRUPTED")


def test_the_file_has_the_whole_report(tmp_path):
    write(full_report(), tmp_path / "device.json")
    document = json.loads((tmp_path / "device.json").read_text())
    assert (document["bench"], document["date"], document["complete"]) == ("device", "2026-01-01", True)
    assert len(document["steps"]) == len(full_report().steps) and document["serving"][0]["p99_s"] is None
    assert list(tmp_path.iterdir()) == [tmp_path / "device.json"]
