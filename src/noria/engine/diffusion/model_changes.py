"""Loads models beside those of a runtime, and releases them.

Importing this module is cheap, as that of `loading.py` is.
"""

import functools
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from noria.config import EngineConfig
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto
from noria.engine.diffusion.sizing.weight_bytes import weights_to_load
from noria.engine.diffusion.warmup.calibration import CostCache, cost_cache, device_name, measure_costs
from noria.engine.diffusion.warmup.call_choice import use_known_choice
from noria.engine.multi_model import MultiModelExecutor
from noria.engine.resources.memory import check_memory
from noria.engine.resources.priority import on_one_core, run_apart
from noria.engine.runtime import LoadedModel
from noria.models.catalog import have_same_architecture
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.messages import ModelPrecision
from noria.protocol.model_spec import CallChoice, ModelKey, ModelSpec
from noria.scheduling.costs import CostModel
from noria.scheduling.step.scheduler import StepScheduler

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import DiffusionExecutor
    from noria.engine.diffusion.preparation import PreparedImageRequest

LoadWarm = Callable[[DiffusionModelSpec, EngineConfig, str, CallChoice | None], "DiffusionExecutor"]
"""Loads a model on a device, with calls that were chosen earlier, and warms it up."""


class ModelChanges:
    """Loads models beside those of a runtime, and releases them."""

    specs: dict[ModelKey, DiffusionModelSpec]  # specs of the models that serve
    precisions: dict[ModelKey, ModelPrecision]  # forms of those that are quantized
    call_choices: dict[ModelKey, CallChoice]  # calls of those with `compile_blocks` "auto"
    cost_caches: dict[ModelKey, CostCache]  # caches of those models whose costs are worth keeping

    def __init__(
        self,
        executor: "MultiModelExecutor[PreparedImageRequest]",
        scheduler: StepScheduler,
        config: EngineConfig,
        device: str,
        free_bytes: Callable[[str], int],
        load_warm: LoadWarm,
    ) -> None:
        """`config` may have "auto" as dtype, attention and `compile_blocks`; it is resolved for each model."""
        self._executor, self._scheduler, self._config = executor, scheduler, config
        self._device, self._free_bytes, self._load_warm = device, free_bytes, load_warm
        self.specs, self.precisions, self.call_choices = {}, {}, {}

    def add(self, spec: DiffusionModelSpec, executor: "DiffusionExecutor") -> None:
        """Note a model that serves from now on."""
        self.specs[spec.key] = spec
        if executor.config.quantize != "none":
            from noria.engine.diffusion.warmup.quantized_loading import precision_of

            self.precisions[spec.key] = precision_of(spec, executor.config, device_name(executor.model.device))
        if executor.call_choice is not None:
            self.call_choices[spec.key] = executor.call_choice

    def load_beside(self, spec: ModelSpec) -> LoadedModel:
        """Load, warm up and test a model; the costs are those of the cache, or of a model of the same architecture.

        Else they are measured, beside the running batch, and only used until some are measured in service.

        Raises ModelError: it does not fit the memory, cannot be loaded, or does not generate images of finite numbers.
        """
        assert isinstance(spec, DiffusionModelSpec)
        config = resolve_auto(self._config, spec, self._device, detect_machine())
        if config.offload == "blocks" and config.offload_resident_bytes == "auto":
            # Models that serve take memory that is free now for their next calls.
            config = msgspec.structs.replace(config, offload_resident_bytes=0)
        config, choice = use_known_choice(spec, config, device_name(self._device))
        weights = weights_to_load(spec, config, self._device)
        check_memory(spec.name, sum(weights.here.values()), self._device, self._free_bytes)
        if weights.elsewhere:
            name, place = f"{spec.name}: its text encoder", config.text_encoder_device
            check_memory(name, sum(weights.elsewhere.values()), place, self._free_bytes)
        if weights.streamed:
            check_memory(f"{spec.name}: what streams", sum(weights.streamed.values()), "cpu", self._free_bytes)
        niceness = self._config.mount_niceness if self._device == "cpu" else 0
        load = functools.partial(self._load_warm, spec, config, self._device, choice)
        # Compiled code is for the number of threads that it was compiled with, and is compiled again for another.
        is_compiled = config.compile or config.compile_blocks
        executor = run_apart(load if is_compiled else on_one_core(load), niceness)
        config = executor.config
        cache = cost_cache(spec, config, executor.model.device)
        costs = CostModel(self._scheduler.costs.max_rows)
        alike = None
        if not (is_cached := cache.load(costs)):
            alike = next((other.key for other in self.specs.values() if have_same_architecture(other, spec)), None)
            if alike is None:
                measure = functools.partial(measure_costs, executor, spec, config, costs)
                run_apart(measure if is_compiled else on_one_core(measure))
                costs = costs.as_estimates()

        def add() -> None:
            known = self._scheduler.costs
            known.add(costs if alike is None else known.copy_as(alike, spec.key))
            self.add(spec, executor)
            if is_cached or alike is not None:
                self.cost_caches[spec.key] = cache
            self._executor.add(spec.key, executor)

        return LoadedModel(add, costs.longest_s)

    def release(self, model: ModelKey) -> None:
        """Drop a model of which there is no request."""
        if model in self.cost_caches:
            self.cost_caches.pop(model).save(self._scheduler.costs)
        del self.specs[model]
        self.precisions.pop(model, None)
        self.call_choices.pop(model, None)
        self._executor.remove(model)
        self._scheduler.forget_model(model)

    def free_memory(self) -> None:
        """Return the memory of models that were dropped to the device."""
        from noria.models import cuda_graph

        # Compiled modules refer to themselves; a collection stops the loop for 0.3 s.
        if self._config.compile or self._config.compile_blocks:
            gc.collect()
        if self._device != "cpu":
            cuda_graph.free_memory(self._device)

    def save_costs(self) -> None:
        """Write the cost caches."""
        for cache in self.cost_caches.values():
            cache.save(self._scheduler.costs)
