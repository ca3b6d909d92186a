"""Resolves settings that are "auto", for a machine and a model. Pure: the caller inspects the machine."""

import msgspec

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.families import FAMILIES
from noria.protocol.diffusion import DiffusionModelSpec

FULL_SIZE_PARAMETERS = 200_000_000
"""A UNet above this uses all CPU cores for one image: SD1.5 (860 M) gains nothing from batch 2, 9 M gain 2.7× at 16."""


class Machine(msgspec.Struct, frozen=True):
    """The properties of a machine that settings depend on."""

    num_cores: int  # that this process may use
    has_cuda: bool


def resolve_device(name: str, machine: Machine) -> str:
    """`cuda:0` or `cpu` for `auto`, by whether there is a GPU; `cuda:0` for `cuda`; any other name unchanged."""
    if name == "auto":
        return "cuda:0" if machine.has_cuda else "cpu"
    return "cuda:0" if name == "cuda" else name


def resolve_auto(config: EngineConfig, spec: DiffusionModelSpec, device: str, machine: Machine) -> EngineConfig:
    """`config` with every "auto" resolved, for an engine on `device` ("cpu" or "cuda:N").

    But that of `vae_tiling`, which the VAE resolves for each image.

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
    max_rows = max(config.buckets, default=None)
    if max_rows is not None and max_rows < 2:
        raise ConfigError(
            f"engine.buckets is {config.buckets}; a guided image has two rows, so the largest must be 2 or more."
        )
    cpu_slots = 2 if spec.num_parameters > FULL_SIZE_PARAMETERS else 16
    slots = cpu_slots if on_cpu else 32
    if max_rows is not None:  # all slots with guided images, two rows each, must fit
        slots = min(slots, max_rows // 2)
        if config.slots != "auto" and config.slots > max_rows // 2:
            raise ConfigError(
                f"engine.slots is {config.slots}, whose {2 * config.slots} guided rows do not fit the largest "
                f"of engine.buckets, {max_rows}. Use at most {max_rows // 2} slots, or a bucket of {2 * config.slots}."
            )
    return msgspec.structs.replace(
        config,
        dtype=("float32" if on_cpu else FAMILIES[spec.family].gpu_dtype) if config.dtype == "auto" else config.dtype,
        attention=FAMILIES[spec.family].check_attention(config.attention),
        slots=slots if config.slots == "auto" else config.slots,
        # On an H200, channels last is 7 to 38 % slower: docs/benchmarks/device.md.
        channels_last=on_cpu if config.channels_last == "auto" else config.channels_last,
        cuda_graphs=config.cuda_graphs and not on_cpu,
        text_encoder_device="same" if config.text_encoder_device == device else config.text_encoder_device,
        threads=max(1, machine.num_cores // len(config.devices)) if config.threads == "auto" else config.threads,
    )
