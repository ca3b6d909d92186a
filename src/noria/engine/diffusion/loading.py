"""From a model's description to a warm executor on a device: what the engine process, `noria generate` and the bench begin with.

Importing this module is cheap; torch and diffusers are imported by `load_executor`.
"""

import os
import pathlib
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from noria.config import EngineConfig
from noria.engine.diffusion.calibration import CostCache, cost_folder, measure_costs, run_warmup_request
from noria.engine.multi_model import MultiModelExecutor
from noria.engine.resources import Machine, resolve_auto, resolve_device, usable_cores
from noria.errors import ConfigError
from noria.protocol.model_spec import ModelSpec
from noria.scheduling.costs import CostModel

if TYPE_CHECKING:
    import torch

    from noria.engine.diffusion.executor import DiffusionExecutor


def warm_up(executor: "DiffusionExecutor", spec: ModelSpec, config: EngineConfig) -> None:
    """Draw throw-away images of the default size, one guided one, or enough to fill each bucket, before any caller pays for it.

    Raises:
        ModelError: the model cannot draw on this device with these settings.

    """
    for bucket in config.buckets or (2,):
        guidance = 2.0 if bucket > 1 else 1.0
        run_warmup_request(executor, spec, config, CostModel(), max(1, bucket // 2), steps=2, guidance=guidance)


def load_or_measure_costs(
    multi_executor: MultiModelExecutor, models: Sequence[ModelSpec], config: EngineConfig
) -> tuple[CostModel, list[CostCache]]:
    """Warm each model up; return what their work costs, kept from an earlier start or measured now, and where that is kept.

    Raises:
        ModelError: a model that cannot draw on this device with these settings.

    """
    costs, caches = CostModel(max_rows(config)), []
    for spec in models:
        executor = multi_executor.executors[spec.name]
        cache = cost_cache(spec, config, executor.model.device)
        warm_up(executor, spec, config)
        if not cache.load(costs):
            measure_costs(executor, spec, config, costs)
            cache.save(costs)
        caches.append(cache)
    return costs, caches


def max_rows(config: EngineConfig) -> int:
    """The rows of a full wheel, or of the largest bucket; `config` has no "auto" left."""
    assert isinstance(config.slots, int)
    return max(config.buckets, default=2 * config.slots)


def cost_cache(spec: ModelSpec, config: EngineConfig, device: "torch.device") -> CostCache:
    """Where the costs of this model are kept, under these settings on this device."""
    return CostCache(cost_folder(config.cache_dir), spec, config, device_name(device))


def device_name(device: "torch.device") -> str:
    """What the device is called, so that costs measured on one are not taken for another's."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = next((line for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return f"{cpu.partition(':')[2].strip() or cpu}, {torch.backends.cpu.get_cpu_capability()}"


def _cpuinfo() -> list[str]:
    try:
        return pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def detect_machine() -> Machine:
    """What the settings depend on, of the machine that this process runs on."""
    import torch

    cores = usable_cores(len(os.sched_getaffinity(0)), cgroup_cpus(pathlib.Path("/sys/fs/cgroup")))
    return Machine(num_cores=cores, has_cuda=torch.cuda.is_available())


def load_executor(spec: ModelSpec, config: EngineConfig, device: str) -> tuple["DiffusionExecutor", EngineConfig]:
    """Import torch, load the model, and return its executor with `config` resolved for this machine.

    Raises:
        ConfigError: a device that is not there.
        ModelError: a model that cannot be loaded.

    """
    import torch

    from noria.engine.diffusion.executor import DiffusionExecutor
    from noria.models.diffusion.stable_diffusion import StableDiffusion

    machine = detect_machine()
    device = resolve_device(device, machine)
    if device != "cpu" and (not machine.has_cuda or int(device.partition(":")[2]) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device {device!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices. Use --devices cpu or auto."
        )
    config = resolve_auto(config, spec, device, machine)
    assert isinstance(config.threads, int)
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and bool(config.buckets)
    if device != "cpu":
        torch.cuda.set_device(device)  # events and streams belong to the current device, not to their tensors'
    return DiffusionExecutor(StableDiffusion.load(spec, config, device), config), config


def load_multi_model_executor(
    models: Sequence[ModelSpec], config: EngineConfig, device: str
) -> tuple[MultiModelExecutor, EngineConfig]:
    """Every model's executor, with `config` resolved for all of them: as many slots as the most demanding one allows.

    Raises:
        ConfigError: a device that is not there.
        ModelError: a model that cannot be loaded.

    """
    machine = detect_machine()
    resolved = [resolve_auto(config, spec, resolve_device(device, machine), machine) for spec in models]
    config = min(resolved, key=lambda each: each.slots)
    return MultiModelExecutor({spec.name: load_executor(spec, config, device)[0] for spec in models}), config


def cgroup_cpus(root: pathlib.Path) -> float | None:
    """The container's CPU limit, from cgroup v2's cpu.max or v1's quota and period; None where there is none."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
