"""Derives `engine.slots` = auto from the memory that is free once the models are loaded and warm.

A slot holds the state of one image, far less than what a call needs for a row of it. So most free memory stays for
calls. What limits a call is the rows that pay off or fit, not the slots.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from noria.config import EngineConfig
from noria.config.engine import MAX_AUTO_SLOTS, MAX_SLOTS
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_device
from noria.engine.resources.memory import free_memory_bytes
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import ModelKey

if TYPE_CHECKING:
    from noria.engine.diffusion.executor import DiffusionExecutor

SLOTS_SHARE = 0.25
"""Part of the free memory that slots may take: they grow by doubling, beside the old ones, and calls need the rest."""
_CALL_FACTOR = 2  # an iteration in a hundred tries up to twice as many rows
_MIN_SLOTS = 2


class SlotCount(NamedTuple):
    """A number of slots, and where it came from: "set", "memory", "maximum" or "minimum"."""

    slots: int
    source: str
    reason: str  # for people


def count_slots(free_bytes: int, call_bytes: int, slot_bytes: int, call_images: int = 1) -> SlotCount:
    """Return how many slots an engine has for whose device `free_bytes` are free.

    `call_bytes` are those that the warm-up's calls needed at most beside the weights; 0 if that is not known. The state
    of an image takes `slot_bytes`. There are at least as many slots as the largest bucket has images, `call_images`,
    even if memory is short: a slot takes memory only when it is used, and joins that do not fit are planned again.
    """
    usable = max(0, min(int(SLOTS_SHARE * free_bytes), free_bytes - _CALL_FACTOR * call_bytes))
    fitting, least = usable // max(slot_bytes, 1), min(max(call_images, _MIN_SLOTS), MAX_SLOTS)
    most = max(least, MAX_AUTO_SLOTS)
    facts = f"{_mib(slot_bytes)} MiB each, {_mib(free_bytes)} MiB free, {_mib(free_bytes - usable)} kept for calls"
    if fitting >= most:
        return SlotCount(most, "maximum", f"auto: the maximum; {facts}")
    if fitting <= least:
        return SlotCount(least, "minimum", f"auto: the minimum; {facts}")
    return SlotCount(fitting, "memory", f"auto: by memory; {facts}")


def set_slots(slots: int) -> SlotCount:
    """Return the number that an operator has set."""
    return SlotCount(slots, "set", "engine.slots")


def fit_slots(
    executors: "Mapping[ModelKey, DiffusionExecutor]",
    models: Sequence[DiffusionModelSpec],
    config: EngineConfig,
    free_bytes: Callable[[str], int] = free_memory_bytes,
) -> SlotCount:
    """Return the slots that fit beside warm models; the executors have them from now on.

    Engines on the same device share what is free.
    """
    device = str(executors[models[0].key].model.device)
    count = count_slots(
        free_bytes(device) // count_engines(device, config),
        max(executor.call_bytes for executor in executors.values()),
        max(_slot_bytes(executors[spec.key], spec) for spec in models),
        max(config.buckets, default=0),
    )
    for executor in executors.values():
        executor.set_slots(count.slots)
    return count


def count_engines(device: str, config: EngineConfig) -> int:
    """Return how many engines of the configuration are on a device."""
    machine = detect_machine()
    return [resolve_device(name, machine) for name in config.devices].count(device) or 1


def _slot_bytes(executor: "DiffusionExecutor", spec: DiffusionModelSpec) -> int:
    """Return the bytes of a slot's state, with the largest embeddings of prompts so far."""
    from noria.engine.diffusion.sizing.memory_estimate import state_bytes

    rows = 2 if executor.model.guidance.is_active(2.0, "") else 1
    return state_bytes(executor.model, spec) + rows * executor.conditioner.prompt_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f}" if num_bytes < 10 * 2**20 else f"{num_bytes / 2**20:,.0f}"


def max_rows(config: EngineConfig) -> int:
    """Rows of the largest possible batch: of the largest bucket, or of all slots guided.

    `config` has no "auto" left.
    """
    assert isinstance(config.slots, int)
    return max(config.buckets, default=2 * config.slots)
