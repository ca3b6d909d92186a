"""What an engine counts: the wheel's turns, who boards and leaves, how full it is. Called by the wheel's thread only."""

import time
from typing import TYPE_CHECKING

from noria.engine.delivery import CODES
from noria.engine.executor import Executor
from noria.engine.loop import Ended, Happening, ImageReady, Turn
from noria.observe import metrics
from noria.scheduling.plans import ShapeClass
from noria.scheduling.steps import StepScheduler

if TYPE_CHECKING:
    from noria.engine.diffusion import PreparedImages

_BETWEEN_LOOKS_S = 0.5  # at what takes longer to find out than to count


class Gauges:
    """The metrics of one engine; `name` is what it is called in all its lives."""

    def __init__(self, name: str, executor: "Executor[PreparedImages]", num_slots: int) -> None:
        self._name, self._executor = name, executor
        self._shapes: set[str] = set()
        self._looked_s = 0.0
        metrics.ENGINE_UP.labels(self._name).set(1)
        metrics.SLOTS.labels(self._name).set(num_slots)

    def turned(self, turn: Turn) -> None:
        """A turn was carried out."""
        metrics.TURNS.labels(self._name).inc()
        metrics.ENGINE_BUSY_SECONDS.labels(self._name).inc(turn.seconds)
        metrics.JOINS.labels(self._name).inc(turn.num_boarded)
        if turn.outcome.overflowed is not None:
            metrics.OUT_OF_MEMORY.labels(self._name, turn.outcome.overflowed).inc()
        if turn.stepped is not None:
            metrics.DENOISE_STEPS.labels(self._name, turn.stepped.model).inc(len(turn.plan.steps))
            metrics.BATCH_SIZE.labels(self._name).observe(len(turn.plan.steps))
            metrics.STEP_SECONDS.labels(self._label(turn.stepped)).observe(turn.seconds)

    def stands(self, scheduler: StepScheduler) -> None:
        """How full it is between two turns."""
        metrics.SLOTS_USED.labels(self._name).set(scheduler.num_seated)
        metrics.QUEUE_DEPTH.labels(self._name).set(scheduler.num_waiting)
        now, idle = time.monotonic(), scheduler.num_seated == scheduler.num_waiting == 0
        if idle or now - self._looked_s >= _BETWEEN_LOOKS_S:
            self._looked_s = now
            metrics.QUEUE_DRAIN_SECONDS.labels(self._name).set(scheduler.drain_s)
            metrics.OLDEST_AGE_SECONDS.labels(self._name).set(scheduler.oldest_age_s(now))
            metrics.DEVICE_MEMORY_BYTES.labels(self._name).set(self._executor.memory_bytes())

    def happened(self, event: "Happening[PreparedImages]") -> None:
        """Images leave the batch."""
        if isinstance(event, ImageReady):
            metrics.LEAVES.labels(self._name, "ok").inc()
        if isinstance(event, Ended) and event.event.num_unseated:
            metrics.LEAVES.labels(self._name, CODES[event.event.end]).inc(event.event.num_unseated)

    def _label(self, shape: ShapeClass) -> str:
        """Sizes are the callers' choice, so only the first ones have a label of their own."""
        label = f"{shape.width_px}x{shape.height_px}"
        if label not in self._shapes and len(self._shapes) >= metrics.MOST_SHAPES:
            return "other"
        self._shapes.add(label)
        return label
