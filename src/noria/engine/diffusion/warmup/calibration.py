"""Measures what steps, decodes and text encoding cost with a model on a device, and caches the result between starts.

Warm-up requests with growing numbers of images run through the real engine loop, and the cost model learns from their
iterations as it does in service. A first pass at each size absorbs one-time work (kernel selection, memory allocation);
the lower of the next two counts. Between these two come other sizes, so that a moment's disturbance spoils one of them.
"""

import hashlib
import importlib.metadata
import logging
import math
import os
import pathlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from noria import __version__
from noria.config import EngineConfig
from noria.engine.loop import EngineEvent, RequestEnded, ResultReady, StepLoop
from noria.errors import GenerationFailed, ModelError, NoriaError
from noria.folders import cache_folder
from noria.images import scheduler_names
from noria.models.adapters.refiner_folders import RefinerFolders
from noria.models.adapters.safety_folders import SafetyFolders
from noria.observe.cpuinfo import cpu_model
from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload, Refinement
from noria.protocol.messages import ShapeCosts
from noria.protocol.request import EngineRequest
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, FinishReason

if TYPE_CHECKING:
    import torch

    from noria.engine.diffusion.executor import DiffusionExecutor
    from noria.engine.diffusion.preparation import PreparedImageRequest

_log = logging.getLogger(__name__)

BUDGET_S = 3.0
"""Seconds that measuring may add to a start. The costs of what does not fit into it are learned in service."""

_STEPS = 3  # steps of a measured request; a single one would time the first access to its memory
_GUIDANCE = 2.0  # two rows an image


def shape_costs(costs: CostModel) -> tuple[ShapeCosts, ...]:
    """The measured costs, in the form that clients receive."""
    encodes = costs.image_encodes
    return tuple(
        ShapeCosts(
            model=batch_key.model.name,
            width_px=batch_key.width_px,
            height_px=batch_key.height_px,
            step_s={rows: round(costs.step_s(batch_key, rows), 6) for rows in sorted(curve.points)},
            decode_s={
                n: round(costs.decode_s(batch_key, n), 6) for n in sorted(costs.decodes[batch_key.decode_key].points)
            }
            if batch_key.decode_key in costs.decodes
            else {},
            text_encode_s=round(costs.text_encode_s(batch_key.model), 6),
            max_rows=costs.rows_limit(batch_key),
            version=batch_key.model.version,
            image_encode_s={n: round(costs.image_encode_s(batch_key, n), 6) for n in sorted(encodes[batch_key].points)}
            if batch_key in encodes
            else {},
            reference_px=batch_key.reference_px,
            stage=batch_key.stage,
            slowdown=round(costs.slowdown, 6),
            step_totals=dict(costs.step_totals.get(batch_key, {})),
            decode_totals=dict(costs.decode_totals.get(batch_key.decode_key, {})),
        )
        for batch_key, curve in costs.steps.items()
    )


class CachedCurve(msgspec.Struct, frozen=True):
    """The `CostCurve` of one batch key, as it is in the file."""

    width_px: int
    height_px: int
    seconds: dict[int, float]  # by rows (steps) or images
    stage: int = 0
    reference_px: int = 0


class CachedCosts(msgspec.Struct, frozen=True):
    """The file: one model's costs under one `key`."""

    key: dict[str, str]
    steps: list[CachedCurve]
    decodes: list[CachedCurve]
    text_encode_s: float
    image_encodes: list[CachedCurve] = []


def measure_costs(
    executor: "DiffusionExecutor", spec: DiffusionModelSpec, config: EngineConfig, costs: CostModel
) -> None:
    """Measure the default size into `costs`, at every batch size that fits or until `BUDGET_S` is spent.

    Raises ModelError: the model cannot generate images on this device with these settings.
    """
    assert isinstance(config.slots, int)
    started, was_synchronous, second_pass = time.monotonic(), executor.is_synchronous, CostModel(costs.max_rows)
    executor.is_synchronous = True
    measured_sizes, planned_s = [(1, 0.0)], 0.0  # images and guidance; seconds of all second passes
    try:
        run_warmup_request(executor, spec, config, CostModel(costs.max_rows), 1, steps=2, guidance=0.0)
        run_warmup_request(executor, spec, config, costs, 1, _STEPS, guidance=0.0)
        for num_images in _batch_sizes(min(config.slots, costs.max_rows)):
            began = time.monotonic()
            absorbed = CostModel(costs.max_rows)
            run_warmup_request(executor, spec, config, absorbed, num_images, steps=2)
            if absorbed.has_run_out:
                break  # larger batches do not fit the memory either
            absorbed_at = time.monotonic()
            run_warmup_request(executor, spec, config, costs, num_images, _STEPS)
            now = time.monotonic()
            measured_sizes.append((num_images, _GUIDANCE))
            planned_s += now - absorbed_at
            both_s = now - began + now - absorbed_at
            if now - started + planned_s + 2 * both_s > BUDGET_S:  # the next batch size takes up to twice as long
                break
        for num_images, guidance in measured_sizes:
            run_warmup_request(executor, spec, config, second_pass, num_images, _STEPS, guidance)
    finally:
        executor.is_synchronous = was_synchronous
    costs.slowdown = 1.0
    costs.merge_min(second_pass)
    costs.refresh_knees()


def _batch_sizes(num_images: int) -> list[int]:
    """The powers of two below `num_images`, and `num_images`."""
    return [*(2**power for power in range(num_images.bit_length()) if 2**power < num_images), num_images]


def run_warmup_request(
    executor: "DiffusionExecutor",
    spec: DiffusionModelSpec,
    config: EngineConfig,
    costs: CostModel,
    num_images: int,
    steps: int,
    guidance: float = _GUIDANCE,
    prompt: str = "",
) -> None:
    """Generate and discard `num_images` images of the default size, measured into `costs`.

    An empty `prompt` is one that differs each time, so that no embedding is cached.

    A refiner makes as many `steps` after those of the model.

    Raises ModelError on failure.
    """
    refiner = RefinerFolders.of(config).for_model(spec)
    is_refined = refiner is not None and scheduler_names.find(spec.default_scheduler).takes_refiner
    assert isinstance(config.slots, int)
    events: list[EngineEvent[PreparedImageRequest]] = []
    scheduler = StepScheduler(config.slots, config.decode_batch, costs=costs)
    loop: StepLoop[PreparedImageRequest] = StepLoop(scheduler, executor, events.append, time.monotonic)
    request = EngineRequest(
        request_id=f"warmup-{num_images}",
        attempt_id=f"warmup-{num_images}",
        model=spec.name,
        model_version=spec.fingerprint,
        payload=DiffusionPayload(
            prompt=prompt or f"{num_images} warm-up images, {steps} steps",
            negative_prompt="",
            seed=0,
            width=spec.default_width_px,
            height=spec.default_height_px,
            inference_steps=2 * steps if is_refined else steps,
            guidance_scale=guidance,
            scheduler=spec.default_scheduler,
            n=num_images,
            strength=1.0 if spec.needs_mask else None,
            has_mask=spec.needs_mask,
            refiner=Refinement(0.5) if is_refined else None,
        ),
        timeout_s=math.inf,
    )
    # A black start image, all of which is repainted.
    num_pixels = spec.default_width_px * spec.default_height_px
    frame = memoryview(bytes(3 * num_pixels) + b"\xff" * num_pixels) if spec.needs_mask else None
    try:
        loop.submit(executor.prepare(request, frame))
        while loop.run_iteration() is not None:
            pass
        for event in events:
            _expect_success(event)
    except NoriaError as error:
        raise ModelError(
            f"{spec.name} in {spec.folder} loads but cannot generate images with these settings: {error.message}"
        ) from error


def _expect_success(event: "EngineEvent[PreparedImageRequest]") -> None:
    if isinstance(event, ResultReady):
        event.result.message()
    elif isinstance(event, RequestEnded) and event.event.finish_reason is not FinishReason.FINISHED:
        raise GenerationFailed(event.event.message)


class CostCache:
    """A file with the measured costs of one model, settings and device.

    Failures to read or write it are logged, not raised.
    """

    def __init__(self, folder: pathlib.Path, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> None:
        """`config` has no "auto" left; `device` is the hardware's name, because machines may share the folder."""
        self._model = spec.key
        self._key = cost_key(spec, config, device)
        digest = hashlib.sha256(msgspec.json.encode(sorted(self._key.items()))).hexdigest()[:16]
        self.path = folder / f"{digest}.json"

    def load(self, costs: CostModel) -> bool:
        """Add the cached costs to `costs`; False if there are none, or none that are valid."""
        try:
            cached = msgspec.json.decode(self.path.read_bytes(), type=CachedCosts)
        except FileNotFoundError:
            return False
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("the cached costs in %s cannot be used and are measured again: %s", self.path, error)
            return False
        curves = [*cached.steps, *cached.decodes, *cached.image_encodes]
        are_valid = all(curve.seconds for curve in curves) and all(
            seconds > 0.0 and count > 0 for curve in curves for count, seconds in curve.seconds.items()
        )
        if cached.key != self._key or not cached.steps or not are_valid:
            return False
        for known, of_cache in (
            (costs.steps, cached.steps),
            (costs.decodes, cached.decodes),
            (costs.image_encodes, cached.image_encodes),
        ):
            known |= {self._batch_key(curve): CostCurve(dict(curve.seconds)) for curve in of_cache}
        costs.text_encode_s_by_model[self._model] = cached.text_encode_s
        costs.refresh_knees()
        return True

    def save(self, costs: CostModel) -> None:
        """Write this model's part of `costs`."""
        steps, decodes, image_encodes = (
            [
                _to_cached_curve(batch_key, curve)
                for batch_key, curve in curves.items()
                if batch_key.model == self._model
            ]
            for curves in (costs.steps, costs.decodes, costs.image_encodes)
        )
        text_encode_s = costs.text_encode_s_by_model.get(self._model, 0.0)
        cached = CachedCosts(self._key, steps, decodes, text_encode_s, image_encodes)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(cached))
            temporary.replace(self.path)  # atomic, because another engine may read the file now
        except OSError as error:
            _log.warning("the measured costs cannot be cached: %s", error)

    def _batch_key(self, curve: CachedCurve) -> BatchKey:
        return BatchKey(curve.width_px, curve.height_px, self._model, curve.stage, curve.reference_px)


def _to_cached_curve(batch_key: BatchKey, curve: CostCurve) -> CachedCurve:
    return CachedCurve(
        batch_key.width_px, batch_key.height_px, dict(curve.points), batch_key.stage, batch_key.reference_px
    )


def cost_key(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> dict[str, str]:
    """Everything that a step's cost depends on: model, device, versions, settings."""
    settings: dict[str, Any] = {
        name: getattr(config, name)
        for name in (
            "dtype",
            "threads",
            "attention",
            "channels_last",
            "compile",
            "compile_blocks",
            "quantize",
            "cuda_graphs",
            "buckets",
            "decode_batch",
            "vae_tiling",
            "text_encoder_device",
            "offload",  # how many bytes stay follows from the free memory, and differs from start to start
        )
    }
    refiner, rule = RefinerFolders.of(config).for_model(spec), SafetyFolders.of(config).for_model(spec)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers")} | {"noria": __version__}
    return (
        {"model": spec.fingerprint, "device": device}
        | versions
        | {name: str(value) for name, value in settings.items()}
        | ({} if refiner is None else {"refiner": refiner.digest})
        | ({} if rule is None else {"safety_classifier": rule.folder.digest})
    )


def cost_folder(cache_dir: str) -> pathlib.Path:
    """The folder for cost files: below `cache_dir`, or below the user's cache folder if that is empty."""
    return cache_folder(cache_dir, os.environ) / "costs"


def cost_cache(spec: DiffusionModelSpec, config: EngineConfig, device: "torch.device") -> CostCache:
    """The cost cache of this model with these settings on this device."""
    return CostCache(cost_folder(config.cache_dir), spec, config, device_name(device))


def device_name(device: "torch.device | str") -> str:
    """The hardware's name, which keeps the costs of different devices apart."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"
