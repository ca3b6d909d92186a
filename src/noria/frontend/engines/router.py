"""Routes requests among the engines by model and version. Pure: the engines' state is an argument."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from noria.protocol.model_spec import ModelSpec


class RoutableEngine(Protocol):
    """What the router asks of an engine."""

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The models that it holds; none unless it is ready."""
        ...

    @property
    def num_results_in_flight(self) -> int:
        """The number of results that the requests in flight at it ask for."""
        ...


EngineT = TypeVar("EngineT", bound=RoutableEngine)


def route(engines: Iterable[EngineT], model: str, version: str = "") -> EngineT | None:
    """The engine with the fewest results in flight of those that hold `model`; None if none does.

    `version` is the model's fingerprint; empty: any.
    """
    holding = [engine for engine in engines if holds(engine, model, version)]
    return min(holding, key=lambda engine: engine.num_results_in_flight, default=None)


def holds(engine: RoutableEngine, model: str, version: str = "") -> bool:
    """Whether the engine is ready with this version of the model."""
    return any(spec.matches(model, version) for spec in engine.models)
