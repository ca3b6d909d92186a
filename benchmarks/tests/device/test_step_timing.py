"""Steps are timed and compared with the eager mode; tests that need a GPU are marked."""

import pytest
import torch

from noria_bench.device.architectures import SD15, build_unet, flops_of_row, make_inputs
from noria_bench.device.schedule import StepMeasurement
from noria_bench.device.step_timing import StepBench, capture_graph, measure_matrix_peak, time_calls

CPU = torch.device("cpu")


@pytest.mark.parametrize("mode", ["eager", "channels last"])
def test_a_step_has_its_time_rates_and_share_of_the_peak(tiny, mode):
    found = StepBench(CPU, torch.float32, {"tiny": tiny}).measure(StepMeasurement("tiny", 64, 4, mode), 1e12)
    assert found.step_s > 0 and found.setup_s > 0 and found.peak_bytes > 0
    assert found.rows_per_s == pytest.approx(4 / found.step_s)
    assert found.images_per_s == pytest.approx(4 / found.step_s / 2 / 20)
    assert found.flops_per_s == pytest.approx(4 * flops_of_row(tiny, 64) / found.step_s)
    assert found.peak_share == pytest.approx(found.flops_per_s / 1e12)


def test_a_mode_is_compared_with_the_eager_output_of_the_same_inputs(tiny):
    bench = StepBench(CPU, torch.float32, {"tiny": tiny})
    assert bench.measure(StepMeasurement("tiny", 64, 2, "channels last"), None).max_difference is None
    assert bench.measure(StepMeasurement("tiny", 64, 2, "eager"), None).max_difference == 0.0
    other = bench.measure(StepMeasurement("tiny", 64, 2, "channels last"), None)
    assert other.max_difference is not None and other.max_difference < 1e-4
    assert other.peak_share is None


def test_each_call_is_timed_separately():
    calls = []
    seconds = time_calls(lambda: calls.append(1), CPU, 5)
    assert len(calls) == len(seconds) == 5 and all(each >= 0 for each in seconds)


@pytest.mark.gpu
def test_a_captured_step_replays_over_the_current_inputs(tiny):
    device = torch.device("cuda:0")
    with torch.no_grad():
        unet, inputs = build_unet(tiny, device, torch.float32), make_inputs(tiny, 64, 2, device, torch.float32)
        replay = capture_graph(lambda: inputs.predict(unet), device)
        first = replay().clone()
        torch.testing.assert_close(first, inputs.predict(unet))
        inputs.latents_RCHW.mul_(0.5)
        torch.testing.assert_close(replay(), inputs.predict(unet))
        assert not torch.equal(first, replay())


@pytest.mark.gpu
def test_a_captured_step_holds_its_inputs(tiny):
    device = torch.device("cuda:0")
    with torch.no_grad():
        unet, inputs = build_unet(tiny, device, torch.float32), make_inputs(tiny, 64, 2, device, torch.float32)
        expected, shape = inputs.predict(unet), inputs.latents_RCHW.shape
        replay = capture_graph(lambda given=inputs: given.predict(unet), device)
        del inputs
        junk = [torch.full(shape, 1e3, device=device) for _ in range(64)]  # would overwrite freed inputs
        torch.testing.assert_close(replay(), expected)
        assert junk


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["channels last", "graphs", "compiled", "compiled graphs"])
def test_every_mode_gives_the_eager_output_on_a_gpu(mode):
    bench = StepBench(torch.device("cuda:0"), torch.float16, {"sd15": SD15})
    bench.measure(StepMeasurement("sd15", 256, 2, "eager"), None)
    found = bench.measure(StepMeasurement("sd15", 256, 2, mode), None)
    assert found.max_difference < 0.02  # kernels differ; float16 keeps three digits, and hundreds of layers add up


@pytest.mark.gpu
def test_a_gpu_has_a_peak_and_out_of_memory_can_be_handled():
    device = torch.device("cuda:0")
    assert measure_matrix_peak(device, torch.float16) > 1e12
    bench = StepBench(device, torch.float16, {"sd15": SD15})
    with pytest.raises(torch.OutOfMemoryError):
        bench.measure(StepMeasurement("sd15", 1024, 4096, "eager"), None)
    bench.release()
    assert bench.measure(StepMeasurement("sd15", 64, 1, "eager"), None).step_s > 0
