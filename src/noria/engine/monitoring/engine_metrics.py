"""Records an engine's metrics: iterations, joins and departures, occupancy. Called by the loop's thread only."""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from noria.engine.loop import (
    Client,
    EngineEvent,
    ExecutedBatch,
    Iteration,
    RequestEnded,
    RequestHandedOver,
    ResultReady,
)
from noria.engine.runtime import Executor
from noria.engine.sender import ERROR_CODE_BY_REASON, MOVED
from noria.observe.metrics import declarations
from noria.observe.metrics.exposition import series
from noria.observe.metrics.section import add_all
from noria.protocol.messages import ModelPrecision
from noria.protocol.model_spec import CallChoice
from noria.scheduling.interface import Scheduler
from noria.scheduling.types import BatchKey

_SAMPLE_INTERVAL_S = 0.5  # the time between values of gauges that take longer to compute than a counter


class EngineMetrics:
    """The metrics of one engine; `name` stays the same when its process restarts."""

    def __init__(self, name: str, executor: Executor[Any], num_slots: int, slots_source: str = "set") -> None:
        self._name, self._executor = name, executor
        self._shapes: set[str] = set()
        self._sampled_s = 0.0
        declarations.ENGINE_UP.labels(self._name).set(1)
        declarations.SLOTS.labels(self._name, slots_source).set(num_slots)

    def on_precisions(self, precisions: Sequence[ModelPrecision]) -> None:
        """Set how near its text encoders are to float32, and its quantized models to those before."""
        for each in precisions:
            if each.fidelity is not None:
                declarations.FIDELITY.labels(self._name, each.model, each.dtype).set(each.fidelity)

    def on_call_choices(self, choices: Sequence[CallChoice]) -> None:
        """Set how many times as fast its image models' denoisers are called as without what was chosen."""
        for each in choices:
            compiled = str(each.compile_blocks).lower()
            declarations.CALL_SPEEDUP.labels(self._name, each.model, compiled, each.attention).set(each.speedup)

    def on_iteration(self, iteration: Iteration) -> None:
        """Count an executed iteration."""
        declarations.ITERATIONS.labels(self._name).inc()
        declarations.ENGINE_BUSY_SECONDS.labels(self._name).inc(iteration.duration_s)
        declarations.JOINS.labels(self._name).inc(iteration.num_joined)
        declarations.EVICTIONS.labels(self._name).inc(iteration.num_evicted)
        if iteration.outcome.oom_phase is not None:
            declarations.OUT_OF_MEMORY.labels(self._name, iteration.outcome.oom_phase).inc()
        if iteration.stepped is not None:
            declarations.DENOISE_STEPS.labels(self._name, iteration.stepped.model.name).inc(len(iteration.plan.steps))
            declarations.BATCH_SIZE.labels(self._name).observe(len(iteration.plan.steps))
            declarations.ITERATION_SECONDS.labels(self._bounded(_shape_label(iteration.stepped))).observe(
                iteration.duration_s
            )
            _count_by_key(iteration.images_by_client, iteration.duration_s)

    def on_batch(self, executed: ExecutedBatch[Any], num_sessions: int) -> None:
        """Count an executed batch."""
        batch, name = executed.batch, self._name
        num_rows, num_tokens = len(batch.plan.rows), sum(batch.plan.num_tokens)
        busy_s, length = batch.seconds / num_sessions, batch.plan.length
        iterations, busy, joins, *others = _batch_series(
            name, batch.plan.batch_key.model.name, num_rows, self._bounded(f"{length} tokens")
        )
        amounts = [(iterations, 1), (busy, busy_s), (joins, num_rows)]
        if not batch.result.fits:
            add_all(*amounts, (series(declarations.OUT_OF_MEMORY, name, "steps"), 1))  # the phase of the model call
            return
        num_ok, num_padding = num_rows - len(batch.result.failed), batch.plan.padded_tokens - num_tokens
        values = num_ok, num_rows, num_tokens, num_padding, 1, batch.seconds, batch.seconds
        add_all(*amounts, *zip(others, values, strict=True))
        _count_by_key(executed.tokens_by_client, busy_s)

    def update_occupancy(self, scheduler: Scheduler[Any]) -> None:
        """Set the gauges, between two iterations."""
        declarations.SLOTS_USED.labels(self._name).set(scheduler.num_running)
        declarations.QUEUE_DEPTH.labels(self._name).set(scheduler.num_waiting)
        now, idle = time.monotonic(), scheduler.num_running == scheduler.num_waiting == 0
        if idle or now - self._sampled_s >= _SAMPLE_INTERVAL_S:
            self._sampled_s = now
            declarations.BACKLOG_SECONDS.labels(self._name).set(scheduler.backlog_s)
            declarations.QUEUE_OLDEST_AGE_SECONDS.labels(self._name).set(scheduler.oldest_age_s(now))
            declarations.DEVICE_MEMORY_BYTES.labels(self._name).set(self._executor.memory_bytes())

    def update_evicted(self, num_evicted: int) -> None:
        """Set how many images are evicted, between two iterations."""
        declarations.EVICTED.labels(self._name).set(num_evicted)

    def on_event(self, event: EngineEvent[Any]) -> None:
        """Count the images that leave the batch."""
        if isinstance(event, ResultReady):
            declarations.DEPARTURES.labels(self._name, "ok").inc()
        elif isinstance(event, RequestEnded):
            if event.event.num_departures:
                declarations.DEPARTURES.labels(self._name, ERROR_CODE_BY_REASON[event.event.finish_reason]).inc(
                    event.event.num_departures
                )
        elif isinstance(event, RequestHandedOver) and event.released.images:
            declarations.DEPARTURES.labels(self._name, MOVED).inc(len(event.released.images))

    def _bounded(self, label: str) -> str:
        """The label, or "other" after `MAX_SHAPES` of them: clients choose sizes, so labels must be bounded."""
        if label not in self._shapes and len(self._shapes) >= declarations.MAX_SHAPES:
            return "other"
        self._shapes.add(label)
        return label


@functools.cache
def _batch_series(name: str, model: str, num_rows: int, shape: str) -> tuple[Any, ...]:
    """Return the series of an engine's batches. Labels are bounded, and so is the cache."""
    unit = 1 if num_rows <= declarations.MAX_EXACT_TEXTS else declarations.MAX_EXACT_TEXTS
    texts = str(-(-num_rows // unit) * unit)
    return (
        declarations.ITERATIONS.labels(name),
        declarations.ENGINE_BUSY_SECONDS.labels(name),
        declarations.JOINS.labels(name),
        declarations.DEPARTURES.labels(name, "ok"),
        declarations.BATCH_SIZE.labels(name),
        declarations.TOKENS.labels(name, model),
        declarations.PADDING_TOKENS.labels(name, model),
        declarations.TEXT_BATCHES.labels(model, texts),
        declarations.TEXT_BATCH_SECONDS.labels(model, texts),
        declarations.ITERATION_SECONDS.labels(shape),
    )


def _count_by_key(parts: Mapping[Client, int], seconds: float) -> None:
    """Divide `seconds` among keys in proportion to their parts."""
    total = sum(parts.values())
    for (key, _), part in parts.items():
        series(declarations.KEY_BUSY_SECONDS, key).inc(seconds * part / total)


def _shape_label(batch_key: BatchKey) -> str:
    """WIDTHxHEIGHT of images, and a mark of references."""
    return f"{batch_key.width_px}x{batch_key.height_px}" + ("+references" if batch_key.reference_px else "")
