"""What the previews of one step cost, over what the step itself does; and what the one picture of all slots does that /v1/live shows.

python benchmarks/previews.py [-o FILE]
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import time

import numpy as np
from PIL import Image

from noria.bench.machine import provenance
from noria.config import EngineConfig
from noria.engine.loading import load_executor
from noria.engine.loop import Wheel
from noria.frontend.sheet import sheet
from noria.models.catalog import open_model
from noria.request import ImageRequest
from noria.scheduling.steps import StepScheduler
from noria.views import CellView

NUM_IMAGES, NUM_STEPS, ROUNDS = 4, 20, 8
SHEETS = ((12, 8), (12, 16), (64, 64))  # pictures, pixels of a side


def main() -> None:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the supervisor gives its engines; read when torch is imported
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    output = parser.parse_args().output
    spec = open_model("bundled")
    executor, config = load_executor(spec, EngineConfig(), "auto")

    def steps_s() -> list[float]:
        """Seconds of each turn but the first and the last, which also encode and decode."""
        wheel = Wheel(StepScheduler(config.slots), executor, lambda _: None, time.monotonic)
        for number in range(NUM_IMAGES):
            wheel.submit(executor.prepare(ImageRequest(
                f"r{number}", "a red circle", "", number, spec.default_width_px, spec.default_height_px, NUM_STEPS, 3.0, 1,
                "ddim", math.inf, model=spec.name,
            )))  # fmt: skip
        seconds = []
        while (turn := wheel.turn()) is not None:
            seconds.append(turn.seconds)
        return seconds[1:-1]

    steps_s()
    step = statistics.median(seconds for _ in range(ROUNDS) for seconds in steps_s())
    alone = _alone_s(executor, spec)
    result = provenance() | {
        "command": "python benchmarks/previews.py",
        "images": NUM_IMAGES,
        "step_s": step,
        "previews_of_one_step_s": alone,
        "share_of_a_step": alone / step,
        "sheets": [{"pictures": num, "side_px": side, "median_s": _sheet_s(num, side)} for num, side in SHEETS],
    }
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{NUM_IMAGES} previews take {1e6 * alone:.0f} µs, {100 * alone / step:.2f} % of the step of {1000 * step:.1f} ms"
    )
    for made in result["sheets"]:
        side = made["side_px"]
        print(f"a sheet of {made['pictures']} pictures of {side} × {side} pixels takes {1e3 * made['median_s']:.2f} ms")


def _alone_s(executor: object, spec: object) -> float:
    """The previews of one step of all images by themselves: estimate, map to colours, hand over."""
    import torch

    from noria.sampling.previews import clean_latents, clean_weights, preview_pixels

    size = NUM_IMAGES, 4, spec.default_height_px // 8, spec.default_width_px // 8
    inputs, outputs, timesteps = torch.randn(size), torch.randn(size), np.full(NUM_IMAGES, 500.0, np.float32)
    model, seconds = executor.model, []
    with torch.inference_mode():
        for _ in range(300):
            started = time.perf_counter()
            weights = torch.from_numpy(clean_weights(timesteps, model.alpha_bars, model.prediction_type))
            clean = clean_latents(inputs, outputs, weights)
            for pixels in preview_pixels(clean, model.preview_colours):
                pixels.numpy().data.cast("B")
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _sheet_s(num_pictures: int, side_px: int) -> float:
    """One sheet of pictures whose colours change slowly, as previews' do."""
    coarse = np.random.default_rng(0).integers(0, 256, (num_pictures, 4, 4, 3), dtype=np.uint8)
    pictures = [Image.fromarray(each).resize((side_px, side_px), Image.Resampling.BICUBIC).tobytes() for each in coarse]
    cells = [CellView(k, "r", 0, side_px, side_px, k * len(pictures[0])) for k in range(num_pictures)]
    pixels, seconds = memoryview(b"".join(pictures)), []
    for _ in range(100):
        started = time.perf_counter()
        sheet(cells, pixels)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
