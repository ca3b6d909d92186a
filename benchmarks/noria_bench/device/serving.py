"""Compares the reference article's microbatching with Noria's engine, for eight users in this process.

Each user sends the next request when the previous one is answered. Both servers use the same model on the same device,
without HTTP, PNG files or other processes: only the batching differs. The reference loop does what diffusers' pipeline
does, for groups of equal settings that `targets.reference.microbatcher` chooses: a group of 8 images at once, otherwise
every 500 ms the group with the oldest request. A request is answered when its last image is in host memory.
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

from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.preparation import PreparedImageRequest
from noria.engine.diffusion.sizing.slot_count import max_rows
from noria.engine.diffusion.warmup.calibration import measure_costs
from noria.engine.loop import EngineEvent, RequestEnded, ResultReady, StepLoop
from noria.images import scheduler_names
from noria.models.diffusion.conditioning import collate
from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload
from noria.protocol.request import EngineRequest, ImageRequest
from noria.scheduling.costs import CostModel
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import FinishReason
from noria_bench.load.workload import MIXES, RequestTemplate
from noria_bench.measurement.run_metrics import percentile
from noria_bench.targets.reference.microbatcher import Microbatcher

if TYPE_CHECKING:
    from noria.models.diffusion.diffusion_model import DiffusionModel

NUM_USERS = 8
# The reference article's defaults.
_BATCH_TIMEOUT_S, _BATCH_IMAGES = 0.5, 8
# Share of the time, until all sizes were used and users are out of step.
_WARM_UP_SHARE = 0.2
_TRAFFIC_SEED = 1


@dataclass(frozen=True)
class CompletedRequest:
    """An answered request; times are monotonic seconds."""

    sent_s: float
    done_s: float
    num_images: int
    rows: float


@dataclass
class ServingLog:
    """The requests that a server completed, and the sizes of its batches."""

    completed: list[CompletedRequest] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)  # images of each UNet call


@dataclass(frozen=True)
class ServingResult:
    """The summary of a log, without the first fifth of the time."""

    server: str
    traffic: str
    model: str
    seconds: float
    num_requests: int
    images_per_s: float | None  # None: too few answers
    rows_per_s: float | None  # UNet rows of the model's default size
    p50_s: float | None
    p99_s: float | None
    mean_batch: float | None  # images per UNet call


@dataclass(frozen=True)
class ServingSetup:
    """The parts that both servers use, warmed up; no setting of `config` is "auto"."""

    executor: DiffusionExecutor
    spec: DiffusionModelSpec
    config: EngineConfig
    costs: CostModel  # measured, as at an engine's start


def set_up(executor: DiffusionExecutor, spec: DiffusionModelSpec, config: EngineConfig) -> ServingSetup:
    """Measure the costs, compile the samplers and load the kernels, as a server does at its start.

    Raises:
        ModelError: the model does not run on this device.

    """
    costs = CostModel(max_rows(config))
    measure_costs(executor, spec, config, costs)
    templates = list(itertools.islice(MIXES["mixed"](spec).templates(_TRAFFIC_SEED), 256))
    for template in templates:
        executor.prepare(_request(template, 0, spec))
    sizes = {(template.width, template.height): template for template in templates}
    # Otherwise the reference loop, which runs first, would load each size's kernels for both.
    for template in sizes.values():
        generate(executor.model, [msgspec.structs.replace(template, inference_steps=2)])
    return ServingSetup(executor, spec, config, costs)


def serve_both(setup: ServingSetup, traffic: str, seconds: float) -> Iterator[ServingResult]:
    """Send the same endless sequence of requests to each server, for `seconds`."""
    mix = MIXES[traffic](setup.spec)
    for server in ("reference", "noria"):
        templates, started = mix.templates(_TRAFFIC_SEED), time.monotonic()
        if server == "reference":
            log = run_microbatcher(setup.executor.model, setup.spec, templates, started + seconds)
        else:
            log = run_engine_loop(setup, templates, started + seconds)
        yield summarise_serving(server, traffic, setup.spec.name, log, started + _WARM_UP_SHARE * seconds, seconds)


def summarise_serving(
    server: str, traffic: str, model: str, log: ServingLog, counted_from_s: float, seconds: float
) -> ServingResult:
    """Summarise the answers after `counted_from_s`. Rates are over whole rounds, of as many answers as there are users.

    Users in step are answered in bursts: a window from the first answer of a burst to the last of another would
    overestimate the rate.
    """
    completed = sorted(
        (entry for entry in log.completed if entry.done_s >= counted_from_s), key=lambda each: each.done_s
    )
    num_counted = max(0, len(completed) - 1) // NUM_USERS * NUM_USERS
    later = completed[1 : 1 + num_counted]
    elapsed_s = later[-1].done_s - completed[0].done_s if later else 0.0
    latencies_s = [entry.done_s - entry.sent_s for entry in completed]
    return ServingResult(
        server,
        traffic,
        model,
        seconds,
        num_requests=len(completed),
        images_per_s=sum(entry.num_images for entry in later) / elapsed_s if elapsed_s else None,
        rows_per_s=sum(entry.rows for entry in later) / elapsed_s if elapsed_s else None,
        p50_s=percentile(latencies_s, 0.5) if latencies_s else None,
        p99_s=percentile(latencies_s, 0.99) if latencies_s else None,
        mean_batch=sum(log.batch_sizes) / len(log.batch_sizes) if log.batch_sizes else None,
    )


def run_microbatcher(
    model: "DiffusionModel", spec: DiffusionModelSpec, templates: Iterator[RequestTemplate], end_s: float
) -> ServingLog:
    """Serve the users by microbatching until `end_s`; a batch that has started is completed."""
    log = ServingLog()
    batcher: Microbatcher[tuple[RequestTemplate, float]] = Microbatcher(
        _BATCH_TIMEOUT_S, _BATCH_IMAGES, time.monotonic()
    )

    def send(now: float) -> None:
        template = next(templates)
        group = template.width, template.height, template.inference_steps, template.guidance_scale, template.scheduler
        batcher.put(group, (template, now), template.n, now)

    for _ in range(NUM_USERS):
        send(time.monotonic())
    while (now := time.monotonic()) < end_s:
        batch = batcher.fetch(now)
        # All users wait, so nothing happens before the tick.
        if not batch:
            time.sleep(max(0.0, (batcher.next_tick() or now) - now))
            continue
        batch_templates = [template for template, _ in batch]
        generate(model, batch_templates)
        log.batch_sizes += [sum(template.n for template in batch_templates)] * batch_templates[0].num_calls
        now = time.monotonic()
        for template, sent_s in batch:
            log.completed.append(CompletedRequest(sent_s, now, template.n, template.rows(spec)))
            send(now)
    return log


@torch.inference_mode()
def generate(model: "DiffusionModel", templates: list[RequestTemplate]) -> torch.Tensor:
    """Pixels [B, height, width, 3] of requests with equal settings, as diffusers' pipeline computes them."""
    import diffusers

    template, device = templates[0], model.device
    choice = scheduler_names.find(template.scheduler)
    scheduler: Any = getattr(diffusers, choice.diffusers_class).from_config(model.scheduler_config, **choice.overrides)
    scheduler.set_timesteps(template.inference_steps, device=device)
    prompts = [each.prompt for each in templates for _ in range(each.n)]
    conditioning = collate(model.text_encode([""] * len(prompts) + prompts if template.guided else prompts))
    generators = [torch.Generator().manual_seed(each.seed + k) for each in templates for k in range(each.n)]
    shape = model.latent_shape(template.width, template.height)
    noise = [torch.randn(shape, generator=generator, dtype=model.dtype) for generator in generators]
    latents_BCHW = torch.stack(noise).to(device) * scheduler.init_noise_sigma
    random = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for t in scheduler.timesteps:
        rows_RCHW = scheduler.scale_model_input(torch.cat([latents_BCHW] * (2 if template.guided else 1)), t)
        output = model.predict(rows_RCHW, t, conditioning, None)
        assert isinstance(output, torch.Tensor)
        if template.guided:
            negative, prompted = output.chunk(2)
            output = negative + template.guidance_scale * (prompted - negative)
        latents_BCHW = scheduler.step(output, t, latents_BCHW, return_dict=False, **random)[0]
    return model.decode(latents_BCHW).cpu()


class _ClosedLoopUsers:
    """The users of the engine loop. An image is complete when its copy to the host is."""

    def __init__(
        self, executor: DiffusionExecutor, spec: DiffusionModelSpec, templates: Iterator[RequestTemplate]
    ) -> None:
        self._executor, self._spec, self._templates, self._numbers = executor, spec, templates, itertools.count()
        self._waiting: dict[str, tuple[RequestTemplate, float]] = {}
        self._num_missing_images: dict[str, int] = {}  # images of each
        self._pending_copies: deque[tuple[str, torch.cuda.Event | None]] = deque()
        self.log = ServingLog()

    @property
    def waiting(self) -> list[str]:
        """The ids of the unanswered requests."""
        return list(self._waiting)

    def next_request(self, now: float) -> PreparedImageRequest:
        """The next request of a user, compiled."""
        template = next(self._templates)
        prepared = self._executor.prepare(_request(template, next(self._numbers), self._spec))
        self._waiting[prepared.request.request_id] = template, now
        self._num_missing_images[prepared.request.request_id] = template.n
        return prepared

    def on_event(self, engine_event: EngineEvent[PreparedImageRequest]) -> None:
        """Handle an event of the engine loop."""
        match engine_event:
            case ResultReady(prepared, _, result):
                copied = result.pixels.copied  # type: ignore[attr-defined]
                self._pending_copies.append((prepared.request.request_id, copied))
            case RequestEnded(prepared, event) if event.finish_reason not in (
                FinishReason.FINISHED,
                FinishReason.CANCELLED,
            ):
                raise RuntimeError(f"the engine failed {prepared.request.request_id}: {event.message}")

    def collect_finished(self, *, wait: bool) -> int:
        """Collect the images whose copies are complete; `wait` blocks for the next one.

        Returns the number of answered requests.
        """
        num_finished = 0
        while self._pending_copies:
            request_id, copied = self._pending_copies[0]
            if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                copied.synchronize()
            wait = False
            self._pending_copies.popleft()
            self._num_missing_images[request_id] -= 1
            if self._num_missing_images[request_id] == 0:
                template, sent_s = self._waiting.pop(request_id)
                self.log.completed.append(
                    CompletedRequest(sent_s, time.monotonic(), template.n, template.rows(self._spec))
                )
                num_finished += 1
        return num_finished


def run_engine_loop(
    setup: ServingSetup, templates: Iterator[RequestTemplate], end_s: float, num_users: int = NUM_USERS
) -> ServingLog:
    """Serve the users by Noria's engine loop until `end_s`; the remaining requests are cancelled."""
    assert isinstance(setup.config.slots, int)
    users = _ClosedLoopUsers(setup.executor, setup.spec, templates)
    scheduler = StepScheduler(setup.config.slots, setup.config.decode_batch, costs=setup.costs)
    engine_loop: StepLoop[PreparedImageRequest] = StepLoop(scheduler, setup.executor, users.on_event, time.monotonic)
    num_new = num_users
    while (now := time.monotonic()) < end_s:
        for _ in range(num_new):
            engine_loop.submit(users.next_request(now))
        iteration = engine_loop.run_iteration()
        if iteration is not None and iteration.plan.steps:
            users.log.batch_sizes.append(len(iteration.plan.steps))
        num_new = users.collect_finished(wait=iteration is None)
    for request_id in users.waiting:
        engine_loop.cancel(request_id)
    return users.log


def _request(template: RequestTemplate, number: int, spec: DiffusionModelSpec) -> ImageRequest:
    return EngineRequest(
        request_id=f"request-{number}",
        attempt_id=f"request-{number}",
        model=spec.name,
        model_version=spec.fingerprint,
        payload=DiffusionPayload(negative_prompt="", **template.settings),
        timeout_s=math.inf,
    )
