"""Resolves settings that are "auto", for a machine and a model. Pure: the caller inspects the machine."""

import os

import msgspec

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.adapters.folder_entries import split_entry
from noria.models.adapters.lora_folders import BUNDLED_ENTRY
from noria.models.families import FAMILIES
from noria.observe import cgroup
from noria.protocol.diffusion import DiffusionModelSpec

FULL_SIZE_PARAMETERS = 200_000_000
"""A UNet above this uses all CPU cores for one image: SD1.5 (860 M) gains nothing from batch 2, 9 M gain 2.7× at 16."""


class Machine(msgspec.Struct, frozen=True):
    """The properties of a machine that settings depend on."""

    num_cores: int  # that this process may use
    has_cuda: bool


def detect_machine() -> Machine:
    """The cores that this process may use, by its affinity and its control group, and whether there is CUDA."""
    import torch

    cores = cgroup.usable_cores(len(os.sched_getaffinity(0)), cgroup.cpu_limit())
    return Machine(num_cores=cores, has_cuda=torch.cuda.is_available())


def resolve_device(name: str, machine: Machine) -> str:
    """`cuda:0` or `cpu` for `auto`, by whether there is a GPU; `cuda:0` for `cuda`; any other name unchanged."""
    if name == "auto":
        return "cuda:0" if machine.has_cuda else "cpu"
    return "cuda:0" if name == "cuda" else name


def resolve_auto(config: EngineConfig, spec: DiffusionModelSpec, device: str, machine: Machine) -> EngineConfig:
    """`config` with every "auto" resolved, for an engine on `device` ("cpu" or "cuda:N").

    But that of `vae_tiling`, which the VAE resolves for each image, and that of `compile_blocks`, with that of
    `attention`, which measurements resolve. `slots` is a number for models whose calls are not
    measured, so that the slots limit them; `slot_count.py` finds that of an engine.

    Raises:
        ConfigError: settings that contradict each other.

    """
    on_cpu = device == "cpu"
    if config.compile and config.compile_blocks:
        raise ConfigError("engine.compile and engine.compile_blocks do not work together. Switch off one of them.")
    if config.compile and not config.buckets:
        raise ConfigError(
            "engine.compile needs engine.buckets, or each new number of rows is compiled while requests wait. "
            "Try --buckets 2,4,8,16."
        )
    _check_quantize(config, spec.name, on_cpu=on_cpu)
    _check_offload(config)
    max_rows = max(config.buckets, default=None)
    if max_rows is not None and max_rows < 2:
        raise ConfigError(
            f"engine.buckets is {config.buckets}; a guided image has two rows, so the largest must be 2 or more."
        )
    # With this quantization, a GPU is slow without.
    is_needed = config.quantize in ("fp8", "int8") and not on_cpu
    compile_blocks = True if config.compile_blocks == "auto" and is_needed else config.compile_blocks
    is_measured = compile_blocks == config.attention == "auto"
    cpu_slots = 2 if spec.num_parameters > FULL_SIZE_PARAMETERS else 16
    slots = cpu_slots if on_cpu else 32
    return msgspec.structs.replace(
        config,
        dtype=_auto_dtype(config, spec, on_cpu=on_cpu) if config.dtype == "auto" else config.dtype,
        attention="auto" if is_measured else FAMILIES[spec.family].check_attention(config.attention),
        compile_blocks=compile_blocks,
        slots=slots if config.slots == "auto" else config.slots,
        # On an H200, channels last is 7 to 38 % slower: benchmarks/results/README.md.
        channels_last=on_cpu if config.channels_last == "auto" else config.channels_last,
        cuda_graphs=config.cuda_graphs and not on_cpu and config.offload != "blocks",
        text_encoder_device="same" if config.text_encoder_device == device else config.text_encoder_device,
        threads=max(1, machine.num_cores // len(config.devices)) if config.threads == "auto" else config.threads,
    )


def _check_offload(config: EngineConfig) -> None:
    """Raise ConfigError if other settings contradict `engine.offload`."""
    if config.offload != "blocks":
        if config.offload_resident_bytes != "auto":
            raise ConfigError(
                f"engine.offload_resident_bytes is {config.offload_resident_bytes}, but engine.offload is "
                f"{config.offload!r}, with which all blocks stay. Set that to 'blocks', or leave this out."
            )
    elif config.compile:
        raise ConfigError(
            "engine.offload 'blocks' does not work with engine.compile, whose code calls no block. Use 'encoders', or "
            "engine.compile_blocks."
        )
    elif config.quantize != "none":
        raise ConfigError(
            f"engine.offload 'blocks' does not work with engine.quantize {config.quantize!r}, whose weights do not "
            "stream. Use 'encoders', or the quantization 'none'."
        )


def _auto_dtype(config: EngineConfig, spec: DiffusionModelSpec, *, on_cpu: bool) -> str:
    if config.quantize == "fp8":
        return "bfloat16"
    return "float32" if on_cpu else FAMILIES[spec.family].gpu_dtype


def _check_quantize(config: EngineConfig, model: str, *, on_cpu: bool) -> None:
    """Raise ConfigError if other settings contradict `engine.quantize`."""
    name = f"engine.quantize {config.quantize!r}"
    if config.quantize == "none":
        return
    if config.compile:
        raise ConfigError(f"{name} does not work with engine.compile. Use engine.compile_blocks instead.")
    if config.quantize in ("fp8", "int8") and not config.compile_blocks and not on_cpu:
        raise ConfigError(
            f"{name} needs engine.compile_blocks on a GPU: a call that is not compiled is slower than in bfloat16. Add "
            "--compile-blocks, or use 'nf4'."
        )
    # The bundled ones are there by default, and only for the bundled model.
    loras = [each for each in config.loras if each != BUNDLED_ENTRY and split_entry(each)[0] in (None, model)]
    ip_adapters = [each for each in config.ip_adapters if split_entry(each)[0] in (None, model)]
    for setting, entries, why in (
        ("loras", loras, "of calls with LoRAs, some are not compiled"),
        ("ip_adapters", ip_adapters, "calls with an IP-Adapter are not compiled"),
    ):
        if config.quantize in ("fp8", "int8") and entries and not on_cpu:
            raise ConfigError(
                f"{name} does not work with engine.{setting} {entries[0]!r} on a GPU: {why}, and slow the whole "
                f"batch, in int8 twenty times. Use 'nf4' or 'none', or leave "
                f"engine.{setting} out."
            )
    if config.quantize == "fp8" and config.dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"{name} is of weights in bfloat16, but engine.dtype is {config.dtype!r}. Use 'bfloat16'.")
