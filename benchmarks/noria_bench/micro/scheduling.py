"""Measures `submit`, `plan`, `progress` and `expire` of a full scheduler, in milliseconds of CPU. Needs no device.

    python -m noria_bench.micro.scheduling [--slots N] [--waiting N …] [--rounds N] [-o FILE]

32 images run, or `--slots`, and others wait, each of its own request, with random deadlines, priorities, guidance and
steps, of one batch key and of three. The efficient batch has 32 rows, so that the policy must also select which images
step. Each `submit` and each `progress` computes a forecast, since an iteration or a departure is committed before.

Also prints by how much the forecasts of the requests behind the simulated head of the queue differ from those of a
simulation of the whole queue, as a share of the time to the finish.
"""

import argparse
import gc
import pathlib
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES, Policy
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, IterationPlan, IterationResult, SchedulableRequest
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import write_json

NUM_SUBSCRIBED = 32
ONE_KEY = [BatchKey(512, 512)]
THREE_KEYS = [BatchKey(512, 512), BatchKey(768, 512), BatchKey(512, 768)]


def full_scheduler(
    keys: list[BatchKey], policy: Policy, num_slots: int, num_waiting: int
) -> tuple[StepScheduler, random.Random]:
    """A scheduler with `num_slots` images after some steps, and `num_waiting` waiting."""
    rng = random.Random(0)
    costs = CostModel(max_rows=32)
    for key in keys:
        costs.steps[key] = CostCurve({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.014, 16: 0.020, 32: 0.034})
        costs.decodes[key] = CostCurve({1: 0.010, 4: 0.030})
    scheduler = StepScheduler(num_slots, queue_limit=num_slots + 2 * num_waiting, policy=policy, costs=costs)
    for number in range(num_slots + num_waiting):
        scheduler.submit(make_request(f"r{number}", rng, keys), 0.0)
    for _ in range(5):
        commit_plan(scheduler, scheduler.plan(0.0))
    return scheduler, rng


def make_request(attempt_id: str, rng: random.Random, keys: list[BatchKey]) -> SchedulableRequest:
    """A random request."""
    return SchedulableRequest(
        attempt_id,
        rng.choice(keys),
        num_images=1,
        num_calls=rng.randrange(20, 60),
        expires_at=1e7 + rng.random(),
        deadline=rng.choice([None, 1e6 + rng.random()]),
        rows=rng.choice([1, 2]),
        priority=rng.choice(["low", "normal", "high"]),
        client=f"client{rng.randrange(8)}",
    )


def commit_plan(scheduler: StepScheduler, plan: IterationPlan | None) -> None:
    """Execute the plan in no time."""
    assert plan is not None
    scheduler.commit(plan, IterationResult(), 0.0)


def measure(
    keys: list[BatchKey], policy: Policy, num_slots: int, num_waiting: int, num_rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each call, in rounds of new requests, plans, and plans in which one image joins."""
    ms: dict[str, list[float]] = {"submit": [], "plan": [], "plan with joins": [], "progress": [], "expire": []}
    scheduler, rng = full_scheduler(keys, policy, num_slots, num_waiting)
    plans: list[IterationPlan | None] = []

    def timed_plan(name: str) -> IterationPlan:
        ms[name].append(cpu_milliseconds(lambda: plans.append(scheduler.plan(0.0))))
        plan = plans.pop()
        assert plan is not None
        return plan

    gc.disable()
    for number in range(num_rounds):
        while scheduler.num_waiting < num_waiting:
            scheduler.submit(make_request(f"more{number}.{scheduler.num_waiting}", rng, keys), 0.0)
        commit_plan(scheduler, timed_plan("plan with joins" if scheduler.num_running < num_slots else "plan"))
        name = f"new{number}"
        ms["submit"].append(cpu_milliseconds(partial(scheduler.submit, make_request(name, rng, keys), 0.0)))
        scheduler.cancel(name, 0.0)
        attempt_ids = [f"r{10 + 2 * each}" for each in range(NUM_SUBSCRIBED)]
        ms["progress"].append(cpu_milliseconds(partial(scheduler.progress, attempt_ids, 0.0)))
        ms["expire"].append(cpu_milliseconds(partial(scheduler.expire, 0.0)))
        if number % 2:
            scheduler.cancel(scheduler.snapshot(0.0, 0).running[-1].image.attempt_id, 0.0)  # frees a slot
    gc.enable()
    return ms


def cpu_milliseconds(call: Callable[[], object]) -> float:
    """The CPU time of a call in this thread, which other load on the machine does not affect."""
    started = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - started)


def forecast_errors(keys: list[BatchKey], policy: Policy, num_slots: int, num_waiting: int) -> list[float]:
    """Return the relative differences from the exact forecast for the requests behind the head of the queue."""
    scheduler, _ = full_scheduler(keys, policy, num_slots, num_waiting)
    predictor = scheduler._predictor
    names = [each.image.attempt_id for each in predictor.queue(0.0)][predictor.head_images :]
    found = predictor.predict_requests(names, 0.0)
    predictor.head_images = 10**9
    predictor.table.bump_version()
    exact = predictor.predict_requests(names, 0.0)
    return [abs(found[name].finish_in_s / exact[name].finish_in_s - 1) for name in names]


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p99": statistics.quantiles(values, n=100, method="inclusive")[98]}


def main() -> None:
    """Print and write the median and the 99th percentile for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=32, metavar="N")
    parser.add_argument("--waiting", type=int, nargs="+", default=[256, 10_000], metavar="N")
    parser.add_argument("--rounds", type=int, default=400, metavar="N")
    parser.add_argument("-o", "--output", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for num_waiting in arguments.waiting:
        for name, policy in POLICIES.items():
            for keys in (ONE_KEY, THREE_KEYS):
                measured = measure(keys, policy, arguments.slots, num_waiting, arguments.rounds)
                errors = _summary(forecast_errors(keys, policy, arguments.slots, num_waiting))
                calls = {what: _summary(values) for what, values in measured.items()}
                rows.append({"waiting": num_waiting, "policy": name, "batch_keys": len(keys), "cpu_ms": calls})
                rows[-1]["forecast_error"] = errors
                print(
                    f"{num_waiting:6} {name:15} {len(keys)} keys  "
                    + "  ".join(f"{what} {each['median']:.3f}, {each['p99']:.3f}" for what, each in calls.items())
                    + f"  forecast {errors['median']:.1%}, {errors['p99']:.1%}",
                    flush=True,
                )
    if arguments.output is not None:
        result = collect_provenance() | {"running": arguments.slots, "rounds": arguments.rounds, "rows": rows}
        write_json(result, arguments.output)


if __name__ == "__main__":
    main()
