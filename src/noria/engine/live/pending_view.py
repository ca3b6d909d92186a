"""A view whose thumbnails and timings may still be pending on the device: the loop makes it, the sender resolves it."""

from dataclasses import dataclass

import msgspec

from noria.engine.runtime import Thumbnail
from noria.protocol.live_views import IterationView, ThumbnailView
from noria.protocol.messages import EngineView
from noria.scheduling.types import Phase, PhaseTimings


@dataclass(frozen=True)
class TimedIteration:
    """An iteration as the loop saw it, with the device's timings of its phases."""

    view: IterationView  # without stage timings
    timings: PhaseTimings | None

    def with_timings(self) -> IterationView:
        """The view with its stage timings; waits for the device.

        If the device runs behind the loop, `duration_s` is the device's too.
        """
        if self.timings is None:
            return self.view
        phases: tuple[Phase, ...] = ("encodes", "joins", "steps", "decodes")
        image_encode_s, text_encode_s, step_s, decode_s = map(self.timings.seconds, phases)
        total_s = image_encode_s + text_encode_s + step_s + decode_s
        return msgspec.structs.replace(
            self.view,
            duration_s=self.view.duration_s if self.timings.is_known else total_s,
            image_encode_s=image_encode_s,
            text_encode_s=text_encode_s,
            decode_s=decode_s,
        )


@dataclass(frozen=True)
class PendingView:
    """A view without iterations and thumbnails, and these beside it; thumbnails with slot and request id."""

    view: EngineView
    iterations: tuple[TimedIteration, ...] = ()
    thumbnails: tuple[tuple[int, str, Thumbnail], ...] = ()


def resolve_view(pending: PendingView) -> tuple[EngineView, bytes | None]:
    """The complete view, and the frame with the pixels of its thumbnails (None without any); waits for the device."""
    thumbnails, frames, offset = [], [], 0
    for slot, request_id, thumbnail in pending.thumbnails:
        thumbnails.append(
            ThumbnailView(slot, request_id, thumbnail.image.index, thumbnail.width_px, thumbnail.height_px, offset)
        )
        frames.append(thumbnail.rgb())
        offset += 3 * thumbnail.width_px * thumbnail.height_px
    iterations = tuple(iteration.with_timings() for iteration in pending.iterations)
    view = msgspec.structs.replace(pending.view, iterations=iterations, thumbnails=tuple(thumbnails))
    return view, b"".join(frames) if frames else None
