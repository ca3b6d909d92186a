"""Whether servers draw what they are asked for: a sample of a run's replies beside what diffusers' pipeline draws of the same bodies alone.

How alike two images are is their peak signal-to-noise ratio. Rounding, which differs with a batch's size, leaves more than 50 dB;
another seed or another prompt gives 10 to 20. `PSNR_DB` lies between, far from both; docs/benchmarks/scenarios.md has the measurement.
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

from noria.bench.keeping import kept
from noria.bench.runs import Sample
from noria.config import EngineConfig
from noria.spec import ModelSpec

PSNR_DB = 30.0  # an image below it is another image

Body = Mapping[str, Any]

# What Pillow raises for files that are no images, and for sizes that would fill the memory; what a document of another form gives.
_UNREADABLE = (OSError, SyntaxError, Image.DecompressionBombError)
_MALFORMED = (msgspec.DecodeError, ValueError, KeyError, TypeError)


def check(
    folder: pathlib.Path, body_of: Callable[[int], Body], draw: Callable[[Body], list[np.ndarray]]
) -> tuple[Sample, ...]:
    """Judge every reply in `folder` (see `keeping`); `draw` gives the images of a body as uint8 [H, W, 3]."""
    return tuple(judge(number, file, draw(body_of(number))) for number, file in kept(folder).items())


def judge(number: int, file: pathlib.Path, expected: list[np.ndarray]) -> Sample:
    """Compare the images of the reply in `file` with what they should be."""
    try:
        images = [_pixels(content) for content in _files(file)]
    except (*_UNREADABLE, *_MALFORMED) as error:
        return Sample(number, None, f"cannot be decoded: {error}")
    if len(images) != len(expected):
        return Sample(number, None, f"has {len(images)} images instead of {len(expected)}")
    for got, wanted in zip(images, expected, strict=True):
        if got.shape != wanted.shape:
            return Sample(number, None, f"is {_size(got)} instead of {_size(wanted)} pixels")
    worst = min(psnr_db(got, wanted) for got, wanted in zip(images, expected, strict=True))
    if worst < PSNR_DB:
        return Sample(
            number, worst, f"is another image: {worst:.1f} dB beside its solo run, where {PSNR_DB:.0f} is the least"
        )
    return Sample(number, worst if math.isfinite(worst) else None)


def psnr_db(one: np.ndarray, other: np.ndarray) -> float:
    """The peak signal-to-noise ratio of two uint8 images of one shape, in decibels; endless where they are the same."""
    error = float(np.mean((one.astype(float) - other.astype(float)) ** 2))
    return 10 * math.log10(255.0**2 / error) if error else math.inf


def _files(file: pathlib.Path) -> list[bytes]:
    if file.suffix == ".image":
        return [file.read_bytes()]
    return [base64.b64decode(image["b64_json"]) for image in msgspec.json.decode(file.read_bytes())["images"]]


def _pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def _size(image: np.ndarray) -> str:
    return f"{image.shape[1]} × {image.shape[0]}"


class SoloRuns:
    """What diffusers' pipeline draws of bodies alone, in this process, set as the servers are; each is drawn once."""

    def __init__(self, spec: ModelSpec, config: EngineConfig) -> None:
        """Loads nothing before the first image is asked for; the UNet is not compiled, which would take longer than all else."""
        self._spec, self._config = spec, msgspec.structs.replace(config, compile=False)
        self._pipeline: Any = None
        self._drawn: dict[bytes, list[np.ndarray]] = {}

    def draw(self, body: Body) -> list[np.ndarray]:
        """Its images, each drawn alone from the body's seed + its place: uint8 [H, W, 3]."""
        key = msgspec.json.encode(body, order="deterministic")
        if key not in self._drawn:
            self._drawn[key] = [self._image(body, body["seed"] + place) for place in range(body.get("n", 1))]
        return self._drawn[key]

    def _image(self, body: Body, seed: int) -> np.ndarray:
        import torch

        if self._pipeline is None:
            self._pipeline = _loaded(self._spec, self._config)
        spec, pipeline = self._spec, self._pipeline
        pipeline.use_scheduler(body.get("scheduler", spec.default_scheduler))
        with torch.inference_mode():
            (picture,) = pipeline.pipe(
                body["prompt"],
                width=body.get("width", spec.default_width_px),
                height=body.get("height", spec.default_height_px),
                num_inference_steps=body["inference_steps"],
                guidance_scale=body.get("guidance_scale", spec.default_guidance),
                generator=torch.Generator("cpu").manual_seed(seed),
            ).images
        return np.asarray(picture)


def _loaded(spec: ModelSpec, config: EngineConfig) -> Any:
    import torch

    from noria.bench.baselines import Pipeline
    from noria.engine.loading import look_at_machine
    from noria.engine.resources import resolve, resolve_device

    machine = look_at_machine()
    device = resolve_device(config.devices[0], machine)
    settings = resolve(config, spec, device, machine)
    assert isinstance(settings.threads, int)
    torch.set_num_threads(settings.threads)
    return Pipeline(spec, settings, device)
