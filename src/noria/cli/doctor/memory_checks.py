"""The checks of `noria doctor` of an image model's memory: whether it fits, and what it would take."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from noria.cli.doctor.finding import Finding, Verdict, fail, ok
from noria.cli.doctor.machine_facts import MEMORY_SHARE, Facts, available_bytes
from noria.config import EngineConfig
from noria.config.auto import Auto
from noria.config.engine import MAX_AUTO_SLOTS
from noria.engine.diffusion.sizing.slot_count import count_slots
from noria.protocol.diffusion import DiffusionModelSpec

if TYPE_CHECKING:
    from noria.engine.diffusion.sizing.memory_estimate import MemoryChange, MemoryEstimate

_GIB = 2**30


def check_memory(
    estimate: "MemoryEstimate", facts: Facts, spec: DiffusionModelSpec, engine: EngineConfig, devices: list[str]
) -> Iterator[Finding]:
    """Yield the memory that the model needs, also if its GPU is not here, and whether the device has that much."""
    assert isinstance(engine.slots, int)
    rows = estimate.rows(engine.slots)
    elsewhere = sum(estimate.elsewhere.values())
    graphs = _gib(estimate.graphs(engine.slots))
    yield ok(
        "memory",
        f"weights {_gib(sum(estimate.weights.values()))} GiB in {engine.dtype} ({_list(estimate.weights)})"
        + (
            f", and on {engine.text_encoder_device} {_gib(elsewhere)} ({_list(estimate.elsewhere)})"
            if elsewhere
            else ""
        )
        + f"; {spec.default_width_px}×{spec.default_height_px} px: a call of {rows} rows {_gib(rows * estimate.row)}, "
        f"decoding {estimate.decode_batch} images {_gib(estimate.decode_batch * estimate.decoded_image)}, "
        f"the state of {engine.slots} images {_gib(engine.slots * estimate.slot)}, "
        f"prompts kept for reuse {_gib(estimate.caches)}" + (f", CUDA graphs {graphs}" if estimate.graph_rows else ""),
    )
    available = available_bytes(facts.memory_bytes, facts.gpus, devices)
    if available is None:
        return
    where = "free memory" if devices[0] == "cpu" else "GPU memory"
    others = sum(facts.weight_bytes.values())
    needed, smallest = (others + estimate.needed(slots) for slots in (engine.slots, 1))
    usable = int(MEMORY_SHARE * available)
    text = (
        f"{_gib(needed)} GiB in {engine.dtype} with {engine.slots} images at once, {_gib(smallest)} with 1, of "
        f"{_gib(available)} {where}"
    )
    if others:
        text += f"; of it the weights of additional models {_gib(others)} ({_list(facts.weight_bytes)})"
    if needed <= usable:
        yield ok("fits", text)
    else:
        verdict: Verdict = "warn" if estimate.slots_in(available - others) else "fail"
        slots = estimate.slots_in(usable - others)
        hints = [f"--slots {slots}"] if slots else []
        hints += _describe_changes(facts, usable - others, slots, len(devices))
        advice = f"use {', or '.join(hints)}" if hints else "no setting that Noria knows is enough"
        yield Finding(verdict, "fits", f"{text}: {'tight' if verdict == 'warn' else 'too little'}; {advice}")
    if engine.text_encoder_device == "cpu" and elsewhere * len(devices) > facts.memory_bytes:
        yield fail(
            "fits",
            f"text encoders take {_gib(elsewhere * len(devices))} GiB of main memory, which has "
            f"{_gib(facts.memory_bytes)}: use --text-encoder-device same",
        )


def check_slots(
    estimate: "MemoryEstimate", facts: Facts, slots: int | Auto, call_images: int, devices: list[str]
) -> Finding:
    """Report the slots that are set, or about those that `auto` will find; `call_images` as `count_slots` has it."""
    if slots != "auto":
        return ok("slots", f"{slots}, as engine.slots says: {_gib(slots * estimate.slot)} GiB if all are used")
    available = available_bytes(facts.memory_bytes, facts.gpus, devices)
    if available is None:
        return ok("slots", f"auto: up to {MAX_AUTO_SLOTS}, by the memory that is free when the engine has started")
    loaded = sum(estimate.weights.values()) + sum(facts.weight_bytes.values())
    count = count_slots(
        max(available - loaded, 0),
        max(estimate.rows_per_image * estimate.row, estimate.decoded_image),
        estimate.slot,
        call_images,
    )
    return ok("slots", f"about {count.slots} ({count.reason}); found anew when the engine has started")


def check_quantization(facts: Facts, engine: EngineConfig, devices: list[str]) -> Iterator[Finding]:
    """Yield what is known of the quantization of the settings, or what each one would need, and whether it fits."""
    assert isinstance(engine.slots, int)
    if facts.quantization_error:
        yield fail("quantize", facts.quantization_error)
    if facts.quantization:
        yield ok("quantize", facts.quantization)
    if not facts.quantizations:
        return
    texts = [_describe_need(change, facts, engine.slots, devices) for change in facts.quantizations]
    yield ok("quantize", f"none; {engine.slots} images at once with {'; '.join(texts)}")


def check_offload(
    facts: Facts, spec: DiffusionModelSpec, engine: EngineConfig, devices: list[str]
) -> Iterator[Finding]:
    """Yield what streams with the settings, or what the model would take on a GPU with each `engine.offload`."""
    assert isinstance(engine.slots, int)
    assert facts.memory is not None
    assert not isinstance(facts.memory, str)
    if engine.offload != "none" and devices[0] == "cpu":
        yield Finding("warn", "offload", f"{engine.offload}: on a CPU it saves no memory and takes time; use 'none'")
    elif engine.offload != "none":
        yield ok("offload", f"{engine.offload}: {_describe_streams(facts.memory, spec)}")
    in_host = len(devices) * sum(facts.memory.streamed.values())
    if in_host > facts.memory_bytes:
        text = f"{_gib(in_host)} GiB would be in main memory, which has {_gib(facts.memory_bytes)}"
        yield fail("offload", f"{text}: use fewer devices, or engine.offload 'none'")
    if not facts.offloads:
        return
    texts = [
        f"{_describe_need(change, facts, engine.slots, devices)} ({_describe_streams(change.estimate, spec)})"
        for change in facts.offloads
    ]
    yield ok("offload", f"none; {engine.slots} images at once with {'; '.join(texts)}")


def _describe_need(change: "MemoryChange", facts: Facts, slots: int, devices: list[str]) -> str:
    available = available_bytes(facts.memory_bytes, facts.gpus, devices)
    needed = change.estimate.needed(slots) + sum(facts.weight_bytes.values())
    fits = "" if available is None else ", fits" if needed <= MEMORY_SHARE * available else ", too much"
    return f"{' '.join(change.names)}: {_gib(needed)} GiB{fits}"


def _describe_streams(estimate: "MemoryEstimate", spec: DiffusionModelSpec) -> str:
    """Say what is in main memory, what a step copies of it, and which calls hide that."""
    from noria.engine.diffusion.sizing.offload_estimate import REFERENCE_DEVICES, rows_that_hide, step_bytes

    text = f"{_gib(sum(estimate.streamed.values()))} GiB in main memory"
    num_bytes = step_bytes(spec, estimate)
    if not num_bytes:
        return text
    size = f"{spec.default_width_px}×{spec.default_height_px} px"
    hidden = []
    for device in REFERENCE_DEVICES:
        seconds, rows = num_bytes / device.bytes_per_s, rows_that_hide(num_bytes, estimate.row_flops, device)
        hidden.append(f"{seconds:.2f} s on {device.name}, hidden by {rows:.1f} rows")
    return f"{text}; a step copies {_gib(num_bytes)}: {', '.join(hidden)} of {size}"


def check_weights(facts: Facts, engine: EngineConfig, device: str) -> Iterator[Finding]:
    """Whether the weights of an encoder and of the models beside it fit; nothing of a GPU that is not here."""
    available = available_bytes(facts.memory_bytes, facts.gpus, [device] * len(engine.devices))
    if available is None:
        return
    needed = sum(facts.weight_bytes.values())
    where = "free memory" if device == "cpu" else "GPU memory"
    text = f"weights of all models {_gib(needed)} GiB ({_list(facts.weight_bytes)}), of {_gib(available)} {where}"
    if needed <= MEMORY_SHARE * available:
        yield ok("fits", text)
    else:
        yield fail("fits", f"{text}: too little; serve fewer or smaller models, or in another precision")


def _describe_changes(facts: Facts, usable: int, slots: int, num_engines: int) -> Iterator[str]:
    """Yield the changes by which more than `slots` fit; all of them together only if none is enough alone."""
    is_one_enough = False
    for change in facts.changes:
        fitting = min(change.estimate.slots_in(usable), MAX_AUTO_SLOTS)
        moved_bytes = (*change.estimate.elsewhere.values(), *change.estimate.streamed.values())
        elsewhere = num_engines * sum(moved_bytes)
        if fitting <= slots or elsewhere > facts.memory_bytes or (is_one_enough and len(change.names) > 1):
            continue
        is_one_enough = True
        moved = f", {_gib(elsewhere)} GiB in main memory" if elsewhere else ""
        yield f"{' and '.join(change.names)} (up to {fitting} slots{moved})"


def _list(weights: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(num)}" for name, num in sorted(weights.items(), key=lambda part: -part[1]))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f}" if num_bytes < 10 * _GIB else f"{num_bytes / _GIB:.0f}"
