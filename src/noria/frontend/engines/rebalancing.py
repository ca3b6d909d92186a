"""Has busy engines hand over requests to engines of the same model that have much less to do.

The newest requests go first: those that wait, and then the running images that have the most steps left.
"""

from collections.abc import Sequence

from noria.frontend.engines.client import EngineClient
from noria.frontend.engines.router import holds, predict_backlogs_s
from noria.protocol.request import AnyRequest
from noria.scheduling.cluster.rebalancer import EngineWork, results_to_move


def rebalance(engines: Sequence[EngineClient], now: float) -> None:
    """Ask for as many requests as `scheduling/cluster/rebalancer.py` says, of each model by itself."""
    movable = {engine: engine.movable_requests(now) for engine in engines}
    models = {(request.model, request.model_version) for requests in movable.values() for request in requests}
    for model, version in sorted(models):
        holding = [engine for engine in engines if holds(engine, model, version)]
        if len(holding) < 2:
            continue
        of_model = [
            [request for request in movable[engine] if (request.model, request.model_version) == (model, version)]
            for engine in holding
        ]
        work = [
            EngineWork(backlog_s, sum(request.payload.num_results for request in requests), _call_s(engine, requests))
            for engine, requests, backlog_s in zip(holding, of_model, predict_backlogs_s(holding), strict=True)
        ]
        for engine, requests, num_results in zip(holding, of_model, results_to_move(work), strict=True):
            engine.move(_choose(requests, num_results))


def _choose(requests: Sequence[AnyRequest], num_results: int) -> list[AnyRequest]:
    """Return the first requests that have so many results together, or less."""
    chosen = []
    for request in requests:
        if request.payload.num_results <= num_results:
            chosen.append(request)
            num_results -= request.payload.num_results
    return chosen


def _call_s(engine: EngineClient, requests: Sequence[AnyRequest]) -> float:
    """Return the longest call that the engine has measured of the sizes of these requests; 0 if there is none."""
    sizes = {(request.model, request.payload.width, request.payload.height) for request in requests}
    costs = () if engine.load is None else engine.load.costs
    calls_s = [
        each.slowdown * seconds
        for each in costs
        if (each.model, each.width_px, each.height_px) in sizes
        for seconds in each.step_s.values()
    ]
    return max(calls_s, default=0.0)
