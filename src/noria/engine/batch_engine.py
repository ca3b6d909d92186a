"""The engine of models that take one call: its sessions execute batches beside the loop.

The loop has no thread of its own, so that a request changes threads only once: the channel's thread accepts what has
arrived and plans the batch, and the session that executes it commits it, takes the next one and sends the answers. The
engine's own thread does what is due at a time, and what is rare.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from opentelemetry.trace import Tracer

from noria.engine.base_engine import LOAD_INTERVAL_S, BaseEngine
from noria.engine.batch_loop import BatchLoop
from noria.engine.commands import SubmitCommand, WakeCommand
from noria.engine.live.batch_publisher import BatchLiveView
from noria.engine.loop import EngineEvent, RequestEnded
from noria.engine.receiver import RequestReceiver
from noria.engine.runtime import BatchRuntime, FinishedBatch
from noria.engine.sender import EndedItem
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import BatchPlan


class BatchEngine(BaseEngine):
    """An engine whose sessions execute batches beside the loop."""

    def __init__(
        self,
        name: str,
        channel: EngineChannel,
        receiver: RequestReceiver,
        runtime: BatchRuntime[Any],
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        super().__init__(name, channel, receiver, runtime, tracer)
        scheduler, self._num_sessions = runtime.scheduler, runtime.num_sessions
        self._loop: BatchLoop[Any] = BatchLoop(
            scheduler, runtime.executor, self._on_event, time.monotonic, self._on_plan, self._on_batch
        )
        self._live_view: BatchLiveView[ClientId] = BatchLiveView(
            receiver.incarnation, scheduler, runtime.num_sessions, self._loop.find_request, time.monotonic()
        )
        self._session_timers = receiver.watchdog.add_sessions(runtime.num_sessions)
        self._in_flight: dict[int, set[str]] = {}  # by session
        self._next_report_s = -math.inf
        self._ended: list[EndedItem] = []  # that are not answered yet
        receiver.on_accepted, receiver.on_forgotten = self._submit_all, self._forget

    def _wait_s(self, now: float) -> float | None:
        report_s = None if self._is_reported() else max(self._next_report_s - now, 0.0)
        waits_s = (self._loop.wait_s(now), self._live_view.wait_s(now), report_s)
        return min([wait_s for wait_s in waits_s if wait_s is not None], default=None)

    def _advance(self) -> None:
        self._change(lambda: None)

    def _submit_all(self, commands: list[SubmitCommand]) -> None:
        """Accept requests; on the channel's thread."""
        self._change(lambda: list(map(self._submit, commands)))

    def _forget(self, client: ClientId) -> None:
        """Cancel the requests of a client; on the thread that finds that it has left."""
        self._change(lambda: self._cancel(client, None))

    def _change(self, change: Callable[[], object]) -> None:
        """Change the loop, on any thread; then start what can start, and answer what has ended."""
        with self._lock:
            change()
            with self._receiver.watchdog.loop:
                self._loop.start_batches()
            if (now := time.monotonic()) >= self._next_report_s:
                self._next_report_s = now + LOAD_INTERVAL_S
                self._metrics.update_occupancy(self._loop.scheduler)
                self._publish_load(now)
            wait_s = self._wait_s(now)
            if wait_s is not None and now + wait_s < self._wakes_at:
                self._wakes_at = now + wait_s
                self._receiver.commands.put(WakeCommand())
            ended, self._ended = self._ended, []
        if ended:
            self._sender.send_ends(ended)

    def _is_reported(self) -> bool:
        """Whether the engine is idle and clients and metrics have it; a busy engine reports at intervals."""
        load = self._last_load[1]
        return load is not None and load.num_running + load.num_waiting == 0 and self._is_idle()

    def _on_plan(self, plan: BatchPlan) -> None:
        self._in_flight[plan.session] = {row.attempt_id for row in plan.rows}
        self._receiver.crash_journal.record_in_flight(set().union(*self._in_flight.values()))
        self._session_timers[plan.session].start()

    def _send(self, client: ClientId, event: EngineEvent[Any]) -> None:
        """Answer together what ends together."""
        if isinstance(event, RequestEnded):
            self._ended.append((client, event))
        else:
            super()._send(client, event)

    def _on_batch(self, batch: FinishedBatch) -> None:
        """Commit a batch; on its session's thread."""
        self._change(lambda: self._commit(batch))

    def _commit(self, batch: FinishedBatch) -> None:
        self._session_timers[batch.plan.session].stop()
        del self._in_flight[batch.plan.session]
        executed = self._loop.finish(batch)
        self._metrics.on_batch(executed, self._num_sessions)
        self._live_view.on_batch(executed, time.monotonic(), time.time())
