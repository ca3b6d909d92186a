"""The pictures of a wheel's slots: kept by the wheel as what may still be on its way from the device, packed by the delivery."""

from dataclasses import dataclass

import msgspec

from noria.engine.executor import PreviewPixels
from noria.messages import WheelView
from noria.request import request_id_of
from noria.views import CellView


@dataclass(frozen=True)
class Shown:
    """A view without its cells, and its slots' pictures."""

    view: WheelView
    pictures: tuple[tuple[int, PreviewPixels], ...] = ()


def packed(shown: Shown) -> tuple[WheelView, bytes | None]:
    """The view as it is sent, and the frame beside it, if any; waits for the device."""
    cells, parts, offset = [], [], 0
    for slot, picture in shown.pictures:
        image = picture.image
        cells.append(
            CellView(slot, request_id_of(image.request_id), image.index, picture.width_px, picture.height_px, offset)
        )
        parts.append(picture.pixels.rgb())
        offset += 3 * picture.width_px * picture.height_px
    return msgspec.structs.replace(shown.view, cells=tuple(cells)), b"".join(parts) if parts else None
