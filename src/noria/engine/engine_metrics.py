"""Records an engine's metrics: iterations, joins and departures, occupancy. Called by the loop's thread only."""

import time
from typing import Any

from noria.engine.loop import EngineEvent, Iteration, RequestEnded, ResultReady
from noria.engine.runtime import Executor
from noria.engine.sender import ERROR_CODE_BY_REASON
from noria.observe.metrics import declarations
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey

_SAMPLE_INTERVAL_S = 0.5  # of the gauges whose values take longer to compute than a counter


class EngineMetrics:
    """The metrics of one engine; `name` stays the same when its process restarts."""

    def __init__(self, name: str, executor: Executor[Any], num_slots: int) -> None:
        self._name, self._executor = name, executor
        self._shapes: set[str] = set()
        self._sampled_s = 0.0
        declarations.ENGINE_UP.labels(self._name).set(1)
        declarations.SLOTS.labels(self._name).set(num_slots)

    def on_iteration(self, iteration: Iteration) -> None:
        """Count an executed iteration."""
        declarations.ITERATIONS.labels(self._name).inc()
        declarations.ENGINE_BUSY_SECONDS.labels(self._name).inc(iteration.duration_s)
        declarations.JOINS.labels(self._name).inc(iteration.num_joined)
        if iteration.outcome.oom_phase is not None:
            declarations.OUT_OF_MEMORY.labels(self._name, iteration.outcome.oom_phase).inc()
        if iteration.batch_key is not None:
            declarations.DENOISE_STEPS.labels(self._name, iteration.batch_key.model.name).inc(len(iteration.plan.steps))
            declarations.BATCH_SIZE.labels(self._name).observe(len(iteration.plan.steps))
            declarations.ITERATION_SECONDS.labels(self._shape_label(iteration.batch_key)).observe(iteration.duration_s)

    def update_occupancy(self, scheduler: StepScheduler) -> None:
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

    def _shape_label(self, batch_key: BatchKey) -> str:
        """WIDTHxHEIGHT, or "other" after `MAX_SHAPES` sizes: clients choose sizes, so labels must be bounded."""
        label = f"{batch_key.width_px}x{batch_key.height_px}"
        if label not in self._shapes and len(self._shapes) >= declarations.MAX_SHAPES:
            return "other"
        self._shapes.add(label)
        return label
