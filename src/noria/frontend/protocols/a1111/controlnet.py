"""Converts the units of A1111's ControlNet extension (`alwayson_scripts.controlnet`) to fields of `/t2i`.

Its routes are what clients ask before they send units.

Units whose preprocessor or model is an IP-Adapter are its `ip_adapter`, others are controls. Images go into ControlNets
as they are: a unit with a preprocessor is rejected, and so is every option that would change
the image and that Noria does not have.
"""

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidField, OperationNotSupported, RequestError, short_repr
from noria.errors.problems import Problems, each_part
from noria.frontend.http.json_response import json_response
from noria.frontend.protocols.a1111.off_values import is_empty, is_off
from noria.frontend.services.images.request_images import MAX_CONTROLS
from noria.images.start_image import RequestImageFacts
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ControlField, ImageRequest, IpAdapterField

SCRIPT = "controlnet"
FIELD = f"alwayson_scripts.{SCRIPT}.args"
_MAX_UNITS = 20  # with those that are off; the extension has at most as many
_MAX_NAMED = 8  # unknown options in a message
_HASH = re.compile(r" \[[0-9a-f]+\]\Z")  # A1111 lists models as `name [hash]`

_IP_ADAPTER = "ip-adapter"  # the beginning of the names of its preprocessors and models
IP_ADAPTER_MODULE = "ip-adapter-auto"
"""The preprocessor of a unit that is an IP-Adapter, whatever its model is called."""

_NO_PREPROCESSOR = "no preprocessor is run here: send an image as the ControlNet takes it, and none"

# Clients send these by default, and the extension's own default is 1; without cropping and filling they resize as 0
# does where proportions are equal.
_DEFAULT_RESIZE_MODE = 1
_CROPPING_OR_FILLING = (1, 2, "Crop and Resize", "Resize and Fill", "Scale to Fit (Inner Fit)", "Envelope (Outer Fit)")
# What means "off" of options that Noria does not have, besides the usual values.
_OFF_VALUES: Mapping[str, tuple[object, ...]] = {
    "module": ("none",),
    "control_mode": (0, "Balanced"),
    "hr_option": ("Both", "HiResFixOption.BOTH"),  # passes of a hires fix
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
_NAMES_OF_UNITS = {"scale": "weight", "start": "guidance_start", "end": "guidance_end"}
_USED = ("image", "input_image", "model", "weight", "guidance_start", "guidance_end", "guidance")
_KNOWN = frozenset({*_OFF_VALUES, *_IGNORED, *_USED})


def title(name: str, digest: str) -> str:
    """Return a ControlNet's title as A1111 lists it."""
    return f"{name} [{digest}]"


class UnitFields(NamedTuple):
    """The fields of `/t2i` that units become."""

    controls: tuple[ControlField, ...] = ()
    ip_adapter: IpAdapterField | None = None


def fields_of(sent: Mapping[str, Any]) -> UnitFields:
    """Return the fields of the units in a body. Raises InvalidField, of all units that are wrong."""
    problems, controls = Problems(), []
    ip_adapter: IpAdapterField | None = None
    for k, unit in problems.attempt(lambda: _units(sent), []):
        where = f"{FIELD}[{k}]"
        problems.add(*_unsupported_options(where, unit, has_second_pass=not is_off(sent.get("enable_hr"))))
        if not _is_ip_adapter(unit):
            controls.append(problems.attempt(functools.partial(_control, where, unit), None))
        elif ip_adapter is not None:
            problems.add(InvalidField(f"{where} is a second IP-Adapter; one is allowed.", field=FIELD))
        else:
            ip_adapter = problems.attempt(functools.partial(_ip_adapter, where, unit), None)
    problems.raise_all()
    return UnitFields(tuple(each for each in controls if each is not None), ip_adapter)


class UnitSettings(NamedTuple):
    """The settings of a unit that are kept beside its control."""

    number: int  # among the units of the body
    resize_mode: object


def settings_of(sent: Mapping[str, Any]) -> list[UnitSettings]:
    """Return the settings of the controls in a body, which passed `fields_of`."""
    modes = [(k, unit.get("resize_mode")) for k, unit in _units(sent) if not _is_ip_adapter(unit)]
    return [UnitSettings(k, _DEFAULT_RESIZE_MODE if mode in (None, "") else mode) for k, mode in modes]


def error_of_units(error: RequestError, units: Sequence[UnitSettings]) -> RequestError:
    """Return `error` with the name of a unit and its setting in place of that of a control."""
    return each_part(error, lambda part: _error_of_unit(part, units))


def _error_of_unit(error: RequestError, units: Sequence[UnitSettings]) -> RequestError:
    if error.field == "ip_adapter":
        return type(error)(f"{FIELD}: {error.message}", field=FIELD)
    found = re.match(r"controls\[(\d+)\](?:\.(\w+))?", error.message)
    if found is None or error.field != "controls":
        return error
    name = found[2] and f".{_NAMES_OF_UNITS.get(found[2], found[2])}"
    message = f"{FIELD}[{units[int(found[1])].number}]{name or ''}{error.message[found.end() :]}"
    return type(error)(message, field=FIELD)


def check_proportions(units: Sequence[UnitSettings], request: ImageRequest, images: RequestImageFacts) -> None:
    """Raise InvalidField if units with these settings would crop or fill their images, of `request`."""
    size_px = request.payload.width, request.payload.height
    for (number, mode), image in zip(units, images.controls, strict=True):
        if mode in _CROPPING_OR_FILLING and image.width_px * size_px[1] != image.height_px * size_px[0]:
            raise InvalidField(
                f"{FIELD}[{number}].resize_mode is {short_repr(mode)} (the default is {_DEFAULT_RESIZE_MODE}), but the "
                f"image has {image.width_px} × {image.height_px} pixels and the result {size_px[0]} × {size_px[1]}: "
                "cropping and filling are not supported. Send an image of the same proportions, or 0 (Just Resize).",
                field=FIELD,
            )


def images_in(sent: Mapping[str, Any]) -> list[object]:
    """Return the images of all units in a body, also of those that are not enabled, which clients send as well.

    Raises InvalidField.
    """
    sources = [unit.get(name) for unit in _all_units(sent) for name in ("image", "input_image")]
    return [part for each in sources for part in (each.values() if isinstance(each, dict) else [each])]


def _units(sent: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the units that are enabled, and their numbers. Raises InvalidField."""
    return [(k, unit) for k, unit in enumerate(_all_units(sent)) if _is_enabled(f"{FIELD}[{k}]", unit)]


def _all_units(sent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the units of all spellings of the script. Raises InvalidField."""
    units: list[dict[str, Any]] = []
    scripts = sent.get("alwayson_scripts")
    for name, script in (scripts if isinstance(scripts, dict) else {}).items():
        if name.lower() != SCRIPT:
            continue
        found = script.get("args") if isinstance(script, dict) else script
        found = [] if is_off(found) else found
        if isinstance(found, list):
            if len(units) + len(found) > _MAX_UNITS:
                num_units = len(units) + len(found)
                raise InvalidField(f"{FIELD} has {num_units} units; at most {_MAX_UNITS} are allowed.", field=FIELD)
            found = [{"enabled": False} if is_off(unit) else unit for unit in found]
        if not isinstance(found, list) or not all(isinstance(unit, dict) for unit in found):
            raise InvalidField(
                f"{FIELD} is {short_repr(found)}; a list of objects is expected, one for each unit.", field=FIELD
            )
        units += found
    return units


def _is_enabled(where: str, unit: Mapping[str, Any]) -> bool:
    """Whether a unit is used, as it is if it does not say so."""
    enabled = unit.get("enabled")
    if is_empty(enabled) or is_off(enabled, 1, True):
        return is_empty(enabled) or not is_off(enabled)
    raise InvalidField(
        f"{where}.enabled is {short_repr(enabled)}; allowed are true, which is the default, and false.", field=FIELD
    )


def _unsupported_options(where: str, unit: Mapping[str, Any], *, has_second_pass: bool) -> Iterator[InvalidField]:
    """Yield an error for each option of a unit that would change the image, one for all that are unknown."""
    unknown = [name for name, value in unit.items() if name not in _KNOWN and not is_off(value)]
    if unknown:
        names = ", ".join(map(short_repr, unknown[:_MAX_NAMED])) + (" and others" if len(unknown) > _MAX_NAMED else "")
        are = "are not supported: leave them out" if len(unknown) > 1 else "is not supported: leave it out"
        yield InvalidField(f"{where}: {names} {are}.", field=FIELD)
    for name, off_values in _OFF_VALUES.items():
        if is_off(value := unit.get(name), *off_values) or (name == "module" and _is_named_ip_adapter(value)):
            continue
        if name == "hr_option" and not has_second_pass:
            continue
        if name == "module":
            message = f"{where}.module is {short_repr(value)}; {_NO_PREPROCESSOR}."
        else:
            off = " or ".join(map(short_repr, (*off_values, None)))
            message = f"{where}.{name} is {short_repr(value)}, which is not supported: leave it out, or send {off}."
        yield InvalidField(message, field=FIELD)


def _is_ip_adapter(unit: Mapping[str, Any]) -> bool:
    return _is_named_ip_adapter(unit.get("module")) or _is_named_ip_adapter(unit.get("model"))


def _is_named_ip_adapter(name: object) -> bool:
    return isinstance(name, str) and name.lower().startswith(_IP_ADAPTER)


def _ip_adapter(where: str, unit: Mapping[str, Any]) -> IpAdapterField:
    control = _control(where, unit)
    if (control.start, control.end) != (0, 1):
        raise InvalidField(
            f"{where}: its guidance is from {control.start} to {control.end}; an IP-Adapter is in all steps here, from "
            "0 to 1.",
            field=FIELD,
        )
    return IpAdapterField(control.name, control.image, control.scale)


def _control(where: str, unit: Mapping[str, Any]) -> ControlField:
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
    if value is None or (kind is float and is_empty(value)):
        value = default
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)  # as in A1111, "0.8" is a number
    if not isinstance(value, kind):
        expected = "a number" if kind is float else "a text"
        raise InvalidField(f"{where}.{name} is {short_repr(value)}; {expected} is expected.", field=FIELD)
    return value


_NO_MODEL = "None"
_MODULES = ["none", IP_ADAPTER_MODULE]

FIXED_RESPONSES: Mapping[str, Any] = {
    "scripts": {"txt2img": [SCRIPT], "img2img": [SCRIPT]},
    "version": {"version": 3},  # version of the extension's API: units in `alwayson_scripts`
    "settings": {"control_net_unit_count": MAX_CONTROLS},
    "module_list": {
        "module_list": _MODULES,
        "module_detail": {name: {"model_free": False, "sliders": []} for name in _MODULES},
    },
}
"""The responses that are the same for all models, by the last part of the path."""


class ControlNetRoutes:
    """The routes under /controlnet, besides those with `FIXED_RESPONSES`."""

    def __init__(self, folders: AdapterFolders, selected_model: Callable[[Request], DiffusionModelSpec]) -> None:
        """`selected_model` returns the model that a client has selected."""
        self._folders, self._selected_model = folders, selected_model

    async def model_list(self, http: Request) -> Response:
        """List the ControlNets and the IP-Adapters of the selected model."""
        return json_response({"model_list": await self._models(http)})

    async def control_types(self, http: Request) -> Response:
        """Return the models and preprocessors of all units, and those of IP-Adapters if the model has some."""
        models, ip_adapters = await self._models(http), await self._ip_adapters(http)
        types = {"All": _control_type(_MODULES, models)}
        if ip_adapters:
            types["IP-Adapter"] = _control_type([IP_ADAPTER_MODULE], ip_adapters)
        return json_response({"control_types": types})

    async def detect(self, _: Request) -> Response:
        """Raise OperationNotSupported."""
        raise OperationNotSupported(
            "this server has no preprocessors: send images as ControlNets take them, with the module none."
        )

    async def _models(self, http: Request) -> list[str]:
        spec = self._selected_model(http)
        controlnets = await asyncio.to_thread(self._folders.controlnets.for_model, spec)  # reads folders
        return [*_titles(controlnets), *await self._ip_adapters(http)]

    async def _ip_adapters(self, http: Request) -> list[str]:
        return _titles(await asyncio.to_thread(self._folders.ip_adapters.for_model, self._selected_model(http)))


def _titles(files: Mapping[str, Any]) -> list[str]:
    return [title(name, each.digest) for name, each in files.items()]


def _control_type(modules: Sequence[str], models: Sequence[str]) -> dict[str, Any]:
    return {
        "module_list": modules,
        "model_list": [_NO_MODEL, *models],
        "default_option": modules[0],
        "default_model": _NO_MODEL,
    }
