"""From a model's description to a warm executor on a device: what the engine process, `noria generate` and the bench begin with.

Importing this module is cheap; torch and diffusers are imported by `load_executor`.
"""

import os
import pathlib
import time
from typing import TYPE_CHECKING

from noria.config import EngineConfig
from noria.engine.loop import Wheel
from noria.engine.resources import Machine, resolve, resolve_device, usable_cores
from noria.errors import ConfigError
from noria.request import ImageRequest
from noria.scheduling.steps import StepScheduler
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import DiffusionExecutor, PreparedImages


def warm_up(executor: "DiffusionExecutor", spec: ModelSpec, config: EngineConfig) -> None:
    """Draw throw-away images of the default size, alone and as a full batch, so that no caller pays for the first time."""
    assert isinstance(config.slots, int)
    scheduler = StepScheduler(config.slots, config.decode_batch, config.queue_limit)
    wheel: Wheel[PreparedImages] = Wheel(scheduler, executor, lambda _event: None, time.monotonic)
    for num_images in (1, config.slots) if config.buckets or config.compile else (1,):
        request = ImageRequest(
            request_id=f"warm-up-{num_images}",
            prompt="",
            negative_prompt="",
            seed=0,
            num_steps=2,
            guidance_scale=2.0,
            num_images=num_images,
            width_px=spec.default_width_px,
            height_px=spec.default_height_px,
            scheduler=spec.default_scheduler,
            timeout_s=float("inf"),
        )
        wheel.submit(executor.prepare(request))
        while wheel.turn() is not None:
            pass


def look_at_machine() -> Machine:
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

    from noria.engine.diffusion import DiffusionExecutor
    from noria.models.stable_diffusion import StableDiffusion

    machine = look_at_machine()
    device = resolve_device(device, machine)
    if device != "cpu" and (not machine.has_cuda or int(device.partition(":")[2]) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device {device!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices. Use --devices cpu or auto."
        )
    config = resolve(config, spec, device, machine)
    assert isinstance(config.threads, int)
    torch.set_num_threads(config.threads)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    return DiffusionExecutor(StableDiffusion.load(spec, config, device), config), config


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
