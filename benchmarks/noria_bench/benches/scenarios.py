"""The reference article's scenarios: users arrive one by one; each requests an image, waits for it and requests the
next. Pure.

The article loads a server for 15 minutes, with 1 user, or with 8 of whom one more arrives every 50 seconds, so that all
are active after 350 of the 900 seconds. A shorter run keeps these proportions: in 90 seconds a user arrives every 5, in
45 every 2.5.

The requests are those of the article's task: random seeds, 20 inference steps, one image, the model's default size and
guidance (the article's were 512 × 512 and 8.2). The article has one prompt, which a server with a cache would encode
once; here 2,304 consecutive requests have different prompts.
"""

from dataclasses import replace

from noria.protocol.diffusion import DiffusionModelSpec
from noria_bench.benches.suite_options import FULL_S
from noria_bench.load.workload import Mix, Weighted, uniform
from noria_bench.measurement.runs import Traffic

_FULL_SPAWN_INTERVAL_S = 50.0
_STEPS = 20


NUM_USERS = {"scenario1": 1, "scenario2": 8}
DEFAULT_S = 90.0


def scaled_traffic(name: str, seconds: float, seed: int) -> Traffic:
    """The scenario in `seconds` instead of 900, with its ramp scaled in proportion."""
    return Traffic(
        kind="closed",
        seconds=seconds,
        mix="uniform",
        num_users=NUM_USERS[name],
        spawn_interval_s=_FULL_SPAWN_INTERVAL_S * seconds / FULL_S,
        seed=seed,
    )


def scenario_mix(spec: DiffusionModelSpec) -> Mix:
    """The article's requests: the model's defaults, with 20 steps."""
    return replace(uniform(spec), steps=Weighted((_STEPS,), (1.0,)))
