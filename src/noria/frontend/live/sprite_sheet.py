"""Packs the thumbnails of a view into one JPEG, so that a view of 64 slots is one image to encode, send and decode."""

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from noria.protocol.live_views import ThumbnailView

# Eight of the largest thumbnails in a row.
_MAX_WIDTH_PX = 512
# JPEG transforms squares of this side: thumbnails aligned to it take no colours from their neighbours.
_JPEG_BLOCK_PX = 8


@dataclass(frozen=True)
class Position:
    """The upper left corner of a thumbnail in the sheet, in pixels."""

    x: int
    y: int


def layout(thumbnails: Sequence[ThumbnailView]) -> tuple[list[Position], tuple[int, int]]:
    """Return the thumbnails' positions, in rows from the highest to the lowest, and the (width, height) in pixels."""
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
    """Return the positions and the size of `layout`, and the JPEG file in base64. Slow: call it in a worker thread.

    `pixels` is the frame beside an `EngineView`. JPEG, because WebP takes two to three times as long to encode, and a
    view is shown for a fifth of a second.
    """
    positions, size = layout(thumbnails)
    sheet_image = Image.new("RGB", size)
    for thumbnail, position in zip(thumbnails, positions, strict=True):
        width, height = thumbnail.width_px, thumbnail.height_px
        thumbnail_image = Image.frombytes(
            "RGB", (width, height), pixels[thumbnail.offset : thumbnail.offset + 3 * width * height]
        )
        # The rest of its last squares is filled with its own colours: an edge to black would blur into it.
        for x, y in itertools.product(_shifts(width), _shifts(height)):
            sheet_image.paste(thumbnail_image, (position.x + x, position.y + y))
    file = io.BytesIO()
    sheet_image.save(file, "jpeg", quality=80, subsampling=0)
    return positions, size, base64.b64encode(file.getvalue()).decode("ascii")


def _shifts(side_px: int) -> list[int]:
    """Return the offsets at which a thumbnail is pasted to fill its squares; the last one is 0."""
    return sorted({0, _round_up(side_px) - side_px}, reverse=True)


def _round_up(side_px: int) -> int:
    return -(-side_px // _JPEG_BLOCK_PX) * _JPEG_BLOCK_PX
