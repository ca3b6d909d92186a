"""Records the costs that an engine of Noria measures while it is loaded, for `noria simulate --calibrate`.

They are those of `GET /v1/models/{model}`: the engine has learned them when the load ends, and its slowdown, a factor
in all of them, is averaged over the load.
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

_SAMPLE_INTERVAL_S = 1.0  # a sample costs the front end about 2 ms


@contextlib.contextmanager
def record_engine_costs(
    port: int, spec: DiffusionModelSpec, config: EngineConfig, recorded: dict[str, Any]
) -> Iterator[None]:
    """Sample the server's costs meanwhile; at the end put them into `recorded`, as `simulator.devices.Device`.

    Nothing is recorded if there are none, or if the server has several engines.
    """
    samples: list[dict[str, Any]] = []
    ended = threading.Event()

    def sample() -> None:
        url = f"http://127.0.0.1:{port}/v1/models/{urllib.parse.quote(spec.name)}"
        is_last = False
        while not is_last:
            is_last = ended.wait(_SAMPLE_INTERVAL_S)
            with (
                contextlib.suppress(OSError, http.client.HTTPException, ValueError),
                NO_PROXY_OPENER.open(url, timeout=5) as answer,
            ):
                samples.append(json.load(answer))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if len(config.devices) == 1:
        recorded |= device_costs(samples, spec, config)


def device_costs(samples: list[dict[str, Any]], spec: DiffusionModelSpec, config: EngineConfig) -> dict[str, Any]:
    """The last answer of `/v1/models/{model}` as a `Device`, at the mean slowdown of all; empty if there is none."""
    shapes = (
        [each for each in samples[-1]["costs"] if not each["stage"] and not each["reference_px"]] if samples else []
    )
    if not shapes:
        return {}
    slowdown = statistics.fmean(shape["slowdown"] for sample in samples for shape in sample["costs"][:1])

    def seconds(measured: dict[str, float], now: float) -> dict[str, float]:
        return {count: value / now * slowdown for count, value in measured.items()}

    num_slots = samples[-1]["load"]["num_slots"]
    return {
        "name": spec.name,
        "steps": [
            {
                "width_px": each["width_px"],
                "height_px": each["height_px"],
                "seconds": seconds(each["step_s"], each["slowdown"]),
            }
            for each in shapes
        ],
        "decodes": [
            {
                "width_px": each["width_px"],
                "height_px": each["height_px"],
                "seconds": seconds(each["decode_s"], each["slowdown"]),
            }
            for each in shapes
            if each["decode_s"]
        ],
        "text_encode_s": shapes[0]["text_encode_s"] / shapes[0]["slowdown"] * slowdown,
        "slowdown": slowdown,
        "slots": num_slots,
        "max_rows": max(config.buckets, default=2 * num_slots),
        "decode_batch": config.decode_batch,
    }
