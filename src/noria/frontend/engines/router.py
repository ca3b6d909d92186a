"""Routes requests among the engines by model and version. Pure: the engines' state is an argument."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from noria.protocol.model_spec import ModelKey, ModelSpec
from noria.scheduling.cluster.router import ReplicaLoad, rank_replicas


class RoutableEngine(Protocol):
    """The part of an engine that the router uses."""

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The models that it holds; none unless it is ready."""

    @property
    def reported_backlog_s(self) -> float:
        """Predicted seconds of the work that it had when it reported last."""

    @property
    def num_results_since_load(self) -> int:
        """The number of results that were asked of it after that report."""

    @property
    def result_s(self) -> float:
        """Seconds of its backlog for each result, as it last had any; 0: it never had."""

    @property
    def num_results_in_flight(self) -> int:
        """The number of results that the requests in flight at it ask for."""


EngineT = TypeVar("EngineT", bound=RoutableEngine)


def route(engines: Iterable[EngineT], model: str, version: str = "") -> EngineT | None:
    """The engine with the smallest backlog in seconds of those that hold `model`; None if none does.

    Of equal ones, that with the fewest results in flight. `version` is the model's fingerprint; empty: any.
    """
    holding = [engine for engine in engines if holds(engine, model, version)]
    if len(holding) < 2:
        return holding[0] if holding else None
    holding.sort(key=lambda engine: engine.num_results_in_flight)
    wanted = ModelKey(model, version)
    held = frozenset({wanted})
    loads = [ReplicaLoad(str(number), held, backlog_s) for number, backlog_s in enumerate(predict_backlogs_s(holding))]
    return holding[int(rank_replicas(loads, wanted)[0])]


def predict_backlogs_s(engines: Sequence[RoutableEngine]) -> list[float]:
    """Return the backlogs that engines have reported, with what was asked of them since."""
    # The same for all, else in a burst all requests go to one that was last seen with a nearly finished result.
    result_s = max(engine.result_s for engine in engines)
    return [engine.reported_backlog_s + engine.num_results_since_load * result_s for engine in engines]


def holds(engine: RoutableEngine, model: str, version: str = "") -> bool:
    """Whether the engine is ready with this version of the model."""
    for spec in engine.models:  # noqa: SIM110 - a generator would take longer than the rest
        if spec.name == model and version in ("", spec.fingerprint):
            return True
    return False
