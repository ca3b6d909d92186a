"""What of a view may still be on its way from the device: the slots' pictures, the turns' seconds. Kept by the wheel, packed by the delivery."""

from dataclasses import dataclass

import msgspec

from noria.engine.runtime import PreviewPixels
from noria.protocol.live_views import IterationView, ThumbnailView
from noria.protocol.messages import EngineView
from noria.protocol.request import request_id_of
from noria.scheduling.types import PhaseTimings


@dataclass(frozen=True)
class TimedIteration:
    """A turn as the wheel saw it, and what the device will have taken for it."""

    view: IterationView  # its stages not filled in
    timings: PhaseTimings | None

    def with_timings(self) -> IterationView:
        """With its stages; waits for the device. Where that works behind the wheel, the turn's seconds are the device's, too."""
        if self.timings is None:
            return self.view
        text_encode_s, step_s, decode_s = self.timings.text_encode_s, self.timings.step_s, self.timings.decode_s
        seconds = self.view.duration_s if self.timings.is_known else text_encode_s + step_s + decode_s
        return msgspec.structs.replace(self.view, seconds=seconds, encode_s=text_encode_s, decode_s=decode_s)


@dataclass(frozen=True)
class PendingView:
    """A view without its turns and cells; its turns, and its slots' pictures."""

    view: EngineView
    iterations: tuple[TimedIteration, ...] = ()
    thumbnails: tuple[tuple[int, PreviewPixels], ...] = ()


def resolve_view(pending: PendingView) -> tuple[EngineView, bytes | None]:
    """The view as it is sent, and the frame beside it, if any; waits for the device."""
    thumbnails, frames, offset = [], [], 0
    for slot, thumbnail in pending.thumbnails:
        image = thumbnail.image
        thumbnails.append(
            ThumbnailView(
                slot, request_id_of(image.request_id), image.index, thumbnail.width_px, thumbnail.height_px, offset
            )
        )
        frames.append(thumbnail.pixels.rgb())
        offset += 3 * thumbnail.width_px * thumbnail.height_px
    iterations = tuple(iteration.with_timings() for iteration in pending.iterations)
    return msgspec.structs.replace(pending.view, turns=iterations, cells=tuple(thumbnails)), b"".join(
        frames
    ) if frames else None
