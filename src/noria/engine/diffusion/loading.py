"""Loads models into executors on a device, warms them up and gets their costs.

Used by the engine, `noria generate`, `noria doctor` and the bench.

Importing this module is cheap: torch and diffusers are imported by its functions.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from noria.config import EngineConfig, cache_folder
from noria.engine.diffusion.auto_settings import Machine, resolve_auto, resolve_device
from noria.engine.diffusion.calibration import (
    CostCache,
    cost_folder,
    measure_costs,
    run_warmup_request,
    shape_costs,
)
from noria.engine.multi_model import MultiModelExecutor
from noria.engine.runtime import Runtime
from noria.errors import ConfigError
from noria.models.families import FAMILIES
from noria.observe import cgroup
from noria.observe.cpuinfo import cpu_model
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.step.scheduler import StepScheduler
from noria.storage.private_files import make_own_folder

if TYPE_CHECKING:
    import torch

    from noria.engine.diffusion.executor import DiffusionExecutor, PreparedImageRequest


def warm_up(executor: "DiffusionExecutor", spec: DiffusionModelSpec, config: EngineConfig) -> None:
    """Run warm-up requests of the default size: one guided image, or as many images as fill each bucket.

    Raises:
        ModelError: the model cannot generate images on this device with these settings.

    """
    for bucket in config.buckets or (2,):
        guidance = 2.0 if bucket > 1 else 1.0
        run_warmup_request(executor, spec, config, CostModel(), max(1, bucket // 2), steps=2, guidance=guidance)


def load_runtime(
    models: Sequence[DiffusionModelSpec], config: EngineConfig, device: str
) -> "Runtime[PreparedImageRequest]":
    """Load the models, warm them up and get their costs.

    Raises:
        ConfigError: the device does not exist.
        ModelError: a model cannot be loaded, or cannot generate images on this device with these settings.

    """
    executors, config = load_executors(models, config, device)
    costs, cost_caches = load_or_measure_costs(executors, models, config)
    assert isinstance(config.slots, int)
    scheduler = StepScheduler(
        config.slots,
        config.decode_batch,
        config.queue_limit,
        config.queue_limit_s,
        POLICIES[config.policy],
        costs,
    )

    def save_costs() -> None:
        for cost_cache in cost_caches:
            cost_cache.save(costs)

    return Runtime(
        MultiModelExecutor(executors),
        scheduler,
        device=str(executors[models[0].key].model.device),
        longest_iteration_s=costs.longest_s,
        shape_costs=lambda: shape_costs(costs),
        on_idle=costs.refresh_knees,  # when it delays no step and changes no running batch
        save_costs=save_costs,
        resolved_settings={"dtype": config.dtype, "slots": config.slots, "threads": config.threads},
    )


def load_or_measure_costs(
    executors: "Mapping[ModelKey, DiffusionExecutor]", models: Sequence[DiffusionModelSpec], config: EngineConfig
) -> tuple[CostModel, list[CostCache]]:
    """Warm up each model; return the costs of all, cached or measured now, and the cache of each.

    Raises:
        ModelError: a model cannot generate images on this device with these settings.

    """
    costs, caches = CostModel(max_rows(config)), []
    for spec in models:
        executor = executors[spec.key]
        cache = cost_cache(spec, config, executor.model.device)
        warm_up(executor, spec, config)
        if not cache.load(costs):
            measure_costs(executor, spec, config, costs)
            cache.save(costs)
        caches.append(cache)
    return costs, caches


def max_rows(config: EngineConfig) -> int:
    """Rows of the largest possible batch: of the largest bucket, or of all slots guided.

    `config` has no "auto" left.
    """
    assert isinstance(config.slots, int)
    return max(config.buckets, default=2 * config.slots)


def cost_cache(spec: DiffusionModelSpec, config: EngineConfig, device: "torch.device") -> CostCache:
    """The cost cache of this model with these settings on this device."""
    return CostCache(cost_folder(config.cache_dir), spec, config, device_name(device))


def device_name(device: "torch.device") -> str:
    """The hardware's name, which keeps the costs of different devices apart."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"


def detect_machine() -> Machine:
    """The cores that this process may use, by its affinity and its control group, and whether there is CUDA."""
    import torch

    cores = cgroup.usable_cores(len(os.sched_getaffinity(0)), cgroup.cpu_limit())
    return Machine(num_cores=cores, has_cuda=torch.cuda.is_available())


def load_executor(
    spec: DiffusionModelSpec, config: EngineConfig, device: str
) -> tuple["DiffusionExecutor", EngineConfig]:
    """Load the model on `device` ("auto", "cpu", "cuda" or "cuda:N"); also return `config` resolved for this machine.

    Raises:
        ConfigError: the device does not exist, or compiled code cannot be kept in a private folder.
        ModelError: a model cannot be loaded.

    """
    _use_private_compile_cache(config)
    import torch

    from noria.engine.diffusion.executor import DiffusionExecutor

    machine = detect_machine()
    device = resolve_device(device, machine)
    if device != "cpu" and (not machine.has_cuda or int(device.partition(":")[2]) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device {device!r} does not exist: torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use --devices cpu or auto."
        )
    config = resolve_auto(config, spec, device, machine)
    assert isinstance(config.threads, int)
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and bool(config.buckets)
    if device != "cpu":
        torch.cuda.set_device(device)  # events and streams belong to the current device, not to their tensors'
    return DiffusionExecutor(FAMILIES[spec.family].load(spec, config, device), config), config


def _use_private_compile_cache(config: EngineConfig) -> None:
    """Have torch keep compiled code in a private folder of the cache folder, unless the operator has named one.

    Its default is a predictable folder in the temporary folder, where another user may put code before us.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = cache_folder(config.cache_dir, os.environ) / "compiled"
    try:
        make_own_folder(folder)
    except OSError as error:
        if config.compile:
            raise ConfigError(
                f"compiled code cannot be kept: {error}. Set engine.cache_dir to another folder."
            ) from error
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def load_executors(
    models: Sequence[DiffusionModelSpec], config: EngineConfig, device: str
) -> "tuple[dict[ModelKey, DiffusionExecutor], EngineConfig]":
    """Return every model's executor, and `config` resolved for all: with the fewest slots that any of them gets.

    Raises:
        ConfigError: the device does not exist.
        ModelError: a model cannot be loaded.

    """
    machine = detect_machine()
    resolved = [resolve_auto(config, spec, resolve_device(device, machine), machine) for spec in models]
    config = min(resolved, key=lambda each: each.slots)
    return {spec.key: load_executor(spec, config, device)[0] for spec in models}, config
