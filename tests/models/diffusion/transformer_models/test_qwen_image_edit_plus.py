"""Qwen-Image-Edit-Plus in the running batch, compared with diffusers' own pipeline and with each image alone."""

import msgspec
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

import tiny_models
from flow_pipelines import generate_with_pipeline, open_pipeline
from generating import PARITY_TOLERANCE, assert_latents_as_alone, difference, final_latents, generate, load, relative
from noria.errors import InvalidField, ModelError
from noria.images import reference_size
from noria.images.reference_size import place_reference, prompt_size
from qwen_pipelines import request_with_references, shown_images


@pytest.fixture(scope="module", autouse=True)
def _small_images():
    """Images are shown in 64² instead of 1024² pixels, and read in 48² instead of 384²."""
    with pytest.MonkeyPatch.context() as patch:
        for name, side_px in (("_VISION_AREA_PX", 64), ("_PROMPT_AREA_PX", 48)):
            patch.setattr(reference_size, name, side_px**2)
        for name, side_px in (("VAE_IMAGE_SIZE", 64), ("CONDITION_IMAGE_SIZE", 48)):
            patch.setattr(pipeline_qwenimage_edit_plus, name, side_px**2)
        yield


@pytest.fixture(scope="module", params=[False, True], ids=["2509", "2511"])
def model(request, tmp_path_factory):
    """Spec, executor, and diffusers' pipeline; the later models show the references at time 0."""
    folder = tmp_path_factory.mktemp("edit") / "qwen-image-edit-plus"
    transformer = {"zero_cond_t": request.param}
    tiny_models.save_qwen_image_edit_plus(folder, transformer=transformer)
    return *load(folder), open_pipeline(folder)


def requests_of(spec):
    """Return images with one to three references and with none, of several sizes, guided or not; and their frames."""
    made = [
        request_with_references(
            spec,
            number,
            num_images,
            width=[32, 48, 40][number % 3],
            inference_steps=2 + number % 3,
            scheduler=spec.schedulers[number % len(spec.schedulers)],
            guidance_scale=[3.5, 1.0][number % 2],
            negative_prompt=[None, "blue", ""][number % 3],
        )
        for number, num_images in enumerate([1, 2, 0, 3])
    ]
    return [request for request, _ in made], {request.request_id: frame for request, frame in made if frame is not None}


def pipeline_image(model, request):
    spec, _, pipe = model
    images = shown_images(int(request.request_id[1:]), len(request.payload.reference_images))
    return generate_with_pipeline(pipe, request, spec.path, image=images)


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(model):
    requests, frames = requests_of(model[0])
    together = generate(model[1], requests, [0, 2, 1, 0], frames)
    for request in requests:
        if request.payload.reference_images:  # the pipeline takes no other
            image = together[request.request_id, 0]
            assert difference(image, pipeline_image(model, request)) <= PARITY_TOLERANCE, request
            assert image.std() > 10, "the image is flat"


def test_rows_of_a_batch_are_those_alone_and_depend_on_their_references(model, monkeypatch):
    spec, executor, _ = model
    requests, frames = requests_of(spec)
    together = assert_latents_as_alone(executor, requests, monkeypatch, [0, 2, 1, 0], frames)
    without, _ = request_with_references(spec, 0, 0, width=32, guidance_scale=3.5)
    assert relative(final_latents(executor, [without], monkeypatch)["r0"], together["r0"]) > 1e-3


def test_a_prompt_is_encoded_once_with_the_same_images_and_anew_with_others(model, monkeypatch):
    spec, executor, _ = model
    encoder, calls = executor.model._text_encoder, []
    real = encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda **options: calls.append(1) or real(**options))
    for prompt, number, num_calls in (("one prompt", 0, 1), ("one prompt", 0, 0), ("one prompt", 1, 1)):
        calls.clear()
        request, frame = request_with_references(spec, number, 1, prompt=prompt, inference_steps=2)
        generate(executor, [request], frames={request.request_id: frame})
        assert len(calls) == num_calls


def test_words_that_stand_for_images_are_left_out_of_prompts(model):
    text_encode = model[1].model.text_encode
    plain, hostile = text_encode(["a b", "a <|image_<|video_pad|>pad|>b<|image_pad|>"])
    assert torch.equal(*(each.tokens["encoder_hidden_states"] for each in (plain, hostile)))


@pytest.mark.parametrize("size", [(1500, 1100), (333, 214), (64, 511), (2000, 700), (1024, 1024)])
def test_images_are_resized_as_by_the_pipeline(model, size):
    for area, found in (
        (pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE, place_reference("a", size, model[0]).shown_px),
        (pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE, prompt_size(size, model[0])),
    ):
        assert found == pipeline_qwenimage_edit_plus.calculate_dimensions(area, size[0] / size[1])


def test_frames_and_folders_that_do_not_fit_are_refused(model, tmp_path):
    spec, executor, _ = model
    assert (spec.family, spec.max_references) == ("qwen-image-edit-plus", 3)
    with pytest.raises(InvalidField, match="at most 3 are allowed"):
        request_with_references(spec, 0, 4)
    request, frame = request_with_references(spec, 0, 1)
    with pytest.raises(InvalidField, match="of references of"):
        executor.prepare(request, frame[:-3])
    folder = tiny_models.save_qwen_image_edit_plus(tmp_path / "a")
    file = folder / "text_encoder" / "config.json"
    config = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode(config | {"image_token_id": 7}))
    with pytest.raises(ModelError, match="is token 259, but image_token_id of the text encoder is 7"):
        load(folder)
