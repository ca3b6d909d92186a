"""Images as clients send them, random pixels as files and as base64, and as they get them."""

import base64
import concurrent.futures
import io
import itertools

import numpy as np
from PIL import Image


def photo(size=(64, 48), seed=0):
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def left_half(size=(64, 48), mode="L", inside=255, outside=0):
    """A mask whose left half is different."""
    mask = Image.new(mode, size, outside)
    mask.paste(inside, (0, 0, size[0] // 2, size[1]))
    return mask


def file_of(image, file_format="png", **options):
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, format=file_format, **options)
    return file.getvalue()


def b64(content):
    """Bytes in base64."""
    return base64.b64encode(content).decode()


def pixels_of(content):
    """The pixels of a file, [height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)


def check_own_images(generate, choices, min_mean_batch=2.0, min_change=5):
    """Check that images of one batch are as alone, to 1/255, and differ from each other by more than `min_change`.

    `generate` returns the response to one of `choices`. Returns the responses of the batch and the pixels alone.
    """
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        together = list(threads.map(generate, choices * 2))
    assert max(float(answer.headers["X-Noria-Mean-Batch"]) for answer in together) > min_mean_batch
    alone = [pixels_of(generate(chosen).content) for chosen in choices]
    for number, answer in enumerate(together):
        assert np.abs(pixels_of(answer.content) - alone[number % len(choices)]).max() <= 1
    for one, other in itertools.combinations(alone, 2):
        assert np.abs(one - other).max() > min_change
    return together, alone
