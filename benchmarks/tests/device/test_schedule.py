"""What is done first, what is left out, and what a part is thought to take."""

import itertools
from dataclasses import replace

import pytest

from noria_bench.device.schedule import (
    COMPILED,
    CPU_ESTIMATE,
    GPU_ESTIMATE,
    FinishedMeasurement,
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
    return {"sd15": 0.8e12, "sdxl": 1.7e12}[model] * (side_px / 512) ** 2


def predict(part, *done, guess=GPU_ESTIMATE):
    return predict_s(part, done, flops, guess)


def finished(part, step_s, seconds=2.0):
    return FinishedMeasurement(part, "ok", seconds, step_s)


def test_a_gpu_is_asked_everything_once_and_the_most_important_first():
    parts = gpu_measurements(quick=False)
    assert len(set(parts)) == len(parts)
    assert parts[:3] == (
        PeakMeasurement(),
        StepMeasurement("sd15", 512, 2, "eager"),
        StepMeasurement("sd15", 512, 2, "channels last"),
    )
    steps = [part for part in parts if isinstance(part, StepMeasurement)]
    for mode in ("eager", "channels last", "graphs"):
        asked = {(part.model, part.side_px, part.rows) for part in steps if part.mode == mode}
        assert asked == {(m, s, r) for m in ("sd15", "sdxl") for s in (512, 1024) for r in (1, 2, 4, 8, 16, 32)}
    order = [parts.index(part) for part in (ServingMeasurement("mixed", 20.0), replace(MEASUREMENT, mode="compiled"))]
    order.append(next(k for k, part in enumerate(parts) if isinstance(part, StepMeasurement) and part.model == "sdxl"))
    assert order == sorted(order)


def test_what_is_compiled_is_captured_before_the_next_is_compiled():
    parts = gpu_measurements(quick=False)
    for one, other in itertools.pairwise(parts):
        if isinstance(one, StepMeasurement) and one.mode == "compiled":
            assert other == replace(one, mode="compiled graphs")


@pytest.mark.parametrize("parts", [gpu_measurements(quick=True), cpu_measurements(128, quick=True)])
def test_a_sample_compiles_nothing(parts):
    assert not [part for part in parts if isinstance(part, StepMeasurement) and part.mode in COMPILED]
    assert [part.traffic for part in parts if isinstance(part, ServingMeasurement)] == ["alike", "mixed"]


def test_a_cpu_is_asked_for_small_sizes_and_no_sdxl():
    sizes = {
        (part.model, part.side_px) for part in cpu_measurements(128, quick=False) if isinstance(part, StepMeasurement)
    }
    assert sizes == {("sd15", 64), ("sd15", 128), ("bundled", 128)}


def test_a_step_is_predicted_from_the_nearest_that_was_measured():
    near, far = finished(replace(MEASUREMENT, rows=8), 0.1), finished(replace(MEASUREMENT, rows=1), 0.05)
    # 16 rows take twice as long as 8: 0.2 s, of which 5 to warm up and 5 that count
    assert predict(MEASUREMENT, far, near) == pytest.approx(10 * 0.2 + 0.5)
    # a smaller step may well take as long
    assert predict(replace(MEASUREMENT, rows=4), near) == pytest.approx(15 * 0.1 + 0.5)


def test_without_any_measurement_the_guess_counts():
    step_s = 16 * 0.8e12 / GPU_ESTIMATE.flops_per_s
    expected = GPU_ESTIMATE.build_s + 0.5 + (5 + num_timed_calls(step_s)) * step_s
    assert predict(MEASUREMENT) == pytest.approx(expected)
    assert predict(MEASUREMENT, finished(StepMeasurement("sdxl", 1024, 2, "eager"), 0.01)) == pytest.approx(expected)


def test_another_model_is_built_first_and_the_same_is_not():
    part, other = replace(MEASUREMENT, rows=8), StepMeasurement("sdxl", 512, 2, "eager")
    at_once = predict(MEASUREMENT, finished(part, 0.1))
    assert predict(MEASUREMENT, finished(part, 0.1), finished(other, 0.1)) == pytest.approx(
        at_once + GPU_ESTIMATE.build_s
    )
    failed = FinishedMeasurement(replace(MEASUREMENT, mode="graphs"), "failed", 1.0)  # after which the UNet was dropped
    assert predict(MEASUREMENT, finished(part, 0.1), failed) == pytest.approx(at_once + GPU_ESTIMATE.build_s)


def test_compiling_is_predicted_from_the_longest_and_capturing_costs_none():
    compiled, eager = replace(MEASUREMENT, mode="compiled"), finished(MEASUREMENT, 0.1)
    base = predict(replace(MEASUREMENT, mode="graphs"), eager)
    assert predict(compiled, eager) == pytest.approx(base + GPU_ESTIMATE.compile_s)
    other = finished(replace(compiled, rows=2), 0.1, seconds=40.0)
    assert predict(compiled, other, eager) == pytest.approx(base + 40.0)
    assert predict(replace(MEASUREMENT, mode="compiled graphs"), eager, finished(compiled, 0.1)) == pytest.approx(base)
    assert predict(replace(compiled, model="sdxl")) > 2 * GPU_ESTIMATE.compile_s


def test_serving_is_set_up_once():
    part = ServingMeasurement("alike", 10.0)
    assert predict(part, guess=CPU_ESTIMATE) == pytest.approx(26.0 + CPU_ESTIMATE.serving_setup_s)
    assert predict(part, FinishedMeasurement(part, "ok", 30.0), guess=CPU_ESTIMATE) == pytest.approx(26.0)


def test_what_does_not_fit_the_time_is_left_out():
    assert skip_reason(MEASUREMENT, [], 30.0, 30.0) is None
    assert skip_reason(MEASUREMENT, [], 30.0, 29.0) == "predicted to take 30 s, 29 s are left"
    assert skip_reason(ServingMeasurement("alike", 9.0), [], 30.0, -1.0) == "predicted to take 30 s, 0 s are left"


@pytest.mark.parametrize(
    ("tried", "left_out"),
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
def test_what_did_not_fit_the_memory_with_fewer_rows_is_not_tried(tried, left_out):
    why = skip_reason(MEASUREMENT, [FinishedMeasurement(tried, "out of memory", 1.0)], 1.0, 100.0)
    assert (why is not None) == left_out
    if left_out:
        assert why == f"{tried.rows} rows did not fit the memory"


def test_a_mode_that_failed_is_not_tried_again_with_the_same_model():
    compiled = replace(MEASUREMENT, mode="compiled")
    failed = [FinishedMeasurement(replace(compiled, rows=2), "failed", 1.0)]
    assert skip_reason(compiled, failed, 1.0, 100.0) == "compiled failed before"
    assert skip_reason(MEASUREMENT, failed, 1.0, 100.0) is None
    assert skip_reason(replace(compiled, model="sdxl"), failed, 1.0, 100.0) is None


@pytest.mark.parametrize(("mode", "captured"), [("channels last", "graphs"), ("compiled", "compiled graphs")])
def test_what_failed_is_not_captured_either(mode, captured):
    failed = [FinishedMeasurement(replace(MEASUREMENT, mode=mode), "failed", 1.0)]
    assert skip_reason(replace(MEASUREMENT, mode=captured), failed, 1.0, 100.0) == f"{mode} failed before"
    full = [FinishedMeasurement(replace(MEASUREMENT, mode=mode), "out of memory", 1.0)]
    assert skip_reason(replace(MEASUREMENT, mode=captured), full, 1.0, 100.0) == "16 rows did not fit the memory"


def test_a_step_is_timed_for_about_a_second():
    assert [num_timed_calls(seconds) for seconds in (0.001, 0.1, 0.25, 9.0)] == [20, 10, 4, 3]
