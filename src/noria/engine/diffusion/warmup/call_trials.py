"""Times the ways to call a denoiser: other kernels for its attention, then compiled blocks, then these with LoRAs.

Each is timed beside the fastest one before it, in turns, so that what slows the machine meanwhile slows both.
"""

import contextlib
import functools
import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.loras.lora_cache import Adapter, Adapters
from noria.engine.diffusion.loras.lora_rows import LoraRows
from noria.engine.diffusion.warmup.block_warmup import TEXTS, has_loras, make_call, warm_up_blocks
from noria.engine.diffusion.warmup.call_choice import compare, trial_name
from noria.engine.resources.out_of_memory import first_line, is_out_of_memory
from noria.models import cuda_graph
from noria.models.diffusion.block_compilation import compile_blocks, is_hooked, with_hooks, without_compiled_blocks
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.loras.lora_layer import LoraLayer, LoraWeights
from noria.models.diffusion.transformer_models.transformer_model import set_attention
from noria.models.diffusion.unet_models.graphed_calls import without_graphs
from noria.models.families import FAMILIES
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import CallTrial

_log = logging.getLogger(__name__)

_ATTENTION = ("_native_cudnn", "flash_varlen", "_flash_varlen_3")
"""Kernels that compute the same as torch's own, and take masks of padding. Sage's round to 8 bits."""

_NUM_ROWS = (1, 2, 4)
_LORA_RANK = 16
_NUM_WARM_UPS = 3  # calls before those that count: the third one of a shape is the first from a CUDA graph
_NUM_PAIRS, _MIN_PAIRS = 9, 3
_BUDGET_S = 10.0  # seconds after which a number of rows has no further pair

Way = Callable[[], AbstractContextManager[None]]
"""Returns a context within which the model is called in one of the ways."""


class TimePair(Protocol):
    """Times two ways of one call."""

    def __call__(self, ways: tuple[Way, Way], call: Callable[[], object], device: torch.device) -> tuple[float, float]:
        """Return the seconds of the call each way."""


def time_pair(
    ways: tuple[Way, Way],
    call: Callable[[], object],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Return the median seconds of the call each way, made in turns."""
    seconds: tuple[list[float], list[float]] = [], []
    began = clock()
    for number in range(_NUM_WARM_UPS + _NUM_PAIRS):
        if number >= _NUM_WARM_UPS + _MIN_PAIRS and clock() - began > _BUDGET_S:
            break
        for way, of_way in zip(ways, seconds, strict=True):
            with way():
                started = clock()
                call()
                if device.type == "cuda":
                    cuda_graph.synchronize(device)
                if number >= _NUM_WARM_UPS:
                    of_way.append(clock() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def try_calls(
    model: DiffusionModel, spec: DiffusionModelSpec, config: EngineConfig, time_pair: TimePair = time_pair
) -> Sequence[CallTrial]:
    """Return what each way takes, in order; the last chosen one is the fastest. Empty: no call fits the memory.

    The blocks of `model` are compiled afterwards, and its attention may be another. `config` is without
    `compile_blocks`.
    """
    with torch.inference_mode() if config.inference_mode else torch.no_grad():
        trials = _Trials(model, spec, config, time_pair)
        if trials.calls:
            for attention in trials.other_attention:
                trials.add(CallTrial(attention, compile_blocks=False))
            trials.add(CallTrial(trials.best.attention, compile_blocks=True))
            if trials.best.compile_blocks and has_loras(model, spec, config):
                trials.add(CallTrial(trials.best.attention, compile_blocks=True, with_loras=True))
        return trials.done


def release_memory(device: torch.device) -> None:
    """Free what a model held that was dropped; compiled modules refer to themselves."""
    gc.collect()
    if device.type == "cuda":
        cuda_graph.free_memory(device)


class _Trials:
    """The trials of one model."""

    def __init__(
        self, model: DiffusionModel, spec: DiffusionModelSpec, config: EngineConfig, time_pair: TimePair
    ) -> None:
        self._model, self._spec, self._config, self._time_pair = model, spec, config, time_pair
        self.calls = _calls(model, spec, config)  # by the number of rows
        self.other_attention = _other_attention(model, spec, config)
        self.best = CallTrial("sdpa" if config.attention == "auto" else config.attention, compile_blocks=False)
        self.done: list[CallTrial] = []

    def add(self, trial: CallTrial) -> None:
        """Time this way beside the best one so far; a failure is logged and leaves that one."""
        try:
            trial = self._time(trial)
        except Exception as error:  # compilers and kernels raise what they like
            trial = msgspec.structs.replace(trial, error=first_line(getattr(error, "inner_exception", error)))
            _log.warning(
                "%s: %s cannot be used here: %s",
                self._spec.name,
                trial_name(trial),
                trial.error,
                extra=fields(
                    event="calls_failed",
                    model=self._spec.name,
                    compile_blocks=trial.compile_blocks,
                    with_loras=trial.with_loras,
                ),
            )
        self.done.append(trial)
        if trial.is_chosen and not trial.with_loras:
            self.best = trial

    def _time(self, trial: CallTrial) -> CallTrial:
        if trial.compile_blocks:
            with self._way(trial):
                if not trial.with_loras:
                    compile_blocks(self._model.network)
                warm_up_blocks(self._model, self._spec, self._config, with_loras=trial.with_loras)
        before, calls = self.best, self.calls
        if trial.with_loras:
            before, calls = msgspec.structs.replace(trial, compile_blocks=False), _with_loras(self._model, calls)
        ways = functools.partial(self._way, before), functools.partial(self._way, trial)
        pairs = {rows: self._time_pair(ways, call, self._model.device) for rows, call in calls.items()}
        return compare(trial, pairs)

    @contextlib.contextmanager
    def _way(self, trial: CallTrial) -> Iterator[None]:
        if self.other_attention:
            set_attention(self._model.network, trial.attention)
        with contextlib.ExitStack() as stack:
            if trial.with_loras:
                stack.enter_context(without_graphs())
            if not trial.compile_blocks:
                stack.enter_context(without_compiled_blocks(self._model.network))
            elif trial.with_loras:
                stack.enter_context(with_hooks(self._model.network))
            yield


def _other_attention(model: DiffusionModel, spec: DiffusionModelSpec, config: EngineConfig) -> list[str]:
    """Return the kernels to try: those that are installed and that the masks of the model allow."""
    found: list[str] = []
    if config.attention != "auto" or model.device.type == "cpu":
        return found
    for name in _ATTENTION:
        if name in FAMILIES[spec.family].attention:
            with contextlib.suppress(Exception):  # a package may be missing, or broken
                set_attention(model.network, name)
                found.append(name)
    return found


def _calls(model: DiffusionModel, spec: DiffusionModelSpec, config: EngineConfig) -> Mapping[int, Callable[[], object]]:
    """Return calls for images of the default size, by the number of their rows, as far as they fit the memory."""
    assert isinstance(config.slots, int)
    calls: dict[int, Callable[[], object]] = {}
    texts = model.text_encode(TEXTS)[:1]
    size = spec.default_width_px, spec.default_height_px
    for num_rows in (each for each in _NUM_ROWS if each <= 2 * config.slots):
        call = make_call(model, model, [size] * num_rows, texts)
        try:
            call()
        except Exception as error:
            if is_out_of_memory(error):
                break
            raise
        calls[num_rows] = call
    return calls


def _with_loras(model: DiffusionModel, calls: Mapping[int, Callable[[], object]]) -> Mapping[int, Callable[[], object]]:
    """Return the calls with a LoRA in each row, of all linear layers in the blocks; it adds zeros."""
    name, part = next(iter(model.lora_parts.items()))
    zeros = functools.partial(torch.zeros, dtype=model.dtype, device=model.device)
    layers = {
        path: LoraLayer(zeros(_LORA_RANK, module.in_features), zeros(module.out_features, _LORA_RANK))
        for path, module in part.named_modules()
        if isinstance(module, torch.nn.Linear) and is_hooked(module)
    }
    adapters = Adapters((Adapter("zeros", LoraWeights({name: layers}), 1.0),))
    lora_rows = LoraRows(name, part)

    def call_with_loras(num_rows: int) -> object:
        with lora_rows.applied([adapters] * num_rows):
            return calls[num_rows]()

    return {num_rows: functools.partial(call_with_loras, num_rows) for num_rows in calls}
