"""Thumbnails packed into a sprite sheet."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from noria.frontend.live.sprite_sheet import layout, make_sprite_sheet
from noria.protocol.live_views import ThumbnailView

SIDES = st.integers(1, 64)


def thumbnails_of(sizes):
    thumbnails, offset = [], 0
    for number, (width, height) in enumerate(sizes):
        thumbnails.append(ThumbnailView(number, f"r{number}", 0, width, height, offset))
        offset += 3 * width * height
    return thumbnails


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=64))
def test_thumbnails_do_not_overlap_and_stay_inside_the_sheet(sizes):
    positions, (width, height) = layout(thumbnails_of(sizes))
    assert width <= 512
    num_covering = np.zeros((height, width), int)
    for position, (thumbnail_width, thumbnail_height) in zip(positions, sizes, strict=True):
        part = num_covering[position.y : position.y + thumbnail_height, position.x : position.x + thumbnail_width]
        assert part.shape == (thumbnail_height, thumbnail_width)
        part += 1
    assert num_covering.max() == 1


def test_64_of_the_largest_thumbnails_fill_a_square():
    assert layout(thumbnails_of([(64, 64)] * 64))[1] == (512, 512)


def test_each_thumbnail_of_the_file_keeps_its_colours():
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (240, 240, 20), (0, 0, 0)]
    sizes = [(16, 16), (24, 16), (16, 24), (15, 17), (64, 64)]
    pixels = b"".join(bytes(colour) * (w * h) for colour, (w, h) in zip(colours, sizes, strict=True))
    positions, size, text = make_sprite_sheet(thumbnails_of(sizes), memoryview(pixels))
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    assert (image.format, image.size) == ("JPEG", size)
    for position, colour, (w, h) in zip(positions, colours, sizes, strict=True):
        part = np.asarray(image.convert("RGB").crop((position.x, position.y, position.x + w, position.y + h))).astype(
            float
        )
        assert part.mean(axis=(0, 1)) == pytest.approx(colour, abs=3)  # JPEG is lossy
