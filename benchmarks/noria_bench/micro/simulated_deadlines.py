"""Deadlines and predictions in virtual time: the real scheduler and engine loop on a fake device with measured costs, ±
10 %.

    python -m noria_bench.micro.simulated_deadlines

The costs are the bundled model's on two CPU cores. Open loop: 1,000 requests of 8 to 50 steps, one or two images, with
deadlines of 2.5, 5 or 15 times their time alone plus 0.1 s; a load of 1 is 256 rows per second. Batches are selected as
usual (small while slots are free), without regard to deadlines, or always small. Closed loop: each user sends the next
request when the previous one is done.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec

from noria.engine.loop import ProgressChanged, RequestEnded, StepLoop
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import ImageRequest
from noria.sampling.guidance import CLASSIFIER_FREE
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.step import forecast, scheduler
from noria.scheduling.step.batch_selection import select_batch
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, FinishReason, IterationPlan, IterationResult, MeasuredTimings
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import VirtualClock

STEP_S = {1: 0.012, 2: 0.019, 4: 0.0256, 8: 0.037, 16: 0.0635, 32: 0.107}
DECODE_S, TEXT_ENCODE_S = {1: 0.0085, 2: 0.0163, 4: 0.0326}, 0.002
BATCH_KEY, ROWS_PER_S, NOISE = BatchKey(64, 64, ModelKey("m")), 256, 0.1
STEPS, IMAGES, DEADLINE_FACTORS = (8, 12, 20, 20, 30, 50), (1, 1, 1, 2), (2.5, 5.0, 15.0)


class SimulatedDevice(FakeExecutor):
    """A fake device with the durations above, and random noise on them."""

    def __init__(self) -> None:
        super().__init__(VirtualClock(), lambda _: self._iteration_s)
        self._rng, self._iteration_s = random.Random(2), 0.0

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        rows = sum(self._accepted[step.image.attempt_id].num_rows for step in plan.steps)
        exact_s = (
            TEXT_ENCODE_S * (len(plan.joins) - len(plan.returns)),
            CostCurve(dict(STEP_S)).at(rows) if rows else 0.0,
            CostCurve(dict(DECODE_S)).at(len(plan.decodes)) if plan.decodes else 0.0,
        )
        text_encode_s, step_s, decode_s = (math.exp(self._rng.gauss(0, NOISE)) * seconds for seconds in exact_s)
        timings = MeasuredTimings({"joins": text_encode_s, "steps": step_s, "decodes": decode_s})
        self._iteration_s = text_encode_s + step_s + decode_s
        result = super().execute(plan, with_thumbnails=with_thumbnails)
        return dataclasses.replace(result, phase_timings=timings)


def make_simulation(
    policy: str, on_event: Callable[[Any], None]
) -> tuple[SimulatedDevice, StepScheduler, StepLoop[Any]]:
    costs = CostModel(
        32, {BATCH_KEY: CostCurve(dict(STEP_S))}, {BATCH_KEY: CostCurve(dict(DECODE_S))}, {ModelKey("m"): TEXT_ENCODE_S}
    )
    costs.refresh_knees()
    step_scheduler, device = StepScheduler(16, 4, 256, 120.0, POLICIES[policy], costs), SimulatedDevice()
    return device, step_scheduler, StepLoop(step_scheduler, device, on_event, device.clock)


def make_request(number: int, rng: random.Random, num_images: int) -> ImageRequest:
    guidance = 3.0 if rng.random() < 0.8 else 1.0
    name, num_steps = f"r{number}", rng.choice(STEPS)
    return make_image_request(
        name,
        "m",
        width=64,
        height=64,
        inference_steps=num_steps,
        guidance_scale=guidance,
        n=num_images,
        timeout_s=600.0,
    )


def open_loop(load: float, policy: str, num_requests: int = 1000) -> float:
    """The share of requests that meet their deadline; those that miss it expire."""
    rng, finish_reasons = random.Random(1), dict[str, FinishReason]()

    def on_event(event: Any) -> None:
        if isinstance(event, RequestEnded):
            finish_reasons[event.event.attempt_id] = event.event.finish_reason

    device, step_scheduler, engine_loop = make_simulation(policy, on_event)
    mean_rows = sum(STEPS) / len(STEPS) * 1.8 * sum(IMAGES) / len(IMAGES)
    arrivals, now = [], 0.0
    for number in range(num_requests):
        request = make_request(number, rng, rng.choice(IMAGES))
        payload = request.payload
        rows = (2 if CLASSIFIER_FREE.is_active(payload.guidance_scale, payload.negative_prompt) else 1) * payload.n
        deadline_s = (
            rng.choice(DEADLINE_FACTORS) * request.payload.inference_steps * CostCurve(dict(STEP_S)).at(rows) + 0.1
        )
        arrivals.append((now, msgspec.structs.replace(request, deadline_s=deadline_s)))
        now += rng.expovariate(load * ROWS_PER_S / mean_rows)
    arrivals.reverse()
    while arrivals or step_scheduler.num_running or step_scheduler.num_waiting:
        if not (step_scheduler.num_running or step_scheduler.num_waiting):
            device.clock.now = max(device.clock.now, arrivals[-1][0])
        while arrivals and arrivals[-1][0] <= device.clock.now:
            arrived, request = arrivals.pop()
            engine_loop.submit(device.prepare(request), arrived)
        engine_loop.run_iteration()
    return sum(reason is FinishReason.FINISHED for reason in finish_reasons.values()) / num_requests


def closed_loop(num_users: int, images: tuple[int, ...], num_requests: int = 400) -> float:
    """The share of requests without a deadline that end within 15 % of their first prediction."""
    rng, predictions = random.Random(1), dict[str, tuple[float, float]]()
    errors, finished_ids = list[float](), list[str]()

    def on_event(event: Any) -> None:
        name = event.prepared.request.attempt_id
        if isinstance(event, ProgressChanged):
            predictions.setdefault(name, (device.clock.now, event.progress.finish_in_s))
        if isinstance(event, RequestEnded):
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
    print("share of requests within their deadlines at a load of", *loads)

    def always_small(images: Any, limits: Any, now: float) -> Any:
        return select_batch(images, dataclasses.replace(limits, is_full=False), now)

    print("least-slack          ", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    with (
        mock.patch("noria.scheduling.step.predictor.uses_deadlines", return_value=False),
        mock.patch.object(scheduler, "uses_deadlines", return_value=False),
    ):
        print("  never small batches", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    with (
        mock.patch.object(scheduler, "select_batch", always_small),
        mock.patch.object(forecast, "select_batch", always_small),
        mock.patch.object(scheduler, "all_fit", return_value=False),
        mock.patch.object(forecast, "all_fit", return_value=False),
    ):
        print("  always small       ", *(f"{open_loop(load, 'least-slack'):.3f}" for load in loads), flush=True)
    for users in (4, 8, 16):
        single_image, multi_image = closed_loop(users, (1,)), closed_loop(users, (1, 1, 1, 1, 2, 4))
        print(
            f"{users} users, within 15 % of the prediction: {single_image:.2f} with one image each, {multi_image:.2f} "
            "with one to four",
            flush=True,
        )


if __name__ == "__main__":
    main()
