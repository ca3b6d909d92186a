"""Loads text encoders into sessions on a device, and measures what batches cost. Importing this module is cheap."""

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from noria.config import EngineConfig
from noria.engine.encoder.executor import EncoderExecutor
from noria.engine.encoder.request import PreparedTextRequest
from noria.engine.encoder.sessions import find_device, load_sessions, precision_of, uses_torch
from noria.engine.resources.memory import check_memory, free_memory_bytes
from noria.engine.resources.priority import MAX_NICENESS, run_apart
from noria.engine.runtime import BatchRuntime, LoadedModel, log_imported
from noria.errors import ModelError, SetupError
from noria.folders import cache_folder
from noria.models.catalog import count_parameters, have_same_architecture
from noria.models.encoder.onnx_export import find_or_export
from noria.models.encoder.tokenizers.token_rows import Session, TokenRow, image_part, sample_images
from noria.observe.logs.log_record import fields
from noria.protocol.messages import ModelPrecision
from noria.protocol.model_spec import ModelKey, ModelSpec
from noria.protocol.text import EncoderModelSpec
from noria.scheduling.batch.scheduler import BatchScheduler
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.types import BatchKey

_log = logging.getLogger("noria.engine")

_CPU_TEXTS, _CPU_TOKENS = 8, 512  # above 2,000 tokens a token costs a third more there
_GPU_TEXTS, _GPU_TOKENS = 64, 16_384
_PACKED_TEXTS = 256  # short texts fill the tokens of a batch, of which no padding is computed
_BUDGET_S = 2.0  # for the measurements of a model
_MEASURED_LENGTHS = (16, 32, 64, 128, 256, 512)

LoadMore = Callable[[EncoderModelSpec, int], Sequence[Session]]
"""Loads so many sessions of another model."""


def load_runtime(
    models: Sequence[EncoderModelSpec],
    config: EngineConfig,
    device: str,
    free_bytes: Callable[[str], int] = free_memory_bytes,
) -> BatchRuntime[PreparedTextRequest]:
    """Load the models, and measure their costs.

    `free_bytes` says how much of a device's memory another model may use.

    Raises:
        ConfigError: the device does not exist.
        ModelError: a model cannot be loaded, or cannot encode texts on this device.
    """
    started_s = time.monotonic()
    device = find_device(device)  # with a GPU, this imports torch
    log_imported(models, device, time.monotonic() - started_s)
    loaded = {spec: _load_and_say(spec, config, device) for spec in models}

    def load_more(spec: EncoderModelSpec, num_sessions: int) -> Sequence[Session]:
        check_memory(spec.name, _needed_bytes(spec, device), device, free_bytes)
        if not uses_torch(config, device):  # the sessions are opened below, since their threads would keep the niceness
            cache, niceness = cache_folder(config.cache_dir, os.environ), config.mount_niceness
            for tower in (spec,) if spec.image_input is None else (spec, image_part(spec)):
                export = functools.partial(find_or_export, tower, cache, yields_cores=niceness == MAX_NICENESS)
                run_apart(export, niceness)
        return load_sessions(spec, msgspec.structs.replace(config, encoder_sessions=num_sessions), device)

    return make_runtime(loaded, config, device, load_more)


def _load_and_say(spec: EncoderModelSpec, config: EngineConfig, device: str) -> Sequence[Session]:
    started_s = time.monotonic()
    sessions = load_sessions(spec, config, device)
    seconds = time.monotonic() - started_s
    extra = fields(event="part_loaded", folder=str(spec.folder), device=device, seconds=round(seconds, 3))
    _log.info("loaded %s in %.1f s", spec.name, seconds, extra=extra)
    return sessions


def _needed_bytes(spec: EncoderModelSpec, device: str) -> int:
    """The weights: float32, and on a CPU a copy more, for batches that run alone and for an export."""
    return count_parameters(spec) * 4 * (2 if device == "cpu" else 1)


def _load_nothing(spec: EncoderModelSpec, num_sessions: int) -> Sequence[Session]:  # noqa: ARG001
    raise SetupError(f"{spec.name} cannot be loaded: the models of this engine do not change")


def make_runtime(
    models: Mapping[EncoderModelSpec, Sequence[Session]],
    config: EngineConfig,
    device: str,
    load_more: LoadMore = _load_nothing,
) -> BatchRuntime[PreparedTextRequest]:
    """Return the runtime of loaded models."""
    on_cpu = device == "cpu"
    gpu_texts = _PACKED_TEXTS if all(sessions[0].is_packed for sessions in models.values()) else _GPU_TEXTS
    max_texts = (
        (_CPU_TEXTS if on_cpu else gpu_texts) if config.encoder_batch_texts == "auto" else config.encoder_batch_texts
    )
    max_tokens = (
        (_CPU_TOKENS if on_cpu else _GPU_TOKENS)
        if config.encoder_batch_tokens == "auto"
        else config.encoder_batch_tokens
    )
    num_sessions = min(len(sessions) for sessions in models.values())
    models = {spec: sessions[:num_sessions] for spec, sessions in models.items()}
    costs = CostModel(max_tokens)
    for spec, sessions in models.items():
        warm_up(spec, sessions)
        measure_costs(spec, sessions, costs, max_texts, max_tokens, time.perf_counter)
    executor = EncoderExecutor({spec.key: (spec, sessions) for spec, sessions in models.items()})
    scheduler = BatchScheduler(
        num_sessions=num_sessions,
        max_rows=max_texts,
        token_budget=max_tokens,
        is_faster_alone=executor.is_faster_alone,
        max_wait_s=config.encoder_max_wait_ms / 1000,
        queue_limit_s=config.queue_limit_s,
        policy=POLICIES[config.policy],
        costs=costs,
    )
    changes = _ModelChanges(executor, scheduler, device, load_more, lambda spec: precision_of(spec, config, device))
    for spec, sessions in models.items():
        changes.add(spec, sessions)
    return BatchRuntime(
        executor,
        scheduler,
        num_sessions,
        device=device,
        longest_iteration_s=costs.longest_s,
        precisions=lambda: tuple(changes.precisions.values()),
        resolved_settings={"sessions": num_sessions, "batch_texts": max_texts, "batch_tokens": max_tokens},
        load_beside=changes.load_beside,
        release=changes.release,
        free_memory=changes.free_memory,
    )


class _ModelChanges:
    """Loads models beside those of a runtime, and releases them."""

    def __init__(
        self,
        executor: EncoderExecutor,
        scheduler: BatchScheduler,
        device: str,
        load_more: LoadMore,
        precision_of: Callable[[EncoderModelSpec], ModelPrecision],
    ) -> None:
        self._executor, self._scheduler, self._device, self._load_more = executor, scheduler, device, load_more
        self._precision_of = precision_of
        self._specs: dict[ModelKey, EncoderModelSpec] = {}  # specs of the models that serve
        self.precisions: dict[ModelKey, ModelPrecision] = {}

    def add(self, spec: EncoderModelSpec, sessions: Sequence[Session]) -> None:
        """Record a model that serves from now on."""
        self._specs[spec.key], self.precisions[spec.key] = spec, self._precision_of(spec)
        if sessions[0].is_packed:
            self._scheduler.costs.packed_models.add(spec.key)

    def load_beside(self, spec: ModelSpec) -> LoadedModel:
        """Load, warm up and test a model; the costs are those of a model of the same architecture.

        Else they are measured, beside the running batches, and only used until some are measured in service.

        Raises:
            ConfigError: it cannot be computed in the engine's precision.
            MissingExtra: a package is not installed.
            ModelError: it does not fit the memory, cannot be loaded, or its results are not finite.
        """
        assert isinstance(spec, EncoderModelSpec)
        sessions = self._load_more(spec, self._executor.num_sessions)
        warm_up(spec, sessions)
        known = self._scheduler.costs
        costs = CostModel(known.max_rows)
        alike = next((other.key for other in self._specs.values() if have_same_architecture(other, spec)), None)
        if alike is None:
            limits = self._scheduler.max_rows, self._scheduler.token_budget
            measure_costs(spec, sessions, costs, *limits, time.perf_counter)
            costs = costs.as_estimates()

        def add() -> None:
            known.add(costs if alike is None else known.copy_as(alike, spec.key))
            self.add(spec, sessions)
            self._executor.add(spec, sessions)
            self._choose_alone()

        return LoadedModel(add, costs.longest_s)

    def release(self, model: ModelKey) -> None:
        """Drop a model of which there is no request and no batch."""
        del self._specs[model], self.precisions[model]
        self._executor.remove(model)
        self._scheduler.forget_model(model)
        self._choose_alone()

    def _choose_alone(self) -> None:
        self._scheduler.is_faster_alone = self._executor.is_faster_alone

    def free_memory(self) -> None:
        """Return the memory of models that were dropped to the device."""
        if self._device != "cpu":
            from noria.models import cuda_graph

            cuda_graph.free_memory(self._device)


def warm_up(spec: EncoderModelSpec, sessions: Sequence[Session]) -> None:
    """Compute a text, and an image, in every session. Raises ModelError: a result is not finite."""
    images = [] if spec.image_input is None else sample_images(spec, 1)
    for session in sessions:
        results = session.run([_row(spec, min(8, spec.max_length)), *images])
        if not all(np.isfinite(result).all() for result in results):
            raise ModelError(f"{spec.name} in {spec.folder} loads, but its results are not finite; save it again.")


def measure_costs(
    spec: EncoderModelSpec,
    sessions: Sequence[Session],
    costs: CostModel,
    max_texts: int,
    max_tokens: int,
    clock: Callable[[], float],
) -> None:
    """Measure batches of growing size in the first session, until the budget is spent."""
    batch_key = BatchKey(0, 0, ModelKey(spec.name, spec.fingerprint))
    began = clock()
    points: dict[int, float] = {}  # by tokens, padding included
    for length in _MEASURED_LENGTHS:
        if length > min(spec.max_length, max_tokens) or clock() - began > _BUDGET_S:
            break
        num_texts = max(1, min(max_texts, max_tokens // length))
        for rows in {1, num_texts}:
            batch, seconds = [_row(spec, length)] * rows, []
            for _ in range(3):
                started = clock()
                sessions[0].run(batch)
                seconds.append(clock() - started)
            points[rows * length] = min(seconds)
    costs.steps[batch_key] = CostCurve(points)


def _row(spec: EncoderModelSpec, length: int) -> TokenRow:
    return TokenRow(np.arange(length) % spec.vocab_size)
