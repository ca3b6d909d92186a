"""The command `noria bench calls` and its options. Imports little: the command line reads it."""

import pathlib
from dataclasses import dataclass

from noria.protocol.diffusion import MIN_CALLS
from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import number, whole, wholes


@dataclass(frozen=True)
class CallsOptions:
    """The images to generate: each with all calls, and for each share with skipped calls and with as few steps."""

    shares: tuple[float, ...] = (0.66, 0.5, 0.33)
    steps: tuple[int, ...] = ()  # empty: the model's default
    schedulers: tuple[str, ...] = ()  # empty: the model's default, or the first whose calls can be skipped
    num_images: int = 12
    prompts: pathlib.Path | None = None  # None: the bench's own
    seed: int = 0  # seed of the first image; the others follow


_SHARE = number(MIN_CALLS, 0.99, f"shares are numbers from {MIN_CALLS} to 0.99, such as 0.5,0.33")
_STEPS = wholes(1, 1000, "steps are whole numbers up to 1000, such as 50,20")
_IMAGES = whole(1, 10_000, "it is a whole number of images from 1 to 10000")


def _read_shares(text: str) -> tuple[float, ...]:
    return tuple(sorted(set(map(_SHARE, text.split(","))), reverse=True))


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


COMMAND = BenchCommand(
    "calls",
    "how near images with skipped calls are to full ones",
    "Generate images with all calls of the model, with a share of them, and with as few steps, and compare both with "
    "the full ones.",
    CallsOptions(),
    (
        ("--shares A,B", "shares", _read_shares, "of the calls that are made, 0.33 to 0.99"),
        ("--steps A,B", "steps", _STEPS, "of the full images (the model's)"),
        ("--schedulers A,B", "schedulers", _read_names, "(the model's, or its first whose calls can be skipped)"),
        ("--images N", "num_images", _IMAGES, "with each setting, of as many prompts and seeds"),
        ("--prompts FILE", "prompts", pathlib.Path, "of prompts, one a line (the bench's)"),
        ("--seed N", "seed", int, "of the first image"),
    ),
    usage="[MODEL] [--steps A,B] [--shares A,B] [--out FOLDER]",
)
