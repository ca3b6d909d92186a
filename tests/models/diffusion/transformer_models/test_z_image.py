"""Z-Image in what only it does, in calls with images of different sizes; `test_each_family.py` has the rest."""

import pytest
import torch

import tiny_models
from flow_pipelines import generate_with_pipeline, open_pipeline
from flow_pipelines import make_request as make_flow_request
from generating import PARITY_TOLERANCE, difference, generate, load
from noria.engine.diffusion import step_batch
from noria.engine.loop import StepLoop
from noria.errors import InvalidField
from noria.protocol.diffusion import Lora
from noria.scheduling.step.scheduler import StepScheduler

SIZES = [(64, 64), (32, 48), (64, 40), (40, 64)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def executor(tiny_z_image_folder, request):
    return load(tiny_z_image_folder, request.param)[1]


def make_request(number, **fields):
    width, height = SIZES[number % 4]
    guidance = [0.0, 0.5, 4.0][number % 3]
    return make_flow_request(number, **{"width": width, "height": height, "guidance_scale": guidance} | fields)


def test_the_norm_of_guided_outputs_is_limited_as_by_the_pipeline(tmp_path):
    folder = tiny_models.save_z_image(tmp_path)
    (folder / "noria.json").write_text('{"cfg_normalization": 0.5}')
    executor, pipe = load(folder)[1], open_pipeline(folder)
    requests = [make_request(number) for number in range(3)]
    for request, image in zip(requests, generate(executor, requests).values(), strict=True):
        limited = generate_with_pipeline(pipe, request, cfg_normalization=0.5)
        assert difference(image, limited) <= PARITY_TOLERANCE
        changes = difference(limited, generate_with_pipeline(pipe, request)) > PARITY_TOLERANCE
        assert changes == (request.payload.guidance_scale > 0)


def test_a_step_that_runs_out_of_memory_is_repeated_for_all_sizes(executor, monkeypatch):
    failing = []
    requests = [make_request(number) for number in range(4)]
    undisturbed = generate(executor, requests)
    real = step_batch.next_samples

    def next_samples(*arguments):
        failing.append(arguments)
        if len(failing) == 3:  # call of the second size, after the first
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*arguments)

    monkeypatch.setattr(step_batch, "next_samples", next_samples)
    images = generate(executor, requests)
    assert all(difference(images[key], image) <= 1 for key, image in undisturbed.items())


def test_thumbnails_of_all_sizes(executor):
    loop = StepLoop(StepScheduler(8), executor, lambda _: None, lambda: 0.0, lambda _plan: True)
    for number in range(2):
        loop.submit(executor.prepare(make_request(number, inference_steps=4)))
    thumbnails = loop.run_iteration().thumbnails
    assert {(each.image.attempt_id, each.width_px, each.height_px) for each in thumbnails} == {
        ("r0", 16, 16),
        ("r1", 8, 12),
    }


def test_loras_are_rejected_by_the_name_of_a_model_that_takes_none(executor, monkeypatch):
    monkeypatch.setattr(executor.model, "lora_parts", {})
    with pytest.raises(InvalidField, match="has no parts that LoRAs can change"):
        executor.prepare(make_request(0, loras=(Lora("ink"),)))


def test_the_start_is_drawn_in_float32_by_models_in_bfloat16(tiny_z_image_folder):
    assert load(tiny_z_image_folder, dtype="bfloat16")[1].model.noise_dtype is torch.float32
