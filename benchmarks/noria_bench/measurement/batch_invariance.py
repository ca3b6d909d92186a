"""Compares, over HTTP, the images of the same seeds alone and among many requests."""

import io
import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
from PIL import Image

from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.load.trace_client import image_files
from noria_bench.load.workload import RequestTemplate, mixed

IN_FLIGHT = 32
# The requests of the batch that are also sent alone.
_PROBE_INDICES = (3, 15, 28)
# Enough for a difference to show.
_NUM_STEPS = 8
_SEED = 11


def max_channel_differences(url: str, spec: DiffusionModelSpec) -> list[int]:
    """For each probe, the largest channel difference (of 255) between its image alone and among 32 in flight."""
    batch = _batch_templates(spec)
    with httpx.Client(timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        solo_pixels = {index: _pixels(client, url, batch[index]) for index in _PROBE_INDICES}
        with ThreadPoolExecutor(IN_FLIGHT) as executor:
            batched_pixels = list(executor.map(lambda template: _pixels(client, url, template), batch))
    return [int(np.abs(batched_pixels[index] - pixels).max()) for index, pixels in solo_pixels.items()]


def _batch_templates(spec: DiffusionModelSpec) -> list[RequestTemplate]:
    """32 requests of one size, which can share every step, with the guidances and schedulers of the mix."""
    size = {"width": spec.default_width_px, "height": spec.default_height_px}
    templates = itertools.islice(mixed(spec).templates(_SEED), IN_FLIGHT)
    return [msgspec.structs.replace(template, **size, n=1, inference_steps=_NUM_STEPS) for template in templates]


def _pixels(client: httpx.Client, url: str, template: RequestTemplate) -> np.ndarray:
    answer = client.post(url, json=template.body).raise_for_status()
    (file,) = image_files(answer.headers, answer.content)
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int)
