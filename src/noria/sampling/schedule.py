"""The arguments of a pipeline to `set_timesteps` of its scheduler. This module knows neither torch nor diffusers."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_LENGTHS = {"base_image_seq_len": 256, "max_image_seq_len": 4096}
_SHIFTS = {"base_shift": 0.5, "max_shift": 1.15}


@dataclass(frozen=True)
class Schedule:
    """The times of one image's steps, as the pipeline of its model sets them; by default the scheduler chooses them.

    Hashable, so that samplers are cached by it. A pipeline that gives both `sigmas` and `timesteps` gives as many.
    """

    sigmas: tuple[float, ...] | None = None  # noise levels before the scheduler's own shift, falling
    timesteps: tuple[float, ...] | None = None
    mu: float | None = None  # the shift of a schedule that depends on the image's size (`use_dynamic_shifting`)
    gives_flow_sigmas: bool = False  # `sigmas` also to schedulers that derive those of flow models by themselves
    # Only the calls below this timestep are made, on latents that another model left there.
    begins_below: int | None = None

    def arguments(self, num_steps: int) -> dict[str, object]:
        """Return the arguments of `set_timesteps`: the number of steps only if neither sigmas nor timesteps say it."""
        given: dict[str, object] = {}
        if self.sigmas is not None:
            given["sigmas"] = np.array(self.sigmas) if self.gives_flow_sigmas else list(self.sigmas)
        if self.timesteps is not None:
            given["timesteps"] = list(self.timesteps)
        if not given:
            given["num_inference_steps"] = num_steps
        return given if self.mu is None else given | {"mu": self.mu}


DEFAULT_SCHEDULE = Schedule()


def switch_timestep(denoising_start: float, scheduler_config: Mapping[str, Any]) -> int:
    """Return the timestep below which the second of two models makes the calls, as diffusers' pipelines round it."""
    num_timesteps: int = scheduler_config.get("num_train_timesteps", 1000)
    return round(num_timesteps - denoising_start * num_timesteps)


@functools.lru_cache(maxsize=1024)  # keys of compiled samplers share them
def evenly_falling_sigmas(num_steps: int) -> tuple[float, ...]:
    """Return 1 to 1 / `num_steps`, as many, as the pipelines of flow models give them to a scheduler."""
    return tuple(np.linspace(1.0, 1 / num_steps, num_steps).tolist())


def shift_of_length(num_tokens: int, scheduler_config: Mapping[str, Any]) -> float:
    """Return the shift `mu` of an image of so many tokens: on the line through two lengths and their shifts."""
    lengths = [scheduler_config.get(name, default) for name, default in _LENGTHS.items()]
    shifts = [scheduler_config.get(name, default) for name, default in _SHIFTS.items()]
    slope = (shifts[1] - shifts[0]) / (lengths[1] - lengths[0])
    return float(num_tokens * slope + (shifts[0] - slope * lengths[0]))


# Two lines of FLUX.2's authors: of the shift by tokens, of images with 10 and with 200 steps.
_LINE_OF_10_STEPS = 8.73809524e-05, 1.89833333
_LINE_OF_200_STEPS = 0.00016927, 0.45666666
_LONG = 4300  # tokens, above which the steps have no effect


def shift_of_length_and_steps(num_tokens: int, num_steps: int) -> float:
    """Return the shift `mu` of an image of FLUX.2, as `compute_empirical_mu` of diffusers: between the lines."""
    of_10, of_200 = (slope * num_tokens + start for slope, start in (_LINE_OF_10_STEPS, _LINE_OF_200_STEPS))
    if num_tokens > _LONG:
        return of_200
    slope = (of_200 - of_10) / 190.0
    return slope * num_steps + (of_200 - 200.0 * slope)
