"""FLUX.1 Kontext and FLUX.2 with reference images, compared with diffusers' own pipelines and with each alone."""

import gc
import io
import itertools

import msgspec
import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import Flux2KleinInpaintPipeline, FluxKontextInpaintPipeline
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

import tiny_models
from flow_pipelines import generate_with_pipeline, make_request, open_pipeline, remember_prompts
from generating import (
    PARITY_TOLERANCE,
    assert_as_alone,
    assert_latents_as_alone,
    difference,
    final_latents,
    generate,
    load,
    moved_image,
    relative,
)
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.request import reference_class_px
from noria.engine.loop import StepLoop
from noria.errors import InvalidField
from noria.images.reference_size import place_reference
from noria.images.start_image import ImageFiles, RequestImages
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.conditioning import collate
from noria.protocol.diffusion import Lora, Reference
from noria.scheduling.step.scheduler import StepScheduler

# Sizes of images that both pipelines accept, with 9, 12, 10, 8 and 16 patches a side.
SHAPES = [(72, 72), (96, 64), (80, 72), (64, 64), (64, 128)]


@pytest.fixture(scope="module", params=["kontext", "flux-2-klein", "flux-2-dev"])
def model(request, folder_of, tmp_path_factory):
    """Spec, executor, and diffusers' pipeline."""
    if request.param == "kontext":
        folder = tiny_models.save_flux(tmp_path_factory.mktemp("kontext") / "m", pipeline="FluxKontextPipeline")
    else:
        folder = folder_of(request.param)
    return *load(folder), remember_prompts(open_pipeline(folder))


def pixels_of(request):
    return [
        np.random.default_rng(request.payload.seed + k).integers(0, 256, (each.height, each.width, 3), np.uint8)
        for k, each in enumerate(request.payload.reference_images)
    ]


def frames(requests):
    return {
        each.request_id: memoryview(b"".join(pixels.tobytes() for pixels in pixels_of(each)))
        for each in requests
        if each.payload.reference_images
    }


def pipeline_image(model, request):
    spec, _, pipe = model
    images = [PIL.Image.fromarray(pixels) for pixels in pixels_of(request)]
    if spec.family == "flux":
        area = request.payload.width * request.payload.height
        options = {"image": images[0] if images else None, "_auto_resize": False, "max_area": area}
    else:
        options = {"image": images or None}
        with torch.inference_mode():
            if request.payload.negative_prompt is not None and spec.family == "flux-2-klein":
                options["negative_prompt_embeds"] = pipe.encode_prompt(request.payload.negative_prompt)[0]
        options["negative_prompt"] = None
    return generate_with_pipeline(pipe, request, **options)


def of_shapes(*shapes):
    return tuple(Reference(width, height) for width, height in shapes)


def mixed_requests(spec):
    """Images with one reference, with several (klein) and with none, of several sizes and of all schedulers."""
    several = [SHAPES[2:4], SHAPES[:3]] if spec.max_references > 1 else [SHAPES[3:4], SHAPES[4:]]
    return [
        make_request(
            k,
            reference_images=of_shapes(*shapes),
            scheduler=spec.schedulers[k % len(spec.schedulers)],
            inference_steps=2 + k % 3,
            guidance_scale=[3.5, 1.0, 7.0][k % 3],
            width=[32, 48, 24][k % 3],
            negative_prompt=[None, "blue"][k % 2],
        )
        for k, shapes in enumerate([(), SHAPES[:1], several[0], several[1], SHAPES[1:2], ()])
    ]


def test_late_joiners_of_a_mixed_batch_give_the_images_of_the_pipeline(model):
    spec, executor, _ = model
    requests = mixed_requests(spec)
    assert {request.payload.scheduler for request in requests} == {*spec.schedulers}
    together = generate(executor, requests, [(5 * k) % 3 for k in range(6)], frames(requests))
    for request in requests:
        image = together[request.request_id, 0]
        assert difference(image, pipeline_image(model, request)) <= PARITY_TOLERANCE, request
        assert image.std() > 10, "the image is flat"


def test_rows_of_a_batch_are_those_alone_and_depend_on_their_references(model, monkeypatch):
    spec, executor, _ = model
    requests = mixed_requests(spec)[:4]
    together = assert_latents_as_alone(executor, requests, monkeypatch, [0, 2, 1, 0], frames(requests))
    other = msgspec.structs.replace(requests[1].payload, reference_images=of_shapes(SHAPES[1]))
    changed = msgspec.structs.replace(requests[1], payload=other)
    others = final_latents(executor, [changed], monkeypatch, frames=frames([changed]))
    assert relative(together["r1"], others["r1"]) > 1e-3


def test_rows_of_one_call_with_different_references_and_none_equal_the_rows_alone(model):
    denoiser = model[1].model
    generator, times = torch.Generator().manual_seed(0), torch.tensor([999.0, 640.0, 333.0, 3.0])
    scales = torch.tensor([0.0, 3.5, 9.0, 2.0]) if denoiser.guidance.embedded else None
    images = [torch.randint(256, (height, width, 3), generator=generator).byte() for width, height in SHAPES[:3]]
    with torch.inference_mode():
        references = [denoiser.encode_references(each) for each in (images[:1], images[:2], images[2:])] + [None]
        texts = denoiser.text_encode(["a", "b", "c", "d"])
        latents = [torch.randn(denoiser.latent_shape(*size), generator=generator) for size in SHAPES[:4]]
        together = denoiser.predict(latents, times, collate(texts), scales, references)
        for k in range(4):
            row = slice(k, k + 1)
            of_row = None if scales is None else scales[row]
            alone = denoiser.predict(latents[k][None], times[row], collate(texts[row]), of_row, references[row])[0]
            assert together[k].shape == alone.shape
            assert (together[k] - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_requests_with_nearly_as_many_tokens_share_calls(model, monkeypatch):
    _, executor, _ = model
    shared, real = [], executor.model.predict

    def predict(latents_R, *rest, references=()):
        shared.append([None if each is None else each.sizes for each in references])
        return real(latents_R, *rest, references=references)

    monkeypatch.setattr(executor.model, "predict", predict)
    requests = [
        make_request(0, width=72, height=72, reference_images=of_shapes((72, 72)), guidance_scale=1.0),
        make_request(1, width=72, height=72, reference_images=of_shapes((64, 80)), guidance_scale=1.0),
        make_request(2, width=104, height=104, guidance_scale=1.0),
    ]
    assert len({executor.prepare(each, frames([each]).get(each.request_id)).call_size for each in requests}) == 1
    generate(executor, requests, frames=frames(requests))
    scale = executor.model.latent_scale
    sizes = [((72 // scale, 72 // scale),), ((80 // scale, 64 // scale),), None]
    assert shared == [sizes] * 4


@pytest.mark.parametrize("num_references", [1, 2])
def test_with_a_start_image_and_a_mask_it_is_the_pipeline_for_masks(model, num_references, monkeypatch):
    """The pipeline shows the image itself, and one more to FLUX.2 klein, or another one in its place to Kontext."""
    spec, executor, pipe = model
    if spec.family == "flux-2-dev":
        pytest.skip("diffusers has no such pipeline of dev")
    width, height = 72, 64
    image, other = np.random.default_rng(1).integers(0, 256, (2, height, width, 3), np.uint8)
    mask = np.zeros((height, width), np.uint8)
    mask[8:24, 16:40] = 255
    shown = [image, other][:num_references]
    options = {"image": PIL.Image.fromarray(image), "mask_image": PIL.Image.fromarray(mask), "strength": 0.7}
    if num_references == 2:
        options["image_reference"] = PIL.Image.fromarray(other)
    if spec.family == "flux":
        shown, inpaint = shown[-1:], FluxKontextInpaintPipeline
        options |= {"_auto_resize": False, "max_area": width * height}
    else:
        inpaint = Flux2KleinInpaintPipeline
    start_pipe = inpaint(**pipe.components)
    start_pipe.set_progress_bar_config(disable=True)
    references = of_shapes(*[(width, height)] * len(shown))
    request = make_request(0, width=width, height=height, strength=0.7, has_mask=True, reference_images=references)
    frame = memoryview(b"".join(each.tobytes() for each in (image, mask, *shown)))
    ours = generate(executor, [request], frames={"r0": frame})["r0", 0]
    theirs = generate_with_pipeline(start_pipe, request, spec.path, **options)
    assert difference(ours, theirs) <= PARITY_TOLERANCE


def test_with_padded_rows_they_are_equal_in_every_bit(model):
    padded = DiffusionExecutor(model[1].model, msgspec.structs.replace(model[1].config, buckets=(4,)))
    requests = [
        make_request(k, reference_images=of_shapes(*shapes), inference_steps=2)
        for k, shapes in enumerate([[(72, 72)], [(64, 96)], []])
    ]
    assert_as_alone(padded, requests, [0, 0, 1], frames(requests), tolerance=0)


def test_adapters_are_those_of_their_rows(model, tmp_path):
    bare = model[1].model
    save_diffusers_lora(tmp_path / "all.safetensors", {"transformer": bare.lora_parts["transformer"]}, rank=2)
    adapted = DiffusionExecutor(bare, EngineConfig(dtype="float32", slots=8, threads=1, loras=(str(tmp_path),)))
    lora = Lora("all", 0.7, digest_of(tmp_path / "all.safetensors"))
    requests = [
        make_request(k, inference_steps=2, reference_images=of_shapes(SHAPES[k // 2]), loras=(lora,) * (k % 2))
        for k in range(4)
    ]
    together = assert_as_alone(adapted, requests, frames=frames(requests))
    without = msgspec.structs.replace(requests[1], payload=msgspec.structs.replace(requests[1].payload, loras=()))
    assert difference(together["r1", 0], generate(adapted, [without], frames=frames([without]))["r1", 0]) > 5


def test_images_of_a_request_share_its_references_until_it_ends(model):
    _, executor, _ = model
    request = make_request(0, n=3, reference_images=of_shapes((72, 72)))
    loop = StepLoop(StepScheduler(8), executor, lambda _: None, lambda: 0.0)
    loop.submit(executor.prepare(request, frames([request])["r0"]))
    (references,) = executor._preparer._start_frames._alive
    assert references.waiting_bytes == 72 * 72 * 3
    loop.run_iteration()
    assert references.waiting_bytes == 0
    assert len({id(each.references) for each, *_ in executor._guided.values()}) == 1
    loop.cancel("r0")
    del references
    gc.collect()
    assert not executor._preparer._start_frames._alive


def test_running_out_of_memory_while_encoding_changes_no_image(model, monkeypatch):
    _, executor, _ = model
    requests = [make_request(k, reference_images=of_shapes((72, 72))) for k in range(3)]
    undisturbed, encode, calls = generate(executor, requests, frames=frames(requests)), executor.model.encode, []

    def limited_encode(pixels_BHW3):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return encode(pixels_BHW3)

    monkeypatch.setattr(executor.model, "encode", limited_encode)
    constrained = generate(executor, requests, frames=frames(requests))
    assert all(difference(constrained[image], pixels) <= 1 for image, pixels in undisturbed.items())
    assert len(calls) == 4, "what was encoded is kept"


def shown_by_the_pipeline(model, image, monkeypatch):
    """The tensor [3, height, width] that diffusers' pipeline encodes of an image."""
    spec, _, pipe = model
    found = []

    class StopError(Exception):
        pass

    def stop(images, *_args, **named):
        found.append(named["images"][0] if "images" in named else images)
        raise StopError

    monkeypatch.setattr(pipe, "prepare_latents" if spec.family == "flux" else "prepare_image_latents", stop)
    with pytest.raises(StopError):
        pipe(image=image, prompt="a", width=32, height=24, num_inference_steps=1)
    shown = found[0][0]
    return shown[0] if shown.ndim == 4 else shown


def test_images_are_resized_as_by_the_pipelines(model, monkeypatch):
    for size in [(1500, 1100), (333, 214), (64, 511), (2000, 700), (100, 101)]:
        image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
        images = RequestImages(ImageFiles(references=(_png(image),)))
        (width, height) = place_reference("a", size, model[0]).shown_px
        ours = np.frombuffer(images.pixels(8, 8, model[0]), np.uint8).reshape(height, width, 3)
        theirs = shown_by_the_pipeline(model, image, monkeypatch)
        assert np.array_equal(ours, ((theirs * 0.5 + 0.5) * 255).round().byte().permute(1, 2, 0).numpy())


def _png(image):
    file = io.BytesIO()
    image.save(file, format="png", compress_level=0)
    return file.getvalue()


def test_sizes_that_kontext_was_trained_at_have_one_class():
    classes = {reference_class_px(width * height) for width, height in PREFERRED_KONTEXT_RESOLUTIONS}
    assert len(classes) == 1
    assert reference_class_px(0) == 0
    for num_pixels in itertools.chain(range(64 * 64, 10**6, 9973), (4 * 1024**2,)):
        assert num_pixels <= reference_class_px(num_pixels) <= 1.0906 * num_pixels + 1


def test_models_that_take_none_reject_them(model, tmp_path):
    spec, executor, _ = model
    assert (spec.max_references, spec.reference_size) == ((1, "preferred") if spec.family == "flux" else (4, "area"))
    request = make_request(0, reference_images=of_shapes((72, 72)), model=spec.name)
    with pytest.raises(InvalidField, match="has 3 bytes, and not the 15552 of references of 5184 pixels"):
        executor.prepare(request, memoryview(b"abc"))
    _, other = load(tiny_models.save_stable_diffusion_3(tmp_path / "sd3"))
    with pytest.raises(InvalidField, match="takes no reference images"):
        other.prepare(request, frames([request])["r0"])


def test_an_image_that_moves_is_shown_its_references_again(model):
    spec, executor, _ = model
    request = make_request(1, scheduler=spec.schedulers[0], inference_steps=4, reference_images=of_shapes(*SHAPES[:1]))
    undisturbed = generate(executor, [request], frames=frames([request]))[request.request_id, 0]
    moved = moved_image(executor, request, 2, frames([request])[request.request_id])
    assert difference(moved, undisturbed) <= 1
