"""Images of diffusers' own pipelines, with the settings of requests."""

import warnings

import diffusers
import numpy as np
import torch

from noria.images import scheduler_names


def set_scheduler(pipe, request, folder=None, **overrides):
    """Give a pipeline the scheduler that a request names, with the settings of its own, or of that of `folder`."""
    choice = scheduler_names.find(request.payload.scheduler)
    folder = folder or pipe.config._name_or_path
    own_config = diffusers.FlowMatchEulerDiscreteScheduler.load_config(folder, subfolder="scheduler")
    if "use_flow_sigmas" in choice.overrides and "shift" in own_config:
        overrides["flow_shift"] = own_config["shift"]
    elif "flow_shift" in own_config:
        overrides["shift"] = own_config["flow_shift"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' deprecations of its own configuration keys
        scheduler = getattr(diffusers, choice.diffusers_class)
        pipe.scheduler = scheduler.from_config(own_config, **{**overrides, **choice.overrides})


def open_pipeline(pipeline_class, folder, **parts):
    """A pipeline of a folder, in float32, with some parts of others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' own schedulers use deprecated features of numpy
        pipe = pipeline_class.from_pretrained(folder, dtype=torch.float32, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_pipeline(pipe, request, **options):
    """The image [height, width, 3], or the latents of `output_type` "latent".

    `options` go before the settings of the request; what is None among them is left out.
    """
    payload = request.payload
    settings = {
        "prompt": payload.prompt,
        "negative_prompt": payload.negative_prompt,
        "width": payload.width,
        "height": payload.height,
        "num_inference_steps": payload.inference_steps,
        "guidance_scale": payload.guidance_scale,
        "generator": torch.Generator("cpu").manual_seed(payload.seed),
        "output_type": "np",
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        images = pipe(**{name: value for name, value in settings.items() if value is not None}).images
    return images if settings["output_type"] == "latent" else (images[0] * 255).round().astype(np.uint8)
