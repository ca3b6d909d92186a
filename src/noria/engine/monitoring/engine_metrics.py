"""Records an engine's metrics: iterations, joins and departures, occupancy. Called by the loop's thread only."""

import time
from collections.abc import Sequence
from typing import Any

from noria.engine.batch_loop import ExecutedBatch
from noria.engine.loop import EngineEvent, Iteration, RequestEnded, RequestHandedOver, ResultReady
from noria.engine.runtime import Executor
from noria.engine.sender import ERROR_CODE_BY_REASON, MOVED
from noria.observe.metrics import declarations
from noria.protocol.messages import ModelPrecision
from noria.scheduling.interface import Scheduler

_SAMPLE_INTERVAL_S = 0.5  # of the gauges whose values take longer to compute than a counter


class EngineMetrics:
    """The metrics of one engine; `name` stays the same when its process restarts."""

    def __init__(self, name: str, executor: Executor[Any], num_slots: int) -> None:
        self._name, self._executor = name, executor
        self._shapes: set[str] = set()
        self._sampled_s = 0.0
        declarations.ENGINE_UP.labels(self._name).set(1)
        declarations.SLOTS.labels(self._name).set(num_slots)

    def on_precisions(self, precisions: Sequence[ModelPrecision]) -> None:
        """Set how near its text encoders are to float32."""
        for each in precisions:
            if each.fidelity is not None:
                declarations.ENCODER_FIDELITY.labels(self._name, each.model, each.dtype).set(each.fidelity)

    def on_iteration(self, iteration: Iteration) -> None:
        """Count an executed iteration."""
        declarations.ITERATIONS.labels(self._name).inc()
        declarations.ENGINE_BUSY_SECONDS.labels(self._name).inc(iteration.duration_s)
        declarations.JOINS.labels(self._name).inc(iteration.num_joined)
        if iteration.outcome.oom_phase is not None:
            declarations.OUT_OF_MEMORY.labels(self._name, iteration.outcome.oom_phase).inc()
        if iteration.stepped is not None:
            declarations.DENOISE_STEPS.labels(self._name, iteration.stepped.request.model).inc(
                len(iteration.plan.steps)
            )
            declarations.BATCH_SIZE.labels(self._name).observe(len(iteration.plan.steps))
            declarations.ITERATION_SECONDS.labels(self._bounded(iteration.stepped.shape_label)).observe(
                iteration.duration_s
            )

    def on_batch(self, executed: ExecutedBatch[Any], num_sessions: int) -> None:
        """Count an executed batch."""
        batch, name = executed.batch, self._name
        num_rows, num_tokens = len(batch.plan.rows), sum(batch.plan.num_tokens)
        model = batch.plan.batch_key.model.name
        declarations.ITERATIONS.labels(name).inc()
        declarations.ENGINE_BUSY_SECONDS.labels(name).inc(batch.seconds / num_sessions)
        declarations.JOINS.labels(name).inc(num_rows)
        if batch.result.oom_phase is not None:
            declarations.OUT_OF_MEMORY.labels(name, batch.result.oom_phase).inc()
            return
        declarations.DEPARTURES.labels(name, "ok").inc(num_rows - len(batch.result.failed))
        declarations.BATCH_SIZE.labels(name).observe(num_rows)
        declarations.TOKENS.labels(name, model).inc(num_tokens)
        declarations.PADDING_TOKENS.labels(name, model).inc(batch.plan.padded_tokens - num_tokens)
        unit = 1 if num_rows <= declarations.MAX_EXACT_TEXTS else declarations.MAX_EXACT_TEXTS
        texts = str(-(-num_rows // unit) * unit)
        declarations.TEXT_BATCHES.labels(model, texts).inc()
        declarations.TEXT_BATCH_SECONDS.labels(model, texts).inc(batch.seconds)
        label = f"{batch.plan.length} tokens"
        declarations.ITERATION_SECONDS.labels(self._bounded(label)).observe(batch.seconds)

    def update_occupancy(self, scheduler: Scheduler[Any, Any]) -> None:
        """Set the gauges, between two iterations."""
        declarations.SLOTS_USED.labels(self._name).set(scheduler.num_running)
        declarations.QUEUE_DEPTH.labels(self._name).set(scheduler.num_waiting)
        now, idle = time.monotonic(), scheduler.num_running == scheduler.num_waiting == 0
        if idle or now - self._sampled_s >= _SAMPLE_INTERVAL_S:
            self._sampled_s = now
            declarations.BACKLOG_SECONDS.labels(self._name).set(scheduler.backlog_s)
            declarations.QUEUE_OLDEST_AGE_SECONDS.labels(self._name).set(scheduler.oldest_age_s(now))
            declarations.DEVICE_MEMORY_BYTES.labels(self._name).set(self._executor.memory_bytes())

    def on_event(self, event: EngineEvent[Any]) -> None:
        """Count the images that leave the batch."""
        if isinstance(event, ResultReady):
            declarations.DEPARTURES.labels(self._name, "ok").inc()
        if isinstance(event, RequestEnded) and event.event.num_departures:
            declarations.DEPARTURES.labels(self._name, ERROR_CODE_BY_REASON[event.event.finish_reason]).inc(
                event.event.num_departures
            )
        if isinstance(event, RequestHandedOver) and event.released.images:
            declarations.DEPARTURES.labels(self._name, MOVED).inc(len(event.released.images))

    def _bounded(self, label: str) -> str:
        """The label, or "other" after `MAX_SHAPES` of them: clients choose sizes, so labels must be bounded."""
        if label not in self._shapes and len(self._shapes) >= declarations.MAX_SHAPES:
            return "other"
        self._shapes.add(label)
        return label
