"""Estimates what `engine.offload` saves and costs: memory, the bytes that a step copies, and the rows that hide it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec

from noria.config import EngineConfig
from noria.engine.diffusion.sizing.memory_estimate import MemoryChange, MemoryEstimate, estimate_memory
from noria.engine.diffusion.sizing.weight_bytes import weights_of
from noria.models.diffusion.block_quantization import denoiser_part, is_quantized
from noria.models.diffusion.weight_blocks import is_streamed
from noria.models.families import FAMILIES
from noria.protocol.diffusion import DiffusionModelSpec

_USED_SHARE = 0.9  # part of the free memory: the rest is for what kernels allocate
_NUM_SLOTS = 4  # images that step together; more rows than these hide the copies on no device
_UNIT_BYTES = 2**28


class ReferenceDevice(NamedTuple):
    """A GPU of which is known how fast it computes rows, and how fast bytes come to it."""

    name: str
    bytes_per_s: float
    flops_per_s: float  # in bfloat16, of a large transformer


REFERENCE_DEVICES = (
    ReferenceDevice("an RTX 4090 with PCIe 4", 25e9, 108e12),  # 65 % of its peak
    ReferenceDevice("an H100 with PCIe 5", 50e9, 436e12),  # FLUX.1, measured: 0.172 s a row of 75 TFLOP
)


def rows_that_hide(num_bytes: int, row_flops: int, device: ReferenceDevice) -> float:
    """Return the rows of a call that are computed in the time in which so many bytes are copied to the device."""
    return num_bytes / device.bytes_per_s / (row_flops / device.flops_per_s)


def free_for_blocks(spec: DiffusionModelSpec, config: EngineConfig, free_bytes: int) -> int:
    """Return the bytes of a denoiser's blocks that can stay beside all else that `_NUM_SLOTS` images need.

    `config` says that blocks stream. The result is rounded down, so that it is mostly the same at the next start.

    Raises ModelError: the libraries cannot build a part.
    """
    streaming = msgspec.structs.replace(config, offload_resident_bytes=0)
    return _left(estimate_memory(spec, streaming), config, free_bytes)


def _left(estimate: MemoryEstimate, config: EngineConfig, free_bytes: int) -> int:
    assert isinstance(config.slots, int)
    left = int(_USED_SHARE * free_bytes) - estimate.needed(min(config.slots, _NUM_SLOTS))
    return max(0, left // _UNIT_BYTES * _UNIT_BYTES)


def find_offloads(
    spec: DiffusionModelSpec, config: EngineConfig, estimate: MemoryEstimate, device: str, free_bytes: int | None
) -> tuple[MemoryChange, ...]:
    """Return what the model takes with each value of `engine.offload` on a GPU, if `config` has chosen none.

    `estimate` is of `config`. With "blocks" as many stay as `auto` lets with these free bytes; None: none.
    """
    if config.offload != "none" or device == "cpu":
        return ()
    return tuple(_find_offloads(spec, config, estimate, free_bytes))


def _find_offloads(
    spec: DiffusionModelSpec, config: EngineConfig, estimate: MemoryEstimate, free_bytes: int | None
) -> Iterator[MemoryChange]:
    quantized = {part for part in FAMILIES[spec.family].weight_stems if is_quantized(spec, part)}
    for kind in ("encoders", "blocks"):
        changed = msgspec.structs.replace(
            config, offload=kind, offload_resident_bytes=0 if kind == "blocks" else "auto"
        )
        can_stream = not any(is_streamed(changed, part) for part in quantized)
        if kind == "blocks" and (config.compile or config.quantize != "none"):
            can_stream = False
        if can_stream:
            at_least = _with_weights(estimate, spec, changed)
            changed = msgspec.structs.replace(changed, offload_resident_bytes="auto")
            yield MemoryChange((f"--offload {kind}",), with_resident_blocks(at_least, spec, changed, free_bytes))


def with_resident_blocks(
    estimate: MemoryEstimate, spec: DiffusionModelSpec, config: EngineConfig, free_bytes: int | None
) -> MemoryEstimate:
    """Return an estimate in which no block stays with those that will, if `config` leaves that open and it is known."""
    if config.offload != "blocks" or config.offload_resident_bytes != "auto" or free_bytes is None:
        return estimate
    resident = _left(estimate, config, free_bytes)
    return _with_weights(estimate, spec, msgspec.structs.replace(config, offload_resident_bytes=resident))


def _with_weights(estimate: MemoryEstimate, spec: DiffusionModelSpec, config: EngineConfig) -> MemoryEstimate:
    weights = weights_of(spec, config)
    graph_rows = 0 if config.offload == "blocks" else estimate.graph_rows  # which switches CUDA graphs off
    return replace(estimate, weights=weights.here, streamed=weights.streamed, graph_rows=graph_rows)


def step_bytes(spec: DiffusionModelSpec, estimate: MemoryEstimate) -> int:
    """Return the bytes that each step copies to the device."""
    return estimate.streamed.get(denoiser_part(spec), 0)
