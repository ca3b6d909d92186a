"""Measures how long the iterations of a running batch are delayed when start images arrive at once.

python -m noria_bench.micro.start_image_arrivals [--side PX] [-o FILE]
"""

import argparse
import json
import os
import pathlib
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.engine.loop import StepLoop
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageRequest
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request
from noria_bench.measurement.provenance import collect_provenance

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import DiffusionExecutor

NUM_RUNNING, NUM_ARRIVING, NUM_STEPS, NUM_ROUNDS = 8, 16, 12, 5


def main() -> None:
    # As the supervisor sets it for engines; read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=256, metavar="PX", help="of all images")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    arguments = parser.parse_args()
    spec = open_model_of(DiffusionModelSpec, "bundled", EngineConfig())
    executor, config = load_executor(spec, EngineConfig(slots=NUM_RUNNING + NUM_ARRIVING), "auto")
    rounds = [longest_s(executor, config, arguments.side, number) for number in range(NUM_ROUNDS)][
        1:
    ]  # after a warm-up
    iteration_s, delay_s = (statistics.median(each) for each in zip(*rounds, strict=True))
    result = collect_provenance() | {
        "running": NUM_RUNNING, "arriving": NUM_ARRIVING, "side_px": arguments.side,
        "longest_iteration_s": iteration_s, "longest_delay_s": delay_s,
    }  # fmt: skip
    print(
        f"{NUM_RUNNING} images of {arguments.side}² run, {NUM_ARRIVING} start images arrive: longest iteration "
        f"{1000 * iteration_s:.0f} ms, of which at most {1000 * delay_s:.0f} ms before its model call"
    )
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def longest_s(
    executor: "DiffusionExecutor", config: EngineConfig, side_px: int, round_number: int
) -> tuple[float, float]:
    """Return the longest duration of an iteration after the arrivals, and of what an iteration does beside its call.

    Iterations that decode are left out.
    """
    assert isinstance(config.slots, int)
    loop = StepLoop(StepScheduler(config.slots, config.decode_batch), executor, lambda _: None, time.monotonic)

    def request(number: int, strength: float | None = None) -> ImageRequest:
        prompt = f"{round_number} {number}"  # differs each time, so that no embedding is cached
        return make_image_request(
            f"r{number}", "noria-shapes", prompt=prompt, seed=number, width=side_px, height=side_px,
            inference_steps=NUM_STEPS, guidance_scale=1.0, strength=strength, scheduler="ddim",
        )  # fmt: skip

    pixels = np.random.default_rng(round_number).integers(0, 256, (side_px, side_px, 3), np.uint8).tobytes()
    for number in range(NUM_RUNNING):
        loop.submit(executor.prepare(request(number)))
    for _ in range(2):
        loop.run_iteration()
    for number in range(NUM_RUNNING, NUM_RUNNING + NUM_ARRIVING):
        loop.submit(executor.prepare(request(number, 0.5), memoryview(pixels)))
    durations_s, delays_s = [], []
    while (iteration := loop.run_iteration()) is not None:
        if not iteration.plan.decodes:
            assert iteration.outcome.phase_timings is not None
            durations_s.append(iteration.duration_s)
            delays_s.append(iteration.duration_s - iteration.outcome.phase_timings.seconds("steps"))
    return max(durations_s), max(delays_s)


if __name__ == "__main__":
    main()
