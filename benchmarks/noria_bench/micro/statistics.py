"""Measures what counting the built-in variables costs a front end, in microseconds of one request.

python -m noria_bench.micro.statistics
"""

import time
from collections.abc import Callable

from noria.config import StatisticsConfig
from noria.frontend.engines.results import RawImage
from noria.frontend.services.counted_values import image_values, request_values
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.protocol.diffusion import DiffusionPayload
from noria.statistics.values import Values

NUM_REQUESTS, NUM_ROUNDS = 2000, 20
PAYLOAD = DiffusionPayload(
    512, 512, "ddim", 7.5, 20, prompt="a red circle above a large blue square on green", negative_prompt="", seed=1
)


def quietest_us(call: Callable[[], object], num: int = NUM_REQUESTS) -> float:
    """Return the time of one call, in the quietest of many batches."""
    found = []
    for _ in range(NUM_ROUNDS):
        started = time.perf_counter()
        for _ in range(num):
            call()
        found.append((time.perf_counter() - started) / num)
    return 1e6 * min(found)


def main() -> None:
    off, on = StatisticsRecorder(), StatisticsRecorder(StatisticsConfig(builtin=("prompts", "parameters", "images")))
    wanted = on.wanted("t2i")
    image = RawImage(1, 512, 512, memoryview(bytes(range(256)) * (512 * 512 * 3 // 256)))
    pixels: Values = image_values([image], wanted)

    def count() -> None:
        on.record("t2i", "shapes@1", on.wanted("t2i"), [*request_values(PAYLOAD, wanted), *pixels])

    def count_and_export() -> None:
        count()
        on.flush()

    image_us = quietest_us(lambda: image_values([image], wanted), 20)
    print(f"switched off                   {quietest_us(lambda: off.wanted('t2i')):8.2f} µs")
    print(f"a request, 10 variables        {quietest_us(count):8.2f} µs, in the event loop")
    print(f"an image of 512 × 512          {image_us:8.2f} µs, in a thread")
    print(f"export, twice a second         {quietest_us(count_and_export, 200):8.2f} µs")


if __name__ == "__main__":
    main()
