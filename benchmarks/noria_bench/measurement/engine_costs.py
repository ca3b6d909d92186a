"""Records the costs that an engine of Noria measures while it is loaded, for `noria simulate --calibrate`.

They come from `GET /v1/models/{model}`: the mean durations of the calls and decodes that were made meanwhile, by rows
and images. What was not needed then is estimated from the costs that the engine has learned.
"""

import contextlib
import http.client
import json
import statistics
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from noria.config import EngineConfig
from noria.protocol.diffusion import DiffusionModelSpec
from noria.testing.server import NO_PROXY_OPENER
from noria_bench.running import in_background

_SAMPLE_INTERVAL_S = 1.0  # a sample costs the front end about 2 ms


@contextlib.contextmanager
def record_engine_costs(
    port: int, spec: DiffusionModelSpec, config: EngineConfig, recorded: dict[str, Any]
) -> Iterator[None]:
    """Sample the server's costs meanwhile; at the end put them into `recorded`, as `simulator.devices.Device`.

    Nothing is recorded if there are none, or if the server has several engines.
    """
    samples: list[dict[str, Any]] = []

    def sample(ended: threading.Event) -> None:
        url = f"http://127.0.0.1:{port}/v1/models/{urllib.parse.quote(spec.name)}"
        is_last, wait_s = False, 0.0
        while not is_last:
            is_last, wait_s = ended.wait(wait_s), _SAMPLE_INTERVAL_S
            with (
                contextlib.suppress(OSError, http.client.HTTPException, ValueError),
                NO_PROXY_OPENER.open(url, timeout=5) as answer,
            ):
                samples.append(json.load(answer))

    with in_background(sample):
        yield
    if len(config.devices) == 1:
        recorded |= device_costs(samples, spec, config)


def device_costs(samples: list[dict[str, Any]], spec: DiffusionModelSpec, config: EngineConfig) -> dict[str, Any]:
    """Return the costs measured between the first and the last answer of `/v1/models/{model}`, as a `Device`.

    Empty if there is no answer. `slowdown` is the mean of all.
    """
    shapes = [each for each in samples[-1]["costs"] if _is_simple(each)] if samples else []
    if not shapes:
        return {}
    before = {_size(each): each for each in samples[0]["costs"] if _is_simple(each)}
    slowdown = statistics.fmean(shape["slowdown"] for sample in samples for shape in sample["costs"][:1])

    def seconds(shape: dict[str, Any], what: str) -> dict[str, float]:
        earlier = before.get(_size(shape), {}).get(f"{what}_totals", {})
        means = {}
        for count, (number, sum_s) in shape[f"{what}_totals"].items():
            number_before, sum_before_s = earlier.get(count, (0, 0.0))
            if number > number_before:
                means[count] = (sum_s - sum_before_s) / (number - number_before)
        learned = {count: value / shape["slowdown"] * slowdown for count, value in shape[f"{what}_s"].items()}
        return means or learned

    def curves(what: str) -> list[dict[str, Any]]:
        sizes = [{"width_px": each["width_px"], "height_px": each["height_px"]} for each in shapes]
        found = [size | {"seconds": seconds(each, what)} for size, each in zip(sizes, shapes, strict=True)]
        return [each for each in found if each["seconds"]]

    num_slots = samples[-1]["load"]["num_slots"]
    return {
        "name": spec.name,
        "steps": curves("step"),
        "decodes": curves("decode"),
        "text_encode_s": shapes[0]["text_encode_s"] / shapes[0]["slowdown"] * slowdown,
        "slowdown": slowdown,
        "slots": num_slots,
        "max_rows": max(config.buckets, default=2 * num_slots),
        "decode_batch": config.decode_batch,
    }


def _is_simple(shape: dict[str, Any]) -> bool:
    return not shape["stage"] and not shape["reference_px"]


def _size(shape: dict[str, Any]) -> tuple[int, int]:
    return shape["width_px"], shape["height_px"]
