"""The images of the bundled model, compared with a file: changes of the engine or the samplers must keep them.

`PYTHONPATH=tests python tests/engine/diffusion/test_bundled_pixels.py` writes the file again, after a change of the
model's weights.
"""

import pathlib

import numpy as np
from PIL import Image

from generating import generate, load
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
    spec, executor = load("bundled")
    requests = [
        make_image_request(
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
        for number, (scheduler, steps, guidance, width) in enumerate(SETTINGS)
    ]
    images = generate(executor, requests, arrivals=range(len(requests)))
    return np.concatenate([images[each.request_id, 0] for each in requests], axis=1)


def test_the_bundled_model_makes_the_images_it_always_made():
    expected = np.asarray(Image.open(FILE))
    difference = np.abs(generate_sheet().astype(int) - expected.astype(int))
    assert difference.max() <= TOLERANCE
    assert expected.std() > 10, "the images are flat"


if __name__ == "__main__":
    Image.fromarray(generate_sheet()).save(FILE, optimize=True)
