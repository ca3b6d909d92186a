"""A device that computes nothing: a step takes a fixed time, however many images step, and images are blocks of colour.

`install_at` has the engine processes of a server load this module instead of `noria.engine.diffusion.loading`. All else
of an engine is the real one: its process, channel, loop and scheduler. The server needs no setting for that, so that it
is started as any other. The time of a step depends on the width of the images, so that one server has several.
"""

import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from noria.config import EngineConfig
from noria.engine.diffusion.results import DecodedImage
from noria.engine.diffusion.warmup.calibration import shape_costs
from noria.engine.multi_model import MultiModelExecutor
from noria.engine.runtime import StepRuntime
from noria.protocol.diffusion import DiffusionModelSpec
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import ItemId, IterationPlan, IterationResult
from noria.testing.fake_executor import FakeExecutor
from noria.testing.virtual_clock import VirtualClock

STEP_MS_VARIABLE = "FAKE_DEVICE_STEP_MS"
"""JSON: the milliseconds of a step, by the width of the images in pixels."""

# Python runs a module of this name when it starts.
_SITE_MODULE = """\
import sys

if "noria.engine.process" in sys.orig_argv:
    from noria_bench.cluster import fake_device

    sys.modules["noria.engine.diffusion.loading"] = fake_device
"""
_BLOCK_PX = 8


def install_at(folder: pathlib.Path, step_ms: Mapping[int, float]) -> dict[str, str]:
    """Return the variables with which a server has this device, and write what they name into `folder`."""
    (folder / "sitecustomize.py").write_text(_SITE_MODULE, encoding="utf-8")
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), STEP_MS_VARIABLE: msgspec.json.encode(step_ms).decode()}


@dataclass(frozen=True)
class BlockPixels:
    """Blocks of colours that a seed determines."""

    seed: int
    width_px: int
    height_px: int

    def rgb(self) -> bytes:
        """Height × width × 3 bytes."""
        shape = -(-self.height_px // _BLOCK_PX), -(-self.width_px // _BLOCK_PX), 3
        blocks = np.random.default_rng(self.seed).integers(0, 256, shape, np.uint8)
        pixels = blocks.repeat(_BLOCK_PX, axis=0).repeat(_BLOCK_PX, axis=1)
        return pixels[: self.height_px, : self.width_px].tobytes()


class SleepingExecutor(FakeExecutor):
    """A fake executor whose iterations with steps take `step_ms` milliseconds, by the width of their images."""

    def __init__(self, step_ms: Mapping[int, float]) -> None:
        super().__init__(VirtualClock())
        self._step_ms = step_ms

    def execute(self, plan: IterationPlan, *, with_thumbnails: bool = False) -> IterationResult:
        """Sleep as long as the step takes."""
        result = super().execute(plan, with_thumbnails=with_thumbnails)
        if plan.steps:
            width_px = self._accepted[plan.steps[0].image.attempt_id].request.payload.width
            time.sleep(self._step_ms[width_px] / 1000)
        return result

    def take_result(self, image: ItemId) -> DecodedImage:
        """An image of the request's size."""
        request = self._accepted[image.attempt_id].request
        payload = request.payload
        pixels = BlockPixels(payload.seed + image.index, payload.width, payload.height)
        return DecodedImage(request, image.index, pixels)


def load_runtime(models: Sequence[DiffusionModelSpec], config: EngineConfig, _device: str) -> StepRuntime[Any]:
    """Return what the engine runs, in the place of `noria.engine.diffusion.loading.load_runtime`."""
    step_ms = msgspec.json.decode(os.environ[STEP_MS_VARIABLE], type=dict[int, float])
    assert isinstance(config.slots, int)
    executors = {spec.key: SleepingExecutor(step_ms) for spec in models}
    costs = CostModel(2 * config.slots)
    scheduler = StepScheduler(
        config.slots,
        config.decode_batch,
        config.queue_limit,
        config.queue_limit_s,
        POLICIES[config.policy],
        costs,
        config.fair_width_slack,
    )
    return StepRuntime(
        MultiModelExecutor(executors),
        scheduler,
        longest_iteration_s=max(step_ms.values()) / 1000,
        shape_costs=lambda: shape_costs(costs),
        on_idle=costs.refresh_knees,
    )
