"""The thread that sends an engine's results. It waits for device transfers, so that the loop does not."""

import queue
import threading
import time
from typing import Any

from msgspec.structs import replace

from noria.engine.commands import CancelCommand
from noria.engine.live.pending_view import PendingView, resolve_view
from noria.engine.loop import (
    EngineEvent,
    PreviewReady,
    ProgressChanged,
    RequestEnded,
    RequestHandedOver,
    ResultReady,
)
from noria.engine.monitoring.request_spans import StageSpans
from noria.engine.receiver import RequestReceiver
from noria.errors import DeadlineUnmeetable, NoriaError, QueueFull
from noria.protocol.messages import Failed, Finished, FromEngine, HandedOver, MountResult, Progress
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import FinishReason

ERROR_CODE_BY_REASON = {
    FinishReason.FAILED: "generation_failed",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.EXPIRED: "deadline_exceeded",
    FinishReason.REJECTED: QueueFull.code,
    FinishReason.UNMEETABLE: DeadlineUnmeetable.code,
}
"""The error codes (of `noria.errors`) of requests that did not finish."""

MOVED = "moved"
"""How a request that another engine goes on with has left, in metrics, logs and views."""


EndedItem = tuple[ClientId, RequestEnded[Any]]
OutboxItem = tuple[ClientId, EngineEvent[Any] | PendingView | MountResult]


class ResponseSender(threading.Thread):
    """Sends the items of `outbox` in order: events, views and results of changes, each with the client that gets it."""

    def __init__(self, channel: EngineChannel, receiver: RequestReceiver, spans: StageSpans) -> None:
        super().__init__(name="sender", daemon=True)
        self._spans = spans
        self._commands, self._busy_timer = receiver.commands, receiver.watchdog.sender
        self.outbox: queue.SimpleQueue[OutboxItem | None] = queue.SimpleQueue()
        self._channel = channel
        # By attempt: when its last result was complete, in monotonic seconds.
        self._result_ready_s: dict[str, float] = {}
        # By attempt: the error of a result that was found invalid after it was decoded.
        self._failed: dict[str, NoriaError] = {}

    def run(self) -> None:
        """Send until the outbox yields None."""
        while (item := self.outbox.get()) is not None:
            with self._busy_timer:
                client, event = item
                match event:
                    case ProgressChanged():
                        self._channel.send(client, _progress(event))
                    case PreviewReady():
                        self._channel.send(client, *event.preview.message())
                    case ResultReady():
                        self._send_result(client, event)
                    case RequestEnded():
                        self._channel.send(client, *self._end_message(event))
                    case RequestHandedOver():
                        self._channel.send(client, *self._handed_over(event))
                    case PendingView():
                        self._channel.send(client, *resolve_view(event))
                    case MountResult():
                        self._channel.send(client, event)

    def _send_result(self, client: ClientId, ready: ResultReady[Any]) -> None:
        attempt_id = ready.prepared.request.attempt_id
        if attempt_id in self._failed:
            return
        try:
            message, data = ready.result.message()
        except NoriaError as error:
            self._failed[attempt_id] = error
            self._commands.put(CancelCommand(client, attempt_id))  # its other images are not needed
            return
        self._result_ready_s[attempt_id] = time.monotonic()
        self._channel.send(client, message, data)

    def send_ends(self, items: list[EndedItem]) -> None:
        """Send the ends of requests without images, those of one client together; on any thread."""
        messages: dict[ClientId, list[tuple[FromEngine, bytes | memoryview | None]]] = {}
        for client, ended in items:
            messages.setdefault(client, []).append(self._end_message(ended))
        for client, group in messages.items():
            self._channel.send_group(client, group)

    def _handed_over(self, event: RequestHandedOver[Any]) -> tuple[FromEngine, bytes | memoryview | None]:
        released, request = event.released, event.prepared.request
        attempt_id = request.attempt_id
        self._failed.pop(attempt_id, None)  # the image was not sent, so another engine finds that, too
        self._result_ready_s.pop(attempt_id, None)
        self._spans.record(request, released.timings, released.released_at, None, event.prepared)
        handed_over = HandedOver(
            attempt_id,
            tuple(state for state, _ in event.states),
            request.model_version,
            event.prepared.timings(released.timings),
        )
        return handed_over, b"".join(data for _, data in event.states) or None

    def _end_message(self, ended: RequestEnded[Any]) -> tuple[FromEngine, bytes | memoryview | None]:
        event = ended.event
        error = self._failed.pop(event.attempt_id, None)
        is_generated = event.finish_reason is FinishReason.FINISHED
        at, request_timings = event.finished_at, event.timings
        result_ready_s = self._result_ready_s.pop(event.attempt_id, at)
        if is_generated and result_ready_s > at:
            # A GPU runs behind the loop: it had not completed the image when the loop saw the end.
            request_timings = replace(request_timings, slot_s=request_timings.slot_s + result_ready_s - at)
            at = result_ready_s
        code = error.code if error is not None else None if is_generated else ERROR_CODE_BY_REASON[event.finish_reason]
        self._spans.record(
            ended.prepared.request,
            request_timings,
            at,
            code,
            ended.prepared,
            is_generated=is_generated,
        )
        timings = ended.prepared.timings(request_timings)
        if code is None:
            result, data = ended.prepared.final_result()
            finished = Finished(
                event.attempt_id,
                timings,
                request_timings.num_calls,
                request_timings.mean_batch,
                event.predicted_s,
                result,
            )
            return finished, data
        failed = Failed(
            event.attempt_id,
            code,
            event.message if error is None else error.message,
            retry_after_s=event.retry_after_s,
            timings=timings,
            num_steps_run=request_timings.num_calls,
            mean_batch=request_timings.mean_batch,
        )
        return failed, None


def _progress(event: ProgressChanged[Any]) -> Progress:
    progress = event.progress
    return Progress(
        attempt_id=event.prepared.request.attempt_id,
        queue_position=progress.queue_position,
        call=progress.call,
        num_calls=event.prepared.num_calls,
        start_in_s=progress.start_in_s,
        finish_in_s=progress.finish_in_s,
    )
