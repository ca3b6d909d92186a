"""What of a view may still be on its way from the device: the slots' pictures, the turns' seconds. Kept by the wheel, packed by the delivery."""

from dataclasses import dataclass

import msgspec

from noria.engine.executor import PreviewPixels
from noria.messages import WheelView
from noria.request import request_id_of
from noria.scheduling.plans import Spent
from noria.views import CellView, TurnView


@dataclass(frozen=True)
class Spun:
    """A turn as the wheel saw it, and what the device will have taken for it."""

    turn: TurnView  # its stages not filled in
    spent: Spent | None

    def timed(self) -> TurnView:
        """With its stages; waits for the device. Where that works behind the wheel, the turn's seconds are the device's, too."""
        if self.spent is None:
            return self.turn
        encode_s, step_s, decode_s = self.spent.encode_s, self.spent.step_s, self.spent.decode_s
        seconds = self.turn.seconds if self.spent.is_known else encode_s + step_s + decode_s
        return msgspec.structs.replace(self.turn, seconds=seconds, encode_s=encode_s, decode_s=decode_s)


@dataclass(frozen=True)
class Shown:
    """A view without its turns and cells; its turns, and its slots' pictures."""

    view: WheelView
    turns: tuple[Spun, ...] = ()
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
    turns = tuple(spun.timed() for spun in shown.turns)
    return msgspec.structs.replace(shown.view, turns=turns, cells=tuple(cells)), b"".join(parts) if parts else None
