"""Routes requests among the engines by model and version. Pure: the engines' state is an argument."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from noria.protocol.model_spec import ModelKey, ModelSpec
from noria.scheduling.cluster.router import ReplicaLoad, rank_replicas


class RoutableEngine(Protocol):
    """What the router asks of an engine."""

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The models that it holds; none unless it is ready."""
        ...

    @property
    def expected_backlog_s(self) -> tuple[float, float]:
        """Predicted seconds of the work that it had when it reported last, and of what was submitted since."""
        ...

    @property
    def num_results_in_flight(self) -> int:
        """The number of results that the requests in flight at it ask for."""
        ...


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
    loads = [ReplicaLoad(str(number), held, *engine.expected_backlog_s) for number, engine in enumerate(holding)]
    return holding[int(rank_replicas(loads, wanted)[0])]


def holds(engine: RoutableEngine, model: str, version: str = "") -> bool:
    """Whether the engine is ready with this version of the model."""
    return any(spec.matches(model, version) for spec in engine.models)
