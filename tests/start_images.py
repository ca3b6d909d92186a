"""Requests with start images and masks, and the images of diffusers' pipelines for them."""

import functools

import diffusers
import numpy as np
import PIL.Image

from generating import generate
from noria.images import scheduler_names
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler

SCHEDULERS = [each.name for each in scheduler_names.choices_of_family("diffusion") if each.takes_start_image]
PIPELINES = {
    "stable-diffusion": (diffusers.StableDiffusionImg2ImgPipeline, diffusers.StableDiffusionInpaintPipeline),
    "stable-diffusion-xl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
}


@functools.cache
def open_pipelines(spec):
    """diffusers' pipelines for a start image alone and for one with a mask."""
    return [open_pipeline(each, spec.folder) for each in PIPELINES[spec.family]]


def start_pixels(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def start_mask(width, height, number=0):
    """255 where it is repainted: a band whose edges are in the middle of latents, and single pixels."""
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 + 1 :, 3 : width - 5] = 255
    mask[:8:2, :8:2] = 255
    return np.roll(mask, (number % 5, 3 * (number % 7)), (0, 1))


def make_request(number, *, width=48, height=32, **fields):
    settings = {
        "prompt": ["a red circle", "a blue square above a green star", "a large ring"][number % 3],
        "seed": 500 + number,
        "inference_steps": 5,
        "guidance_scale": [1.0, 5.0][number % 2],
    }
    return make_image_request(f"r{number}", width=width, height=height, **settings | fields)


def mask_of(request):
    """The mask of a request, which differs by its number."""
    return start_mask(request.payload.width, request.payload.height, int(request.request_id[1:]))


def frame(request):
    """The data of a request; None if it has no start image."""
    payload = request.payload
    if payload.strength is None:
        return None
    pixels = start_pixels(payload.width, payload.height)
    return memoryview(pixels.tobytes() + (mask_of(request).tobytes() if payload.has_mask else b""))


generate_all = functools.partial(generate, frames=frame)


def generate_with_pipeline(pipelines, request):
    payload, pipe = request.payload, pipelines[request.payload.has_mask]
    # The pipeline of XL leaves steps_offset as the folder has it.
    set_scheduler(pipe, request, clip_sample=False, **({} if "XL" in type(pipe).__name__ else {"steps_offset": 1}))
    options = {"image": PIL.Image.fromarray(start_pixels(payload.width, payload.height)), "strength": payload.strength}
    if payload.has_mask:
        return run_pipeline(pipe, request, mask_image=PIL.Image.fromarray(mask_of(request)), **options)
    return run_pipeline(pipe, request, width=None, height=None, **options)
