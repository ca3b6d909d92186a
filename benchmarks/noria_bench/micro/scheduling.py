"""What deciding costs: `submit`, `plan` and `whereabouts` of a full scheduler, in milliseconds. No device is needed.

    python benchmarks/scheduling.py

32 images are seated and 256 wait, each of a request of its own, with deadlines, priorities, guidance and steps as they come, of one
shape class and of three. The batch that pays is 32 rows, so that the policy must also say who steps.
"""

import random
import statistics
import time
from collections.abc import Callable

from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES, Policy
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, IterationPlan, IterationResult, SchedulableRequest

NUM_RUNNING, NUM_WAITING, NUM_WATCHED, NUM_ROUNDS = 32, 256, 32, 30


def full_scheduler(shapes: list[BatchKey], policy: Policy) -> tuple[StepScheduler, random.Random]:
    """32 seated and some way on their way, 256 waiting."""
    rng = random.Random(0)
    costs = CostModel(max_rows=32)
    for shape in shapes:
        costs.steps[shape] = CostCurve({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.014, 16: 0.020, 32: 0.034})
        costs.decodes[shape] = CostCurve({1: 0.010, 4: 0.030})
    scheduler = StepScheduler(NUM_RUNNING, queue_limit=NUM_WAITING + 2, policy=policy, costs=costs)
    for number in range(NUM_RUNNING + NUM_WAITING):
        scheduler.submit(make_request(f"r{number}", rng, shapes), 0.0)
    for _ in range(5):
        commit_plan(scheduler, scheduler.plan(0.0))
    return scheduler, rng


def make_request(request_id: str, rng: random.Random, shapes: list[BatchKey]) -> SchedulableRequest:
    """A request as they come."""
    return SchedulableRequest(
        request_id,
        rng.choice(shapes),
        num_images=1,
        num_calls=rng.randrange(20, 60),
        expires_at=None,
        deadline=rng.choice([None, 1e6 + rng.random()]),
        rows=rng.choice([1, 2]),
        priority=rng.choice(["low", "normal", "high"]),
    )


def commit_plan(scheduler: StepScheduler, plan: IterationPlan | None) -> None:
    """Carry it out, at once."""
    assert plan is not None
    scheduler.commit(plan, IterationResult(), 0.0)


def measure(shapes: list[BatchKey], policy: Policy) -> dict[str, float]:
    """Median milliseconds of each."""
    durations_ms: dict[str, list[float]] = {"submit": [], "plan": [], "plan that boards": [], "whereabouts": []}
    scheduler, rng = full_scheduler(shapes, policy)
    for number in range(NUM_ROUNDS):
        name = f"new{number}"
        new_request = make_request(name, rng, shapes)
        durations_ms["submit"].append(
            cpu_milliseconds(lambda new_request=new_request: scheduler.submit(new_request, 0.0))
        )
        scheduler.cancel(name, 0.0)
        watched_ids = [f"r{10 + 2 * each}" for each in range(NUM_WATCHED)]
        durations_ms["whereabouts"].append(
            cpu_milliseconds(lambda watched_ids=watched_ids: scheduler.progress(watched_ids, 0.0))
        )
        plans: list[IterationPlan | None] = []
        durations_ms["plan"].append(cpu_milliseconds(lambda plans=plans: plans.append(scheduler.plan(0.0))))
        commit_plan(scheduler, plans[0])
    scheduler, rng = full_scheduler(shapes, policy)
    for number in range(NUM_ROUNDS):
        commit_plan(scheduler, plan := scheduler.plan(0.0))
        assert plan is not None
        scheduler.cancel(plan.steps[-1].image.request_id, 0.0)  # a slot is free
        plans = []
        durations_ms["plan that boards"].append(cpu_milliseconds(lambda plans=plans: plans.append(scheduler.plan(0.0))))
        commit_plan(scheduler, plans[0])
        scheduler.submit(make_request(f"more{number}", rng, shapes), 0.0)
    return {name: statistics.median(each) for name, each in durations_ms.items()}


def cpu_milliseconds(call: Callable[[], object]) -> float:
    """Of this thread's CPU that a call takes: what neighbours on the machine take is not counted."""
    started = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - started)


def main() -> None:
    """Print a table."""
    one_shape, three_shapes = [BatchKey(512, 512)], [BatchKey(512, 512), BatchKey(768, 512), BatchKey(512, 768)]
    for name, policy in POLICIES.items():
        for shapes in (one_shape, three_shapes):
            medians_ms = measure(shapes, policy)
            print(
                f"{name:15} {len(shapes)} shapes  " + "  ".join(f"{what} {ms:.2f}" for what, ms in medians_ms.items())
            )


if __name__ == "__main__":
    main()
