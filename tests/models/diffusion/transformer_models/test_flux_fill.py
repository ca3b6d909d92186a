"""FLUX.1 Fill, whose transformer takes a mask and what it keeps, compared with diffusers' pipeline and alone."""

import msgspec
import PIL.Image
import pytest

import tiny_models
from flow_pipelines import generate_with_pipeline, open_pipeline
from flow_pipelines import make_request as make_flow_request
from generating import PARITY_TOLERANCE, assert_latents_as_alone, difference, load
from noria.errors import InvalidField, ModelError
from noria.models.catalog import open_model
from start_images import frame, generate_all, mask_of, start_pixels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fill") / "fill"
    return tiny_models.save_flux(folder, transformer=tiny_models.FILL_TRANSFORMER, pipeline="FluxFillPipeline")


@pytest.fixture(scope="module")
def fill(folder):
    return load(folder)


def make_request(number, **fields):
    return make_flow_request(number, **{"width": 48, "height": 32, "strength": 1.0, "has_mask": True} | fields)


def requests_of_every_kind():
    """Masks, strengths, steps and guidance mixed, and sizes: the two have equally many tokens, and share calls."""
    return [
        make_request(
            k,
            strength=[1.0, 0.4, 0.8][k % 3],
            inference_steps=3 + k % 2,
            guidance_scale=[30.0, 3.5][k % 2],
            **({"width": 32, "height": 48} if k % 4 == 1 else {}),
        )
        for k in range(4)
    ]


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(fill, folder):
    _, executor = fill
    pipe, requests = open_pipeline(folder), requests_of_every_kind()
    images = generate_all(executor, requests, [0, 2, 1, 0])
    for request in requests:
        payload = request.payload
        theirs = generate_with_pipeline(
            pipe,
            request,
            image=PIL.Image.fromarray(start_pixels(payload.width, payload.height)),
            mask_image=PIL.Image.fromarray(mask_of(request)),
            strength=payload.strength,
        )
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE, request


def test_each_image_of_a_mixed_batch_is_as_it_is_alone(fill, monkeypatch):
    requests = requests_of_every_kind()
    frames = {each.request_id: frame(each) for each in requests}
    assert_latents_as_alone(fill[1], requests, monkeypatch, [0, 2, 1, 0], frames)


def test_its_spec_has_the_defaults_of_the_pipeline(fill):
    spec, executor = fill
    assert (spec.pipeline, spec.needs_mask, spec.default_strength) == ("FluxFillPipeline", True, 1.0)
    assert (spec.default_steps, spec.default_guidance) == (50, 30.0)
    request = make_request(1)
    plain = msgspec.structs.replace(request, payload=msgspec.structs.replace(request.payload, has_mask=False))
    with pytest.raises(InvalidField, match="for inpainting, and needs a start image and a mask"):
        executor.prepare(plain, frame(plain))


@pytest.mark.parametrize("in_channels", [2 * 16, 2 * 16 + 4])
def test_depth_and_other_inputs_are_rejected(tmp_path, in_channels):
    tiny_models.save_flux(tmp_path, transformer=tiny_models.FILL_TRANSFORMER | {"in_channels": in_channels})
    with pytest.raises(ModelError, match=f"in_channels is {in_channels}; supported is 16, .* of Fill 96, with mask"):
        open_model(str(tmp_path))
