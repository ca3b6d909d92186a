"""Deadlines and predictions in virtual time: the real scheduler and wheel on a device that takes what a cost curve says, ± 10 %.

    python benchmarks/deadlines.py

The curve is the bundled model's on two CPU cores. Open loop: 1,000 requests of 8 to 50 steps, one or two images, due after 2.5, 5 or
15 times what they take alone and 0.1 s; a load of 1 is 256 rows a second. Batches are as they are (small while slots are free), never
small, or always. Closed loop: users who send the next request when the last is done.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec

from noria.engine.executor import FakeExecutor, VirtualClock
from noria.engine.loop import Ended, Moved, Wheel
from noria.request import ImageRequest
from noria.scheduling import forecast, steps
from noria.scheduling.batches import together
from noria.scheduling.costs import CostModel, Curve
from noria.scheduling.plans import End, Outcome, Plan, ShapeClass
from noria.scheduling.policies import POLICIES
from noria.scheduling.steps import StepScheduler

STEP_S = {1: 0.012, 2: 0.019, 4: 0.0256, 8: 0.037, 16: 0.0635, 32: 0.107}
DECODE_S, ENCODE_S = {1: 0.0085, 2: 0.0163, 4: 0.0326}, 0.002
SHAPE, ROWS_PER_S, NOISE = ShapeClass(64, 64, "m"), 256, 0.1
STEPS, IMAGES, FACTORS = (8, 12, 20, 20, 30, 50), (1, 1, 1, 2), (2.5, 5.0, 15.0)


class Device(FakeExecutor):
    """One that takes what the curves say, and times its parts."""

    lot = random.Random(0)

    def execute(self, plan: Plan) -> Outcome:
        rows = sum(2 if self._accepted[s.image.request_id].request.guided else 1 for s in plan.steps)
        step_s = Curve(dict(STEP_S)).at(rows) if rows else 0.0
        decode_s = Curve(dict(DECODE_S)).at(len(plan.decodes)) if plan.decodes else 0.0
        parts = [math.exp(self.lot.gauss(0, NOISE)) * s for s in (step_s, decode_s, ENCODE_S * len(plan.boards))]
        self.turn_s = lambda _: sum(parts)
        return dataclasses.replace(super().execute(plan), step_s=parts[0], decode_s=parts[1], encode_s=parts[2])


def world(policy: str, hear: Callable[[Any], None]) -> tuple[Device, StepScheduler, Wheel[Any]]:
    costs = CostModel(32, {SHAPE: Curve(dict(STEP_S))}, {SHAPE: Curve(dict(DECODE_S))}, {"m": ENCODE_S})
    costs.settle()
    scheduler, device = StepScheduler(16, 4, 256, 120.0, POLICIES[policy], costs), Device(VirtualClock())
    device.lot = random.Random(2)
    return device, scheduler, Wheel(scheduler, device, hear, device.clock)


def request(number: int, lot: random.Random, num_images: int) -> ImageRequest:
    guidance = 3.0 if lot.random() < 0.8 else 1.0
    name, num_steps = f"r{number}", lot.choice(STEPS)
    return ImageRequest(name, "p", "", number, 64, 64, num_steps, guidance, num_images, "ddim", 600.0, model="m")


def open_loop(load: float, policy: str, count: int = 1000) -> float:
    """The share of requests that are done by their deadline."""
    lot, ends = random.Random(1), dict[str, End]()

    def hear(event: Any) -> None:
        if isinstance(event, Ended):
            ends[event.event.request_id] = event.event.end

    device, scheduler, wheel = world(policy, hear)
    mean_rows = sum(STEPS) / len(STEPS) * 1.8 * sum(IMAGES) / len(IMAGES)
    arrivals, now = [], 0.0
    for number in range(count):
        asked = request(number, lot, lot.choice(IMAGES))
        alone_s = asked.num_steps * Curve(dict(STEP_S)).at((2 if asked.guided else 1) * asked.num_images)
        deadline_s = lot.choice(FACTORS) * alone_s + 0.1
        arrivals.append((now, msgspec.structs.replace(asked, deadline_s=deadline_s)))
        now += lot.expovariate(load * ROWS_PER_S / mean_rows)
    arrivals.reverse()
    while arrivals or scheduler.num_seated or scheduler.num_waiting:
        if not (scheduler.num_seated or scheduler.num_waiting):
            device.clock.now = max(device.clock.now, arrivals[-1][0])
        while arrivals and arrivals[-1][0] <= device.clock.now:
            arrived, asked = arrivals.pop()
            wheel.submit(device.prepare(asked), arrived)
        wheel.turn()
    return sum(end is End.FINISHED for end in ends.values()) / count  # who is late has expired


def closed_loop(num_users: int, images: tuple[int, ...], count: int = 400) -> float:
    """The share of requests without a deadline that end within 15 % of what they were told."""
    lot, told, errors, ended = random.Random(1), dict[str, tuple[float, float]](), list[float](), list[str]()

    def hear(event: Any) -> None:
        name = event.prepared.request.request_id
        if isinstance(event, Moved):
            told.setdefault(name, (device.clock.now, event.whereabouts.finish_in_s))
        if isinstance(event, Ended):
            sent, finish_in_s = told[name]
            errors.append((device.clock.now - sent) / finish_in_s - 1.0)
            ended.append(name)

    device, _, wheel = world("least-slack", hear)
    for number in range(count):
        if number >= num_users:
            while not ended:
                wheel.turn()
            ended.pop()
        wheel.submit(device.prepare(request(number, lot, lot.choice(images))))
    return sum(abs(error) <= 0.15 for error in errors[30:]) / len(errors[30:])


def main() -> None:
    loads = (0.5, 0.75, 0.9, 1.1, 1.3, 1.5)
    print("done by their deadline at a load of", *loads)
    always = lambda images, device, now: together(images, dataclasses.replace(device, is_full=False), now)  # noqa: E731
    print("least-slack          ", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    with mock.patch("noria.scheduling.outlook.heeds_deadlines", return_value=False):
        print("  never small batches", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    with mock.patch.object(steps, "together", always), mock.patch.object(forecast, "together", always):
        print("  always small       ", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    for users in (4, 8, 16):
        alike, several = closed_loop(users, (1,)), closed_loop(users, (1, 1, 1, 1, 2, 4))
        print(
            f"{users} users, told to 15 %: {alike:.2f} with one image each, {several:.2f} with one to four", flush=True
        )


if __name__ == "__main__":
    main()
