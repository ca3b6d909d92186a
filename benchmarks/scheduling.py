"""What deciding costs: `submit`, `plan` and `whereabouts` of a full scheduler, in milliseconds. No device is needed.

    python benchmarks/scheduling.py

32 images are seated and 256 wait, each of a request of its own, with deadlines, priorities, guidance and steps as they come, of one
shape class and of three. The batch that pays is 32 rows, so that the policy must also say who steps.
"""

import random
import statistics
import time
from collections.abc import Callable

from noria.scheduling.costs import CostModel, Curve
from noria.scheduling.plans import Outcome, Plan, ShapeClass, Ticket
from noria.scheduling.policies import POLICIES, Policy
from noria.scheduling.steps import StepScheduler

SEATED, WAITING, WATCHED, ROUNDS = 32, 256, 32, 30


def full_scheduler(shapes: list[ShapeClass], policy: Policy) -> tuple[StepScheduler, random.Random]:
    """32 seated and some way on their way, 256 waiting."""
    lot = random.Random(0)
    costs = CostModel(most_rows=32)
    for shape in shapes:
        costs.steps[shape] = Curve({1: 0.010, 2: 0.011, 4: 0.012, 8: 0.014, 16: 0.020, 32: 0.034})
        costs.decodes[shape] = Curve({1: 0.010, 4: 0.030})
    scheduler = StepScheduler(SEATED, queue_limit=WAITING + 2, policy=policy, costs=costs)
    for number in range(SEATED + WAITING):
        scheduler.submit(ticket(f"r{number}", lot, shapes), 0.0)
    for _ in range(5):
        turn(scheduler, scheduler.plan(0.0))
    return scheduler, lot


def ticket(request_id: str, lot: random.Random, shapes: list[ShapeClass]) -> Ticket:
    """A request as they come."""
    return Ticket(
        request_id,
        lot.choice(shapes),
        num_images=1,
        num_calls=lot.randrange(20, 60),
        deadline=None,
        due=lot.choice([None, 1e6 + lot.random()]),
        rows=lot.choice([1, 2]),
        priority=lot.choice(["low", "normal", "high"]),
    )


def turn(scheduler: StepScheduler, plan: Plan | None) -> None:
    """Carry it out, at once."""
    assert plan is not None
    scheduler.commit(plan, Outcome(), 0.0)


def measure(shapes: list[ShapeClass], policy: Policy) -> dict[str, float]:
    """Median milliseconds of each."""
    took: dict[str, list[float]] = {"submit": [], "plan": [], "plan that boards": [], "whereabouts": []}
    scheduler, lot = full_scheduler(shapes, policy)
    for number in range(ROUNDS):
        name = f"new{number}"
        newcomer = ticket(name, lot, shapes)
        took["submit"].append(milliseconds(lambda newcomer=newcomer: scheduler.submit(newcomer, 0.0)))
        scheduler.cancel(name, 0.0)
        watched = [f"r{10 + 2 * each}" for each in range(WATCHED)]
        took["whereabouts"].append(milliseconds(lambda watched=watched: scheduler.whereabouts(watched, 0.0)))
        plans: list[Plan | None] = []
        took["plan"].append(milliseconds(lambda plans=plans: plans.append(scheduler.plan(0.0))))
        turn(scheduler, plans[0])
    scheduler, lot = full_scheduler(shapes, policy)
    for number in range(ROUNDS):
        turn(scheduler, plan := scheduler.plan(0.0))
        assert plan is not None
        scheduler.cancel(plan.steps[-1].image.request_id, 0.0)  # a slot is free
        plans = []
        took["plan that boards"].append(milliseconds(lambda plans=plans: plans.append(scheduler.plan(0.0))))
        turn(scheduler, plans[0])
        scheduler.submit(ticket(f"more{number}", lot, shapes), 0.0)
    return {name: statistics.median(each) for name, each in took.items()}


def milliseconds(what: Callable[[], object]) -> float:
    """Of this thread's CPU that a call takes: what neighbours on the machine take is not counted."""
    started = time.thread_time()
    what()
    return 1e3 * (time.thread_time() - started)


def main() -> None:
    """Print a table."""
    one, three = [ShapeClass(512, 512)], [ShapeClass(512, 512), ShapeClass(768, 512), ShapeClass(512, 768)]
    for name, policy in POLICIES.items():
        for shapes in (one, three):
            figures = measure(shapes, policy)
            print(f"{name:15} {len(shapes)} shapes  " + "  ".join(f"{what} {ms:.2f}" for what, ms in figures.items()))


if __name__ == "__main__":
    main()
