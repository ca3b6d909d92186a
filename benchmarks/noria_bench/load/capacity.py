"""Measures how fast a server is: how long a request takes alone, and how much mixed work it sustains."""

import itertools
import math
import time
from collections.abc import Iterable
from typing import Any

import httpx
from msgspec import Struct

from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.load import closed_loop
from noria_bench.load.workload import Mix, RequestTemplate

# Repetitions of each request alone; the quickest counts, since only disturbances make one slower.
_NUM_REPEATS = 3
_FEW_STEPS = 5
# Twice a CPU's slots: a request always waits to join the batch.
_NUM_USERS = 32
_WARM_UP_SHARE = 0.25
NUM_STEADY_USERS = 8


class SoloCost(Struct, frozen=True):
    """Seconds that requests of one size, guidance and number of images take alone: `fixed_s + call_s × calls`."""

    width: int
    height: int
    guided: bool
    n: int
    fixed_s: float
    call_s: float

    def matches(self, template: RequestTemplate) -> bool:
        """Whether this is the cost of requests such as `template`."""
        return all(getattr(self, name) == getattr(template, name) for name in ("width", "height", "guided", "n"))


class Capacity(Struct, frozen=True):
    """The work that a server finished per second while 32 users kept it busy."""

    rows_per_s: float
    images_per_s: float
    requests_per_s: float
    num_failures: int


def solo_s(costs: Iterable[SoloCost], template: RequestTemplate) -> float:
    """Seconds that `template` takes alone; its kind must be among `costs`."""
    cost = next(cost for cost in costs if cost.matches(template))
    return cost.fixed_s + cost.call_s * template.num_calls


def measure_solo(url: str, mix: Mix, spec: DiffusionModelSpec) -> tuple[SoloCost, ...]:
    """Send one request at a time, of every size, guidance and number of images in `mix`, with few and default steps."""
    guidances = {guidance > 1.0: guidance for guidance in mix.guidance.values}.values()
    shapes = list(itertools.product(mix.sizes.values, guidances, mix.num_images.values))
    steps = (_FEW_STEPS, max(spec.default_steps, 2 * _FEW_STEPS))
    pairs = [
        tuple(RequestTemplate("a red circle", 1, *size, count, guidance, spec.default_scheduler, n) for count in steps)
        for size, guidance, n in shapes
    ]
    seconds = dict.fromkeys(itertools.chain.from_iterable(pairs), math.inf)
    with httpx.Client(timeout=300, trust_env=False) as client:
        # In rounds, so that one disturbance does not affect all repeats of a kind.
        for _, template in itertools.product(range(_NUM_REPEATS), list(seconds)):
            started = time.perf_counter()
            client.post(url, json=template.body).raise_for_status()
            seconds[template] = min(seconds[template], time.perf_counter() - started)
    return tuple(fit_solo_cost(few, seconds[few], many, seconds[many]) for few, many in pairs)


def fit_solo_cost(few: RequestTemplate, few_s: float, many: RequestTemplate, many_s: float) -> SoloCost:
    """The line through the durations with few and with many steps; neither of its parts is below 0."""
    call_s = max(0.0, many_s - few_s) / (many.num_calls - few.num_calls)
    fixed_s = max(0.0, few_s - call_s * few.num_calls)
    return SoloCost(few.width, few.height, few.guided, few.n, fixed_s, call_s)


def measure_capacity(port: int, path: str, mix: Mix, spec: DiffusionModelSpec, seconds: float, seed: int) -> Capacity:
    """Keep the server busy with `mix` for `seconds`; the first quarter is warm-up. No request has a deadline.

    Raises:
        RuntimeError: nothing was finished after the warm-up.

    """
    start, templates = time.monotonic(), _templates(mix, seed)
    replies = _run_users(port, path, templates, _NUM_USERS, seconds)
    return capacity_of_replies(replies, templates, spec, start + _WARM_UP_SHARE * seconds, start + seconds)


def measure_prediction_errors(port: int, path: str, mix: Mix, seconds: float, seed: int) -> list[float]:
    """The relative errors of predictions while 8 users keep a server busy with `mix`: (actual / predicted - 1) of each
    request.

    Each user sends the next request when the previous one is done, so the load is steady. The first quarter of
    `seconds` is warm-up.
    """
    counted_from = time.monotonic() + _WARM_UP_SHARE * seconds
    replies = _run_users(port, path, _templates(mix, seed), NUM_STEADY_USERS, seconds)
    predictions = [
        (reply.latency_s, reply.predicted_s)
        for reply in replies
        if reply.status == 200 and reply.sent_s >= counted_from
    ]
    return [took_s / predicted_s - 1.0 for took_s, predicted_s in predictions if predicted_s]


def _templates(mix: Mix, seed: int) -> list[RequestTemplate]:
    return list(itertools.islice(mix.templates(seed), 4096))


def _run_users(
    port: int, path: str, templates: list[RequestTemplate], num_users: int, seconds: float
) -> list[closed_loop.Reply]:
    def body(number: int) -> dict[str, Any]:
        return templates[number % len(templates)].body

    return closed_loop.run_closed_loop(port, num_users, seconds, body, path)


def capacity_of_replies(
    replies: list[closed_loop.Reply],
    templates: list[RequestTemplate],
    spec: DiffusionModelSpec,
    start: float,
    end: float,
) -> Capacity:
    """Return what was finished per second between `start` and `end`.

    Raises:
        RuntimeError: nothing was.

    """
    finished = [
        templates[reply.number % len(templates)]
        for reply in replies
        if reply.status == 200 and start <= reply.done_s < end
    ]
    if not finished:
        statuses = sorted({reply.status for reply in replies})
        raise RuntimeError(
            f"the server finished nothing in {end - start:.1f} s under load; its answers were {statuses}"
        )
    return Capacity(
        rows_per_s=sum(template.rows(spec) for template in finished) / (end - start),
        images_per_s=sum(template.n for template in finished) / (end - start),
        requests_per_s=len(finished) / (end - start),
        num_failures=sum(reply.status != 200 for reply in replies),
    )
