"""What a pipeline passes to `set_timesteps` of its scheduler. This module knows neither torch nor diffusers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The times of one image's steps, as the pipeline of its model sets them; by default the scheduler chooses them.

    Hashable, so that samplers are cached by it. A pipeline that gives both `sigmas` and `timesteps` gives as many.
    """

    sigmas: tuple[float, ...] | None = None  # noise levels before the scheduler's own shift, falling
    timesteps: tuple[float, ...] | None = None
    mu: float | None = None  # the shift of a schedule that depends on the image's size (`use_dynamic_shifting`)

    def arguments(self, num_steps: int) -> dict[str, object]:
        """Return the arguments of `set_timesteps`: the number of steps only if neither sigmas nor timesteps say it."""
        given: dict[str, object] = {
            name: list(times)
            for name, times in (("sigmas", self.sigmas), ("timesteps", self.timesteps))
            if times is not None
        }
        if not given:
            given["num_inference_steps"] = num_steps
        return given if self.mu is None else given | {"mu": self.mu}


DEFAULT_SCHEDULE = Schedule()
