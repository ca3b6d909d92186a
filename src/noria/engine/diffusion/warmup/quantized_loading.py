"""Loads a model with a quantized denoiser, and measures how near its outputs are to those of the denoiser before.

The measurement needs both on the device, one after the other; it is kept, and the next start quantizes in the host's
memory. The quantized weights are not kept: to quantize takes less time than to read the weights does.
"""

import hashlib
import importlib.metadata
import logging
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.sizing.weight_bytes import weights_of
from noria.engine.diffusion.warmup.calibration import run_warmup_request
from noria.engine.resources.fidelity import Fidelity, read_fidelity, write_fidelity
from noria.engine.resources.memory import bytes_to_load, free_memory_bytes
from noria.errors import ModelError
from noria.folders import cache_folder
from noria.models import cuda_graph
from noria.models.diffusion.block_compilation import without_compiled_blocks
from noria.models.diffusion.block_quantization import PACKAGES, check_device, check_quantizable, quantize_blocks
from noria.models.diffusion.diffusion_model import DiffusionModel
from noria.models.diffusion.unet_models.graphed_calls import without_graphs
from noria.models.families import FAMILIES
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.messages import ModelPrecision
from noria.scheduling.costs import CostModel

_log = logging.getLogger(__name__)

_PROMPTS = (
    "a red circle",
    "a blue square beside a green triangle",
    "a yellow star on a black background",
    "two circles",
)
"""Every model can draw them, the bundled one too: what it cannot draw is another picture after any change."""

_STEPS = 6


def load_quantized(spec: DiffusionModelSpec, config: EngineConfig, device: str, hardware: str) -> DiffusionModel:
    """Load a model on `device`, which is `hardware`, as `config` says, which has no "auto" left.

    Its fidelity is not measured if the model before does not fit the device; the log says so.

    Raises:
        ConfigError: the device cannot compute so.
        MissingExtra: the library that quantizes is not installed.
        ModelError: the model cannot be loaded or quantized, or its fidelity is below `config.quantize_min_fidelity`.
    """
    check_quantizable(spec, config.quantize)
    check_device(config, device)
    file = fidelity_file(spec, config, hardware)
    fidelity = read_fidelity(file)
    if fidelity is None:
        plain = msgspec.structs.replace(config, quantize="none")
        num_bytes, free = bytes_to_load(sum(weights_of(spec, plain).here.values())), free_memory_bytes(device)
        if num_bytes <= free:
            model: DiffusionModel = FAMILIES[spec.family].load(spec, plain, device)
            fidelity = _quantize(model, spec, config, device)
            write_fidelity(file, fidelity)
            _check(spec, config, fidelity)
            return model
        _log.warning(
            "%s: what it loses in %s is not known: to be measured, the model before needs %d bytes of %s, which has %d",
            *(spec.name, config.quantize, num_bytes, device, free),
            extra=fields(event="fidelity_unknown", model=spec.name),
        )
    else:
        _check(spec, config, fidelity)
    return FAMILIES[spec.family].load(spec, config, device)  # type: ignore[no-any-return]


def precision_of(spec: DiffusionModelSpec, config: EngineConfig, hardware: str) -> ModelPrecision:
    """Return in which form `load_quantized` has loaded a model."""
    fidelity = read_fidelity(fidelity_file(spec, config, hardware))
    return ModelPrecision(spec.name, spec.fingerprint, config.quantize, None if fidelity is None else fidelity.min)


def fidelity_file(spec: DiffusionModelSpec, config: EngineConfig, hardware: str) -> pathlib.Path:
    """Return where the fidelity of a model is kept: by its weights, and all that it depends on besides them."""
    packages = ("torch", "diffusers", PACKAGES[config.quantize])
    parts = (spec.fingerprint, config.quantize, config.dtype, hardware, *map(importlib.metadata.version, packages))
    name = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]
    return cache_folder(config.cache_dir, os.environ) / "fidelity" / f"{name}.json"


def _check(spec: DiffusionModelSpec, config: EngineConfig, fidelity: Fidelity) -> None:
    if not fidelity.min >= config.quantize_min_fidelity:  # NaN is rejected, too
        raise ModelError(
            f"{spec.name} quantized to {config.quantize} differs too much from the model before: fidelity {fidelity}; "
            f"engine.quantize_min_fidelity is {config.quantize_min_fidelity:g}. Choose another engine.quantize, or "
            "allow less."
        )


def _quantize(model: DiffusionModel, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> Fidelity:
    """Quantize a loaded model; return how near the denoiser's outputs are to those before, by the cosine of each row.

    The rows are those of all calls for some images, of half the default size.
    """
    width_px, height_px = (
        max(spec.min_side_px, side_px // 2 // spec.multiple_px * spec.multiple_px)
        for side_px in (spec.default_width_px, spec.default_height_px)
    )
    small = msgspec.structs.replace(spec, default_width_px=width_px, default_height_px=height_px)
    before: list[tuple[Any, ...]] = []  # arguments and output of each call
    predict: Callable[..., Any] = model.predict

    def record(latents_R: Any, *others: Any) -> Any:
        output = predict(latents_R, *others)
        before.append((latents_R.clone(), *others, output.clone()))
        return output

    with without_graphs(), without_compiled_blocks(model.network):
        model.predict = record  # type: ignore[method-assign, assignment]
        executor = DiffusionExecutor(model, config)
        for prompt in _PROMPTS:
            run_warmup_request(executor, small, config, CostModel(), 1, _STEPS, prompt=prompt)
        del model.predict
        started_s = time.monotonic()
        num_layers = quantize_blocks(model.network, config.quantize, device)
        if device != "cpu":
            cuda_graph.free_memory(device)
        seconds = time.monotonic() - started_s
        with torch.inference_mode():
            cosines = torch.cat([_cosines(predict(*args), output) for *args, output in before])
    fidelity = Fidelity(cosines.min().item(), cosines.mean().item(), len(cosines))
    _log.info(
        "%s: quantized %d layers to %s in %.1f s: fidelity %s",
        *(spec.name, num_layers, config.quantize, seconds, fidelity),
        extra=fields(
            event="model_quantized",
            model=spec.name,
            layers=num_layers,
            seconds=round(seconds, 3),
            fidelity=round(fidelity.min, 6),
        ),
    )
    return fidelity


def _cosines(outputs_R: torch.Tensor, others_R: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(outputs_R.flatten(1).double(), others_R.flatten(1).double())
