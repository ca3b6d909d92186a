"""Loads models into executors on a device, warms them up and gets their costs.

Used by the engine, `noria generate`, `noria doctor` and the bench.

Importing this module is cheap: torch and diffusers are imported by its functions.
"""

import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from noria.config import EngineConfig
from noria.config.engine import MAX_SLOTS
from noria.engine.diffusion.model_changes import ModelChanges
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto, resolve_device
from noria.engine.diffusion.sizing.slot_count import count_engines, fit_slots, max_rows, set_slots
from noria.engine.diffusion.warmup.calibration import (
    CostCache,
    cost_cache,
    device_name,
    measure_costs,
    run_warmup_request,
    shape_costs,
)
from noria.engine.diffusion.warmup.call_choice import choose_calls
from noria.engine.multi_model import MultiModelExecutor
from noria.engine.resources.memory import free_memory_bytes, peak_bytes
from noria.engine.runtime import StepRuntime, log_imported
from noria.errors import ConfigError
from noria.models.adapters.safety_folders import SafetyFolders
from noria.models.families import FAMILIES
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.messages import ModelPrecision
from noria.protocol.model_spec import CallChoice, ModelKey
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.step.scheduler import StepScheduler

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import DiffusionExecutor
    from noria.engine.diffusion.preparation import PreparedImageRequest
    from noria.models.diffusion.diffusion_model import DiffusionModel
    from noria.models.diffusion.safety_classifier import SafetyCheck

_log = logging.getLogger("noria.engine")

_SLOW_MODULES = (
    "transformers.modeling_utils",
    "diffusers.models.autoencoders",
    "diffusers.models.transformers",
    "diffusers.models.unets",
)
"""Modules that the families import where they load a model: 15 s of a start on two cores, a minute from a slow disk."""


def warm_up(executor: "DiffusionExecutor", spec: DiffusionModelSpec, config: EngineConfig) -> None:
    """Run warm-up requests of the default size: one guided image, or as many images as fill each bucket.

    If blocks are compiled, each kind of call that compiled code differs for comes first. The executor notes the bytes
    that the requests took.

    Raises ModelError: the model cannot generate images on this device with these settings.
    """
    assert isinstance(config.slots, int)
    if executor.config.compile_blocks:
        from noria.engine.diffusion.warmup.block_warmup import has_loras, warm_up_blocks

        warm_up_blocks(executor.model, spec, config)
        choice = executor.call_choice
        if (choice is None or choice.compile_loras) and has_loras(executor.model, spec, config):
            warm_up_blocks(executor.model, spec, config, with_loras=True)
    rows = 2 if executor.model.guidance.is_active(2.0, "") else 1
    for bucket in config.buckets or (2,):
        guidance, num_images = 2.0 if bucket > 1 else 0.0, min(max(1, bucket // rows), config.slots)
        request = functools.partial(run_warmup_request, executor, spec, config, CostModel(), num_images, 2, guidance)
        executor.call_bytes = max(executor.call_bytes, peak_bytes(str(executor.model.device), request))


def load_runtime(
    models: Sequence[DiffusionModelSpec],
    config: EngineConfig,
    device: str,
    free_bytes: Callable[[str], int] = free_memory_bytes,
) -> "StepRuntime[PreparedImageRequest]":
    """Load the models, warm them up and get their costs.

    `free_bytes` says how much of a device's memory another model may use.

    Raises:
        ConfigError: the device does not exist.
        ModelError: a model cannot be loaded, or cannot generate images on this device with these settings.
    """
    started_s = time.monotonic()
    for module in _SLOW_MODULES:
        importlib.import_module(module)
    device = resolve_device(device, detect_machine())
    log_imported(models, device, time.monotonic() - started_s)
    requested = config.slots
    if requested == "auto":
        config = msgspec.structs.replace(config, slots=MAX_SLOTS)  # until it is known what is free
    executors, config = load_executors(models, config, device)
    costs, cost_caches = load_or_measure_costs(executors, models, config)
    slots = set_slots(requested) if requested != "auto" else fit_slots(executors, models, config, free_bytes)
    config = msgspec.structs.replace(config, slots=slots.slots)
    costs.max_rows = max_rows(config)
    costs.refresh_knees()
    device = str(executors[models[0].key].model.device)
    scheduler = StepScheduler(
        slots.slots,
        config.decode_batch,
        config.queue_limit,
        config.queue_limit_s,
        POLICIES[config.policy],
        costs,
        config.fair_width_slack,
    )

    executor = MultiModelExecutor(executors)
    changes = ModelChanges(executor, scheduler, config, device, free_bytes, _load_warm)
    for spec in models:
        changes.add(spec, executors[spec.key])
    changes.cost_caches = dict(zip(changes.specs, cost_caches, strict=True))
    return StepRuntime(
        executor,
        scheduler,
        device=device,
        longest_iteration_s=costs.longest_s,
        shape_costs=lambda: shape_costs(costs),
        on_idle=costs.refresh_knees,  # when it delays no step and changes no running batch
        save_costs=changes.save_costs,
        resolved_settings={
            "dtype": executors[models[0].key].config.dtype,
            "slots": f"{slots.slots} ({slots.reason})",
            "threads": config.threads,
        }
        | ({} if config.offload == "none" else {"offload": _describe_offload(executors.values())})
        | ({} if config.quantize == "none" else {"quantize": _describe(changes.precisions.values())}),
        precisions=lambda: tuple(changes.precisions.values()),
        call_choices=lambda: tuple(changes.call_choices.values()),
        load_beside=changes.load_beside,
        release=changes.release,
        free_memory=changes.free_memory,
        slots_source=slots.source,
    )


def _describe(precisions: Iterable[ModelPrecision]) -> str:
    """Return how near the models are to those before they were quantized, for the log."""
    return ", ".join(
        f"{each.dtype} (fidelity {'not measured' if each.fidelity is None else format(each.fidelity, '.5f')})"
        for each in precisions
    )


def _describe_offload(executors: "Iterable[DiffusionExecutor]") -> str:
    """Return what of the models streams, for the log."""
    configs = [executor.config for executor in executors]
    if configs[0].offload == "encoders":
        return "encoders"
    resident = (f"{each.offload_resident_bytes:,}" for each in configs)
    return f"blocks (beyond {', '.join(resident)} bytes of a denoiser)"


def load_or_measure_costs(
    executors: "Mapping[ModelKey, DiffusionExecutor]", models: Sequence[DiffusionModelSpec], config: EngineConfig
) -> tuple[CostModel, list[CostCache]]:
    """Warm up each model; return the costs of all, cached or measured now, and the cache of each.

    Raises ModelError: a model cannot generate images on this device with these settings.
    """
    costs, caches = CostModel(max_rows(config)), []
    for spec in models:
        executor = executors[spec.key]
        cache = cost_cache(spec, executor.config, executor.model.device)
        started_s = time.monotonic()
        warm_up(executor, spec, config)
        is_cached = cache.load(costs)
        if not is_cached:
            measure_costs(executor, spec, config, costs)
            cache.save(costs)
        seconds, what = time.monotonic() - started_s, "warmed up" if is_cached else "warmed up and measured"
        extra = fields(event="model_warmed_up", model=spec.name, seconds=round(seconds, 3))
        _log.info("%s %s in %.1f s", what, spec.name, seconds, extra=extra)
        caches.append(cache)
    return costs, caches


def load_executor(
    spec: DiffusionModelSpec, config: EngineConfig, device: str
) -> tuple["DiffusionExecutor", EngineConfig]:
    """Load the model on `device` ("auto", "cpu", "cuda" or "cuda:N"); also return `config` resolved for this machine.

    Raises:
        ConfigError: the device does not exist, or compiled code cannot be kept in a private folder.
        ModelError: a model cannot be loaded.
    """
    import torch

    from noria.models.diffusion.block_compilation import use_private_cache

    use_private_cache(config)
    machine = detect_machine()
    device = resolve_device(device, machine)
    num_gpus = torch.cuda.device_count() if machine.has_cuda else 0
    if device != "cpu" and int(device.partition(":")[2]) >= num_gpus:
        raise ConfigError(
            f"device {device!r} does not exist: torch sees {num_gpus} CUDA devices. Use --devices cpu or auto."
        )
    place = config.text_encoder_device
    if place.startswith("cuda") and int(place.partition(":")[2]) >= num_gpus:
        raise ConfigError(
            f"engine.text_encoder_device is {place!r}, which does not exist: torch sees {num_gpus} CUDA devices. Use "
            "'same' or 'cpu'."
        )
    config = resolve_auto(config, spec, device, machine)
    assert isinstance(config.threads, int)
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and bool(config.buckets)
    executor = _load(spec, config, device)
    return executor, executor.config


def _load(
    spec: DiffusionModelSpec, config: EngineConfig, device: str, choice: CallChoice | None = None
) -> "DiffusionExecutor":
    """Load the model on `device`, "cpu" or "cuda:N"; what is still "auto" in `config` is resolved by measurements.

    `choice` is that by which its `compile_blocks` is no longer "auto".
    """
    import torch

    from noria.engine.diffusion.executor import DiffusionExecutor

    if device != "cpu":
        torch.cuda.set_device(device)  # events and streams belong to the thread's device, not to their tensors'
    if config.offload == "blocks" and config.offload_resident_bytes == "auto":
        from noria.engine.diffusion.sizing.offload_estimate import free_for_blocks

        num_bytes = free_for_blocks(spec, config, free_memory_bytes(device) // count_engines(device, config))
        config = msgspec.structs.replace(config, offload_resident_bytes=num_bytes)
    hardware = device_name(device)
    if config.compile_blocks == "auto":
        load = functools.partial(_load_model, spec, device=device, hardware=hardware)
        config, choice = choose_calls(spec, config, hardware, load)
    safety = _load_safety_check(spec, config, device)
    return DiffusionExecutor(_load_model(spec, config, device, hardware), config, safety, choice)


def _load_warm(
    spec: DiffusionModelSpec, config: EngineConfig, device: str, choice: CallChoice | None
) -> "DiffusionExecutor":
    executor = _load(spec, config, device, choice)
    warm_up(executor, spec, config)
    return executor


def _load_model(spec: DiffusionModelSpec, config: EngineConfig, device: str, hardware: str) -> "DiffusionModel":
    if config.quantize == "none":
        return FAMILIES[spec.family].load(spec, config, device)  # type: ignore[no-any-return]
    from noria.engine.diffusion.warmup.quantized_loading import load_quantized

    return load_quantized(spec, config, device, hardware)


def _load_safety_check(spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "SafetyCheck | None":
    """Load the safety classifier of a model, if it has one. Raises ModelError: it cannot be."""
    rule = SafetyFolders.of(config).for_model(spec)
    if rule is None:
        return None
    from noria.models.diffusion.safety_classifier import load_safety_check

    return load_safety_check(rule, device)


def load_executors(
    models: Sequence[DiffusionModelSpec], config: EngineConfig, device: str
) -> "tuple[dict[ModelKey, DiffusionExecutor], EngineConfig]":
    """Return every model's executor, and `config` resolved for all, with the fewest slots that any of them gets.

    Its dtype, attention and `compile_blocks` stay as they are; an executor's own `config` has what its model takes.

    Raises:
        ConfigError: the device does not exist, or the bytes that stay of several offloaded models are not set.
        ModelError: a model cannot be loaded.
    """
    if len(models) > 1 and config.offload == "blocks" and config.offload_resident_bytes == "auto":
        names = ", ".join(spec.name for spec in models)
        raise ConfigError(
            f"engine.offload_resident_bytes is 'auto', and engine.offload 'blocks' is for several models, {names}: the "
            "first would take all of the device. Set it to the bytes of blocks that may stay of each model, such as 0."
        )
    machine = detect_machine()
    resolved = [resolve_auto(config, spec, resolve_device(device, machine), machine) for spec in models]
    slots, threads = min(each.slots for each in resolved), resolved[0].threads
    config = msgspec.structs.replace(config, slots=slots, threads=threads)
    return {spec.key: load_executor(spec, config, device)[0] for spec in models}, config
