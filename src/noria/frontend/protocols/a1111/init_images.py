"""The images of A1111's img2img: how they get the size of the request, and how their masks are used.

Fields that are left out mean what they do in A1111's API: its defaults are not those of its web page.
"""

import functools
from collections.abc import Mapping
from typing import Any

from noria.errors import InvalidField, short_repr
from noria.errors.problems import Problems
from noria.frontend.protocols.a1111.bodies import Img2Img
from noria.frontend.protocols.a1111.controlnet import UnitFields
from noria.frontend.services.images.request_images import check_num_references
from noria.frontend.services.images.request_validation import Limits, check_range
from noria.frontend.services.images.start_images import LoadFiles, control_images, decode_files
from noria.images.inpainting import MaskContent, MaskUse, ResizeMode
from noria.protocol.diffusion import DiffusionModelSpec

RESIZE_MODES: Mapping[ResizeMode, str] = {
    "stretch": "Just resize",
    "crop": "Crop and resize",
    "fill": "Resize and fill",
    "latent": "Just resize (latent upscale)",
}
"""A1111's names; its numbers are their positions."""

_CONTENTS: tuple[MaskContent, ...] = ("surroundings", "original", "noise", "nothing")
_BLUR = Limits(0, 256, 4)  # as wide as a part of an image is; A1111's page has 64

IMAGE_LIMITS: Mapping[str, Limits] = {
    "mask_blur": _BLUR,
    "mask_blur_x": _BLUR,
    "mask_blur_y": _BLUR,
    "inpaint_full_res_padding": Limits(0, 4096, 0),  # A1111's page has 256
    "inpainting_fill": Limits(0, len(_CONTENTS) - 1, 0),
}
"""The limits of the numbers of a mask."""


def has_references(body: Img2Img, spec: DiffusionModelSpec | None) -> bool:
    """Return whether the images of `body` are shown to the model, since nothing of them is kept.

    Several are, too, where there is no such model, which is then the error of the request.
    """
    if spec is None:
        return len(body.init_images or ()) > 1
    return spec.max_references > 0 and bool(body.init_images) and not body.mask and body.denoising_strength == 1


def files_of_image_body(body: Img2Img, fields: UnitFields, *, are_references: bool) -> LoadFiles:
    """Return what decodes the images of `body` and of its units.

    Raises:
        InvalidField: not one starts, or fields of it and of its mask are wrong.

    """
    images = body.init_images or []
    of_units: dict[str, Any] = {
        "control_images": control_images(fields.controls),
        "ip_adapter_image": fields.ip_adapter and fields.ip_adapter.image,
    }
    if are_references:
        check_num_references(images)
        return functools.partial(decode_files, None, None, reference_images=images, **of_units)
    if len(images) != 1:
        others = "; several are reference images, with denoising_strength 1 and no mask" if images else ""
        raise InvalidField(f"init_images has {len(images)} images; allowed is one{others}.", field="init_images")
    problems = Problems()
    stretch: ResizeMode = "stretch"
    resize = problems.attempt(lambda: _resize_mode(body), stretch)
    mask_use = _mask_use(body, problems) if body.mask else None
    if resize == "latent" and body.mask:
        message = f"resize_mode is {short_repr(body.resize_mode)}; with a mask allowed are 0 to 2."
        problems.add(InvalidField(message, field="resize_mode"))
    problems.raise_all()
    return functools.partial(
        decode_files,
        images[0],
        body.mask or None,
        "alpha or white",
        inverts_mask=bool(body.inpainting_mask_invert),
        resize=resize,
        mask_use=mask_use,
        **of_units,
    )


def _resize_mode(body: Img2Img) -> ResizeMode:
    got = 0 if body.resize_mode is None else body.resize_mode
    for number, (mode, name) in enumerate(RESIZE_MODES.items()):
        if str(got).strip().lower() in (str(number), name.lower()):
            return mode
    allowed = ", ".join(f"{number} ({name})" for number, name in enumerate(RESIZE_MODES.values()))
    raise InvalidField(f"resize_mode is {short_repr(got)}; allowed are {allowed}.", field="resize_mode")


def _mask_use(body: Img2Img, problems: Problems) -> MaskUse:
    """Return how the mask of `body` is used; adds to `problems`."""

    def checked(field: str) -> float:
        limit, got = IMAGE_LIMITS[field], getattr(body, field)
        default = limit.default or 0
        return default if got is None else problems.attempt(lambda: check_range(field, got, limit), default)

    blurs = ("mask_blur_x", "mask_blur_y") if body.mask_blur is None else ("mask_blur", "mask_blur")
    padding_px = int(checked("inpaint_full_res_padding"))
    return MaskUse(
        blur_px=(checked(blurs[0]), checked(blurs[1])),
        padding_px=None if body.inpaint_full_res is False else padding_px,
        content=_CONTENTS[int(checked("inpainting_fill"))],
    )
