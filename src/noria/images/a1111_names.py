"""Converts between the names of Noria's schedulers and those of AUTOMATIC1111's web UI.

Since version 1.9, A1111 names the *sampler* ("DPM++ 2M") and the *schedule type* ("Karras") separately; before, one
name contained both ("DPM++ 2M Karras"), which newer versions still accept. The schedule type "Automatic" is the
sampler's default, for some Karras. Names that A1111 itself does not have (DEIS, TCD, …) are those of its forks.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from noria.errors import InvalidField, short_repr
from noria.images import scheduler_names
from noria.protocol.diffusion import LatentUpscaler

KARRAS, UNIFORM, AUTOMATIC = "Karras", "Uniform", "Automatic"  # "Uniform" is A1111's name of the model's own timesteps
SCHEDULE_TYPES = (AUTOMATIC, UNIFORM, KARRAS)

UPSCALERS: Mapping[str, LatentUpscaler] = MappingProxyType(
    {
        "Latent": "bilinear",
        "Latent (antialiased)": "bilinear antialiased",
        "Latent (bicubic)": "bicubic",
        "Latent (bicubic antialiased)": "bicubic antialiased",
        "Latent (nearest)": "nearest",
        "Latent (nearest-exact)": "nearest-exact",
    }
)
"""How latents are enlarged, by A1111's names; the first one is its default."""

SAMPLERS: Mapping[str, str] = MappingProxyType(
    {
        "ddim": "DDIM",
        "ddpm": "DDPM",
        "pndm": "PLMS",
        "lms": "LMS",
        "lms-karras": "LMS Karras",
        "euler": "Euler",
        "euler-karras": "Euler Karras",
        "euler-a": "Euler a",
        "heun": "Heun",
        "heun-karras": "Heun Karras",
        "kdpm2": "DPM2",
        "kdpm2-karras": "DPM2 Karras",
        "kdpm2-a": "DPM2 a",
        "dpm++2m": "DPM++ 2M",
        "dpm++2m-karras": "DPM++ 2M Karras",
        "dpm++2m-sde": "DPM++ 2M SDE",
        "dpm++2m-sde-karras": "DPM++ 2M SDE Karras",
        "dpm++3m": "DPM++ 3M",
        "dpm++3m-karras": "DPM++ 3M Karras",
        "dpm++2s": "DPM++ 2S",
        "dpm++2s-karras": "DPM++ 2S Karras",
        "deis": "DEIS",
        "unipc": "UniPC",
        "unipc3": "UniPC 3",
        "sa-solver": "SA-Solver",
        "ipndm": "IPNDM",
        "lcm": "LCM",
        "tcd": "TCD",
    }
)

# Samplers whose "Automatic" is not the plain schedule in A1111 ≥ 1.9 (modules/sd_samplers_kdiffusion.py, the option
# `scheduler`).
_AUTOMATIC_IS_KARRAS = frozenset({"kdpm2", "dpm++2m"})
_AUTOMATIC_IS_NOT_UNIFORM = _AUTOMATIC_IS_KARRAS | {"kdpm2-a", "dpm++2m-sde"}
# A1111's samplers on timesteps: they ignore the schedule type.
_WITHOUT_SCHEDULE_TYPE = frozenset({"ddim", "pndm", "unipc"})


def a1111_name(scheduler: str) -> tuple[str, str | None]:
    """Return A1111's name of a sampler, including " Karras", and the schedule type to write if "Automatic" is wrong.

    A sampler of flow models has the name of the same one of Stable Diffusion; without a name there it keeps its own.
    """
    name = SAMPLERS.get(scheduler.removeprefix("flow-"), scheduler)
    return name, UNIFORM if scheduler in _AUTOMATIC_IS_NOT_UNIFORM else None


def scheduler_for(sampler: str, schedule_type: str | None = None) -> str:
    """Return Noria's name of A1111's `sampler`.

    Without a schedule type, as before A1111 1.9, the sampler's name contains it.

    Raises InvalidField: the sampler is unknown or not supported; the message has the nearest name, or the reason.
    """
    type_name = (schedule_type or UNIFORM).strip().lower()
    if sampler.lower().endswith(" karras"):
        return scheduler_names.find(sampler).name
    base_name = scheduler_names.find(sampler).name
    if base_name in _WITHOUT_SCHEDULE_TYPE or type_name == UNIFORM.lower():
        return base_name
    if type_name == AUTOMATIC.lower():
        return f"{base_name}-karras" if base_name in _AUTOMATIC_IS_KARRAS else base_name
    return scheduler_names.find(f"{sampler} {schedule_type}").name


def select_scheduler(sampler: str, schedule_type: str, schedulers: Sequence[str], model: str) -> str:
    """Return the one of a model's `schedulers` that is A1111's `sampler` with a schedule type.

    Raises InvalidField: a name is not known, the model has no such sampler, or the two are not combinable; in A1111's
    names.
    """
    samplers, types = samplers_and_types(schedulers)
    kind = next((each for each in SCHEDULE_TYPES if each.lower() == schedule_type.strip().lower()), None)
    if kind is None:
        raise InvalidField(
            f"scheduler is {short_repr(schedule_type)}; allowed are {', '.join(types)}.", field="sampler_name"
        )
    name = scheduler_names.find(sampler, samplers).name
    found = _with_type(name, kind, schedulers)
    if found is not None:
        return found
    fitting_types = [each for each in types if _with_type(name, each, schedulers)]
    if not fitting_types:
        raise InvalidField(
            f"sampler_name is {short_repr(sampler)}, which {model} cannot be sampled with. Allowed are: "
            f"{', '.join(samplers)}.",
            field="sampler_name",
        )
    fitting = [each for each in samplers if _with_type(scheduler_names.find(each).name, kind, schedulers)]
    others = f", or {kind} with {' or '.join(fitting)}" if fitting else ""
    raise InvalidField(
        f"sampler_name {short_repr(sampler)} and scheduler {kind!r} are not combinable; send {sampler} with "
        f"{' or '.join(fitting_types)}{others}.",
        field="sampler_name",
    )


def _with_type(name: str, schedule_type: str, schedulers: Sequence[str]) -> str | None:
    """Return the one of `schedulers` that is the scheduler `name` with A1111's schedule type; None: there is none."""
    plain = name.removesuffix("-karras")
    wanted = [name]
    if name == plain and name not in _WITHOUT_SCHEDULE_TYPE:
        if schedule_type == KARRAS:
            wanted = [f"{name}-karras"]
        elif schedule_type == AUTOMATIC and name in _AUTOMATIC_IS_KARRAS:
            wanted = [f"{name}-karras", name]  # flow models have no Karras
    spellings = [spelling for each in wanted for spelling in (f"flow-{each}", each)]
    return next((each for each in spellings if each in schedulers), None)


def samplers_and_types(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the samplers and the schedule types with which A1111's clients can select the schedulers `names`."""
    a1111 = [a1111_name(name)[0] for name in names]
    samplers = list(dict.fromkeys(name.removesuffix(f" {KARRAS}") for name in a1111))
    types = [AUTOMATIC, UNIFORM] + [KARRAS] * any(name.endswith(f" {KARRAS}") for name in a1111)
    return samplers, types
