"""Images as clients send them: random pixels, as files, as base64."""

import base64
import io

import numpy as np
from PIL import Image


def photo(size=(64, 48), seed=0):
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def file_of(image, file_format="png", **options):
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, format=file_format, **options)
    return file.getvalue()


def b64(content):
    """Bytes in base64."""
    return base64.b64encode(content).decode()
