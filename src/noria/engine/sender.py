"""The thread that sends an engine's results. It waits for device transfers, so that the loop does not."""

import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from noria.engine.loop import EngineEvent, ImageReady, PreviewReady, ProgressChanged, RequestEnded
from noria.engine.pending_view import PendingView, resolve_view
from noria.engine.receiver import CancelCommand, RequestReceiver
from noria.engine.request_spans import StageSpans
from noria.errors import DeadlineUnmeetable, NoriaError, QueueFull
from noria.protocol.messages import Failed, Finished, ImageDone, Preview, Progress, Timings
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import FinishReason

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import CompiledImageRequest

ERROR_CODE_BY_REASON = {
    FinishReason.FAILED: "generation_failed",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.EXPIRED: "deadline_exceeded",
    FinishReason.REFUSED: QueueFull.code,
    FinishReason.UNMEETABLE: DeadlineUnmeetable.code,
}
"""The error codes (of `noria.errors`) of requests that did not finish."""


class ResponseSender(threading.Thread):
    """Sends the items of `outbox` in order; each is an event or a view with the client that gets it."""

    def __init__(self, channel: EngineChannel, receiver: RequestReceiver, spans: StageSpans) -> None:
        super().__init__(name="sender", daemon=True)
        self._spans = spans
        self._commands, self._busy_timer = receiver.commands, receiver.watchdog.sender
        self.outbox: queue.SimpleQueue[tuple[ClientId, EngineEvent[CompiledImageRequest] | PendingView] | None] = (
            queue.SimpleQueue()
        )
        self._channel = channel
        # By request id: when the pixels of its last image were complete, in monotonic seconds.
        self._pixels_ready_s: dict[str, float] = {}
        # By request id: the error of an image that failed after it was decoded.
        self._failed: dict[str, NoriaError] = {}

    def run(self) -> None:
        """Send until the outbox yields None."""
        while (item := self.outbox.get()) is not None:
            client, event = item
            with self._busy_timer:
                match event:
                    case ProgressChanged():
                        self._channel.send(client, _progress(event))
                    case PreviewReady():
                        self._send_preview(client, event)
                    case ImageReady():
                        self._send_image(client, event)
                    case RequestEnded():
                        self._send_end(client, event)
                    case PendingView():
                        self._channel.send(client, *resolve_view(event))

    def _send_preview(self, client: ClientId, ready: "PreviewReady[CompiledImageRequest]") -> None:
        preview = ready.preview
        message = Preview(
            preview.image.request_id, preview.image.index, preview.call, preview.width_px, preview.height_px
        )
        self._channel.send(client, message, preview.pixels.rgb())

    def _send_image(self, client: ClientId, ready: "ImageReady[CompiledImageRequest]") -> None:
        request = ready.prepared.request
        if request.request_id in self._failed:
            return
        try:
            rgb = ready.pixels.rgb()
        except NoriaError as error:
            self._failed[request.request_id] = error
            self._commands.put(CancelCommand(client, request.request_id))  # its other images are not needed
            return
        self._pixels_ready_s[request.request_id] = time.monotonic()
        message = ImageDone(
            request.request_id, ready.index, request.seed + ready.index, request.width_px, request.height_px
        )
        self._channel.send(client, message, rgb)

    def _send_end(self, client: ClientId, ended: "RequestEnded[CompiledImageRequest]") -> None:
        event = ended.event
        error = self._failed.pop(event.request_id, None)
        is_generated = event.finish_reason is FinishReason.FINISHED
        # A GPU runs behind the loop: it had not completed the image when the loop saw the end.
        pixels_ready_s = self._pixels_ready_s.pop(event.request_id, event.finished_at)
        at = max(pixels_ready_s, event.finished_at) if is_generated else event.finished_at
        request_timings = replace(event.timings, slot_s=event.timings.slot_s + at - event.finished_at)
        code = error.code if error is not None else None if is_generated else ERROR_CODE_BY_REASON[event.finish_reason]
        self._spans.record(ended.prepared.request, request_timings, at, code, is_generated=is_generated)
        timings = Timings(
            request_timings.queue_s, request_timings.text_encode_s, request_timings.denoise_s, request_timings.decode_s
        )
        if code is None:
            self._channel.send(
                client, Finished(event.request_id, timings, request_timings.num_calls, request_timings.mean_batch)
            )
            return
        failed = Failed(
            event.request_id,
            code,
            event.message if error is None else error.message,
            retry_after_s=event.retry_after_s,
            timings=timings,
            num_steps_run=request_timings.num_calls,
            mean_batch=request_timings.mean_batch,
        )
        self._channel.send(client, failed)


def _progress(event: "ProgressChanged[CompiledImageRequest]") -> Progress:
    progress = event.progress
    return Progress(
        request_id=event.prepared.request.request_id,
        queue_position=progress.queue_position,
        call=progress.call,
        num_calls=event.prepared.num_calls,
        start_in_s=progress.start_in_s,
        finish_in_s=progress.finish_in_s,
    )
