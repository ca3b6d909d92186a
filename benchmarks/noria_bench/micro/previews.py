"""Measures the cost of the previews of one step relative to the step, and of the sprite sheets that /v1/live sends.

python -m noria_bench.micro.previews [-o FILE]
"""

import argparse
import json
import os
import pathlib
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.engine.loop import StepLoop
from noria.frontend.live.sprite_sheet import make_sprite_sheet
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.live_views import ThumbnailView
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request
from noria_bench.measurement.provenance import collect_provenance

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import DiffusionExecutor

NUM_IMAGES, NUM_STEPS, NUM_ROUNDS = 4, 20, 8
# Thumbnails and their side in pixels.
SPRITE_SHEETS = ((12, 8), (12, 16), (64, 64))


def main() -> None:
    # As the supervisor sets it for engines; read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=pathlib.Path)
    output = parser.parse_args().output
    spec = open_model_of(DiffusionModelSpec, "bundled", EngineConfig())
    executor, config = load_executor(spec, EngineConfig(), "auto")
    assert isinstance(config.slots, int)
    num_slots = config.slots

    def steps_s() -> list[float]:
        """Seconds of each iteration except the first and the last, which also encode and decode."""
        engine_loop = StepLoop(StepScheduler(num_slots), executor, lambda _: None, time.monotonic)
        for number in range(NUM_IMAGES):
            engine_loop.submit(executor.prepare(make_image_request(
                f"r{number}", spec.name, seed=number, width=spec.default_width_px, height=spec.default_height_px,
                inference_steps=NUM_STEPS, guidance_scale=3.0,
            )))  # fmt: skip
        seconds = []
        while (iteration := engine_loop.run_iteration()) is not None:
            seconds.append(iteration.duration_s)
        return seconds[1:-1]

    steps_s()
    median_step_s = statistics.median(seconds for _ in range(NUM_ROUNDS) for seconds in steps_s())
    previews_s = _measure_previews_s(executor, spec)
    result = collect_provenance() | {
        "images": NUM_IMAGES,
        "step_s": median_step_s,
        "previews_per_step_s": previews_s,
        "share_of_step": previews_s / median_step_s,
        "sprite_sheets": [
            {"thumbnails": num, "side_px": side, "median_s": _measure_sprite_sheet_s(num, side)}
            for num, side in SPRITE_SHEETS
        ],
    }
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{NUM_IMAGES} previews take {1e6 * previews_s:.0f} µs, {100 * previews_s / median_step_s:.2f} % "
        f"of the step of {1000 * median_step_s:.1f} ms"
    )
    for sheet_result in result["sprite_sheets"]:
        side = sheet_result["side_px"]
        print(
            f"a sprite sheet of {sheet_result['thumbnails']} thumbnails of {side} × {side} pixels takes "
            f"{1e3 * sheet_result['median_s']:.2f} ms"
        )


def _measure_previews_s(executor: "DiffusionExecutor", spec: DiffusionModelSpec) -> float:
    """Median seconds of the previews of one step of all images: estimate the clean latents, map to colours, convert."""
    import torch

    from noria.sampling.previews import clean_latents, preview_pixels

    size = NUM_IMAGES, 4, spec.default_height_px // 8, spec.default_width_px // 8
    inputs, outputs, timesteps = torch.randn(size), torch.randn(size), np.full(NUM_IMAGES, 500.0, np.float32)
    model, seconds = executor.model, []
    with torch.inference_mode():
        for _ in range(300):
            started = time.perf_counter()
            weights = torch.from_numpy(model.clean_weights(timesteps))
            clean = clean_latents(inputs, outputs, weights)
            for pixels in preview_pixels(clean, model.preview_colours):
                pixels.numpy().data.cast("B")
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _measure_sprite_sheet_s(num_thumbnails: int, side_px: int) -> float:
    """Median seconds of one sprite sheet, of thumbnails with smooth colours as previews have."""
    coarse = np.random.default_rng(0).integers(0, 256, (num_thumbnails, 4, 4, 3), dtype=np.uint8)
    rgb_bytes = [
        Image.fromarray(each).resize((side_px, side_px), Image.Resampling.BICUBIC).tobytes() for each in coarse
    ]
    thumbnails = [ThumbnailView(k, "r", 0, side_px, side_px, k * len(rgb_bytes[0])) for k in range(num_thumbnails)]
    pixels, seconds = memoryview(b"".join(rgb_bytes)), []
    for _ in range(100):
        started = time.perf_counter()
        make_sprite_sheet(thumbnails, pixels)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
