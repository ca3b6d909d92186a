"""Options of `noria bench calls`. Imports little: the command line reads it before it knows which command runs."""

import pathlib
from dataclasses import dataclass

from noria.protocol.diffusion import MIN_CALLS
from noria_bench.option_values import read_number, read_whole, read_whole_numbers


@dataclass(frozen=True)
class CallsOptions:
    """The images to generate: each with all calls, and for each share with skipped calls and with as few steps."""

    shares: tuple[float, ...] = (0.66, 0.5, 0.33)
    steps: tuple[int, ...] = ()  # empty: the model's default
    schedulers: tuple[str, ...] = ()  # empty: the model's default, or the first whose calls can be skipped
    num_images: int = 12
    prompts: pathlib.Path | None = None  # None: the bench's own
    seed: int = 0  # seed of the first image; the others follow


def read_shares(text: str) -> tuple[float, ...]:
    """Parse `0.5,0.33`, in falling order. Raises ValueError unless all are shares that a request may have."""
    allowed = f"shares are numbers from {MIN_CALLS} to 0.99, such as 0.5,0.33"
    return tuple(sorted({read_number(word, MIN_CALLS, 0.99, allowed) for word in text.split(",")}, reverse=True))


def read_steps(text: str) -> tuple[int, ...]:
    """Parse `50,20`. Raises ValueError unless all are 1 to 1000."""
    return tuple(dict.fromkeys(read_whole_numbers(text, 1, 1000, "steps are whole numbers up to 1000, such as 50,20")))


def read_images(text: str) -> int:
    """Parse a number of images. Raises ValueError unless it is 1 to 10000."""
    return read_whole(text, 1, 10_000, "it is a whole number of images from 1 to 10000")
