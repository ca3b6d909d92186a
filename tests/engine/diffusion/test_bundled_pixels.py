"""The images of the bundled model, compared with a file: changes of the engine or the samplers must keep them.

`python tests/engine/diffusion/test_bundled_pixels.py` writes the file again, after a change of the model's weights.
"""

import pathlib

import numpy as np
import torch
from PIL import Image

from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.engine.loop import ResultReady, StepLoop
from noria.models.catalog import open_model
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.requests import make_image_request

FILE = pathlib.Path(__file__).with_name("bundled_pixels.png")
# One uint8 step: another machine's kernels round differently, so a value near a half may be rounded either way.
TOLERANCE = 1
HEIGHT_PX = 64
SETTINGS = [  # scheduler, steps, guidance, width; windows of 1 to 4 calls, with and without noise
    ("ddim", 6, 1.0, 64),
    ("ddim", 9, 7.5, 96),
    ("euler-a", 5, 3.0, 64),
    ("dpm++2m-karras", 7, 3.0, 64),
    ("dpm++2m-sde", 6, 1.0, 64),
    ("heun", 4, 5.0, 96),
    ("unipc", 8, 3.0, 64),
    ("pndm", 6, 4.0, 64),
    ("lcm", 4, 1.0, 64),
    ("ddpm", 5, 2.0, 96),
]


def generate_sheet() -> np.ndarray:
    """All images from one batch, which they join one after the other, side by side: [HEIGHT_PX, sum of widths, 3]."""
    torch.set_num_threads(1)
    spec = open_model("bundled")
    executor, _ = load_executor(spec, EngineConfig(dtype="float32", slots=8, threads=1), "cpu")
    images: dict[str, np.ndarray] = {}

    def on_event(event: object) -> None:
        if isinstance(event, ResultReady):
            pixels = np.frombuffer(event.result.pixels.rgb(), np.uint8)
            images[event.prepared.request.request_id] = pixels.reshape(HEIGHT_PX, -1, 3)

    loop = StepLoop(StepScheduler(8), executor, on_event, lambda: 0.0)
    for number, (scheduler, steps, guidance, width) in enumerate(SETTINGS):
        request = make_image_request(
            str(number),
            spec.name,
            prompt=["a red circle above a blue square", "a large green ring"][number % 2],
            negative_prompt=["", "a black cross"][number % 2],
            seed=number,
            width=width,
            height=HEIGHT_PX,
            inference_steps=steps,
            guidance_scale=guidance,
            scheduler=scheduler,
        )
        loop.submit(executor.prepare(request))
        loop.run_iteration()
    while loop.run_iteration() is not None:
        pass
    return np.concatenate([images[str(number)] for number in range(len(SETTINGS))], axis=1)


def test_the_bundled_model_makes_the_images_it_always_made():
    expected = np.asarray(Image.open(FILE))
    difference = np.abs(generate_sheet().astype(int) - expected.astype(int))
    assert difference.max() <= TOLERANCE
    assert expected.std() > 10, "the images are flat"


if __name__ == "__main__":
    Image.fromarray(generate_sheet()).save(FILE, optimize=True)
