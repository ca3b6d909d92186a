"""Converts the units of A1111's ControlNet extension (`alwayson_scripts.controlnet`) to controls of `/t2i`.

Images go into ControlNets as they are: a unit with a preprocessor is rejected, and so is every option that would change
the image and that Noria does not have.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from noria.errors import InvalidField, short_repr
from noria.images.start_image import ImageFacts
from noria.protocol.request import ControlField

SCRIPT = "controlnet"
FIELD = f"alwayson_scripts.{SCRIPT}.args"
_HASH = re.compile(r" \[[0-9a-f]+\]\Z")  # A1111 lists models as `name [hash]`

_NO_PREPROCESSOR = "no preprocessor is run here: send an image as the ControlNet takes it, and none"

# Clients send these by default; without cropping and filling they resize as 0 does where proportions are equal.
_CROPPING_OR_FILLING = (1, 2, "Crop and Resize", "Resize and Fill", "Scale to Fit (Inner Fit)", "Envelope (Outer Fit)")
# What is allowed of options that Noria does not have, besides null and "".
_OFF_VALUES: Mapping[str, tuple[object, ...]] = {
    "module": ("none", "None"),
    "control_mode": (0, "Balanced"),
    "resize_mode": (0, "Just Resize", *_CROPPING_OR_FILLING),
    "guessmode": (False,),
    "mask": (False,),
    "mask_image": (),
    "effective_region_mask": (),
    "advanced_weighting": (),
    "ipadapter_input": (),
    "pulid_mode": ("Fidelity",),
    "union_control_type": ("Unknown",),
    "input_mode": ("simple",),
    "loopback": (False,),
    "batch_images": (),
    "batch_image_dir": (),
    "batch_mask_dir": (),
    "use_preview_as_input": (False,),
}
# These have no effect without a preprocessor, or none on the image.
_IGNORED = (
    "enabled",
    "hr_option",
    "inpaint_crop_input_image",
    "low_vram",
    "is_ui",
    "lowvram",
    "output_dir",
    "pixel_perfect",
    "processor_res",
    "save_detected_map",
    "threshold_a",
    "threshold_b",
)
_USED = ("image", "input_image", "model", "weight", "guidance_start", "guidance_end", "guidance")


def title(name: str, digest: str) -> str:
    """Return a ControlNet's title as A1111 lists it."""
    return f"{name} [{digest}]"


def controls_of(sent: Mapping[str, Any]) -> tuple[ControlField, ...]:
    """Return the controls of the units in a body. Raises InvalidField."""
    return tuple(_control(f"{FIELD}[{k}]", unit) for k, unit in _units(sent))


def resize_modes(sent: Mapping[str, Any]) -> list[object]:
    """Return how the units in a body, which passed `controls_of`, resize their images."""
    return [unit.get("resize_mode") for _, unit in _units(sent)]


def check_proportions(modes: Sequence[object], images: Sequence[ImageFacts], size_px: tuple[int, int]) -> None:
    """Raise InvalidField if units with these resize modes would crop or fill `images`, for a result of this size."""
    for mode, image in zip(modes, images, strict=True):
        if mode in _CROPPING_OR_FILLING and image.width_px * size_px[1] != image.height_px * size_px[0]:
            raise InvalidField(
                f"{FIELD}: resize_mode is {short_repr(mode)}, but an image has {image.width_px} × {image.height_px} "
                f"pixels and the result {size_px[0]} × {size_px[1]}: cropping and filling are not supported. Send an "
                "image of the same proportions, or 0 (Just Resize).",
                field=FIELD,
            )


def _units(sent: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the units that are enabled, and their numbers. Raises InvalidField."""
    scripts = sent.get("alwayson_scripts")
    found = (
        next((each for name, each in scripts.items() if name.lower() == SCRIPT), None)
        if isinstance(scripts, dict)
        else None
    )
    units = found.get("args") if isinstance(found, dict) else None
    if not units:
        return []
    if not isinstance(units, list) or not all(isinstance(unit, dict) for unit in units):
        raise InvalidField(f"{FIELD} is {short_repr(units)}; a list of objects is expected.", field=FIELD)
    return [(k, unit) for k, unit in enumerate(units) if unit.get("enabled") is not False]


def _control(where: str, unit: Mapping[str, Any]) -> ControlField:
    for name, value in unit.items():
        off_values = _OFF_VALUES.get(name)
        if off_values is None and name not in (*_IGNORED, *_USED):
            raise InvalidField(f"{where}: {short_repr(name)} is not supported: leave it out.", field=FIELD)
        if off_values is not None and value not in (None, "", *off_values):
            if name == "module":
                raise InvalidField(f"{where}.module is {short_repr(value)}; {_NO_PREPROCESSOR}.", field=FIELD)
            off = " or ".join(map(short_repr, (*off_values, None)))
            raise InvalidField(
                f"{where}.{name} is {short_repr(value)}, which is not supported: leave it out, or send {off}.",
                field=FIELD,
            )
    return ControlField(
        name=_HASH.sub("", _value(where, unit, "model", "", str)),
        image=_image(where, unit),
        scale=_value(where, unit, "weight", 1.0, float),
        start=_value(where, unit, "guidance_start", 0.0, float),
        end=_value(where, unit, "guidance_end", _value(where, unit, "guidance", 1.0, float), float),
    )


def _image(where: str, unit: Mapping[str, Any]) -> str:
    image = unit.get("image") or unit.get("input_image")
    if isinstance(image, dict):
        if image.get("mask"):
            raise InvalidField(f"{where}.image has a mask, which is not supported: leave it out.", field=FIELD)
        image = image.get("image")
    if not isinstance(image, str):
        raise InvalidField(f"{where}.image is {short_repr(image)}; send a file in base64.", field=FIELD)
    return image


def _value(where: str, unit: Mapping[str, Any], name: str, default: Any, kind: type) -> Any:
    value = unit.get(name)
    if value is None:
        value = default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind):
        expected = "a number" if kind is float else "a text"
        raise InvalidField(f"{where}.{name} is {short_repr(value)}; {expected} is expected.", field=FIELD)
    return value
