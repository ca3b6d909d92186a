"""What AUTOMATIC1111's web UI calls our schedulers, and which of ours its names mean: data, and two look-ups.

A1111 names a *sampler* ("DPM++ 2M") and, since its version 1.9, a *schedule type* ("Karras") apart; before, one name had both ("DPM++ 2M
Karras"), which newer ones still read. A schedule type of "Automatic" is the sampler's favourite, which for some is Karras. Names that
A1111 itself has not (DEIS, TCD, …) are written as its forks write them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from noria.images import schedulers

KARRAS, UNIFORM, AUTOMATIC = "Karras", "Uniform", "Automatic"  # "Uniform" is A1111's word for the model's own timesteps
SCHEDULE_TYPES = (AUTOMATIC, UNIFORM, KARRAS)

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

# Whose "Automatic" is not the plain schedule in A1111 ≥ 1.9 (modules/sd_samplers_kdiffusion.py, the option `scheduler`).
_AUTOMATIC_IS_KARRAS = frozenset({"kdpm2", "dpm++2m"})
_AUTOMATIC_IS_NOT_UNIFORM = _AUTOMATIC_IS_KARRAS | {"kdpm2-a", "dpm++2m-sde"}
# A1111's samplers on timesteps: they know no schedule type, and whatever is sent with them means nothing.
_WITHOUT_SCHEDULE_TYPE = frozenset({"ddim", "pndm", "unipc"})


def a1111_name(scheduler: str) -> tuple[str, str | None]:
    """A1111's name of a sampler, " Karras" included, and the schedule type to write beside it, lest "Automatic" be understood.

    A scheduler of a family that A1111 has no names for keeps its own.
    """
    return SAMPLERS.get(scheduler, scheduler), UNIFORM if scheduler in _AUTOMATIC_IS_NOT_UNIFORM else None


def scheduler_for(sampler: str, schedule_type: str | None = None) -> str:
    """Our short name of A1111's `sampler`; without a schedule type (A1111 before 1.9) the sampler's name has it all.

    Raises:
        InvalidField: naming the nearest scheduler, or why that one is not served.

    """
    wanted = (schedule_type or UNIFORM).strip().lower()
    if sampler.lower().endswith(" karras"):
        return schedulers.find(sampler).name
    base_name = schedulers.find(sampler).name
    if base_name in _WITHOUT_SCHEDULE_TYPE or wanted == UNIFORM.lower():
        return base_name
    if wanted == AUTOMATIC.lower():
        return f"{base_name}-karras" if base_name in _AUTOMATIC_IS_KARRAS else base_name
    return schedulers.find(f"{sampler} {schedule_type}").name


def samplers_and_types(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The samplers and the schedule types by which A1111's clients can ask for the schedulers `names`."""
    a1111 = [a1111_name(name)[0] for name in names]
    samplers = list(dict.fromkeys(name.removesuffix(f" {KARRAS}") for name in a1111))
    types = [AUTOMATIC, UNIFORM] + [KARRAS] * any(name.endswith(f" {KARRAS}") for name in a1111)
    return samplers, types
