"""The pictures of a wheel's slots as one picture, so that a view of 64 is one file to fetch, encode and decode."""

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from noria.protocol.live_views import ThumbnailView

_MAX_WIDTH_PX = 512  # eight of the largest in a row
_JPEG_BLOCK_PX = 8  # JPEG transforms squares of this side: no cell takes its neighbour's colours


@dataclass(frozen=True)
class Position:
    """Where a cell's upper left corner is."""

    x: int
    y: int


def layout(thumbnails: Sequence[ThumbnailView]) -> tuple[list[Position], tuple[int, int]]:
    """A place for each of `cells`, in rows from the highest to the lowest, and the size (width, height) of the sheet, in pixels."""
    positions: dict[int, Position] = {}
    x = y = width = row_height = 0
    for index in sorted(range(len(thumbnails)), key=lambda index: -thumbnails[index].height_px):
        thumbnail = thumbnails[index]
        if x and x + thumbnail.width_px > _MAX_WIDTH_PX:
            x, y, row_height = 0, y + row_height, 0
        positions[index] = Position(x, y)
        x += _round_up(thumbnail.width_px)
        width, row_height = max(width, x), max(row_height, _round_up(thumbnail.height_px))
    return [positions[index] for index in range(len(thumbnails))], (width, y + row_height)


def make_sprite_sheet(
    thumbnails: Sequence[ThumbnailView], pixels: memoryview
) -> tuple[list[Position], tuple[int, int], str]:
    """`layout`, and the JPEG file in base64; `pixels` is the frame beside a `WheelView`. For a worker thread.

    A view is looked at for a fifth of a second: WebP would be smaller, and takes two to three times as long.
    """
    positions, size = layout(thumbnails)
    sheet_image = Image.new("RGB", size)
    for thumbnail, position in zip(thumbnails, positions, strict=True):
        width, height = thumbnail.width_px, thumbnail.height_px
        thumbnail_image = Image.frombytes(
            "RGB", (width, height), pixels[thumbnail.offset : thumbnail.offset + 3 * width * height]
        )
        # What is left of its last squares is filled with colours like its own, which an edge to black would spoil.
        for x, y in itertools.product(_shifts(width), _shifts(height)):
            sheet_image.paste(thumbnail_image, (position.x + x, position.y + y))
    file = io.BytesIO()
    sheet_image.save(file, "jpeg", quality=80, subsampling=0)
    return positions, size, base64.b64encode(file.getvalue()).decode("ascii")


def _shifts(side_px: int) -> list[int]:
    """By how many pixels a part is shifted each time it is laid down; the last time by none."""
    return sorted({0, _round_up(side_px) - side_px}, reverse=True)


def _round_up(side_px: int) -> int:
    return -(-side_px // _JPEG_BLOCK_PX) * _JPEG_BLOCK_PX
