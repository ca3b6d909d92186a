"""Models for inpainting, whose UNet takes a mask and what it keeps, compared with diffusers' pipelines and alone."""

import json
import shutil

import msgspec
import pytest
import torch
from diffusers import UNet2DConditionModel

import tiny_models
from generating import (
    LATENTS_TOLERANCE,
    NATURAL_TOLERANCE,
    PARITY_TOLERANCE,
    assert_latents_as_alone,
    difference,
    final_latents,
    latents_and_images,
    load,
    loop_of,
    relative,
    run,
)
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.warmup.calibration import run_warmup_request
from noria.errors import InvalidField, ModelError
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.protocol.diffusion import Lora
from noria.scheduling.costs import CostModel
from start_images import (
    SCHEDULERS,
    frame,
    generate_all,
    generate_with_pipeline,
    make_request,
    open_pipelines,
)


@pytest.fixture(scope="module")
def inpainting_folder(tmp_path_factory):
    folder, unet = tmp_path_factory.mktemp("tiny-inpainting"), tiny_models.INPAINTING_UNET
    return tiny_models.save_stable_diffusion(folder, unet=unet, pipeline="StableDiffusionInpaintPipeline")


@pytest.fixture(scope="module")
def inpainting_xl_folder(tmp_path_factory):
    folder, unet = tmp_path_factory.mktemp("tiny-xl-inpainting"), tiny_models.INPAINTING_UNET
    return tiny_models.save_stable_diffusion_xl(folder, unet=unet, pipeline="StableDiffusionXLInpaintPipeline")


@pytest.fixture(scope="module")
def served(request):
    spec, executor = load(request.getfixturevalue(request.param))
    return spec, executor, open_pipelines(spec)


# As in `test_start_images.py`.
FAST = ("pndm", "heun", "dpm++2m-sde")
CASES = [
    pytest.param(folder, name, marks=() if name in FAST else pytest.mark.slow)
    for folder in ("inpainting_folder", "inpainting_xl_folder")
    for name in (SCHEDULERS if folder == "inpainting_folder" else FAST[1:])
]


@pytest.mark.parametrize(("served", "name"), CASES, indirect=["served"])
def test_each_scheduler_gives_the_images_of_the_pipelines(served, name):
    _, executor, pipelines = served
    requests = [
        make_request(number, strength=strength, scheduler=name, has_mask=True)
        for number, strength in enumerate([0.3, 1.0, 0.9999])
    ]
    images = generate_all(executor, requests, [0, 1, 3])
    for request in requests:
        theirs = generate_with_pipeline(pipelines, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def mixed_requests():
    """Images of different masks, strengths, steps, schedulers and guidance; one has another size."""
    names = ["ddim", "euler-a", "dpm++2m-karras", "pndm", "heun", "unipc", "lcm", "kdpm2"]
    return [
        make_request(
            k,
            scheduler=names[k % 8],
            inference_steps=4 + k % 3,
            strength=[1.0, 0.5, 0.8, 0.99][k % 4],
            has_mask=True,
            n=1 + (k == 2),
            width=64 if k == 6 else 48,
        )
        for k in range(8)
    ]


@pytest.mark.parametrize("served", ["inpainting_folder", "inpainting_xl_folder"], indirect=True)
def test_each_image_of_a_mixed_batch_is_as_it_is_alone(served, monkeypatch):
    _, executor, pipelines = served
    requests, arrivals = mixed_requests(), [(5 * k) % 9 for k in range(8)]
    latents, images = latents_and_images(executor, requests, monkeypatch, arrivals, frame)
    for request in requests:
        alone = final_latents(executor, [request], monkeypatch, frames=frame)[request.request_id]
        assert relative(latents[request.request_id], alone) <= LATENTS_TOLERANCE, request
    theirs = generate_with_pipeline(pipelines, requests[1])
    assert difference(images["r1", 0], theirs) <= PARITY_TOLERANCE
    second = make_request(2, **fields_of(requests[2]) | {"seed": requests[2].payload.seed + 1, "n": 1})
    assert difference(generate_all(executor, [second])["r2", 0], images["r2", 1]) <= NATURAL_TOLERANCE


def fields_of(request):
    return msgspec.structs.asdict(request.payload)


def test_what_is_kept_is_encoded_once_and_the_start_image_only_where_it_is_used(inpainting_folder, monkeypatch):
    _, executor = load(inpainting_folder)
    encode, counts = executor.model.encode, []
    monkeypatch.setattr(executor.model, "encode", lambda pixels: counts.append(len(pixels)) or encode(pixels))
    strengths = [1.0, 0.8, 1.0, 0.5]
    requests = [make_request(k, has_mask=True, strength=each, n=2) for k, each in enumerate(strengths)]
    loop, _ = loop_of(executor)
    for request in requests:
        loop.submit(executor.prepare(request, frame(request)))
    starts = set(executor._preparer._start_frames._alive)
    assert {each.waiting_bytes for each in starts} == {48 * 32 * 4}
    loop.run_iteration()
    assert counts == [2, 4]
    assert {each.waiting_bytes for each in starts} == {0}
    assert len(executor._masked_images._inputs) == 8
    assert not executor._masked_images._images
    run(loop)
    assert not executor._masked_images._inputs


def test_a_vae_without_a_distribution_draws_nothing(bundled_folder, tmp_path):
    folder = shutil.copytree(bundled_folder, tmp_path / "model")
    config = json.loads((folder / "unet" / "config.json").read_text())
    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_config(config | tiny_models.INPAINTING_UNET)
    for file in (folder / "unet").iterdir():
        file.unlink()
    unet.save_pretrained(folder / "unet")
    spec, executor = load(folder)
    assert (spec.pipeline, spec.needs_mask) == ("StableDiffusionPipeline", True)  # the UNet says it, whatever the class
    side_px = spec.default_width_px
    requests = [
        make_request(k, width=side_px, height=side_px, strength=strength, has_mask=True, scheduler="ddim")
        for k, strength in enumerate([0.6, 1.0])
    ]
    ours, pipelines = generate_all(executor, requests), open_pipelines(spec)
    for request in requests:
        theirs = generate_with_pipeline(pipelines, request)
        assert difference(ours[request.request_id, 0], theirs) <= PARITY_TOLERANCE


def test_loras_share_a_batch_with_images_that_have_none(inpainting_folder, tmp_path, monkeypatch):
    _, executor = load(inpainting_folder, loras=(str(tmp_path),))
    file = save_diffusers_lora(tmp_path / "ink.safetensors", executor.model.lora_parts, rank=2, seed=2)
    loras = (Lora("ink", 0.7, digest_of(file)),)
    requests = [make_request(3 * k, strength=0.8, has_mask=True, loras=loras[:k]) for k in range(2)]
    requests += [make_request(6, strength=0.8, has_mask=True, loras=loras, seed=503)]
    together = assert_latents_as_alone(executor, requests, monkeypatch, frames=frame)
    plain = [make_request(int(each.request_id[1:]), **fields_of(each) | {"loras": ()}) for each in requests]
    without = final_latents(load(inpainting_folder)[1], plain, monkeypatch, frames=frame)
    for request in requests:
        change = relative(together[request.request_id], without[request.request_id])
        assert change > 1e-3 if request.payload.loras else change <= LATENTS_TOLERANCE


def test_a_lora_whose_first_layer_takes_the_latents_alone_is_rejected(inpainting_folder, tiny_folder, tmp_path):
    _, base = load(tiny_folder)
    file = save_diffusers_lora(tmp_path / "ink.safetensors", {"unet": base.model.unet}, "conv_in")
    _, executor = load(inpainting_folder, loras=(str(tmp_path),))
    request = make_request(1, strength=0.8, has_mask=True, loras=(Lora("ink", 1.0, digest_of(file)),))
    with pytest.raises(InvalidField, match="conv_in"):
        executor.prepare(request, frame(request))


@pytest.mark.parametrize("served", ["inpainting_folder", "inpainting_xl_folder"], indirect=True)
def test_its_spec_has_the_defaults_of_the_pipelines_and_only_schedulers_that_begin_with_an_image(served):
    spec, _, _ = served
    is_xl = spec.family == "stable-diffusion-xl"
    assert (spec.needs_mask, spec.default_strength, spec.default_guidance) == (True, 0.9999 if is_xl else 1.0, 7.5)
    assert list(spec.schedulers) == SCHEDULERS


def test_it_is_warmed_up_with_a_start_image_and_a_mask(inpainting_folder):
    spec, executor = load(inpainting_folder)
    costs = CostModel(4)
    run_warmup_request(executor, spec, EngineConfig(dtype="float32", slots=8, threads=1), costs, 2, steps=2)
    for curves, counts in ((costs.steps, {4}), (costs.image_encodes, {1}), (costs.decodes, {2})):
        assert [set(curve.points) for curve in curves.values()] == [counts]


@pytest.mark.parametrize("changes", [{"strength": None}, {"strength": 0.8}])
def test_a_request_without_a_mask_is_rejected(inpainting_folder, changes):
    _, executor = load(inpainting_folder)
    request = make_request(1, **changes)
    with pytest.raises(InvalidField, match="for inpainting, and needs a start image and a mask") as rejected:
        executor.prepare(request, frame(request))
    assert rejected.value.field == "mask"


@pytest.mark.parametrize("channels", [{"in_channels": 5}, {"in_channels": 8}, {"in_channels": 9, "out_channels": 9}])
def test_other_inputs_and_outputs_are_rejected(tmp_path, channels):
    folder = tiny_models.save_stable_diffusion(tmp_path, unet=channels, pipeline="StableDiffusionInpaintPipeline")
    with pytest.raises(ModelError, match="text to image, with in_channels 4, and inpainting, with 9"):
        open_model(str(folder))
