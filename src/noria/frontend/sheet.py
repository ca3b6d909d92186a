"""The pictures of a wheel's slots as one picture, so that a view of 64 is one file to fetch, encode and decode."""

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from noria.views import CellView

_WIDTH_PX = 512  # eight of the largest in a row
_GRID_PX = 8  # JPEG transforms squares of this side: no cell takes its neighbour's colours


@dataclass(frozen=True)
class Place:
    """Where a cell's upper left corner is."""

    x: int
    y: int


def layout(cells: Sequence[CellView]) -> tuple[list[Place], tuple[int, int]]:
    """A place for each of `cells`, in rows from the highest to the lowest, and the size (width, height) of the sheet, in pixels."""
    places: dict[int, Place] = {}
    x = y = width = row = 0
    for number in sorted(range(len(cells)), key=lambda number: -cells[number].height_px):
        cell = cells[number]
        if x and x + cell.width_px > _WIDTH_PX:
            x, y, row = 0, y + row, 0
        places[number] = Place(x, y)
        x += _up(cell.width_px)
        width, row = max(width, x), max(row, _up(cell.height_px))
    return [places[number] for number in range(len(cells))], (width, y + row)


def sheet(cells: Sequence[CellView], pixels: memoryview) -> tuple[list[Place], tuple[int, int], str]:
    """`layout`, and the JPEG file in base64; `pixels` is the frame beside a `WheelView`. For a worker thread.

    A view is looked at for a fifth of a second: WebP would be smaller, and takes two to three times as long.
    """
    places, size = layout(cells)
    whole = Image.new("RGB", size)
    for cell, place in zip(cells, places, strict=True):
        width, height = cell.width_px, cell.height_px
        part = Image.frombytes("RGB", (width, height), pixels[cell.offset : cell.offset + 3 * width * height])
        # What is left of its last squares is filled with colours like its own, which an edge to black would spoil.
        for x, y in itertools.product(_shifts(width), _shifts(height)):
            whole.paste(part, (place.x + x, place.y + y))
    file = io.BytesIO()
    whole.save(file, "jpeg", quality=80, subsampling=0)
    return places, size, base64.b64encode(file.getvalue()).decode("ascii")


def _shifts(side_px: int) -> list[int]:
    """By how many pixels a part is shifted each time it is laid down; the last time by none."""
    return sorted({0, _up(side_px) - side_px}, reverse=True)


def _up(side_px: int) -> int:
    return -(-side_px // _GRID_PX) * _GRID_PX
