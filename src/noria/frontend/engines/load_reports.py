"""The load that ready engines have last reported, and how they compute their models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from noria.config.engine import MAX_SLOTS
from noria.frontend.engines.client import EngineClient
from noria.frontend.engines.router import holds
from noria.protocol.messages import EngineLoad, ModelPrecision, ShapeCosts
from noria.protocol.model_spec import CallChoice, ModelSpec

ReportT = TypeVar("ReportT", ShapeCosts, ModelPrecision, CallChoice)


@dataclass(frozen=True)
class PoolLoad:
    """The load of the engines that hold one model, together. `backlog_s` is that of the least busy engine."""

    backlog_s: float
    num_running: int
    num_waiting: int
    num_slots: int


class LoadReports:
    """The reports of `engines`, by model. A model is meant in the version of its `spec`."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self._engines = engines

    def backlog_s(self, spec: ModelSpec) -> float:
        """The backlog of the least busy engine that holds a model; 0 if none has reported one."""
        return min((load.backlog_s for load in self._loads(spec)), default=0.0)

    def load(self, spec: ModelSpec) -> PoolLoad:
        """The load of the engines that hold a model among others."""
        loads = self._loads(spec)
        return PoolLoad(
            self.backlog_s(spec),
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.num_slots for load in loads),
        )

    def num_slots(self, spec_type: type[ModelSpec]) -> int:
        """The slots of all engines with models of one kind; 0 until they have reported.

        Of each engine at most as many as the rows of its largest useful call.
        """
        return sum(
            min(engine.load.num_slots, max((costs.max_rows for costs in engine.load.costs), default=MAX_SLOTS))
            for engine in self._engines
            if engine.load is not None and any(isinstance(spec, spec_type) for spec in engine.models)
        )

    def costs(self, spec: ModelSpec) -> list[ShapeCosts]:
        """Return the costs that the engines with a model measured, in the engines' order."""
        return self._of_model(spec, lambda load: load.costs)

    def precision(self, spec: ModelSpec) -> ModelPrecision | None:
        """Return in which form the first engine with a model computes it; None: as it is."""
        return next(iter(self._of_model(spec, lambda load: load.precisions)), None)

    def call_choice(self, spec: ModelSpec) -> CallChoice | None:
        """Return how the first engine with an image model calls it; None: as the settings say."""
        return next(iter(self._of_model(spec, lambda load: load.call_choices)), None)

    def _of_model(self, spec: ModelSpec, reports: Callable[[EngineLoad], Sequence[ReportT]]) -> list[ReportT]:
        found = (each for load in self._loads(spec) for each in reports(load))
        return [each for each in found if spec.matches(each.model, each.version)]

    def _loads(self, spec: ModelSpec) -> list[EngineLoad]:
        engines = [engine for engine in self._engines if holds(engine, spec.name, spec.fingerprint)]
        return [engine.load for engine in engines if engine.load is not None]
