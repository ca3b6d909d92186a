"""Whether a seed draws the same image alone and in a crowd, over HTTP, as a caller would compare them."""

import io
import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
from PIL import Image

from noria.bench.openloop import image_files
from noria.bench.workload import Ask, mixed
from noria.spec import ModelSpec

IN_FLIGHT = 32
_PROBES = (3, 15, 28)  # places in the crowd of those that are asked for alone too
_NUM_STEPS = 8  # an image that has drifted has done so by then
_SEED = 11


def differences(url: str, spec: ModelSpec) -> list[int]:
    """For each probe, the largest difference of a channel (of 255) between its image alone and among 32 in flight."""
    crowd = _crowd(spec)
    with httpx.Client(timeout=300, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        alone = {place: _pixels(client, url, crowd[place]) for place in _PROBES}
        with ThreadPoolExecutor(IN_FLIGHT) as callers:
            together = list(callers.map(lambda ask: _pixels(client, url, ask), crowd))
    return [int(np.abs(together[place] - pixels).max()) for place, pixels in alone.items()]


def _crowd(spec: ModelSpec) -> list[Ask]:
    """32 requests of one size, so that all of them can share every step, with every guidance and scheduler of the mix."""
    size = {"width": spec.default_width_px, "height": spec.default_height_px}
    asks = itertools.islice(mixed(spec).asks(_SEED), IN_FLIGHT)
    return [msgspec.structs.replace(ask, **size, n=1, inference_steps=_NUM_STEPS) for ask in asks]


def _pixels(client: httpx.Client, url: str, ask: Ask) -> np.ndarray:
    answer = client.post(url, json=msgspec.to_builtins(ask)).raise_for_status()
    (file,) = image_files(answer)
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int)
