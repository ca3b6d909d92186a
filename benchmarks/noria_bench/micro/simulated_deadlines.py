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

from noria.engine.loop import EngineLoop, ProgressChanged, RequestClosed
from noria.engine.runtime import FakeExecutor, VirtualClock
from noria.protocol.request import ImageRequest
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.step import forecast
from noria.scheduling.step import scheduler as steps
from noria.scheduling.step.batch_selection import select_batch
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, FinishReason, IterationPlan, IterationResult

STEP_S = {1: 0.012, 2: 0.019, 4: 0.0256, 8: 0.037, 16: 0.0635, 32: 0.107}
DECODE_S, ENCODE_S = {1: 0.0085, 2: 0.0163, 4: 0.0326}, 0.002
SHAPE, ROWS_PER_S, NOISE = BatchKey(64, 64, "m"), 256, 0.1
STEPS, IMAGES, DEADLINE_FACTORS = (8, 12, 20, 20, 30, 50), (1, 1, 1, 2), (2.5, 5.0, 15.0)


class SimulatedDevice(FakeExecutor):
    """One that takes what the curves say, and times its parts."""

    rng = random.Random(0)

    def execute(self, plan: IterationPlan) -> IterationResult:
        rows = sum(2 if self._accepted[s.image.request_id].request.guided else 1 for s in plan.steps)
        step_s = CostCurve(dict(STEP_S)).at(rows) if rows else 0.0
        decode_s = CostCurve(dict(DECODE_S)).at(len(plan.decodes)) if plan.decodes else 0.0
        phase_times = [math.exp(self.rng.gauss(0, NOISE)) * s for s in (step_s, decode_s, ENCODE_S * len(plan.joins))]
        self.turn_s = lambda _: sum(phase_times)
        return dataclasses.replace(
            super().execute(plan), step_s=phase_times[0], decode_s=phase_times[1], encode_s=phase_times[2]
        )


def make_simulation(
    policy: str, on_event: Callable[[Any], None]
) -> tuple[SimulatedDevice, StepScheduler, EngineLoop[Any]]:
    costs = CostModel(32, {SHAPE: CostCurve(dict(STEP_S))}, {SHAPE: CostCurve(dict(DECODE_S))}, {"m": ENCODE_S})
    costs.refresh_knees()
    scheduler, device = StepScheduler(16, 4, 256, 120.0, POLICIES[policy], costs), SimulatedDevice(VirtualClock())
    device.rng = random.Random(2)
    return device, scheduler, EngineLoop(scheduler, device, on_event, device.clock)


def make_request(number: int, rng: random.Random, num_images: int) -> ImageRequest:
    guidance = 3.0 if rng.random() < 0.8 else 1.0
    name, num_steps = f"r{number}", rng.choice(STEPS)
    return ImageRequest(name, "p", "", number, 64, 64, num_steps, guidance, num_images, "ddim", 600.0, model="m")


def open_loop(load: float, policy: str, num_requests: int = 1000) -> float:
    """The share of requests that are done by their deadline."""
    rng, finish_reasons = random.Random(1), dict[str, FinishReason]()

    def on_event(event: Any) -> None:
        if isinstance(event, RequestClosed):
            finish_reasons[event.event.request_id] = event.event.finish_reason

    device, scheduler, engine_loop = make_simulation(policy, on_event)
    mean_rows = sum(STEPS) / len(STEPS) * 1.8 * sum(IMAGES) / len(IMAGES)
    arrivals, now = [], 0.0
    for number in range(num_requests):
        image_request = make_request(number, rng, rng.choice(IMAGES))
        solo_s = image_request.num_steps * CostCurve(dict(STEP_S)).at(
            (2 if image_request.guided else 1) * image_request.num_images
        )
        deadline_s = rng.choice(DEADLINE_FACTORS) * solo_s + 0.1
        arrivals.append((now, msgspec.structs.replace(image_request, deadline_s=deadline_s)))
        now += rng.expovariate(load * ROWS_PER_S / mean_rows)
    arrivals.reverse()
    while arrivals or scheduler.num_running or scheduler.num_waiting:
        if not (scheduler.num_running or scheduler.num_waiting):
            device.clock.now = max(device.clock.now, arrivals[-1][0])
        while arrivals and arrivals[-1][0] <= device.clock.now:
            arrived, image_request = arrivals.pop()
            engine_loop.submit(device.prepare(image_request), arrived)
        engine_loop.run_iteration()
    return (
        sum(end is FinishReason.FINISHED for end in finish_reasons.values()) / num_requests
    )  # who is late has expired


def closed_loop(num_users: int, images: tuple[int, ...], num_requests: int = 400) -> float:
    """The share of requests without a deadline that end within 15 % of what they were told."""
    rng, predictions, errors, finished_ids = (
        random.Random(1),
        dict[str, tuple[float, float]](),
        list[float](),
        list[str](),
    )

    def on_event(event: Any) -> None:
        name = event.prepared.request.request_id
        if isinstance(event, ProgressChanged):
            predictions.setdefault(name, (device.clock.now, event.progress.finish_in_s))
        if isinstance(event, RequestClosed):
            sent, finish_in_s = predictions[name]
            errors.append((device.clock.now - sent) / finish_in_s - 1.0)
            finished_ids.append(name)

    device, _, engine_loop = make_simulation("least-slack", on_event)
    for number in range(num_requests):
        if number >= num_users:
            while not finished_ids:
                engine_loop.run_iteration()
            finished_ids.pop()
        engine_loop.submit(device.prepare(make_request(number, rng, rng.choice(images))))
    return sum(abs(error) <= 0.15 for error in errors[30:]) / len(errors[30:])


def main() -> None:
    loads = (0.5, 0.75, 0.9, 1.1, 1.3, 1.5)
    print("done by their deadline at a load of", *loads)
    always_small_batches = lambda images, device, now: select_batch(
        images, dataclasses.replace(device, is_full=False), now
    )
    print("least-slack          ", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    with mock.patch("noria.scheduling.step.admission.heeds_deadlines", return_value=False):
        print("  never small batches", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    with (
        mock.patch.object(steps, "together", always_small_batches),
        mock.patch.object(forecast, "together", always_small_batches),
    ):
        print("  always small       ", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    for users in (4, 8, 16):
        single_image, multi_image = closed_loop(users, (1,)), closed_loop(users, (1, 1, 1, 1, 2, 4))
        print(
            f"{users} users, told to 15 %: {single_image:.2f} with one image each, {multi_image:.2f} with one to four",
            flush=True,
        )


if __name__ == "__main__":
    main()
