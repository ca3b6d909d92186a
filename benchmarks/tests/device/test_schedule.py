"""The order of measurements, which are skipped, and their predicted durations."""

import itertools
from dataclasses import replace

import pytest

from noria_bench.device.schedule import (
    COMPILED,
    CPU_ESTIMATE,
    GPU_ESTIMATE,
    FinishedMeasurement,
    MixedSizesMeasurement,
    PeakMeasurement,
    ServingMeasurement,
    StepMeasurement,
    cpu_measurements,
    gpu_measurements,
    num_timed_calls,
    predict_s,
    skip_reason,
)

MEASUREMENT = StepMeasurement("sd15", 512, 16, "eager")


def flops(model, side_px):
    return {"sd15": 0.8e12, "sdxl": 1.7e12, "z-image": 14e12}[model] * (side_px / 512) ** 2


def predict(measurement, *done, estimate=GPU_ESTIMATE):
    return predict_s(measurement, done, flops, estimate)


def finished(measurement, step_s, seconds=2.0):
    return FinishedMeasurement(measurement, "ok", seconds, step_s)


def test_a_gpu_measures_everything_once_and_the_most_important_first():
    measurements = gpu_measurements(quick=False)
    assert len(set(measurements)) == len(measurements)
    assert measurements[:3] == (
        PeakMeasurement(),
        StepMeasurement("sd15", 512, 2, "eager"),
        StepMeasurement("sd15", 512, 2, "channels last"),
    )
    steps = [measurement for measurement in measurements if isinstance(measurement, StepMeasurement)]
    for mode in ("eager", "channels last", "graphs"):
        measured = {(each.model, each.side_px, each.rows) for each in steps if each.mode == mode}
        expected = {(m, s, r) for m in ("sd15", "sdxl") for s in (512, 1024) for r in (1, 2, 4, 8, 16, 32)}
        transformers = {"eager": ("z-image", "flux"), "graphs": ("flux",), "channels last": ()}[mode]
        assert measured == expected | {(m, s, r) for m in transformers for s in (512, 1024) for r in (1, 2, 4, 8)}
    first = {each.model: k for k, each in reversed([*enumerate(measurements)]) if isinstance(each, StepMeasurement)}
    serving = measurements.index(ServingMeasurement("mixed", 20.0))
    compiled = measurements.index(replace(MEASUREMENT, mode="compiled"))
    assert serving < first["sdxl"] < first["z-image"] < first["flux"] < compiled


def test_only_the_models_asked_for_are_measured():
    flux = gpu_measurements(("flux",), quick=False)
    assert {getattr(each, "model", each.kind) for each in flux} == {"peak", "flux"}
    assert any(isinstance(each, ServingMeasurement) for each in gpu_measurements(("sd15",), quick=False))


def test_a_call_of_two_sizes_is_predicted_from_its_work():
    mixed, step = MixedSizesMeasurement("z-image", (512, 1024), 2), StepMeasurement("z-image", 512, 10, "eager")
    assert predict(mixed, finished(step, 0.5)) == pytest.approx(2 * (2 + 3) * 0.5)  # as 2 + 2 · 4 rows of 512²


def test_what_is_compiled_is_captured_before_the_next_is_compiled():
    measurements = gpu_measurements(quick=False)
    for one, other in itertools.pairwise(measurements):
        if isinstance(one, StepMeasurement) and one.mode == "compiled" and one.model != "z-image":
            assert other == replace(one, mode="compiled graphs")


@pytest.mark.parametrize("measurements", [gpu_measurements(quick=True), cpu_measurements(128, quick=True)])
def test_the_quick_version_compiles_nothing(measurements):
    assert not [each for each in measurements if isinstance(each, StepMeasurement) and each.mode in COMPILED]
    traffic = [each.traffic for each in measurements if isinstance(each, ServingMeasurement)]
    assert traffic == ["uniform", "mixed"]


def test_a_cpu_measures_small_sizes_and_no_sdxl():
    steps = [each for each in cpu_measurements(128, quick=False) if isinstance(each, StepMeasurement)]
    assert {(each.model, each.side_px) for each in steps} == {("sd15", 64), ("sd15", 128), ("bundled", 128)}


def test_a_step_is_predicted_from_the_nearest_that_was_measured():
    near, far = finished(replace(MEASUREMENT, rows=8), 0.1), finished(replace(MEASUREMENT, rows=1), 0.05)
    # 16 rows take twice as long as 8: 0.2 s, of which 5 to warm up and 5 that count
    assert predict(MEASUREMENT, far, near) == pytest.approx(10 * 0.2 + 0.5)
    # a smaller step may take as long
    assert predict(replace(MEASUREMENT, rows=4), near) == pytest.approx(15 * 0.1 + 0.5)


def test_without_any_measurement_the_estimate_counts():
    step_s = 16 * 0.8e12 / GPU_ESTIMATE.flops_per_s
    expected = GPU_ESTIMATE.build_s + 0.5 + (5 + num_timed_calls(step_s)) * step_s
    assert predict(MEASUREMENT) == pytest.approx(expected)
    assert predict(MEASUREMENT, finished(StepMeasurement("sdxl", 1024, 2, "eager"), 0.01)) == pytest.approx(expected)


def test_building_is_predicted_for_another_model_only():
    measurement, other = replace(MEASUREMENT, rows=8), StepMeasurement("sdxl", 512, 2, "eager")
    at_once = predict(MEASUREMENT, finished(measurement, 0.1))
    assert predict(MEASUREMENT, finished(measurement, 0.1), finished(other, 0.1)) == pytest.approx(
        at_once + GPU_ESTIMATE.build_s
    )
    failed = FinishedMeasurement(replace(MEASUREMENT, mode="graphs"), "failed", 1.0)  # after which the UNet was dropped
    assert predict(MEASUREMENT, finished(measurement, 0.1), failed) == pytest.approx(at_once + GPU_ESTIMATE.build_s)


def test_compiling_is_predicted_from_the_longest_and_capturing_costs_none():
    compiled, eager = replace(MEASUREMENT, mode="compiled"), finished(MEASUREMENT, 0.1)
    base = predict(replace(MEASUREMENT, mode="graphs"), eager)
    assert predict(compiled, eager) == pytest.approx(base + GPU_ESTIMATE.compile_s)
    other = finished(replace(compiled, rows=2), 0.1, seconds=40.0)
    assert predict(compiled, other, eager) == pytest.approx(base + 40.0)
    assert predict(replace(MEASUREMENT, mode="compiled graphs"), eager, finished(compiled, 0.1)) == pytest.approx(base)
    assert predict(replace(compiled, model="sdxl")) > 2 * GPU_ESTIMATE.compile_s


def test_setup_is_predicted_for_the_first_serving_measurement_only():
    measurement = ServingMeasurement("uniform", 10.0)
    assert predict(measurement, estimate=CPU_ESTIMATE) == pytest.approx(26.0 + CPU_ESTIMATE.serving_setup_s)
    assert predict(measurement, FinishedMeasurement(measurement, "ok", 30.0), estimate=CPU_ESTIMATE) == pytest.approx(
        26.0
    )


def test_a_measurement_that_does_not_fit_the_time_is_skipped():
    assert skip_reason(MEASUREMENT, [], 30.0, 30.0) is None
    assert skip_reason(MEASUREMENT, [], 30.0, 29.0) == "predicted to take 30 s, 29 s are left"
    assert skip_reason(ServingMeasurement("uniform", 9.0), [], 30.0, -1.0) == "predicted to take 30 s, 0 s are left"


@pytest.mark.parametrize(
    ("tried", "skipped"),
    [
        (MEASUREMENT, True),
        (replace(MEASUREMENT, rows=8), True),
        (replace(MEASUREMENT, rows=32), False),
        (replace(MEASUREMENT, side_px=1024), False),
        (replace(MEASUREMENT, mode="graphs"), False),
        (replace(MEASUREMENT, model="sdxl"), False),
        (PeakMeasurement(), False),
    ],
)
def test_a_step_is_skipped_if_fewer_rows_exceeded_the_memory(tried, skipped):
    reason = skip_reason(MEASUREMENT, [FinishedMeasurement(tried, "out of memory", 1.0)], 1.0, 100.0)
    assert (reason is not None) == skipped
    if skipped:
        assert reason == f"{tried.rows} rows did not fit the memory"


@pytest.mark.parametrize(
    ("mode", "captured"), [("compiled", "compiled"), ("channels last", "graphs"), ("compiled", "compiled graphs")]
)
def test_a_mode_that_failed_is_neither_tried_again_with_the_same_model_nor_captured(mode, captured):
    tried, next_one = replace(MEASUREMENT, mode=mode, rows=2), replace(MEASUREMENT, mode=captured)
    failed, full = ([FinishedMeasurement(tried, status, 1.0)] for status in ("failed", "out of memory"))
    assert skip_reason(next_one, failed, 1.0, 100.0) == f"{mode} failed before"
    assert skip_reason(next_one, full, 1.0, 100.0) == "2 rows did not fit the memory"
    assert skip_reason(MEASUREMENT, failed, 1.0, 100.0) is None
    assert skip_reason(replace(next_one, model="sdxl"), failed, 1.0, 100.0) is None


def test_a_step_is_timed_for_about_a_second():
    assert [num_timed_calls(seconds) for seconds in (0.001, 0.1, 0.25, 9.0)] == [20, 10, 4, 3]
