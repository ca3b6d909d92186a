"""What steps, decodes and prompts cost on this device with this model: measured at the start, kept from one start to the next.

Measuring is drawing: throw-away requests of growing size turn the real wheel, and the cost model learns from their turns as it does
from everybody's. A first pass at each size pays for what happens once (kernels chosen, memory taken), the second is measured.
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
from noria.engine.loop import Ended, Happening, ImageReady, Wheel
from noria.errors import GenerationFailed, ModelError, NoriaError
from noria.request import ImageRequest
from noria.scheduling.costs import CostModel, Curve
from noria.scheduling.plans import End, ShapeClass
from noria.scheduling.steps import StepScheduler
from noria.spec import ModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion import DiffusionExecutor, PreparedImages

_log = logging.getLogger(__name__)

BUDGET_S = 3.0
"""What measuring may add to a start. A model whose single step takes longer than that is measured in service."""

_STEPS = 3  # of a measured request: one alone would time the first touch of its memory


class KeptCurve(msgspec.Struct, frozen=True):
    """A `Curve` of one shape class, as the file has it."""

    width_px: int
    height_px: int
    seconds: dict[int, float]


class KeptCosts(msgspec.Struct, frozen=True):
    """The file: what was measured of one model under one `key`."""

    key: dict[str, str]
    steps: list[KeptCurve]
    decodes: list[KeptCurve]
    encode_s: float


def measure(executor: "DiffusionExecutor", spec: ModelSpec, config: EngineConfig, costs: CostModel) -> None:
    """Draw until `costs` knows the default size in every batch that the slots allow, or the budget is spent.

    Raises:
        ModelError: the model cannot draw on this device with these settings.

    """
    assert isinstance(config.slots, int)
    started, waits, again = time.monotonic(), executor.waits, CostModel(costs.most_rows)
    executor.waits = True
    try:
        for num_images in _ladder(config.slots):
            began = time.monotonic()
            draw_throw_away(executor, spec, config, CostModel(costs.most_rows), num_images, steps=2)
            for measured in (costs, again):
                draw_throw_away(executor, spec, config, measured, num_images, _STEPS)
            now = time.monotonic()
            if now - started + 2 * (now - began) > BUDGET_S:  # the next size takes up to twice as long
                break
        draw_throw_away(executor, spec, config, CostModel(costs.most_rows), 1, steps=2, guidance=1.0)
        for measured in (costs, again):
            draw_throw_away(executor, spec, config, measured, 1, _STEPS, guidance=1.0)
    finally:
        executor.waits = waits
    costs.pace = 1.0
    costs.take_the_quicker(again)
    costs.settle()


def _ladder(num_slots: int) -> list[int]:
    """1, 2, 4, … and the number of slots itself."""
    return [*(2**power for power in range(num_slots.bit_length()) if 2**power < num_slots), num_slots]


def draw_throw_away(
    executor: "DiffusionExecutor",
    spec: ModelSpec,
    config: EngineConfig,
    costs: CostModel,
    num_images: int,
    steps: int,
    guidance: float = 2.0,
) -> None:
    """Draw `num_images` images of the default size that nobody sees; raises ModelError if that is not possible."""
    assert isinstance(config.slots, int)
    events: list[Happening[PreparedImages]] = []
    scheduler = StepScheduler(config.slots, config.decode_batch, costs=costs)
    wheel: Wheel[PreparedImages] = Wheel(scheduler, executor, events.append, time.monotonic)
    request = ImageRequest(
        request_id=f"throw-away-{num_images}",
        prompt=f"{num_images} throw-away images, {steps} steps",  # new each time: nothing of it is cached
        negative_prompt="",
        seed=0,
        width_px=spec.default_width_px,
        height_px=spec.default_height_px,
        num_steps=steps,
        guidance_scale=guidance,
        num_images=num_images,
        scheduler=spec.default_scheduler,
        timeout_s=math.inf,
        model=spec.name,
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


def _expect_success(event: "Happening[PreparedImages]") -> None:
    if isinstance(event, ImageReady):
        event.pixels.rgb()
    elif isinstance(event, Ended) and event.event.end is not End.FINISHED:
        raise GenerationFailed(event.event.reason)


class CostFile:
    """Where one engine keeps what it has measured; nobody misses it if it cannot be written."""

    def __init__(self, folder: pathlib.Path, spec: ModelSpec, config: EngineConfig, device: str) -> None:
        """`config` has no "auto" left; `device` is the device's own name, as two machines may share the folder."""
        self._model = spec.name
        self._key = cost_key(spec, config, device)
        digest = hashlib.sha256(msgspec.json.encode(sorted(self._key.items()))).hexdigest()[:16]
        self.path = folder / f"{digest}.json"

    def load(self, costs: CostModel) -> bool:
        """Fill `costs` with what was kept of this model, device and settings; False if there is nothing, or nothing usable."""
        try:
            kept = msgspec.json.decode(self.path.read_bytes(), type=KeptCosts)
        except FileNotFoundError:
            return False
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("the measured costs in %s cannot be used and are measured anew: %s", self.path, error)
            return False
        curves = [*kept.steps, *kept.decodes]
        sane = all(curve.seconds for curve in curves) and all(
            seconds > 0.0 and count > 0 for curve in curves for count, seconds in curve.seconds.items()
        )
        if kept.key != self._key or not kept.steps or not sane:
            return False
        costs.steps |= {self._shape(curve): Curve(dict(curve.seconds)) for curve in kept.steps}
        costs.decodes |= {self._shape(curve): Curve(dict(curve.seconds)) for curve in kept.decodes}
        costs.encode_s[self._model] = kept.encode_s
        costs.settle()
        return True

    def save(self, costs: CostModel) -> None:
        """Keep what `costs` knows of this model."""
        kept = KeptCosts(
            self._key,
            [_kept(shape, curve) for shape, curve in costs.steps.items() if shape.model == self._model],
            [_kept(shape, curve) for shape, curve in costs.decodes.items() if shape.model == self._model],
            costs.encode_s.get(self._model, 0.0),
        )
        aside = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(msgspec.json.encode(kept))
            aside.replace(self.path)  # whole or not at all: another engine may read it now
        except OSError as error:
            _log.warning("the measured costs are not kept: %s", error)

    def _shape(self, curve: KeptCurve) -> ShapeClass:
        return ShapeClass(curve.width_px, curve.height_px, self._model)


def _kept(shape: ShapeClass, curve: Curve) -> KeptCurve:
    return KeptCurve(shape.width_px, shape.height_px, dict(curve.points))


def cost_key(spec: ModelSpec, config: EngineConfig, device: str) -> dict[str, str]:
    """All that a step's cost depends on."""
    matters: dict[str, Any] = {
        name: getattr(config, name)
        for name in ("dtype", "slots", "threads", "attention", "channels_last", "compile", "buckets", "decode_batch")
    }
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers")} | {"noria": __version__}
    return (
        {"model": spec.fingerprint, "device": device} | versions | {name: str(value) for name, value in matters.items()}
    )


def cost_folder(cache_dir: str) -> pathlib.Path:
    """Where costs are kept: in the setting's folder, or in the user's cache."""
    if cache_dir:
        return pathlib.Path(cache_dir) / "costs"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "noria" / "costs"
