"""Options of `noria bench calls`. Imports little: the command line reads it before it knows which command runs."""

import pathlib
from dataclasses import dataclass


@dataclass(frozen=True)
class CallsOptions:
    """The images to generate: each with all calls, and for each share with skipped calls and with as few steps."""

    shares: tuple[float, ...] = (0.66, 0.5, 0.33)
    steps: tuple[int, ...] = ()  # empty: the model's default
    schedulers: tuple[str, ...] = ()  # empty: the model's default, or the first whose calls can be skipped
    num_images: int = 12
    prompts: pathlib.Path | None = None  # None: the bench's own
    seed: int = 0  # seed of the first image; the others follow
