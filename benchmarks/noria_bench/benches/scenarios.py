"""The reference article's scenarios: users arrive one by one; each requests an image, waits for it and requests the
next. Pure.

The article loads a server for 15 minutes, with 1 user, or with 8 of whom one more arrives every 50 seconds, so that all
are active after 350 of the 900 seconds. A shorter run keeps these proportions: in 90 seconds a user arrives every 5, in
45 every 2.5.

The requests are those of the article's Locust task: a seed of 0 to 1,000,000, 20 inference steps, one image, the
model's default size and guidance (the article's were 512 × 512 and 8.2). The article has one prompt, which a server
with a cache would encode once; here 2,304 consecutive requests have different prompts. A seed reproduces all requests.
"""

import random
from dataclasses import dataclass
from typing import Any

from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.load.workload import caption
from noria_bench.measurement.runs import Traffic

FULL_S = 900.0
_FULL_SPAWN_INTERVAL_S = 50.0
_STEPS = 20


@dataclass(frozen=True)
class Scenario:
    """One of the article's scenarios; `seconds` is the default length of a run."""

    name: str
    num_users: int
    seconds: float = 90.0


SCENARIOS = {scenario.name: scenario for scenario in (Scenario("scenario1", 1), Scenario("scenario2", 8))}


def scaled_traffic(scenario: Scenario, seconds: float, seed: int) -> Traffic:
    """The scenario in `seconds` instead of 900, with its ramp scaled in proportion."""
    return Traffic(
        kind="closed",
        seconds=seconds,
        mix="uniform",
        num_users=scenario.num_users,
        spawn_interval_s=_FULL_SPAWN_INTERVAL_S * seconds / FULL_S,
        seed=seed,
    )


def request_number(user_index: int, request_index: int, num_users: int) -> int:
    """The number, within a run, of a user's request; both indices count from 0."""
    return request_index * num_users + user_index


def request_body(number: int, seed: int) -> dict[str, Any]:
    """The body of request `number`; settings that it omits are the model's defaults."""
    rng = random.Random(f"{seed} {number}")
    return {
        "prompt": caption(number),
        "seed": rng.randint(0, 1_000_000),
        "inference_steps": _STEPS,
        # Equal images are equal bytes.
        "metadata": False,
    }


def rows_per_request(spec: DiffusionModelSpec) -> float:
    """The work of a request, in UNet inputs at the model's default size."""
    return _STEPS * (2.0 if spec.default_guidance > 1.0 else 1.0)
