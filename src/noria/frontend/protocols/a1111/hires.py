"""A1111's hires fix: a second pass of `txt2img` in another size, which begins with the latents of the first one."""

import math
from collections.abc import Mapping
from typing import Any

from noria.errors import InvalidField, short_list, short_repr
from noria.errors.problems import Problems
from noria.frontend.protocols.a1111.bodies import Txt2Img
from noria.frontend.protocols.a1111.off_values import Feature, features_on, is_off
from noria.frontend.services.images.request_validation import Limits, check_range
from noria.images.a1111_names import UPSCALERS
from noria.protocol.diffusion import DiffusionModelSpec, SecondPass

HIRES_LIMITS: Mapping[str, Limits] = {"hr_scale": Limits(1, 4, 2)}  # as A1111's page has it
_DEFAULT_STRENGTH = 0.7  # as A1111's page has it, and clients send
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


def check_hires(body: Txt2Img, sent: Mapping[str, Any], problems: Problems) -> None:
    """Add what of a hires fix, if it is on, is not supported."""
    if not body.enable_hr:
        return
    errors = features_on(sent, _UNSUPPORTED)
    for name, (own, same) in _SAME.items():
        if not is_off(sent.get(name), same) and sent[name] != getattr(body, own):
            message = f"{name} is not {own}; another one in the second pass is not supported: leave it out."
            errors.append(InvalidField(message, field=name))
    # "None" says nothing in other fields; here it is an upscaler of A1111, which enlarges pixels by Lanczos.
    is_none = str(sent.get("hr_upscaler")).strip().lower() == "none" and sent.get("hr_upscaler") is not None
    upscaler = "None" if is_none else body.hr_upscaler
    if upscaler and upscaler not in UPSCALERS:
        allowed = short_list(map(short_repr, UPSCALERS), len(UPSCALERS))
        message = (
            f"hr_upscaler is {short_repr(upscaler)}; allowed are {allowed}. Others, which enlarge pixels, are not "
        )
        errors.append(InvalidField(f"{message}supported.", field="hr_upscaler"))
    problems.add(*errors, are_of_form=True)


def second_pass_of(
    body: Txt2Img, spec: DiffusionModelSpec, limits: Mapping[str, Limits], problems: Problems
) -> SecondPass | None:
    """Return the second pass of a body for a model, whose `limits` are those of `/t2i`.

    Adds to `problems`, and then returns None.
    """
    if not body.enable_hr:
        return None
    size = problems.attempt(lambda: _size(body, spec, limits), None)
    steps = problems.attempt(lambda: _steps(body, limits["inference_steps"]), None)
    if size is None or steps is None:
        return None
    upscaler = UPSCALERS.get(body.hr_upscaler or next(iter(UPSCALERS)), "bilinear")
    return SecondPass(*size, *steps, upscaler)


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
