"""Loads text encoders into sessions on a device, and measures what batches cost. Importing this module is cheap."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from noria.config import EngineConfig
from noria.engine.encoder.executor import EncoderExecutor
from noria.engine.encoder.request import PreparedTextRequest
from noria.engine.encoder.sessions import find_device, load_sessions
from noria.engine.runtime import BatchRuntime
from noria.models.encoder.token_rows import Session, TokenRow
from noria.protocol.model_spec import ModelKey
from noria.protocol.text import EncoderModelSpec
from noria.scheduling.batch.scheduler import BatchScheduler
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.types import BatchKey

_CPU_TEXTS, _CPU_TOKENS = 8, 512  # above 2,000 tokens a token costs a third more there
_GPU_TEXTS, _GPU_TOKENS = 64, 16_384
_ALONE_TOKENS = 32  # of fewer, threads wait for each other longer than they compute (docs/scheduling.md)
_BUDGET_S = 2.0  # for the measurements of a model
_MEASURED_LENGTHS = (16, 32, 64, 128, 256, 512)


def load_runtime(
    models: Sequence[EncoderModelSpec], config: EngineConfig, device: str
) -> BatchRuntime[PreparedTextRequest]:
    """Load the models, and measure their costs.

    Raises:
        ConfigError: the device does not exist.
        ModelError: a model cannot be loaded, or cannot encode texts on this device.

    """
    device = find_device(device)
    return make_runtime({spec: load_sessions(spec, config, device) for spec in models}, config, device)


def make_runtime(
    models: Mapping[EncoderModelSpec, Sequence[Session]], config: EngineConfig, device: str
) -> BatchRuntime[PreparedTextRequest]:
    """Return the runtime of loaded models."""
    on_cpu = device == "cpu"
    max_texts = (
        (_CPU_TEXTS if on_cpu else _GPU_TEXTS) if config.encoder_batch_texts == "auto" else config.encoder_batch_texts
    )
    max_tokens = (
        (_CPU_TOKENS if on_cpu else _GPU_TOKENS)
        if config.encoder_batch_tokens == "auto"
        else config.encoder_batch_tokens
    )
    num_sessions = min(len(sessions) for sessions in models.values())
    costs = CostModel(max_tokens)
    for spec, sessions in models.items():
        measure_costs(spec, sessions[:num_sessions], costs, max_texts, max_tokens, time.perf_counter)
    scheduler = BatchScheduler(
        num_sessions=num_sessions,
        max_rows=max_texts,
        token_budget=max_tokens,
        alone_min_tokens=_ALONE_TOKENS if all(each[0].is_faster_alone for each in models.values()) else None,
        max_wait_s=config.encoder_max_wait_ms / 1000,
        queue_limit_s=config.queue_limit_s,
        policy=POLICIES[config.policy],
        costs=costs,
    )
    executor = EncoderExecutor({spec.key: (spec, sessions[:num_sessions]) for spec, sessions in models.items()})
    return BatchRuntime(
        executor,
        scheduler,
        num_sessions,
        device=device,
        longest_iteration_s=costs.longest_s,
        resolved_settings={"sessions": num_sessions, "batch_texts": max_texts, "batch_tokens": max_tokens},
    )


def measure_costs(
    spec: EncoderModelSpec,
    sessions: Sequence[Session],
    costs: CostModel,
    max_texts: int,
    max_tokens: int,
    clock: Callable[[], float],
) -> None:
    """Warm up every session, and measure batches of growing size in the first, until the budget is spent."""
    batch_key = BatchKey(0, 0, ModelKey(spec.name, spec.fingerprint))
    for session in sessions:
        session.run([_row(spec, min(8, spec.max_length))])
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
