"""The pictures of a wheel's slots in one."""

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


def cells_of(sizes):
    cells, offset = [], 0
    for number, (width, height) in enumerate(sizes):
        cells.append(ThumbnailView(number, f"r{number}", 0, width, height, offset))
        offset += 3 * width * height
    return cells


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=64))
def test_no_cell_covers_another_or_leaves_the_sheet(sizes):
    places, (width, height) = layout(cells_of(sizes))
    assert width <= 512
    taken = np.zeros((height, width), int)
    for place, (cell_width, cell_height) in zip(places, sizes, strict=True):
        part = taken[place.y : place.y + cell_height, place.x : place.x + cell_width]
        assert part.shape == (cell_height, cell_width)
        part += 1
    assert taken.max() == 1


def test_sixty_four_of_the_largest_are_a_square():
    assert layout(cells_of([(64, 64)] * 64))[1] == (512, 512)


def test_each_cell_of_the_file_has_its_own_colours():
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (240, 240, 20), (0, 0, 0)]
    sizes = [(16, 16), (24, 16), (16, 24), (15, 17), (64, 64)]
    pixels = b"".join(bytes(colour) * (w * h) for colour, (w, h) in zip(colours, sizes, strict=True))
    places, size, text = make_sprite_sheet(cells_of(sizes), memoryview(pixels))
    picture = Image.open(io.BytesIO(base64.b64decode(text)))
    assert (picture.format, picture.size) == ("JPEG", size)
    for place, colour, (w, h) in zip(places, colours, sizes, strict=True):
        part = np.asarray(picture.convert("RGB").crop((place.x, place.y, place.x + w, place.y + h))).astype(float)
        assert part.mean(axis=(0, 1)) == pytest.approx(colour, abs=3)  # it is lossy
