"""The seed article's scenarios: users who each ask for an image, wait for it and ask again, coming one by one. Pure.

The article loads a server for 15 minutes, with 1 user, or with 8 of whom one more comes every 50 seconds, so that all are there after
350 of the 900 seconds. A shorter run keeps these proportions: in 90 seconds a user comes every 5, in 45 every 2.5.

What is asked for is the article's Locust task: a seed of 0 to 1,000,000, 20 inference steps, one image, size and guidance the model's
own, which were the article's 512 × 512 and 8.2. Its one prompt would be encoded once by a server that remembers; here no two of 2,304
requests have the same, and a seed repeats all of them exactly.
"""

import random
from dataclasses import dataclass
from typing import Any

from noria.protocol.model_spec import ModelSpec
from noria_bench.load.workload import caption
from noria_bench.measurement.runs import Traffic

FULL_S = 900.0
_FULL_USER_EVERY_S = 50.0
_STEPS = 20


@dataclass(frozen=True)
class Scenario:
    """One of the article's; `seconds` is a run's length where nobody says."""

    name: str
    num_users: int
    seconds: float = 90.0

    @property
    def locustfile(self) -> str:
        """Its module."""
        return f"noria_bench.load.locustfiles.{self.name}"


SCENARIOS = {scenario.name: scenario for scenario in (Scenario("scenario1", 1), Scenario("scenario2", 8))}


def scaled_traffic(scenario: Scenario, seconds: float, seed: int) -> Traffic:
    """The scenario in `seconds` instead of 900, everything in proportion."""
    return Traffic(
        kind="closed",
        seconds=seconds,
        mix="alike",
        num_users=scenario.num_users,
        spawn_interval_s=_FULL_USER_EVERY_S * seconds / FULL_S,
        seed=seed,
    )


def request_number(user_index: int, request_index: int, num_users: int) -> int:
    """The number, in a run, of a user's request; both count from 0."""
    return request_index * num_users + user_index


def request_body(number: int, seed: int) -> dict[str, Any]:
    """What request `number` asks for; what it leaves out is the model's own."""
    rng = random.Random(f"{seed} {number}")
    return {
        "prompt": caption(number),
        "seed": rng.randint(0, 1_000_000),
        "inference_steps": _STEPS,
        "metadata": False,  # files carry nothing but pixels
    }


def rows_per_request(spec: ModelSpec) -> float:
    """The work of a request, in inputs of the UNet at the model's own size."""
    return _STEPS * (2.0 if spec.default_guidance > 1.0 else 1.0)
