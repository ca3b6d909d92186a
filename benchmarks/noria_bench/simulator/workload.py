"""Requests of a simulation: their arrivals and what they ask for. Randomness is an argument."""

import math
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from noria.errors import SetupError

T = TypeVar("T")


class SimulateError(SetupError, code="simulate"):
    """A flag, a trace or a file of costs that `noria simulate` cannot use."""


def read_json(file: pathlib.Path, kind: type[T], problem: str, expected: str) -> T:
    """Decode a file of JSON. Raises SimulateError: the file, `problem`, the decoder's error, and what is `expected`."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise SimulateError(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SimulateError(f"{file}{problem}: {error}{expected}") from error


class Arrival(NamedTuple):
    """A request."""

    at_s: float
    model: str
    width_px: int
    height_px: int
    steps: int
    images: int = 1
    rows: int = 2  # rows of an image in a call: 2 with guidance
    priority: str = "normal"
    deadline_s: float | None = None  # after its arrival
    client: str = ""  # whose share of the devices it takes
    weight: float = 1.0  # weight of that share


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of request, and its share of all."""

    share: float = 1.0
    model: str = ""
    width_px: int = 512
    height_px: int = 512
    steps: int = 20
    images: int = 1
    rows: int = 2
    priority: str = "normal"
    deadline_s: float | None = None

    @property
    def text(self) -> str:
        """The images that it requests, in words."""
        images = "an image" if self.images == 1 else f"{self.images} images"
        guidance = " with guidance" if self.rows > 1 else ""
        deadline = "" if self.deadline_s is None else f", within {self.deadline_s:g} s"
        return f"{images} of {self.width_px} × {self.height_px} px, {self.steps} steps{guidance}{deadline}"

    def problem(self) -> str:
        """Return what is wrong with it, or an empty string."""
        whole = {"width_px": 16_384, "height_px": 16_384, "steps": 1000, "images": 64, "rows": 3}
        for name, high in whole.items():
            if not 1 <= getattr(self, name) <= high:
                return f"{name} is {getattr(self, name)}; it must be from 1 to {high}"
        if not 0.0 <= self.share <= 1e9:
            return f"share is {self.share:g}; it must be from 0 to 1e9"
        if self.priority not in ("low", "normal", "high"):
            return f"priority is {self.priority!r}; it must be low, normal or high"
        if self.deadline_s is not None and not self.deadline_s > 0.0:
            return f"deadline_s is {self.deadline_s}; it must be above 0"
        return ""


Rate = Callable[[float], float]


def constant(rate: float) -> Rate:
    """Return a rate that does not change."""
    return lambda _: rate


def diurnal(rate: float, ratio: float = 4.0, period_s: float = 86_400.0) -> Rate:
    """Return a sine wave over a day with the mean `rate`, whose highest value is `ratio` times its lowest."""
    swing = (ratio - 1.0) / (ratio + 1.0)
    return lambda at_s: rate * (1.0 - swing * math.cos(2.0 * math.pi * at_s / period_s))


def bursty(rate: float, rng: random.Random, ratio: float = 8.0, on_s: float = 30.0, off_s: float = 270.0) -> Rate:
    """Return a rate that switches between two values at random times (a Markov-modulated Poisson process).

    The mean is `rate`; the high value is `ratio` times the low one. Call it with times that do not decrease.
    """
    low = rate * (on_s + off_s) / (ratio * on_s + off_s)
    # The first call switches: it begins with the high value as often as that is the value at any time.
    state = {"is_high": rng.random() >= on_s / (on_s + off_s), "until_s": 0.0}

    def at(at_s: float) -> float:
        while at_s >= state["until_s"]:
            state["is_high"] = not state["is_high"]
            state["until_s"] += rng.expovariate(1.0 / (on_s if state["is_high"] else off_s))
        return low * ratio if state["is_high"] else low

    return at


def generate(
    rate: Rate, max_rate: float, shapes: list[Shape], duration_s: float, rng: random.Random
) -> Iterator[Arrival]:
    """Yield a Poisson process of that rate by thinning (Lewis and Shedler, 1979); `max_rate` bounds the rate."""
    weights = [shape.share for shape in shapes]
    at_s = rng.expovariate(max_rate)
    while at_s < duration_s:
        if rng.random() * max_rate <= rate(at_s):
            yield arrival_of(rng.choices(shapes, weights)[0], at_s)
        at_s += rng.expovariate(max_rate)


def arrival_of(shape: Shape, at_s: float) -> Arrival:
    """Return a request of a shape."""
    return Arrival(
        at_s, shape.model, shape.width_px, shape.height_px, shape.steps, shape.images, shape.rows, shape.priority,
        shape.deadline_s,
    )  # fmt: skip


def make_arrivals(kind: str, rate: float, shapes: list[Shape], duration_s: float, seed: int) -> Iterator[Arrival]:
    """Yield the requests of `--arrivals KIND`: poisson, bursty or diurnal; `rate` is the mean, in requests a second."""
    rng = random.Random(seed)
    if kind == "poisson":
        return generate(constant(rate), rate, shapes, duration_s, rng)
    if kind == "diurnal":
        return generate(diurnal(rate), 2.0 * rate, shapes, duration_s, rng)
    return generate(bursty(rate, rng), 8.0 * rate, shapes, duration_s, rng)


def read_duration(text: str) -> float:
    """Parse a duration such as 90s, 30m, 24h or 1d. Raises ValueError."""
    return _read_duration(text, 1.0, "it must be from 1s to 30d, with a unit: 90s, 30m, 24h, 1d")


def read_mean_time(text: str) -> float:
    """Parse the mean time of a device to its loss: with a shorter one no request would ever finish. As above."""
    return _read_duration(text, 60.0, "it must be from 1m to 30d, with a unit: 30m, 24h, 1d")


def _read_duration(text: str, low_s: float, allowed: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
    unit = units.get(text[-1:], 0.0)
    try:
        value_s = unit * float(text[:-1] or "nan")
    except ValueError:
        value_s = math.nan
    if not low_s <= value_s <= 30 * 86_400.0:
        raise ValueError(f"{text!r}; {allowed}")
    return value_s
