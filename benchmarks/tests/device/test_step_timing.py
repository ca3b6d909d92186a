"""Steps are timed and compared with the eager mode; tests that need a GPU are marked."""

import pytest
import torch

from noria_bench.device.architectures import SD15, build_denoiser, flops_of_row, joined, make_inputs
from noria_bench.device.schedule import MixedSizesMeasurement, StepMeasurement
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


def test_a_transformer_is_timed_and_compiled_block_by_block(tiny_flux):
    bench = StepBench(CPU, torch.float32, {"flux": tiny_flux})
    eager = bench.measure(StepMeasurement("flux", 64, 2, "eager"), 1e12)
    assert eager.images_per_s == pytest.approx(2 / eager.step_s / 28)
    assert eager.flops_per_s == pytest.approx(2 * flops_of_row(tiny_flux, 64) / eager.step_s)
    denoiser = bench._load(tiny_flux)
    assert bench._compile(StepMeasurement("flux", 64, 2, "compiled"), denoiser) is denoiser
    compiled = [module for module in denoiser.modules() if module._compiled_call_impl is not None]
    assert {type(module).__name__ for module in compiled} == {"FluxTransformerBlock", "FluxSingleTransformerBlock"}
    bench.measure(StepMeasurement("flux", 64, 2, "eager"), None)
    assert all(module._compiled_call_impl is None for module in denoiser.modules())


def test_rows_of_two_sizes_share_a_call_and_give_what_they_give_apart(tiny_z_image):
    bench = StepBench(CPU, torch.float32, {"z-image": tiny_z_image})
    found = bench.measure_mixed_sizes(MixedSizesMeasurement("z-image", (64, 96), 2))
    assert found.together_s > 0 and found.apart_s > 0
    apart = [make_inputs(tiny_z_image, side_px, 2, CPU, torch.float32) for side_px in (64, 96)]
    denoiser, both = bench._load(tiny_z_image), joined(apart)
    with torch.no_grad():
        outputs = denoiser(both.latents, **both.others, return_dict=False)[0]
        for output, alone in zip(outputs, [*apart[0].predict(denoiser), *apart[1].predict(denoiser)], strict=True):
            torch.testing.assert_close(output, alone, rtol=1e-4, atol=1e-4)


def test_each_call_is_timed_separately():
    calls = []
    seconds = time_calls(lambda: calls.append(1), CPU, 5)
    assert len(calls) == len(seconds) == 5 and all(each >= 0 for each in seconds)


@pytest.mark.gpu
def test_a_captured_step_replays_over_the_current_inputs(tiny):
    device = torch.device("cuda:0")
    with torch.no_grad():
        unet, inputs = build_denoiser(tiny, device, torch.float32), make_inputs(tiny, 64, 2, device, torch.float32)
        replay = capture_graph(lambda: inputs.predict(unet), device)
        first = replay().clone()
        torch.testing.assert_close(first, inputs.predict(unet))
        inputs.latents.mul_(0.5)
        torch.testing.assert_close(replay(), inputs.predict(unet))
        assert not torch.equal(first, replay())


@pytest.mark.gpu
def test_a_captured_step_holds_its_inputs(tiny):
    device = torch.device("cuda:0")
    with torch.no_grad():
        unet, inputs = build_denoiser(tiny, device, torch.float32), make_inputs(tiny, 64, 2, device, torch.float32)
        expected, shape = inputs.predict(unet), inputs.latents.shape
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
