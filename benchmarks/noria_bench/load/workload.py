"""What a bench asks for, and when: open-loop traffic that a seed repeats exactly, whatever it is sent to.

An arrival is a request, the moment at which its caller sends it (*intended*: no answer delays it) and the moment at which its answer
is worthless. Pure: the randomness is `seed`, the machine's speed is an argument.

Work is counted in rows: one input of the UNet at the model's own size. A guided image has two rows a call, an image of half the
pixels half a row.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from noria.protocol.model_spec import ModelSpec

T = TypeVar("T")

Arrivals = Literal["poisson", "bursty"]

# Gaps are gamma-distributed with mean 1 and this shape, as in vLLM's `--burstiness`: 1 is Poisson; at 1/4 their coefficient of
# variation is 2, so that requests come in clumps.
_GAMMA_SHAPES: dict[Arrivals, float] = {"poisson": 1.0, "bursty": 0.25}


class RequestTemplate(Struct, frozen=True):
    """One request's body, every setting said, so that no server's defaults matter."""

    prompt: str
    seed: int
    width: int
    height: int
    inference_steps: int
    guidance_scale: float
    scheduler: str
    n: int

    @property
    def guided(self) -> bool:
        """Whether a call has two rows."""
        return self.guidance_scale > 1.0

    @property
    def num_calls(self) -> int:
        """Model calls of each image, with the schedulers that a mix may name; a test compares it with the compiled tables."""
        return {"heun": 2 * self.inference_steps - 1, "pndm": self.inference_steps + 1}.get(
            self.scheduler, self.inference_steps
        )

    def rows(self, spec: ModelSpec) -> float:
        """Its work."""
        share = self.width * self.height / (spec.default_width_px * spec.default_height_px)
        return self.n * self.num_calls * (2 if self.guided else 1) * share


class Arrival(Struct, frozen=True):
    """One request of a trace; times are seconds, `intended_s` from the trace's start, `deadline_s` from `intended_s`."""

    number: int
    intended_s: float
    deadline_s: float | None  # None: it has none
    deadline_class: str  # the name of its DeadlineClass; empty without a deadline
    rows: float
    template: RequestTemplate

    @property
    def body(self) -> dict[str, Any]:
        """What is sent; files carry nothing but pixels, so that equal images are equal bytes."""
        extra: dict[str, Any] = {"metadata": False}
        if self.deadline_s is not None:
            extra["deadline_ms"] = round(1000 * self.deadline_s)
        return msgspec.to_builtins(self.template) | extra  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Weighted(Generic[T]):
    """A setting's values with how often each is asked for, relative to the others."""

    values: tuple[T, ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> T:
        """One of them."""
        return rng.choices(self.values, self.weights)[0]


@dataclass(frozen=True)
class DeadlineClass:
    """A deadline is `factor` times what the request takes alone, and `constant_s` on top."""

    name: str
    factor: float
    constant_s: float


# Before anything was measured: alone, a request has its image after 1 × its own time; in a full batch of 16 after about 4 to 6 ×.
DEADLINE_CLASSES = Weighted(
    (DeadlineClass("tight", 3.0, 0.5), DeadlineClass("normal", 6.0, 1.0), DeadlineClass("loose", 15.0, 2.0)),
    (0.25, 0.5, 0.25),
)


@dataclass(frozen=True)
class Mix:
    """What callers ask for; the settings of a request are drawn independently."""

    sizes: Weighted[tuple[int, int]]
    steps: Weighted[int]
    guidance: Weighted[float]
    schedulers: Weighted[str]
    num_images: Weighted[int]

    def templates(self, seed: int) -> Iterator[RequestTemplate]:
        """An endless row of requests."""
        rng = random.Random(seed)
        for number in itertools.count():
            width, height = self.sizes.draw(rng)
            yield RequestTemplate(
                prompt=caption(number),
                seed=rng.randrange(2**32),
                width=width,
                height=height,
                inference_steps=self.steps.draw(rng),
                guidance_scale=self.guidance.draw(rng),
                scheduler=self.schedulers.draw(rng),
                n=self.num_images.draw(rng),
            )


def mixed(spec: ModelSpec) -> Mix:
    """Most callers leave a setting as it is, three in five for each; the others turn it."""
    default = (spec.default_width_px, spec.default_height_px)
    small = tuple(max(spec.min_side_px, side * 3 // 4 // spec.multiple_px * spec.multiple_px) for side in default)
    steps, guidance = spec.default_steps, spec.default_guidance
    others = tuple(name for name in ("euler-a", "ddim", "heun") if name in spec.schedulers)
    return Mix(
        sizes=Weighted((default, (small[0], small[1])), (3.0, 1.0)),
        steps=Weighted((steps, max(1, steps // 2), steps * 3 // 2, steps * 2), (6.0, 2.0, 1.0, 1.0)),
        guidance=Weighted((guidance, 1.0, guidance * 1.5, guidance * 2.5), (6.0, 2.0, 1.0, 1.0)),
        schedulers=Weighted((spec.default_scheduler, *others), (6.0, *(4.0 / len(others) for _ in others))),
        num_images=Weighted((1, 2, 4), (8.0, 1.5, 0.5)),
    )


def uniform(spec: ModelSpec) -> Mix:
    """Every caller asks for one image with the model's own settings: what microbatching is best at."""
    return Mix(
        sizes=Weighted(((spec.default_width_px, spec.default_height_px),), (1.0,)),
        steps=Weighted((spec.default_steps,), (1.0,)),
        guidance=Weighted((spec.default_guidance,), (1.0,)),
        schedulers=Weighted((spec.default_scheduler,), (1.0,)),
        num_images=Weighted((1,), (1.0,)),
    )


MIXES: dict[str, Callable[[ModelSpec], Mix]] = {"mixed": mixed, "alike": uniform}


def generate_trace(
    mix: Mix,
    spec: ModelSpec,
    solo_s: Callable[[RequestTemplate], float] | None,
    *,
    rows_per_s: float,
    seconds: float,
    arrivals: Arrivals,
    seed: int,
) -> tuple[Arrival, ...]:
    """The arrivals of `seconds` that bring `rows_per_s` of work; `solo_s` is what a request takes alone, in seconds; None: nobody has a deadline.

    Every rate draws the same requests in the same order, as many as its work needs. Their gaps are scaled so that they fill `seconds`
    exactly: the load is what it is called, not what the dice made of it.
    """
    gap_rng, class_rng = random.Random(seed + 1), random.Random(seed + 2)
    shape = _GAMMA_SHAPES[arrivals]
    entries: list[tuple[float, RequestTemplate, DeadlineClass]] = []
    clock = work = 0.0
    for template in mix.templates(seed):
        entries.append((clock, template, DEADLINE_CLASSES.draw(class_rng)))
        clock += gap_rng.gammavariate(shape, 1 / shape)
        work += template.rows(spec)
        if work >= rows_per_s * seconds:
            break
    scale = work / rows_per_s / clock
    return tuple(
        Arrival(
            number=number,
            intended_s=at_gaps * scale,
            deadline_s=None if solo_s is None else deadline_class.factor * solo_s(template) + deadline_class.constant_s,
            deadline_class="" if solo_s is None else deadline_class.name,
            rows=template.rows(spec),
            template=template,
        )
        for number, (at_gaps, template, deadline_class) in enumerate(entries)
    )


def caption(number: int) -> str:
    """One of 2,304 captions, so many that no cache of prompts gives the server an advantage over the bare loop."""
    colours, shapes = (
        ("red", "green", "blue", "yellow", "orange", "purple", "white", "black"),
        ("circle", "square", "triangle", "star", "ring", "cross"),
    )
    number, first = divmod(number, 8)
    number, shape = divmod(number, 6)
    number, second = divmod(number, 8)
    return f"a {colours[first]} {shapes[shape]} above a {colours[second]} {shapes[number % 6]}"
