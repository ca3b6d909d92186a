"""Eight users in this process, each asking again when answered: served by the seed's batched loop, and by the wheel.

Both draw with the same model on the same device, and neither has HTTP, PNG files or a second process to pay for: what differs is who
is drawn with whom. The seed's loop does what diffusers' pipeline does, for groups of equal settings that `targets/microbatch.py`
chooses: a group of 8 images at once, else every 500 ms the group with the oldest request. The wheel is the engine's own. A request
is answered when its last image is in the host's memory.
"""

import inspect
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from noria import schedulers
from noria.bench.statistics import percentile
from noria.bench.targets.microbatch import Microbatcher
from noria.bench.workload import MIXES, Ask
from noria.config import EngineConfig
from noria.engine.calibration import measure
from noria.engine.diffusion import DiffusionExecutor, PreparedImages
from noria.engine.loading import most_rows
from noria.engine.loop import Ended, Happening, ImageReady, Wheel
from noria.request import ImageRequest
from noria.scheduling.costs import CostModel
from noria.scheduling.plans import End
from noria.scheduling.steps import StepScheduler
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.models.stable_diffusion import DiffusionModel

NUM_USERS = 8
_BATCH_TIMEOUT_S, _BATCH_IMAGES = 0.5, 8  # the seed article's
_WARM_UP_SHARE = 0.2  # of the time: until sizes are seen and users are out of step
_TRAFFIC_SEED = 1


@dataclass(frozen=True)
class Answer:
    """One request that was answered; times are monotonic seconds."""

    sent_s: float
    done_s: float
    num_images: int
    rows: float


@dataclass
class Log:
    """What a server did."""

    answers: list[Answer] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)  # images of each UNet call


@dataclass(frozen=True)
class Served:
    """What it amounts to, the first fifth of the time left out."""

    server: str
    traffic: str
    model: str
    seconds: float
    requests: int
    images_per_s: float | None  # None: too few answers to count
    rows_per_s: float | None  # UNet rows of the model's own size
    p50_s: float | None
    p99_s: float | None
    mean_batch: float | None  # images a UNet call


@dataclass(frozen=True)
class Stand:
    """What both servers draw with, warm; `config` has no "auto" left."""

    executor: DiffusionExecutor
    spec: ModelSpec
    config: EngineConfig
    costs: CostModel  # measured, as at an engine's start


def set_up(executor: DiffusionExecutor, spec: ModelSpec, config: EngineConfig) -> Stand:
    """Measure what work costs, which draws; compile the samplers and load the kernels: what happens once in a server's life.

    Raises:
        ModelError: the model cannot draw on this device.

    """
    costs = CostModel(most_rows(config))
    measure(executor, spec, config, costs)
    asks = list(itertools.islice(MIXES["mixed"](spec).asks(_TRAFFIC_SEED), 256))
    for ask in asks:
        executor.prepare(_request(ask, 0, spec))
    sizes = {(ask.width, ask.height): ask for ask in asks}
    for ask in sizes.values():  # the seed's loop goes first, and would load each size's kernels for both
        draw(executor.model, [msgspec.structs.replace(ask, inference_steps=2)])
    return Stand(executor, spec, config, costs)


def serve_both(stand: Stand, traffic: str, seconds: float) -> Iterator[Served]:
    """The same endless row of requests to each, for `seconds`."""
    mix = MIXES[traffic](stand.spec)
    for server in ("seed", "wheel"):
        asks, started = mix.asks(_TRAFFIC_SEED), time.monotonic()
        if server == "seed":
            log = microbatched(stand.executor.model, stand.spec, asks, started + seconds)
        else:
            log = on_the_wheel(stand, asks, started + seconds)
        yield figures(server, traffic, stand.spec.name, log, started + _WARM_UP_SHARE * seconds, seconds)


def figures(server: str, traffic: str, model: str, log: Log, counted_from_s: float, seconds: float) -> Served:
    """Of the answers after `counted_from_s`. Rates are of whole rounds, as many answers as there are users.

    Users in step are answered in bursts: from the first of one burst to the last of another, there would be more than their share.
    """
    answers = sorted(
        (answer for answer in log.answers if answer.done_s >= counted_from_s), key=lambda each: each.done_s
    )
    counted = max(0, len(answers) - 1) // NUM_USERS * NUM_USERS
    later = answers[1 : 1 + counted]
    span_s = later[-1].done_s - answers[0].done_s if later else 0.0
    waits = [answer.done_s - answer.sent_s for answer in answers]
    return Served(
        server,
        traffic,
        model,
        seconds,
        requests=len(answers),
        images_per_s=sum(answer.num_images for answer in later) / span_s if span_s else None,
        rows_per_s=sum(answer.rows for answer in later) / span_s if span_s else None,
        p50_s=percentile(waits, 0.5) if waits else None,
        p99_s=percentile(waits, 0.99) if waits else None,
        mean_batch=sum(log.batches) / len(log.batches) if log.batches else None,
    )


# ── The seed's loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def microbatched(model: "DiffusionModel", spec: ModelSpec, asks: Iterator[Ask], end_s: float) -> Log:
    """Serve the users until `end_s`; a batch that has begun is finished."""
    log = Log()
    batcher: Microbatcher[tuple[Ask, float]] = Microbatcher(_BATCH_TIMEOUT_S, _BATCH_IMAGES, time.monotonic())

    def send(now: float) -> None:
        ask = next(asks)
        group = ask.width, ask.height, ask.inference_steps, ask.guidance_scale, ask.scheduler
        batcher.put(group, (ask, now), ask.n, now)

    for _ in range(NUM_USERS):
        send(time.monotonic())
    while (now := time.monotonic()) < end_s:
        batch = batcher.fetch(now)
        if not batch:  # every user waits: nothing happens before the tick
            time.sleep(max(0.0, (batcher.next_tick() or now) - now))
            continue
        together = [ask for ask, _ in batch]
        draw(model, together)
        log.batches += [sum(ask.n for ask in together)] * together[0].num_calls
        now = time.monotonic()
        for ask, sent_s in batch:
            log.answers.append(Answer(sent_s, now, ask.n, ask.rows(spec)))
            send(now)
    return log


@torch.inference_mode()
def draw(model: "DiffusionModel", asks: list[Ask]) -> torch.Tensor:
    """Pixels [B, height, width, 3] of requests with equal settings, as diffusers' StableDiffusionPipeline draws them."""
    import diffusers

    ask, device = asks[0], model.device
    choice = schedulers.find(ask.scheduler)
    scheduler: Any = getattr(diffusers, choice.diffusers_class).from_config(model.scheduler_config, **choice.overrides)
    scheduler.set_timesteps(ask.inference_steps, device=device)
    prompts = [each.prompt for each in asks for _ in range(each.n)]
    text = model.encode([""] * len(prompts) + prompts if ask.guided else prompts)
    generators = [torch.Generator().manual_seed(each.seed + k) for each in asks for k in range(each.n)]
    shape = model.latent_channels, ask.height // model.latent_scale, ask.width // model.latent_scale
    noise = [torch.randn(shape, generator=generator, dtype=model.dtype) for generator in generators]
    latents_BCHW = torch.stack(noise).to(device) * scheduler.init_noise_sigma
    random = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for t in scheduler.timesteps:
        rows_RCHW = scheduler.scale_model_input(torch.cat([latents_BCHW] * (2 if ask.guided else 1)), t)
        output = model.predict(rows_RCHW, t, text)
        if ask.guided:
            negative, prompted = output.chunk(2)
            output = negative + ask.guidance_scale * (prompted - negative)
        latents_BCHW = scheduler.step(output, t, latents_BCHW, return_dict=False, **random)[0]
    return model.decode(latents_BCHW).cpu()


# ── The wheel ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Users:
    """Who waits for what on the wheel; an image is there when its copy to the host is."""

    def __init__(self, executor: DiffusionExecutor, spec: ModelSpec, asks: Iterator[Ask]) -> None:
        self._executor, self._spec, self._asks, self._numbers = executor, spec, asks, itertools.count()
        self._waiting: dict[str, tuple[Ask, float]] = {}
        self._missing: dict[str, int] = {}  # images of each
        self._landing: deque[tuple[str, torch.cuda.Event | None]] = deque()
        self.log = Log()

    @property
    def waiting(self) -> list[str]:
        """The requests that are not answered."""
        return list(self._waiting)

    def next_request(self, now: float) -> PreparedImages:
        """What a user asks for."""
        ask = next(self._asks)
        prepared = self._executor.prepare(_request(ask, next(self._numbers), self._spec))
        self._waiting[prepared.request.request_id] = ask, now
        self._missing[prepared.request.request_id] = ask.n
        return prepared

    def hear(self, happening: Happening[PreparedImages]) -> None:
        """The wheel's news."""
        match happening:
            case ImageReady(prepared, _, pixels):
                self._landing.append((prepared.request.request_id, pixels.copied))  # type: ignore[attr-defined]
            case Ended(prepared, event) if event.end not in (End.FINISHED, End.CANCELLED):
                raise RuntimeError(f"the wheel failed {prepared.request.request_id}: {event.reason}")

    def answer(self, *, wait: bool) -> int:
        """Take in the images that have landed, or with `wait` the next one too; how many requests were answered."""
        answered = 0
        while self._landing:
            request_id, copied = self._landing[0]
            if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                copied.synchronize()
            wait = False
            self._landing.popleft()
            self._missing[request_id] -= 1
            if self._missing[request_id] == 0:
                ask, sent_s = self._waiting.pop(request_id)
                self.log.answers.append(Answer(sent_s, time.monotonic(), ask.n, ask.rows(self._spec)))
                answered += 1
        return answered


def on_the_wheel(stand: Stand, asks: Iterator[Ask], end_s: float) -> Log:
    """Serve the users until `end_s`; who waits then is cancelled."""
    assert isinstance(stand.config.slots, int)
    users = _Users(stand.executor, stand.spec, asks)
    scheduler = StepScheduler(stand.config.slots, stand.config.decode_batch, costs=stand.costs)
    wheel: Wheel[PreparedImages] = Wheel(scheduler, stand.executor, users.hear, time.monotonic)
    newcomers = NUM_USERS
    while (now := time.monotonic()) < end_s:
        for _ in range(newcomers):
            wheel.submit(users.next_request(now))
        turn = wheel.turn()
        if turn is not None and turn.plan.steps:
            users.log.batches.append(len(turn.plan.steps))
        newcomers = users.answer(wait=turn is None)
    for request_id in users.waiting:
        wheel.cancel(request_id)
    return users.log


def _request(ask: Ask, number: int, spec: ModelSpec) -> ImageRequest:
    return ImageRequest(
        request_id=f"request-{number}",
        prompt=ask.prompt,
        negative_prompt="",
        seed=ask.seed,
        width_px=ask.width,
        height_px=ask.height,
        num_steps=ask.inference_steps,
        guidance_scale=ask.guidance_scale,
        num_images=ask.n,
        scheduler=ask.scheduler,
        timeout_s=math.inf,
        model=spec.name,
    )
