"""From a model's description to a warm executor on a device: what the engine process, `noria generate` and the bench begin with.

Importing this module is cheap; torch and diffusers are imported by `load_executor`.
"""

import math
import os
import pathlib
import time
from typing import TYPE_CHECKING

from noria.config import EngineConfig
from noria.engine.loop import Ended, ImageReady, Wheel
from noria.engine.resources import Machine, resolve, resolve_device, usable_cores
from noria.errors import ConfigError, GenerationFailed, ModelError, NoriaError
from noria.request import ImageRequest
from noria.scheduling.plans import End
from noria.scheduling.steps import StepScheduler
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import DiffusionExecutor, PreparedImages


def warm_up(executor: "DiffusionExecutor", spec: ModelSpec, config: EngineConfig) -> None:
    """Draw throw-away images of the default size, one guided one, or enough to fill each bucket, before any caller pays for it.

    Raises:
        ModelError: the model cannot draw on this device with these settings.

    """
    assert isinstance(config.slots, int)
    events: list[ImageReady[PreparedImages] | Ended[PreparedImages]] = []
    wheel: Wheel[PreparedImages] = Wheel(StepScheduler(config.slots), executor, events.append, time.monotonic)
    for bucket in config.buckets or (2,):
        request = ImageRequest(
            request_id=f"warm-up-{bucket}",
            prompt="",
            negative_prompt="",
            seed=0,
            width_px=spec.default_width_px,
            height_px=spec.default_height_px,
            num_steps=2,
            guidance_scale=2.0 if bucket > 1 else 1.0,
            num_images=max(1, bucket // 2),
            scheduler=spec.default_scheduler,
            timeout_s=math.inf,
        )
        try:
            wheel.submit(executor.prepare(request))
            while wheel.turn() is not None:
                pass
            for event in events:
                _expect_success(event)
        except NoriaError as error:
            raise ModelError(
                f"{spec.name} in {spec.folder} loads but cannot draw with these settings: {error.message}"
            ) from error
        events.clear()


def _expect_success(event: "ImageReady[PreparedImages] | Ended[PreparedImages]") -> None:
    if isinstance(event, ImageReady):
        event.pixels.rgb()
    elif event.event.end is not End.FINISHED:
        raise GenerationFailed(event.event.reason)


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
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and bool(config.buckets)
    if device != "cpu":
        torch.cuda.set_device(device)  # events and streams belong to the current device, not to their tensors'
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
