"""Decides how many results engines hand over to others that have less to do.

Each client of the engines decides for its own requests, and knows of no other. So an engine's excess is a part of its
work, and each client moves that part of its own: together they move what is too much, even if all do so at once. They
move half of it, since the predictions are rough and a client's requests are not as long as the others'. What is then
still too much moves when the engines have reported again.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

_MIN_EXCESS_S = 5.0  # `docs/adr/0019-moving-images.md` has what 2 and 10 s give
# A running image that moves waits for a call of the target, and its texts are encoded again.
_MIN_EXCESS_CALLS = 5.0
_MAX_RATIO = 0.5  # predictions differ by less among engines that are equally busy


class EngineWork(NamedTuple):
    """An engine that holds a model, as a client knows it."""

    backlog_s: float
    num_movable: int  # results of the client's requests that it may hand over
    call_s: float = 0.0  # seconds of the largest batch of the model


def results_to_move(engines: Sequence[EngineWork]) -> list[int]:
    """Return how many results each engine should hand over, to the least busy ones."""
    least_s = min(engine.backlog_s for engine in engines)
    mean_s = sum(engine.backlog_s for engine in engines) / len(engines)
    excess = [
        engine.num_movable * (1.0 - mean_s / engine.backlog_s) if _is_overloaded(engine, least_s) else 0.0
        for engine in engines
    ]
    total, num_to_move = sum(excess), [0] * len(engines)
    for _ in range(math.ceil(total / 2) if total >= 1.0 else 0):
        most = max(range(len(engines)), key=lambda number: excess[number] - num_to_move[number])
        num_to_move[most] += 1
    return num_to_move


def _is_overloaded(engine: EngineWork, least_s: float) -> bool:
    min_excess_s = max(_MIN_EXCESS_S, _MIN_EXCESS_CALLS * engine.call_s)
    return engine.backlog_s - least_s >= min_excess_s and least_s <= _MAX_RATIO * engine.backlog_s
