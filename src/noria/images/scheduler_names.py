"""The schedulers that a request can name: one table for request validation, docs and the compiler.

A choice is a diffusers class and the settings that its name implies; all other settings (betas, prediction type,
timestep spacing) are the model's. Schedulers of diffusers that Noria does not support are in `UNSUPPORTED`, with the
reason.

Rules: names are compared without case, spaces, hyphens and underscores, and `dpmpp` equals `dpm++`, so "DPM++ 2M
Karras", "dpmpp_2m_karras" and "dpm++2m-karras" are one name; a class that several choices share means the first of
them. This module has no arithmetic and imports neither torch nor diffusers.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from noria.errors import InvalidField, did_you_mean, short_repr

Family = Literal["diffusion", "flow", "edm"]
Settings = dict[str, object]


@dataclass(frozen=True, eq=False)
class SchedulerChoice:
    """A short name: `diffusers_class`, configured by the model's configuration with `overrides` on top."""

    name: str
    diffusers_class: str
    overrides: Mapping[str, object]
    aliases: tuple[str, ...]  # other tools' names, and diffusers classes with the same arithmetic
    description: str
    family: Family  # family of models that it can sample

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))

    @property
    def takes_start_image(self) -> bool:
        """Whether it can begin with an image: whether its class can add noise to one."""
        return self.diffusers_class not in _WITHOUT_ADDED_NOISE

    @property
    def takes_refiner(self) -> bool:
        """Whether a refiner can make its last steps: whether its timesteps are those of the training."""
        return self.family == "diffusion" and self.diffusers_class != "IPNDMScheduler"

    @property
    def needs_all_calls(self) -> str | None:
        """Why none of its calls can be skipped; None: they can."""
        if str(self.overrides.get("algorithm_type")).startswith("sde"):
            return _DRAWS_NOISE
        return _NEEDS_ALL_CALLS.get(self.diffusers_class)


_WITHOUT_ADDED_NOISE = frozenset({"IPNDMScheduler", "LTXEulerAncestralRFScheduler"})

_DRAWS_NOISE = "it draws noise at each call"
_TWO_CALLS = "it makes two calls a step"
# On the bundled model LMS with half of its calls is further from the full image than with half of its steps.
_OF_ORDER_4 = "it extrapolates from four calls already"
_NEEDS_ALL_CALLS: Mapping[str, str] = {
    "DDPMScheduler": _DRAWS_NOISE,
    "EulerAncestralDiscreteScheduler": _DRAWS_NOISE,
    "KDPM2AncestralDiscreteScheduler": _DRAWS_NOISE,
    "SASolverScheduler": _DRAWS_NOISE,
    "LCMScheduler": _DRAWS_NOISE,
    "LTXEulerAncestralRFScheduler": _DRAWS_NOISE,
    "FlowMatchLCMScheduler": _DRAWS_NOISE,
    "HeunDiscreteScheduler": _TWO_CALLS,
    "KDPM2DiscreteScheduler": _TWO_CALLS,
    "FlowMatchHeunDiscreteScheduler": _TWO_CALLS,
    "PNDMScheduler": _OF_ORDER_4,
    "LMSDiscreteScheduler": _OF_ORDER_4,
    "IPNDMScheduler": _OF_ORDER_4,
}

_EVEN: Settings = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
_KARRAS: Settings = _EVEN | {"use_karras_sigmas": True}
_2M: Settings = {"solver_order": 2, "algorithm_type": "dpmsolver++"}
_3M: Settings = {"solver_order": 3, "algorithm_type": "dpmsolver++"}
_SDE: Settings = {"solver_order": 2, "algorithm_type": "sde-dpmsolver++"}
_VELOCITY: Settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}

_Row = tuple[str, str, Settings, tuple[str, ...], str]
_ROWS: dict[Family, tuple[_Row, ...]] = {
    # Models that predict epsilon, v or the sample on a discrete noise schedule: Stable Diffusion and similar.
    "diffusion": (
        ("ddim", "DDIMScheduler", {}, ("DDIMParallelScheduler",), "DDIM, no noise (eta 0)"),
        ("ddpm", "DDPMScheduler", {}, ("DDPMParallelScheduler",), "DDPM, ancestral; needs many steps"),
        ("pndm", "PNDMScheduler", {"skip_prk_steps": True}, ("plms",), "PNDM order 4, no Runge-Kutta warm-up"),
        ("lms", "LMSDiscreteScheduler", _EVEN, ("k_lms",), "linear multistep order 4"),
        ("lms-karras", "LMSDiscreteScheduler", _KARRAS, ("k_lms_ka",), "linear multistep order 4, Karras sigmas"),
        ("euler", "EulerDiscreteScheduler", _EVEN, ("k_euler",), "Euler"),
        ("euler-karras", "EulerDiscreteScheduler", _KARRAS, (), "Euler, Karras sigmas"),
        ("euler-a", "EulerAncestralDiscreteScheduler", {}, ("k_euler_a", "euler_ancestral"), "Euler, ancestral"),
        ("heun", "HeunDiscreteScheduler", _EVEN, ("k_heun",), "Heun, 2 calls a step"),
        ("heun-karras", "HeunDiscreteScheduler", _KARRAS, (), "Heun, 2 calls a step, Karras sigmas"),
        ("kdpm2", "KDPM2DiscreteScheduler", _EVEN, ("dpm2",), "DPM2, 2 calls a step"),
        ("kdpm2-karras", "KDPM2DiscreteScheduler", _KARRAS, ("dpm2-karras",), "DPM2, 2 calls a step, Karras sigmas"),
        (
            "kdpm2-a",
            "KDPM2AncestralDiscreteScheduler",
            _EVEN,
            ("k_dpm_2_ancestral", "dpm2-a"),
            "DPM2, 2 calls a step, ancestral",
        ),
        ("dpm++2m", "DPMSolverMultistepScheduler", _2M | _EVEN, ("k_dpmpp_2m",), "DPM-Solver++ multistep order 2"),
        (
            "dpm++2m-karras",
            "DPMSolverMultistepScheduler",
            _2M | _KARRAS,
            (),
            "DPM-Solver++ multistep order 2, Karras sigmas",
        ),
        ("dpm++2m-sde", "DPMSolverMultistepScheduler", _SDE | _EVEN, ("k_dpmpp_2m_sde",), "DPM-Solver++ SDE order 2"),
        (
            "dpm++2m-sde-karras",
            "DPMSolverMultistepScheduler",
            _SDE | _KARRAS,
            (),
            "DPM-Solver++ SDE order 2, Karras sigmas",
        ),
        ("dpm++3m", "DPMSolverMultistepScheduler", _3M | _EVEN, (), "DPM-Solver++ multistep order 3"),
        (
            "dpm++3m-karras",
            "DPMSolverMultistepScheduler",
            _3M | _KARRAS,
            (),
            "DPM-Solver++ multistep order 3, Karras sigmas",
        ),
        (
            "dpm++2s",
            "DPMSolverSinglestepScheduler",
            _2M | _EVEN,
            ("dpm++-singlestep",),
            "DPM-Solver++ singlestep order 2",
        ),
        (
            "dpm++2s-karras",
            "DPMSolverSinglestepScheduler",
            _2M | _KARRAS,
            (),
            "DPM-Solver++ singlestep order 2, Karras sigmas",
        ),
        ("deis", "DEISMultistepScheduler", {"solver_order": 2} | _EVEN, (), "DEIS order 2"),
        ("unipc", "UniPCMultistepScheduler", {"solver_order": 2} | _EVEN, (), "UniPC order 2"),
        ("unipc3", "UniPCMultistepScheduler", {"solver_order": 3} | _EVEN, (), "UniPC order 3"),
        (
            "sa-solver",
            "SASolverScheduler",
            _EVEN | {"algorithm_type": "data_prediction"},  # not that of a model's DPM-Solver
            (),
            "SA-Solver, stochastic Adams order 2",
        ),
        (
            "ipndm",
            "IPNDMScheduler",
            {},
            (),
            "IPNDM order 4, its own time from 1 to 0: not for Stable Diffusion's weights",
        ),
        ("lcm", "LCMScheduler", {}, (), "latent consistency, for LCM weights; 4 to 8 steps"),
        ("tcd", "TCDScheduler", {}, (), "trajectory consistency, for TCD weights; 4 to 8 steps"),
    ),
    # Models that predict the velocity on straight paths: Stable Diffusion 3, Flux.
    "flow": (
        ("flow-euler", "FlowMatchEulerDiscreteScheduler", {}, (), "Euler"),
        ("flow-euler-a", "LTXEulerAncestralRFScheduler", {}, (), "Euler, ancestral"),
        ("flow-heun", "FlowMatchHeunDiscreteScheduler", {}, (), "Heun, 2 calls a step"),
        ("flow-unipc", "UniPCMultistepScheduler", {"solver_order": 2} | _VELOCITY, (), "UniPC order 2"),
        ("flow-dpm++2m", "DPMSolverMultistepScheduler", _2M | _VELOCITY, (), "DPM-Solver++ multistep order 2"),
        ("flow-lcm", "FlowMatchLCMScheduler", {}, (), "latent consistency, for distilled weights"),
    ),
    # Models preconditioned as in Karras et al. (2022): Playground v2.5.
    "edm": (
        ("edm-euler", "EDMEulerScheduler", {}, (), "Euler"),
        ("edm-dpm++2m", "EDMDPMSolverMultistepScheduler", _2M, (), "DPM-Solver++ multistep order 2"),
    ),
}

SCHEDULERS: tuple[SchedulerChoice, ...] = tuple(
    SchedulerChoice(*row, family) for family, rows in _ROWS.items() for row in rows
)

_OTHER_ARGUMENTS = "its step needs more than the model's output, the timestep and the sample"
_TOKENS = "it denoises discrete tokens, not numbers"
_BROWNIAN = "it draws from a Brownian tree (torchsde), whose noise depends on more than the seed and the step"
_TO_NOISE = "it runs from an image to noise"

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "pndm-prk": "its Runge-Kutta warm-up looks back further than 4 model calls; pndm is the same without warm-up",
        "euler-churn": "a request has no field for s_churn; euler-a adds noise too",
        "dpm++sde": _BROWNIAN,
        "DPMSolverSDEScheduler": _BROWNIAN,
        "CosineDPMSolverMultistepScheduler": _BROWNIAN,
        "DDIMInverseScheduler": _TO_NOISE,
        "DPMSolverMultistepInverseScheduler": _TO_NOISE,
        "AmusedScheduler": _TOKENS,
        "BlockRefinementScheduler": _TOKENS,
        "DiscreteDDIMScheduler": _TOKENS,
        "EntropyBoundScheduler": _TOKENS,
        "VQDiffusionScheduler": _TOKENS,
        "CMStochasticIterativeScheduler": "it clips the sample, which is not linear",
        "ConsistencyDecoderScheduler": "it is a decoder of two fixed steps, not a sampler of latents",
        "CogVideoXDDIMScheduler": "it is for CogVideoX, which makes video",
        "CogVideoXDPMScheduler": "it is for CogVideoX, which makes video; " + _OTHER_ARGUMENTS,
        "DDPMWuerstchenScheduler": "it is for Würstchen's continuous time, where calls also need the next timestep",
        "FlowMapEulerDiscreteScheduler": "it is for flow-map models, which also need the end of each step",
        "HeliosScheduler": "it is for Helios, which makes video in stages of different sizes",
        "HeliosDMDScheduler": "it is for Helios, which makes video in stages of different sizes",
        "KarrasVeScheduler": _OTHER_ARGUMENTS,
        "MiniMaxH3Scheduler": "it is for MiniMax-H3, which makes video and sound",
        "PiflowScheduler": "it is for models whose output is wider than the sample",
        "RePaintScheduler": "it fills in a masked image; " + _OTHER_ARGUMENTS,
        "RFD4ProteinaScheduler": "it is for RFD4-Proteína, which makes proteins",
        "SCMScheduler": "it is for models of TrigFlow time, whose pipeline rescales the sample before each call",
        "ScoreSdeVeScheduler": "it is a predictor and a corrector of different signatures, not one step",
        "ScoreSdeVpScheduler": "it is a predictor and a corrector of different signatures, not one step",
        "UnCLIPScheduler": "it is for unCLIP's prior and decoder, which predict the variance too",
    }
)


def find(name: str, names_elsewhere: Sequence[str] = ()) -> SchedulerChoice:
    """Return the choice with the short name, alias or diffusers class `name`; errors list `names_elsewhere`, if any.

    Raises InvalidField: not supported, with the reason, or unknown, with the nearest name and all names.
    """
    normalized = _normalized(name)
    if normalized in _BY_KEY:
        return _BY_KEY[normalized]
    known = names_elsewhere or [choice.name for choice in SCHEDULERS]
    for unsupported, reason in UNSUPPORTED.items():
        if normalized == _normalized(unsupported):
            raise InvalidField(
                f"scheduler {short_repr(name)} is not supported: {reason}. Known are: {', '.join(known)}.",
                field="scheduler",
            )
    spellings = [
        spelling for choice in SCHEDULERS for spelling in (choice.name, *choice.aliases, choice.diffusers_class)
    ]
    hint = did_you_mean(name, names_elsewhere or spellings)
    raise InvalidField(
        f"scheduler {short_repr(name)} is not known.{hint} Known are: {', '.join(known)}.", field="scheduler"
    )


def check_start_image(name: str, schedulers: Iterable[str]) -> None:
    """Raise InvalidField if a scheduler takes no start image; `schedulers` are the names that the model supports."""
    if not find(name).takes_start_image:
        allowed = ", ".join(each for each in schedulers if find(each).takes_start_image)
        raise InvalidField(
            f"scheduler {find(name).name!r} cannot begin with an image: it defines no noise of an image at a step. "
            f"With a start image, use one of {allowed}.",
            field="scheduler",
        )


def check_refiner(name: str, schedulers: Iterable[str]) -> None:
    """Raise InvalidField if a refiner cannot make a scheduler's last steps; `schedulers` are those of the model."""
    if not find(name).takes_refiner:
        allowed = ", ".join(each for each in schedulers if find(each).takes_refiner)
        raise InvalidField(
            f"scheduler {find(name).name!r} cannot be handed over to a refiner: its timesteps are not those of the "
            f"training. With a refiner, use one of {allowed}.",
            field="scheduler",
        )


def check_skipped_calls(name: str, schedulers: Iterable[str]) -> None:
    """Raise InvalidField if no calls of a scheduler can be skipped; `schedulers` are those of the model."""
    choice = find(name)
    if choice.needs_all_calls:
        allowed = ", ".join(each for each in schedulers if not find(each).needs_all_calls)
        raise InvalidField(
            f"calls: none of scheduler {choice.name!r} can be skipped: {choice.needs_all_calls}. Leave calls out, or "
            f"use one of {allowed}.",
            field="calls",
        )


def choices_of_family(family: Family) -> tuple[SchedulerChoice, ...]:
    """Return the choices that can sample models of `family`."""
    return tuple(choice for choice in SCHEDULERS if choice.family == family)


def family_of(config: Mapping[str, object]) -> Family:
    """Return the family of a model from its scheduler_config.json."""
    diffusers_class = str(config.get("_class_name", ""))
    if diffusers_class.startswith("EDM"):
        return "edm"
    flows = diffusers_class in {choice.diffusers_class for choice in choices_of_family("flow") if not choice.overrides}
    return "flow" if flows or config.get("prediction_type") == "flow_prediction" else "diffusion"


def choice_for_config(config: Mapping[str, object]) -> SchedulerChoice:
    """Return the choice nearest to a model's scheduler_config.json: of its class, with the fewest differing settings.

    Raises InvalidField: its class is not supported.
    """
    diffusers_class = str(config.get("_class_name", ""))
    candidates = [
        choice for choice in choices_of_family(family_of(config)) if choice.diffusers_class == diffusers_class
    ]
    if not candidates:
        return find(diffusers_class)
    return min(
        candidates, key=lambda choice: sum(config.get(key, value) != value for key, value in choice.overrides.items())
    )


def _normalized(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower()).replace("dpmpp", "dpm++")


def _by_key() -> dict[str, SchedulerChoice]:
    """Map every spelling to its choice; the name of a class maps to the first choice with that class."""
    by_key: dict[str, SchedulerChoice] = {}
    for choice in SCHEDULERS:
        for name in (choice.name, *choice.aliases):
            by_key[_normalized(name)] = choice
        by_key.setdefault(_normalized(choice.diffusers_class), choice)
    return by_key


_BY_KEY = _by_key()
