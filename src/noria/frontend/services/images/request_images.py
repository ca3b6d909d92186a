"""Checks the images of a request: how many, what models need, and the size that follows. Checks a second pass. Pure."""

from collections.abc import Callable, Sequence

from noria.errors import InvalidField, short_repr
from noria.images import scheduler_names
from noria.images.reference_size import FIELD as REFERENCES
from noria.images.reference_size import place_reference, prompt_size
from noria.images.start_image import ImageFacts, RequestImageFacts, StartImageFacts
from noria.protocol.diffusion import (
    Control,
    DiffusionModelSpec,
    DiffusionPayload,
    IpAdapter,
    Reference,
    min_strength,
    num_skipped_steps,
)
from noria.protocol.request import ControlField, IpAdapterField

SizePx = tuple[int, int]
"""Width and height."""

MAX_CONTROLS = 4  # controls of a request: each costs half a UNet
MAX_REFERENCES = 4  # reference images of a request, for any model: each costs about as much as the image
MAX_CONTROL_SCALE = 2.0  # A1111's, also of IP-Adapters


def fitting_size(sides: tuple[int, int], spec: DiffusionModelSpec) -> tuple[int, int]:
    """Return width and height in pixels of an image with these `sides` as the model can generate it.

    An image with a side above the model's bounds is made smaller, one below larger, with its proportions; then sides
    are rounded down to a multiple, as diffusers does.
    """
    scale = min(max(1.0, spec.min_side_px / min(sides)), spec.max_side_px / max(sides))
    width, height = (
        min(max(int(side * scale) // spec.multiple_px * spec.multiple_px, spec.min_side_px), spec.max_side_px)
        for side in sides
    )
    return width, height


def default_size(
    images: RequestImageFacts, references: Sequence[Reference], spec: DiffusionModelSpec
) -> tuple[int, int] | None:
    """Return the size of the first image, of a reference as the model is shown it; None: there are none."""
    if (first := images.start or next(iter(images.controls), None)) is not None:
        return fitting_size((first.width_px, first.height_px), spec)
    return fitting_size((references[0].width, references[0].height), spec) if references else None


def own_size(start: StartImageFacts | None, size_px: tuple[int, int], spec: DiffusionModelSpec) -> SizePx | None:
    """Return width and height of a start image whose latents are to get `size_px`; None: it has this size.

    Sides are rounded down to a multiple. Raises InvalidField: they are beyond the model's bounds.
    """
    if start is None or not start.resizes_latents:
        return None
    width, height = (side // spec.multiple_px * spec.multiple_px for side in (start.width_px, start.height_px))
    if not spec.min_side_px <= min(width, height) <= max(width, height) <= spec.max_side_px:
        raise InvalidField(
            f"image has {start.width_px} × {start.height_px} pixels; to resize its latents allowed are sides of "
            f"{spec.min_side_px} to {spec.max_side_px}. Let its pixels be resized instead.",
            field="image",
        )
    return None if (width, height) == size_px else (width, height)


def check_needed_images(spec: DiffusionModelSpec, start_image: StartImageFacts | None) -> None:
    """Raise InvalidField if a model for inpainting gets no start image, or no mask."""
    if not spec.needs_mask or (start_image is not None and start_image.mask_digest is not None):
        return
    missing = "image" if start_image is None else "mask"
    raise InvalidField(
        f"{missing} is missing: {spec.name} is a model for inpainting, which repaints the part of an image that a mask "
        "covers. Send both: to /t2i, /v1/images/edits or /sdapi/v1/img2img.",
        field=missing,
    )


def check_num_controls(controls: Sequence[ControlField]) -> None:
    """Raise InvalidField if a request has too many controls."""
    if len(controls) > MAX_CONTROLS:
        raise InvalidField(
            f"controls has {len(controls)} entries; at most {MAX_CONTROLS} are allowed.", field="controls"
        )


def _count(entries: Sequence[object], one: str, several: str) -> str:
    return f"{len(entries)} {one if len(entries) == 1 else several}"


def check_num_references(images: Sequence[object]) -> None:
    """Raise InvalidField if a request has more reference images than any model takes."""
    if len(images) > MAX_REFERENCES:
        raise InvalidField(
            f"{REFERENCES} has {len(images)} entries; at most {MAX_REFERENCES} are allowed.", field=REFERENCES
        )


def check_references(images: Sequence[ImageFacts], spec: DiffusionModelSpec) -> tuple[Reference, ...]:
    """Return the references whose images are these."""
    if len(images) > spec.max_references:
        takes = f"at most {spec.max_references} are allowed" if spec.max_references else "it takes none"
        raise InvalidField(
            f"{REFERENCES} has {_count(images, 'entry', 'entries')}, for {spec.name}; {takes}."
            + ("" if spec.max_references else " A start image is sent as image."),
            field=REFERENCES,
        )
    placements = [
        place_reference(f"{REFERENCES}[{k}]", (image.width_px, image.height_px), spec) for k, image in enumerate(images)
    ]
    return tuple(
        Reference(*placement.shown_px, image.digest, *prompt_size((image.width_px, image.height_px), spec))
        for placement, image in zip(placements, images, strict=True)
    )


def check_controls(controls: Sequence[ControlField], images: Sequence[ImageFacts] | None) -> Sequence[Control]:
    """Return the controls whose `images` are these; None: not known yet."""
    check_num_controls(controls)
    if images is not None and len(controls) != len(images):
        raise InvalidField(
            f"controls has {_count(controls, 'entry', 'entries')} and {_count(images, 'image', 'images')}; send a file "
            "`control` for each entry.",
            field="controls",
        )
    for k, control in enumerate(controls):
        for field, least, most in (("scale", 0.0, MAX_CONTROL_SCALE), ("start", 0.0, 1.0), ("end", 0.0, 1.0)):
            if not least <= (got := getattr(control, field)) <= most:  # also true for NaN
                raise InvalidField(
                    f"controls[{k}].{field} is {short_repr(got)}; allowed are {least} to {most}.",
                    field="controls",
                )
        if control.start >= control.end:
            raise InvalidField(
                f"controls[{k}].start is {control.start}, which is not before its end, {control.end}.",
                field="controls",
            )
    digests = [""] * len(controls) if images is None else [image.digest for image in images]
    return [
        Control(control.name, control.scale, control.start, control.end, image_digest=digest)
        for control, digest in zip(controls, digests, strict=True)
    ]


def check_ip_adapter(got: IpAdapterField | None, images: RequestImageFacts | None) -> IpAdapter | None:
    """Return the IP-Adapter whose image is that of `images`, without its own digest; None: they are not known yet."""
    image = None if images is None else images.ip_adapter
    if got is None:
        if image is None:
            return None
        raise InvalidField("ip_adapter_image is there without ip_adapter, which names one.", field="ip_adapter")
    if not 0 <= got.scale <= MAX_CONTROL_SCALE:  # also true for NaN
        raise InvalidField(
            f"ip_adapter.scale is {short_repr(got.scale)}; allowed are 0.0 to {MAX_CONTROL_SCALE}.", field="ip_adapter"
        )
    if images is not None and image is None:
        raise InvalidField(
            "ip_adapter has no image; send it, in a form as the file `ip_adapter_image`.", field="ip_adapter"
        )
    return IpAdapter(got.name, got.scale, image_digest=image and image.digest)


def check_strength(
    got: float | None,
    images: RequestImageFacts | None,
    spec: DiffusionModelSpec,
    scheduler: str,
    num_steps: int,
    checked: Callable[[str, float | None], float],
) -> float | None:
    """Return how much of the start image is replaced, or None without one; `checked` bounds a number.

    Raises InvalidField: there is no start image, the model takes none, or no step would be left.
    """
    if images is None:
        return None if got is None else checked("strength", got)
    if images.start is None:
        raise InvalidField(
            f"strength is {short_repr(got)}, but there is no image; it is how much of a start image is replaced.",
            field="strength",
        )
    if not spec.takes_start_images:
        raise InvalidField(
            f"{spec.name} cannot begin with an image or repaint one: diffusers has no pipeline for that in its family, "
            f"{spec.family}. Leave the image out.",
            field="image",
        )
    scheduler_names.check_start_image(scheduler, spec.schedulers)
    strength = float(checked("strength", spec.default_strength if got is None else got))
    if num_skipped_steps(scheduler, num_steps, strength) == num_steps:
        raise InvalidField(
            f"strength is {strength}, which leaves none of {num_steps} inference_steps; allowed are "
            f"{min_strength(num_steps)} to 1.0.",
            field="strength",
        )
    return strength


def check_second_pass(payload: DiffusionPayload, spec: DiffusionModelSpec, *, has_images: bool) -> None:
    """Check a payload with a second pass, whose numbers the protocol has checked.

    Raises:
        InvalidField: the model, the scheduler or other settings allow none.

    """
    assert payload.second_pass is not None
    excluded: Sequence[tuple[bool, str]] = (
        (not spec.takes_start_images, f"{spec.name} cannot begin with an image, and so makes none"),
        (has_images, "with start images or reference images there is none"),
        (payload.refiner is not None, "with a refiner there is none"),
    )
    for is_excluded, reason in excluded:
        if is_excluded:
            raise InvalidField(f"second_pass: {reason}. Leave it out.", field="second_pass")
    scheduler_names.check_start_image(payload.scheduler, spec.schedulers)
    if payload.first_step_of_second_pass == payload.second_pass.inference_steps:
        raise InvalidField(
            f"second_pass: its strength {payload.second_pass.strength} leaves none of its "
            f"{payload.second_pass.inference_steps} steps. Use more of either.",
            field="second_pass",
        )
