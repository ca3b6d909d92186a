"""Open-loop traffic: which requests are sent, and when. A seed reproduces a trace exactly, for any server. Pure.

An arrival is a request with its intended start, which no answer delays, and its deadline. The machine's speed is an
argument.

Work is counted in rows: inputs of the UNet at the model's default size. A guided image has two rows per call; an image
with half the pixels has half as many.
"""

import base64
import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import asdict
from PIL import Image, ImageDraw

from noria.protocol.diffusion import DiffusionModelSpec

T = TypeVar("T")

Arrivals = Literal["poisson", "bursty"]

# Gaps are gamma-distributed with mean 1 and this shape, as with vLLM's `--burstiness`: 1 is Poisson; 1/4 gives a
# coefficient of variation of 2, so that requests arrive in bursts.
_GAMMA_SHAPES: dict[Arrivals, float] = {"poisson": 1.0, "bursty": 0.25}


class RequestTemplate(Struct, frozen=True):
    """The body of a request. Every setting is explicit, so that the servers' defaults do not matter."""

    prompt: str
    seed: int
    width: int
    height: int
    inference_steps: int
    guidance_scale: float
    scheduler: str
    n: int
    lora: str = ""  # the name of one; empty: none
    strength: float | None = None  # strength of the change to a start image; None: it has none

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all models, without a LoRA and a start image."""
        return {name: value for name, value in asdict(self).items() if name not in ("lora", "strength")}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        body = self.settings
        if self.lora:
            body["loras"] = [{"name": self.lora, "weight": 1.0}]
        if self.strength is not None:
            body |= {"image": start_image(self.seed % 16, self.width, self.height), "strength": self.strength}
        return body

    @property
    def guided(self) -> bool:
        """Whether guidance applies, so that a call has two rows."""
        return self.guidance_scale > 1.0

    @property
    def num_calls(self) -> int:
        """Model calls per image, for the schedulers of the mixes; a test compares it with the compiled tables."""
        steps = self.inference_steps if self.strength is None else int(self.inference_steps * self.strength)
        return {"heun": 2 * steps - 1, "pndm": steps + 1}.get(self.scheduler, steps)

    def rows(self, spec: DiffusionModelSpec) -> float:
        """The request's work in rows."""
        share = self.width * self.height / (spec.default_width_px * spec.default_height_px)
        return self.n * self.num_calls * (2 if self.guided else 1) * share


class Arrival(Struct, frozen=True):
    """A request of a trace. `intended_s` counts from the trace's start, `deadline_s` from `intended_s`."""

    number: int
    intended_s: float
    deadline_s: float | None
    deadline_class: str  # name of a DeadlineClass; empty without a deadline
    rows: float
    template: RequestTemplate

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent; without metadata in files, equal images are equal bytes."""
        extra: dict[str, Any] = {"metadata": False}
        if self.deadline_s is not None:
            extra["deadline_ms"] = round(1000 * self.deadline_s)
        return self.template.body | extra


@dataclass(frozen=True)
class Weighted(Generic[T]):
    """Values with relative frequencies."""

    values: tuple[T, ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> T:
        """A random value."""
        return rng.choices(self.values, self.weights)[0]


@dataclass(frozen=True)
class DeadlineClass:
    """A deadline is `factor` times what the request takes alone, plus `constant_s`."""

    name: str
    factor: float
    constant_s: float


# Chosen before any measurement: alone, a request takes 1 × its solo time; in a full batch of 16 about 4 to 6 ×.
DEADLINE_CLASSES = Weighted(
    (DeadlineClass("tight", 3.0, 0.5), DeadlineClass("normal", 6.0, 1.0), DeadlineClass("loose", 15.0, 2.0)),
    (0.25, 0.5, 0.25),
)


@dataclass(frozen=True)
class Mix:
    """The distribution of requests; each setting is drawn independently."""

    sizes: Weighted[tuple[int, int]]
    steps: Weighted[int]
    guidance: Weighted[float]
    schedulers: Weighted[str]
    num_images: Weighted[int]
    loras: Weighted[str] = Weighted(("",), (1.0,))
    strengths: Weighted[float | None] = Weighted((None,), (1.0,))

    def templates(self, seed: int) -> Iterator[RequestTemplate]:
        """An endless sequence of requests."""
        rng, added_rng = random.Random(seed), random.Random(seed + 3)  # what mixes had first stays as it was
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
                lora=self.loras.draw(added_rng),
                strength=self.strengths.draw(added_rng),
            )


def mixed(spec: DiffusionModelSpec) -> Mix:
    """Three requests in five have the default of a setting, for each setting; the others vary it."""
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


def uniform(spec: DiffusionModelSpec) -> Mix:
    """Every request is one image with the model's defaults, which suits microbatching best."""
    return Mix(
        sizes=Weighted(((spec.default_width_px, spec.default_height_px),), (1.0,)),
        steps=Weighted((spec.default_steps,), (1.0,)),
        guidance=Weighted((spec.default_guidance,), (1.0,)),
        schedulers=Weighted((spec.default_scheduler,), (1.0,)),
        num_images=Weighted((1,), (1.0,)),
    )


def mixed_settings(spec: DiffusionModelSpec) -> Mix:
    """Mix images of the default size and scheduler; 6 to 40 steps and guidance of 1 (none) to 7.5, all as frequent."""
    return replace(
        uniform(spec),
        steps=Weighted((6, 12, 20, 28, 40), (1.0,) * 5),
        guidance=Weighted((1.0, 3.0, 5.0, 7.5), (1.0,) * 4),
    )


def mixed_sizes(spec: DiffusionModelSpec) -> Mix:
    """Mix images of the model's defaults, of its default size or with one or both sides three quarters as long."""
    sides = (spec.default_width_px, spec.default_height_px)
    width, height = (max(spec.min_side_px, side * 3 // 4 // spec.multiple_px * spec.multiple_px) for side in sides)
    sizes = (sides, (width, sides[1]), (sides[0], height), (width, height))
    return replace(uniform(spec), sizes=Weighted(sizes, (1.0,) * 4))


def mixed_loras(spec: DiffusionModelSpec, names: tuple[str, ...]) -> Mix:
    """Mix images of the model's defaults, without a LoRA or with one of `names`, all as frequent."""
    return replace(uniform(spec), loras=Weighted(("", *names), (1.0,) * (len(names) + 1)))


def mixed_start_images(spec: DiffusionModelSpec) -> Mix:
    """Mix images of the model's defaults, from the prompt alone or from a start image too, at three strengths."""
    return replace(uniform(spec), strengths=Weighted((None, 0.4, 0.6, 0.8), (1.0,) * 4))


@functools.lru_cache(maxsize=64)
def start_image(number: int, width: int, height: int) -> str:
    """A PNG in base64: a disc on a plain ground, in colours and a place that depend on `number`."""
    rng = random.Random(number)
    ground, disc = (tuple(rng.randrange(256) for _ in range(3)) for _ in range(2))
    image = Image.new("RGB", (width, height), ground)
    radius, x, y = min(width, height) // 4, rng.randrange(width), rng.randrange(height)
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), disc)
    image.save(buffer := io.BytesIO(), "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


MIXES: dict[str, Callable[[DiffusionModelSpec], Mix]] = {
    "mixed": mixed,
    "uniform": uniform,
    "mixed-settings": mixed_settings,
}


def generate_trace(
    mix: Mix,
    spec: DiffusionModelSpec,
    solo_s: Callable[[RequestTemplate], float] | None,
    *,
    rows_per_s: float,
    seconds: float,
    arrivals: Arrivals,
    seed: int,
) -> tuple[Arrival, ...]:
    """Arrivals that bring `rows_per_s` of work for `seconds`. `solo_s` gives the seconds of a request alone; None: no
    deadlines.

    Every rate has the same requests in the same order, as many as its work needs. Their gaps are scaled to fill
    `seconds` exactly, so that the load does not depend on the random gaps.
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
    """Return one of 2,304 captions: too many for a prompt cache to give the server an advantage over the bare loop."""
    colours, shapes = (
        ("red", "green", "blue", "yellow", "orange", "purple", "white", "black"),
        ("circle", "square", "triangle", "star", "ring", "cross"),
    )
    number, first = divmod(number, 8)
    number, shape = divmod(number, 6)
    number, second = divmod(number, 8)
    return f"a {colours[first]} {shapes[shape]} above a {colours[second]} {shapes[number % 6]}"
