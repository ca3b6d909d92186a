"""The delivery of an engine: waits for what the device still computes or copies, and sends it; so the wheel never waits for either."""

import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from noria.channel import EngineChannel, Peer
from noria.engine.cells import Shown, packed
from noria.engine.desk import Departure, Desk
from noria.engine.loop import Ended, Happening, ImageReady, Moved, PreviewReady
from noria.engine.spans import StageSpans
from noria.errors import DeadlineUnmeetable, NoriaError, QueueFull
from noria.messages import Failed, Finished, ImageDone, Preview, Progress, Timings
from noria.scheduling.plans import End

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages

CODES = {
    End.FAILED: "generation_failed",
    End.CANCELLED: "cancelled",
    End.EXPIRED: "deadline_exceeded",
    End.REFUSED: QueueFull.code,
    End.UNMEETABLE: DeadlineUnmeetable.code,
}
"""What a request that ended so is answered with, of `noria.errors`."""


class Delivery(threading.Thread):
    """Sends what the wheel hands over, in order, waiting for the device's copies where need be."""

    def __init__(self, channel: EngineChannel, desk: Desk, spans: StageSpans) -> None:
        super().__init__(name="delivery", daemon=True)
        self._spans = spans
        self._arrivals, self._busy = desk.arrivals, desk.watch.delivery
        self.parcels: queue.SimpleQueue[tuple[Peer, Happening[PreparedImages] | Shown] | None] = queue.SimpleQueue()
        self._channel = channel
        self._landed: dict[str, float] = {}  # when the last image's pixels of a request were there, monotonic seconds
        self._failed: dict[str, NoriaError] = {}  # requests with an image that failed after its decoding

    def run(self) -> None:
        """Deliver until a None comes."""
        while (parcel := self.parcels.get()) is not None:
            peer, event = parcel
            with self._busy:
                match event:
                    case Moved():
                        self._channel.send(peer, _progress(event))
                    case PreviewReady():
                        self._preview(peer, event)
                    case ImageReady():
                        self._image(peer, event)
                    case Ended():
                        self._end(peer, event)
                    case Shown():
                        self._channel.send(peer, *packed(event))

    def _preview(self, peer: Peer, ready: "PreviewReady[PreparedImages]") -> None:
        shown = ready.preview
        message = Preview(shown.image.request_id, shown.image.index, shown.call, shown.width_px, shown.height_px)
        self._channel.send(peer, message, shown.pixels.rgb())

    def _image(self, peer: Peer, ready: "ImageReady[PreparedImages]") -> None:
        request = ready.prepared.request
        if request.request_id in self._failed:
            return
        try:
            rgb = ready.pixels.rgb()
        except NoriaError as error:
            self._failed[request.request_id] = error
            self._arrivals.put(Departure(peer, request.request_id))  # its other images need not be drawn
            return
        self._landed[request.request_id] = time.monotonic()
        done = ImageDone(
            request.request_id, ready.index, request.seed + ready.index, request.width_px, request.height_px
        )
        self._channel.send(peer, done, rgb)

    def _end(self, peer: Peer, ended: "Ended[PreparedImages]") -> None:
        event = ended.event
        error = self._failed.pop(event.request_id, None)
        is_drawn = event.end is End.FINISHED
        # A device that works behind the wheel had not drawn it when the wheel saw its end.
        landed = self._landed.pop(event.request_id, event.at)
        at = max(landed, event.at) if is_drawn else event.at
        times = replace(event.times, slot_s=event.times.slot_s + at - event.at)
        code = error.code if error is not None else None if is_drawn else CODES[event.end]
        self._spans.ended(ended.prepared.request, times, at, code, is_drawn=is_drawn)
        timings = Timings(times.queue_s, times.encode_s, times.denoise_s, times.decode_s)
        if code is None:
            self._channel.send(peer, Finished(event.request_id, timings, times.num_calls, times.mean_batch))
            return
        failed = Failed(
            event.request_id,
            code,
            event.reason if error is None else error.message,
            retry_after_s=event.retry_after_s,
            timings=timings,
            num_steps_run=times.num_calls,
            mean_batch=times.mean_batch,
        )
        self._channel.send(peer, failed)


def _progress(moved: "Moved[PreparedImages]") -> Progress:
    at = moved.whereabouts
    return Progress(
        request_id=moved.prepared.request.request_id,
        queue_position=at.queue_position,
        call=at.call,
        num_calls=moved.prepared.num_calls,
        start_in_s=at.start_in_s,
        finish_in_s=at.finish_in_s,
    )
