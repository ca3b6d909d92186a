"""Requests of flow models, and the images of diffusers' own pipelines."""

import json
import pathlib
import warnings

import numpy as np
import torch
from diffusers import DiffusionPipeline
from transformers import PreTrainedTokenizerFast

from noria.testing.requests import make_image_request
from pipelines import run_pipeline, set_scheduler

PROMPTS = ["a red circle", "a blue square", "red red red"]


def open_pipeline(folder):
    """Return diffusers' pipeline of a folder, in float32."""
    folder = pathlib.Path(folder)
    index = json.loads((folder / "model_index.json").read_text())
    match index["_class_name"]:
        case "QwenImageEditPlusPipeline" | "QwenImage21Pipeline" as name:
            import qwen_pipelines

            is_21 = name == "QwenImage21Pipeline"
            pipe = (qwen_pipelines.open_qwen_image_21 if is_21 else qwen_pipelines.open_edit_plus)(folder)
        case name:
            needs_torchvision = name == "Flux2Pipeline"  # its processor reads images; it gives texts to its tokenizer
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                others = {"tokenizer": None} if needs_torchvision else {}
                pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, **others)
            if needs_torchvision:
                pipe.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, subfolder="tokenizer")
    pipe.set_progress_bar_config(disable=True)
    return pipe


_PLAIN = str | int | float | None | torch.device | torch.dtype


def remember_prompts(pipe):
    """Let a pipeline, whose text encoders will not change, encode each prompt once. Return it."""
    encode, encoded = pipe.encode_prompt, {}

    def encode_once(*values, **named):
        given = [*values, *named.values()]
        flat = [each for value in given for each in (value if isinstance(value, list | tuple) else (value,))]
        if not all(isinstance(each, _PLAIN) for each in flat):
            return encode(*values, **named)
        key = repr((values, named))
        if key not in encoded:
            encoded[key] = encode(*values, **named)
        return encoded[key]

    pipe.encode_prompt = encode_once
    return pipe


def make_request(number, **fields):
    settings = {
        "prompt": PROMPTS[number % 3],
        "negative_prompt": None,
        "seed": 700 + number,
        "width": 32,
        "height": 24,
        "inference_steps": 4,
        "guidance_scale": 3.5,
        "scheduler": "flow-euler",
    }
    return make_image_request(f"r{number}", **settings | fields)


def generate_with_pipeline(pipe, request, folder=None, **options):
    """The image of diffusers' own loop, [height, width, 3]; the scheduler's settings are those of `folder`."""
    name = type(pipe).__name__
    set_scheduler(pipe, request, folder, **({"clip_sample": False} if name.startswith("PixArt") else {}))
    image = run_pipeline(pipe, request, **_options_of(name, pipe, request) | options)
    return _on_white(image) if image.shape[-1] == 4 else image


def _on_white(image):
    rgba = image / 255
    assert rgba[..., 3].min() < 0.9, "opacity would not matter"
    return (255 * (rgba[..., :3] * rgba[..., 3:] + 1 - rgba[..., 3:])).round().astype(np.uint8)


def _options_of(name, pipe, request):
    """The options of a pipeline with which it computes what a request asks for."""
    payload = request.payload
    if name.startswith("QwenImage"):
        return {"true_cfg_scale": payload.guidance_scale, "guidance_scale": None}
    if name.startswith(("Sana", "PixArt")):
        exact = {"clean_caption": False, "use_resolution_binning": False}
        return {"negative_prompt": payload.negative_prompt or "", **exact}
    if not name.startswith("Flux2"):
        return {}
    if payload.negative_prompt is None or name == "Flux2Pipeline":  # which takes no negative prompt
        return {"negative_prompt": None}
    with torch.inference_mode():
        embeds, *_ = pipe.encode_prompt(payload.negative_prompt)
    return {"negative_prompt": None, "negative_prompt_embeds": embeds}
