"""Checks whether servers generate the right images: compares sampled replies with diffusers' pipeline on the same
bodies alone.

The measure is the peak signal-to-noise ratio. Rounding, which differs with the batch size, leaves more than 50 dB;
another seed or prompt gives 10 to 20. `MIN_PSNR_DB` lies between, far from both; docs/benchmarks/scenarios.md has the
measurement.
"""

import base64
import io
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from noria.config import EngineConfig
from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.load.reply_sampler import sampled_replies
from noria_bench.measurement.runs import ImageCheck

# An image below it is a different image.
MIN_PSNR_DB = 30.0

Body = Mapping[str, Any]

# Pillow raises these for files that are not images, and for sizes that would exhaust the memory.
_UNREADABLE = (OSError, SyntaxError, Image.DecompressionBombError)
# Documents of another form raise these.
_MALFORMED = (msgspec.DecodeError, ValueError, KeyError, TypeError)


def check_replies(
    folder: pathlib.Path,
    body_of: Callable[[int], Body],
    generate: Callable[[Body], list[np.ndarray]],
    max_replies: int | None = None,
) -> tuple[ImageCheck, ...]:
    """Check the replies in `folder` (see `reply_sampler`), of many at most `max_replies` at even distances.

    `generate` gives the images of a body as uint8 [H, W, 3].
    """
    replies = list(sampled_replies(folder).items())
    stride = 1 if max_replies is None else max(1, math.ceil(len(replies) / max_replies))
    return tuple(check_reply(number, file, generate(body_of(number))) for number, file in replies[::stride])


def check_reply(number: int, file: pathlib.Path, expected: list[np.ndarray]) -> ImageCheck:
    """Compare the images of the reply in `file` with the `expected` ones."""
    try:
        images = [_pixels(content) for content in _files(file)]
    except (*_UNREADABLE, *_MALFORMED) as error:
        return ImageCheck(number, None, f"cannot be decoded: {error}")
    if len(images) != len(expected):
        return ImageCheck(number, None, f"has {len(images)} images instead of {len(expected)}")
    for actual, wanted in zip(images, expected, strict=True):
        if actual.shape != wanted.shape:
            return ImageCheck(number, None, f"is {_size_text(actual)} instead of {_size_text(wanted)} pixels")
    worst_db = min(psnr_db(actual, wanted) for actual, wanted in zip(images, expected, strict=True))
    if worst_db < MIN_PSNR_DB:
        return ImageCheck(
            number,
            worst_db,
            f"is another image: {worst_db:.1f} dB against its solo run, at least {MIN_PSNR_DB:.0f} expected",
        )
    return ImageCheck(number, worst_db if math.isfinite(worst_db) else None)


def psnr_db(left: np.ndarray, right: np.ndarray) -> float:
    """The peak signal-to-noise ratio of two uint8 images of one shape, in decibels; infinite for equal images."""
    error = float(np.mean((left.astype(float) - right.astype(float)) ** 2))
    return 10 * math.log10(255.0**2 / error) if error else math.inf


def _files(file: pathlib.Path) -> list[bytes]:
    if file.suffix == ".image":
        return [file.read_bytes()]
    return [base64.b64decode(image["b64_json"]) for image in msgspec.json.decode(file.read_bytes())["images"]]


def _pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def _size_text(image: np.ndarray) -> str:
    return f"{image.shape[1]} × {image.shape[0]}"


class SoloGenerator:
    """Generates the images of bodies alone, by diffusers' pipeline in this process with the servers' settings.

    Caches them.
    """

    def __init__(self, spec: DiffusionModelSpec, config: EngineConfig) -> None:
        """The pipeline is loaded with the first image.

        The UNet is not compiled, which would take longer than all else.
        """
        self._spec, self._config = spec, msgspec.structs.replace(config, compile=False)
        self._pipeline: Any = None
        self._images: dict[bytes, list[np.ndarray]] = {}

    def generate(self, body: Body) -> list[np.ndarray]:
        """The images, each generated alone from the body's seed + its index: uint8 [H, W, 3]."""
        key = msgspec.json.encode(body, order="deterministic")
        if key not in self._images:
            self._images[key] = [self._generate_one(body, body["seed"] + index) for index in range(body.get("n", 1))]
        return self._images[key]

    def _generate_one(self, body: Body, seed: int) -> np.ndarray:
        import torch

        from noria_bench.targets.pipeline import load_pipeline
        from noria_bench.targets.pipeline_generator import read_start_image

        if self._pipeline is None:
            self._pipeline, _ = load_pipeline(self._spec, self._config)
        spec, pipeline = self._spec, self._pipeline
        pipeline.use_scheduler(body.get("scheduler", spec.default_scheduler))
        pipeline.use_loras({lora["name"]: lora["weight"] for lora in body.get("loras", ())})
        settings: dict[str, Any] = {
            "prompt": body["prompt"],
            "num_inference_steps": body["inference_steps"],
            "guidance_scale": body.get("guidance_scale", spec.default_guidance),
            "generator": torch.Generator("cpu").manual_seed(seed),
        }
        start = [read_start_image(body["image"])] if "image" in body else None
        size = body.get("width", spec.default_width_px), body.get("height", spec.default_height_px)
        (image,) = pipeline.call(start, body.get("strength"), size, **settings)
        return np.asarray(image)
