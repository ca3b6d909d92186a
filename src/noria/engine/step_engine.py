"""The engine of models that step: its loop executes the iterations of one running batch itself."""

import time
from typing import Any

from opentelemetry.trace import Tracer

from noria.engine.base_engine import LOAD_INTERVAL_S, BaseEngine
from noria.engine.commands import Command, ReleaseCommand
from noria.engine.live.step_publisher import StepLiveView
from noria.engine.loop import StepLoop
from noria.engine.receiver import RequestReceiver
from noria.engine.runtime import StepRuntime
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.transport import ClientId, EngineChannel
from noria.scheduling.types import IterationPlan


class StepEngine(BaseEngine):
    """An engine whose loop executes iterations itself."""

    def __init__(
        self,
        name: str,
        channel: EngineChannel,
        receiver: RequestReceiver,
        runtime: StepRuntime[Any],
        tracer: Tracer = GLOBAL_TRACER,
    ) -> None:
        super().__init__(name, channel, receiver, runtime, tracer)
        scheduler = runtime.scheduler
        self._loop: StepLoop[Any] = StepLoop(scheduler, runtime.executor, self._on_event, time.monotonic, self._on_plan)
        self._live_view: StepLiveView[ClientId] = StepLiveView(
            receiver.incarnation, scheduler, self._loop.find_request, time.monotonic(), runtime.slots_source
        )

    def _wait_s(self, now: float) -> float | None:
        return self._live_view.wait_s(now) if self._is_idle() else 0.0

    def _advance(self) -> None:
        if (now := time.monotonic()) - self._last_load[0] >= LOAD_INTERVAL_S:
            # Before the iteration: what arrives during it is not in the load, and clients forget what they have sent
            # before a load.
            self._publish_load(now)
        with self._receiver.watchdog.loop:
            iteration = self._loop.run_iteration()
        if iteration is not None:
            self._metrics.on_iteration(iteration)
            self._live_view.on_iteration(iteration, time.monotonic(), time.time())
        self._metrics.update_occupancy(self._loop.scheduler)
        self._metrics.update_evicted(self._loop.scheduler.num_evicted)
        if self._is_idle():
            self._loaded_models.on_idle()
            self._publish_load(time.monotonic())

    def _process(self, command: Command) -> None:
        if isinstance(command, ReleaseCommand):
            if self._client_by_attempt.get(command.attempt_id) == command.client:
                self._loop.hand_over(command.attempt_id)
        else:
            super()._process(command)

    def _stop_serving(self) -> set[ClientId]:
        clients = super()._stop_serving()
        for attempt_id in list(self._client_by_attempt):
            self._loop.hand_over(attempt_id)
        return clients

    def _on_plan(self, plan: IterationPlan) -> bool:
        images = [assignment.image for assignment in (*plan.joins, *plan.decodes)] + [step.image for step in plan.steps]
        self._receiver.crash_journal.record_iteration({image.attempt_id for image in images})
        return self._live_view.on_plan(plan, time.monotonic())
