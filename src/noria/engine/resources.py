"""Turn "auto" into numbers: what a machine and a model make of the settings. Pure; the caller looks at the machine."""

import msgspec

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.protocol.model_spec import ModelSpec

FULL_SIZE_PARAMETERS = 200_000_000
"""A UNet above this fills a CPU's cores with one image: SD1.5 (860 M) gains nothing from batch 2, 9 M gain 2.7× at 16."""


class Machine(msgspec.Struct, frozen=True):
    """What the settings depend on."""

    num_cores: int  # that this process may use
    has_cuda: bool


def usable_cores(num_scheduled: int, cgroup_cpus: float | None) -> int:
    """How many threads may run at once: those that the process is scheduled on, within the container's limit; at least 1."""
    return max(1, num_scheduled if cgroup_cpus is None else min(num_scheduled, int(cgroup_cpus)))


def resolve_device(name: str, machine: Machine) -> str:
    """`auto` as `cuda:0` where there is a GPU, else `cpu`; anything else as it is."""
    if name == "auto":
        return "cuda:0" if machine.has_cuda else "cpu"
    return "cuda:0" if name == "cuda" else name


def resolve_auto(config: EngineConfig, spec: ModelSpec, device: str, machine: Machine) -> EngineConfig:
    """`config` without a single "auto" left, for an engine on `device` ("cpu" or "cuda:N").

    Raises:
        ConfigError: settings that do not go together.

    """
    on_cpu = device == "cpu"
    if config.compile and not config.buckets:
        raise ConfigError(
            "engine.compile needs engine.buckets, or every new number of rows is compiled in service. Try --buckets 2,4,8,16."
        )
    max_rows = max(config.buckets, default=None)
    if max_rows is not None and max_rows < 2:
        raise ConfigError(
            f"engine.buckets is {config.buckets}; a guided image has two rows, so the largest must be 2 or more."
        )
    cpu_slots = 2 if spec.num_parameters > FULL_SIZE_PARAMETERS else 16
    slots = cpu_slots if on_cpu else 32
    if max_rows is not None:  # a full wheel has two rows a slot, and all of them must fit
        slots = min(slots, max_rows // 2)
        if config.slots != "auto" and config.slots > max_rows // 2:
            raise ConfigError(
                f"engine.slots is {config.slots}, whose {2 * config.slots} guided rows do not fit the largest of engine.buckets, "
                f"{max_rows}. Use at most {max_rows // 2} slots, or a bucket of {2 * config.slots}."
            )
    return msgspec.structs.replace(
        config,
        dtype=("float32" if on_cpu else "float16") if config.dtype == "auto" else config.dtype,
        slots=slots if config.slots == "auto" else config.slots,
        threads=max(1, machine.num_cores // len(config.devices)) if config.threads == "auto" else config.threads,
    )
