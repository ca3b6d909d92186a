"""Measures the CPU time of `submit`, `plan` and `progress` of a full scheduler, in milliseconds. Needs no device.

    python -m noria_bench.micro.scheduling

32 images run and 256 wait, each of its own request, with random deadlines, priorities, guidance and steps, of one batch
key and of three. The efficient batch has 32 rows, so that the policy must also select which images step.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES, Policy
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, IterationPlan, IterationResult, SchedulableRequest

NUM_RUNNING, NUM_WAITING, NUM_SUBSCRIBED, NUM_ROUNDS = 32, 256, 32, 30


def full_scheduler(keys: list[BatchKey], policy: Policy) -> tuple[StepScheduler, random.Random]:
    """A scheduler with 32 images after some steps, and 256 waiting."""
    rng = random.Random(0)
    costs = CostModel(max_rows=32)
    for key in keys:
        costs.steps[key] = CostCurve({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.014, 16: 0.020, 32: 0.034})
        costs.decodes[key] = CostCurve({1: 0.010, 4: 0.030})
    scheduler = StepScheduler(NUM_RUNNING, queue_limit=NUM_WAITING + 2, policy=policy, costs=costs)
    for number in range(NUM_RUNNING + NUM_WAITING):
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
        expires_at=None,
        deadline=rng.choice([None, 1e6 + rng.random()]),
        rows=rng.choice([1, 2]),
        priority=rng.choice(["low", "normal", "high"]),
    )


def commit_plan(scheduler: StepScheduler, plan: IterationPlan | None) -> None:
    """Execute the plan in no time."""
    assert plan is not None
    scheduler.commit(plan, IterationResult(), 0.0)


def _append_plan(scheduler: StepScheduler, plans: list[IterationPlan | None]) -> None:
    plans.append(scheduler.plan(0.0))


def measure(keys: list[BatchKey], policy: Policy) -> dict[str, float]:
    """Median milliseconds of each call."""
    durations_ms: dict[str, list[float]] = {"submit": [], "plan": [], "plan with joins": [], "progress": []}
    scheduler, rng = full_scheduler(keys, policy)
    for number in range(NUM_ROUNDS):
        name = f"new{number}"
        new_request = make_request(name, rng, keys)
        durations_ms["submit"].append(cpu_milliseconds(partial(scheduler.submit, new_request, 0.0)))
        scheduler.cancel(name, 0.0)
        attempt_ids = [f"r{10 + 2 * each}" for each in range(NUM_SUBSCRIBED)]
        durations_ms["progress"].append(cpu_milliseconds(partial(scheduler.progress, attempt_ids, 0.0)))
        plans: list[IterationPlan | None] = []
        durations_ms["plan"].append(cpu_milliseconds(partial(_append_plan, scheduler, plans)))
        commit_plan(scheduler, plans[0])
    scheduler, rng = full_scheduler(keys, policy)
    for number in range(NUM_ROUNDS):
        commit_plan(scheduler, plan := scheduler.plan(0.0))
        assert plan is not None
        # Frees a slot.
        scheduler.cancel(plan.steps[-1].image.attempt_id, 0.0)
        plans = []
        durations_ms["plan with joins"].append(cpu_milliseconds(partial(_append_plan, scheduler, plans)))
        commit_plan(scheduler, plans[0])
        scheduler.submit(make_request(f"more{number}", rng, keys), 0.0)
    return {name: statistics.median(each) for name, each in durations_ms.items()}


def cpu_milliseconds(call: Callable[[], object]) -> float:
    """The CPU time of a call in this thread, which other load on the machine does not affect."""
    started = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - started)


def main() -> None:
    """Print the medians for each policy."""
    one_key, three_keys = [BatchKey(512, 512)], [BatchKey(512, 512), BatchKey(768, 512), BatchKey(512, 768)]
    for name, policy in POLICIES.items():
        for keys in (one_key, three_keys):
            medians_ms = measure(keys, policy)
            print(
                f"{name:15} {len(keys)} batch keys  " + "  ".join(f"{what} {ms:.2f}" for what, ms in medians_ms.items())
            )


if __name__ == "__main__":
    main()
