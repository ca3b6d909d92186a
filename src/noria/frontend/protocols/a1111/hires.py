"""A1111's hires fix: a second pass of `txt2img` in another size, which begins with what the first one made."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from noria.errors import InvalidField, short_list, short_repr
from noria.errors.problems import Problems
from noria.frontend.protocols.a1111.bodies import Txt2Img
from noria.frontend.protocols.a1111.off_values import Feature, features_on, is_off
from noria.frontend.services.images.request_validation import Limits, check_range
from noria.images.a1111_names import UPSCALERS
from noria.models.adapters.upscaler_folders import FILTERS, LANCZOS, UpscalerFolders
from noria.protocol.diffusion import DiffusionModelSpec, PixelUpscaler, SecondPass

Txt2ImgT = TypeVar("Txt2ImgT", bound=Txt2Img)

HIRES_LIMITS: Mapping[str, Limits] = {"hr_scale": Limits(1, 4, 2)}  # as A1111's page has it
_DEFAULT_STRENGTH = 0.7  # as A1111's page has it, and clients send
_MAX_NAMES = 50  # in a message
_ROUNDING = 1e-6  # 20 / 0.7 · 0.7 is 20.000000000000004


# Fields that may say the same as those of the first pass, and how they say so besides being off. Errors do not repeat
# their values: prompts may be secret.
_SAME: Mapping[str, tuple[str, str]] = {
    "hr_prompt": ("prompt", ""),
    "hr_negative_prompt": ("negative_prompt", ""),
    "hr_sampler_name": ("sampler_name", "Use same sampler"),
    "hr_scheduler": ("scheduler", "Use same scheduler"),
    "hr_cfg": ("cfg_scale", ""),
}
_UNSUPPORTED: Mapping[str, Feature] = {
    "hr_checkpoint_name": ("another model of the hires fix", ("Use same checkpoint",)),
    "hr_additional_modules": ("other modules of the hires fix", ("Use same choices",)),
}


def check_hires(body: Txt2ImgT, sent: Mapping[str, Any], problems: Problems) -> Txt2ImgT:
    """Add what of a hires fix, if it is on, is not supported; return the body with the upscaler that it means."""
    if not body.enable_hr:
        return body
    errors = features_on(sent, _UNSUPPORTED)
    for name, (own, same) in _SAME.items():
        if not is_off(sent.get(name), same) and sent[name] != getattr(body, own):
            message = f"{name} is not {own}; another one in the second pass is not supported: leave it out."
            errors.append(InvalidField(message, field=name))
    problems.add(*errors, are_of_form=True)
    # "None" says nothing in other fields; here it is an upscaler of A1111, which enlarges pixels by Lanczos.
    is_none = str(sent.get("hr_upscaler")).strip().lower() == "none" and sent.get("hr_upscaler") is not None
    return msgspec.structs.replace(body, hr_upscaler=LANCZOS) if is_none else body


def second_pass_of(
    body: Txt2Img,
    spec: DiffusionModelSpec,
    limits: Mapping[str, Limits],
    folders: UpscalerFolders,
    problems: Problems,
) -> SecondPass | None:
    """Return the second pass of a body, which has one, for a model, whose `limits` are those of `/t2i`.

    Adds to `problems`, and then returns None. Reads `folders`.
    """
    upscaler = body.hr_upscaler or next(iter(UPSCALERS))
    pixel_upscaler = None
    if upscaler not in UPSCALERS:
        pixel_upscaler = problems.attempt(lambda: _pixel_upscaler(upscaler, folders), None)
    size = problems.attempt(lambda: _size(body, spec, limits), None)
    steps = problems.attempt(lambda: _steps(body, limits["inference_steps"]), None)
    if size is None or steps is None:
        return None
    return SecondPass(*size, *steps, UPSCALERS.get(upscaler, "bilinear"), pixel_upscaler)


def _pixel_upscaler(name: str, folders: UpscalerFolders) -> PixelUpscaler:
    known = (*UPSCALERS, *FILTERS, *folders.files())
    if name not in known:
        raise InvalidField(
            f"hr_upscaler is {short_repr(name)}; allowed are {short_list(map(short_repr, known), _MAX_NAMES)}. Others "
            "are files in the folders of engine.upscalers.",
            field="hr_upscaler",
        )
    return folders.complete(name, "hr_upscaler")


def _steps(body: Txt2Img, limit: Limits) -> tuple[int, float]:
    """Return the steps of a second pass, those that it leaves out included, and its strength. Raises InvalidField."""
    strength = _DEFAULT_STRENGTH if body.denoising_strength is None else body.denoising_strength
    least = 1 / limit.max  # with less no step would be left
    if not least <= strength <= 1:  # also true for NaN
        raise InvalidField(
            f"denoising_strength is {short_repr(strength)}; allowed are {least:g} to 1 with enable_hr.",
            field="denoising_strength",
        )
    name = "hr_second_pass_steps" if body.hr_second_pass_steps else "steps"
    num_made = body.hr_second_pass_steps or body.steps or int(limit.default or 1)
    num_most = int(limit.max * strength + _ROUNDING)
    if not 1 <= num_made <= num_most:
        raise InvalidField(
            f"{name} is {short_repr(num_made)}, of which the second pass makes all: with denoising_strength "
            f"{strength:g} allowed are 1 to {num_most}.",
            field=name,
        )
    num_steps = math.ceil(num_made / strength - _ROUNDING)
    return num_steps + (int(num_steps * strength) < num_made), strength  # diffusers rounds it down


def _size(body: Txt2Img, spec: DiffusionModelSpec, limits: Mapping[str, Limits]) -> tuple[int, int]:
    """Return width and height of a second pass, rounded down. Raises InvalidField."""
    width = min(body.width or spec.default_width_px, spec.max_side_px)  # larger ones are an error of their own
    height = min(body.height or spec.default_height_px, spec.max_side_px)
    sides = Limits(0, spec.max_side_px, 0)
    new_width = check_range("hr_resize_x", body.hr_resize_x or 0, sides)
    new_height = check_range("hr_resize_y", body.hr_resize_y or 0, sides)
    if new_width or new_height:
        size = new_width or new_height * width / height, new_height or new_width * height / width
    else:
        limit = HIRES_LIMITS["hr_scale"]
        scale = limit.default if body.hr_scale is None else check_range("hr_scale", body.hr_scale, limit)
        size = width * (scale or 1), height * (scale or 1)
    new_width, new_height = (_checked_side(name, size[k], limits[name]) for k, name in enumerate(("width", "height")))
    return int(new_width), int(new_height)


def _checked_side(name: str, side: float, limit: Limits) -> float:
    """Return a side, rounded down to a multiple. Raises InvalidField if it is not allowed."""
    rounded = side // limit.multiple * limit.multiple
    if not limit.min <= rounded <= limit.max:
        raise InvalidField(
            f"{name} of the hires fix is {side:g}; allowed are {limit.min} to {limit.max} (hr_scale, hr_resize_x, "
            "hr_resize_y).",
            field="hr_scale",
        )
    return rounded
