"""Converts the bodies of A1111's clients to `ImageRequestBody`, or rejects them with A1111's field names.

Like A1111, this ignores unknown fields. Features that would change the image and that Noria does not have (hires fix,
styles, scripts, …) are rejected unless they are off, because a client would not notice that the image is another one.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from noria.errors import InvalidField, RequestError, short_repr
from noria.frontend.routes.a1111.controlnet import FIELD, SCRIPT
from noria.frontend.services.images.request_images import check_num_references
from noria.frontend.services.images.start_images import LoadFiles, control_images, decode_files
from noria.images.a1111_metadata import split_loras
from noria.images.a1111_names import AUTOMATIC, scheduler_for
from noria.protocol.diffusion import DiffusionModelSpec, Refinement
from noria.protocol.request import ControlField, ImageRequestBody, Priority

# For GET /progress. A1111 makes a preview every 10 steps, and its users ask for 20 to 50 steps.
_NUM_PREVIEWS = 4
# A1111's default where a schedule type comes without a sampler.
_DEFAULT_SAMPLER = "Euler"


class Txt2Img(Struct, frozen=True):
    """The supported fields of `POST /sdapi/v1/txt2img`; `None` means the model's default, not A1111's."""

    prompt: str | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    steps: int | None = None
    cfg_scale: float | None = None
    width: int | None = None
    height: int | None = None
    batch_size: int | None = None
    n_iter: int | None = None
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    override_settings: dict[str, Any] | None = None
    send_images: bool | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None
    metadata: bool | None = None
    refiner_checkpoint: str | None = None
    refiner_switch_at: float | None = None


class Img2Img(Txt2Img, frozen=True):
    """The supported fields of `POST /sdapi/v1/img2img`."""

    init_images: list[str] | None = None
    mask: str | None = None
    inpainting_mask_invert: bool | None = None
    denoising_strength: float | None = None


DESCRIPTIONS = {
    "prompt": "what the image shows, and `<lora:NAME:WEIGHT>`; A1111's weights of words have no effect",
    "negative_prompt": "what it should not show",
    "seed": "of the first image; the following images count up; -1 is a random one",
    "steps": "denoising steps",
    "cfg_scale": "how strongly the prompt guides the image (classifier-free guidance)",
    "width": "in pixels",
    "height": "in pixels",
    "batch_size": "number of images",
    "n_iter": "multiplies batch_size; all images are generated in one request",
    "sampler_name": "A1111's name, such as `DPM++ 2M` or `DPM++ 2M Karras`, or any that `/t2i` knows",
    "sampler_index": "the same, as older clients name it",
    "scheduler": "A1111's schedule type: `Automatic`, `Uniform` or `Karras`",
    "override_settings": "supported are `sd_model_checkpoint` and `samples_format`",
    "send_images": "whether the response has the images",
    "priority": "Noria's extension: `low`, `normal` or `high`, as in `/t2i`",
    "deadline_ms": "Noria's extension, as in `/t2i`",
    "init_images": "one image: a PNG, WebP or JPEG file in base64, or as a data: URL; of a model that takes reference "
    "images these, with denoising_strength 1 and without a mask",
    "mask": "likewise, of the image's size; white is repainted or, if it is not opaque, what is opaque",
    "inpainting_mask_invert": "whether the mask is inverted",
    "denoising_strength": "how much of the image is replaced; 0.75 by default",
    "refiner_checkpoint": "the name of the model's refiner, which makes the last steps",
    "refiner_switch_at": "after which part of the noise's times it makes the steps (0.8); 1 is never",
    "metadata": "Noria's extension: whether files contain their settings, as `enable_pnginfo` of `override_settings`",
}

# Features that would change the image and are not supported: a description, and the values besides null, false, 0 and
# "" that mean "off".
_UNSUPPORTED_FIELDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "enable_hr": ("the hires fix", ()),
    "restore_faces": ("face restoration", ()),
    "tiling": ("tiling", ()),
    "styles": ("styles", ([""],)),
    "subseed_strength": ("variation seeds", ()),
    "seed_resize_from_w": ("a seed of another size", (-1,)),
    "seed_resize_from_h": ("a seed of another size", (-1,)),
    "script_name": ("scripts", ("None",)),
    "alwayson_scripts": ("a script besides controlnet", ()),
    "s_churn": ("churn", ()),
    "s_noise": ("another amount of noise", (1,)),
    "s_min_uncond": ("skipping the negative prompt", ()),
    "eta": ("another eta than the sampler's own", (1,)),  # webuiapi sends 1 with every sampler
    "infotext": ("settings as a text", ()),
}
_UNSUPPORTED_WITH_IMAGE: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "resize_mode": ("cropping or filling instead of resizing", (0,)),
    "initial_noise_multiplier": ("another amount of noise", (1,)),
    "latent_mask": ("a mask of latents", ("",)),
}
# Without a mask they have no effect, and clients send A1111's defaults.
_UNSUPPORTED_WITH_MASK: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "inpaint_full_res": ("repainting only the masked part in full resolution", (False,)),
    "mask_blur": ("a soft mask", (0,)),
    "mask_blur_x": ("a soft mask", (0,)),
    "mask_blur_y": ("a soft mask", (0,)),
    "inpainting_fill": ("filling the masked part before", (1,)),  # 1 is "original"
}
_DEFAULT_DENOISING_STRENGTH = 0.75  # A1111's
_UNSUPPORTED_SETTINGS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "CLIP_stop_at_last_layers": ("Clip skip", (1,)),
    "sd_vae": ("another VAE", ("Automatic", "None")),
    "sd_hypernetwork": ("hypernetworks", ("None",)),
    "forge_additional_modules": ("other modules", ()),
    "eta_noise_seed_delta": ("an offset of the noise's seed", ()),
    "token_merging_ratio": ("token merging", ()),
}
FILE_FORMATS = {"png": "png", "webp": "webp", "jpg": "jpeg", "jpeg": "jpeg"}
_A1111_FIELD_NAMES = {
    "inference_steps": "steps",
    "guidance_scale": "cfg_scale",
    "n": "batch_size × n_iter",
    "scheduler": "sampler_name",
    "model": "sd_model_checkpoint",
    "loras": "prompt",
    "controls": FIELD,
    "refiner": "refiner_checkpoint",
    "image": "init_images",
    "reference_images": "init_images",
    "strength": "denoising_strength",
}


def check_body(sent: Mapping[str, Any]) -> None:
    """Raise InvalidField if the body `sent` uses an unsupported feature."""
    scripts = sent.get("alwayson_scripts") or {}
    if not isinstance(scripts, dict):
        raise InvalidField(
            f'alwayson_scripts is {short_repr(scripts)}; an object is expected: {{"{SCRIPT}": {{"args": […]}}}}.',
            field="alwayson_scripts",
        )
    others = {name: each for name, each in scripts.items() if name.lower() != SCRIPT}
    are_off = not any(isinstance(each, dict) and each.get("args") for each in others.values())  # without arguments
    sent = {**sent, "alwayson_scripts": None if are_off else others}
    _reject_unsupported(sent, _UNSUPPORTED_FIELDS)


def check_image_body(sent: Mapping[str, Any]) -> None:
    """As `check_body`, for a body with an image, whose values are on unless they are named as off."""
    check_body(sent)
    unsupported = {**_UNSUPPORTED_WITH_IMAGE, **(_UNSUPPORTED_WITH_MASK if sent.get("mask") else {})}
    for name, (feature, off_values) in unsupported.items():
        value = sent.get(name)
        if value is not None and value not in off_values:
            raise _unsupported(name, value, feature, off_values)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise InvalidField if `settings`, the server's or a request's, use an unsupported feature."""
    _reject_unsupported(settings, _UNSUPPORTED_SETTINGS)
    file_format = settings.get("samples_format")
    if file_format and not (isinstance(file_format, str) and file_format in FILE_FORMATS):
        raise InvalidField(
            f"samples_format is {short_repr(file_format)}; allowed are {', '.join(FILE_FORMATS)}.",
            field="samples_format",
        )


def _reject_unsupported(sent: Mapping[str, Any], unsupported: Mapping[str, tuple[str, tuple[object, ...]]]) -> None:
    for name, (feature, off_values) in unsupported.items():
        value = sent.get(name)
        if value and value not in off_values:
            raise _unsupported(name, value, feature, (*off_values, None))


def _unsupported(name: str, value: object, feature: str, off_values: tuple[object, ...]) -> InvalidField:
    off = " or ".join(short_repr(each) for each in off_values)
    return InvalidField(
        f"{name} is {short_repr(value)}; {feature} is not supported: leave it out, or send {off}.", field=name
    )


def has_references(body: Img2Img, spec: DiffusionModelSpec | None) -> bool:
    """Return whether the images of `body` are shown to the model, since nothing of them is kept.

    Several are, too, where there is no such model, which is then the error of the request.
    """
    if spec is None:
        return len(body.init_images or ()) > 1
    return spec.max_references > 0 and bool(body.init_images) and not body.mask and body.denoising_strength == 1


def files_of_image_body(body: Img2Img, controls: Sequence[ControlField], *, are_references: bool) -> LoadFiles:
    """Return what decodes the images of `body` and of its controls. Raises InvalidField if not one starts."""
    images = body.init_images or []
    if are_references:
        check_num_references(images)
        return functools.partial(
            decode_files, None, None, control_images=control_images(controls), reference_images=images
        )
    if len(images) != 1:
        others = "; several are reference images, with denoising_strength 1 and no mask" if images else ""
        raise InvalidField(f"init_images has {len(images)} images; allowed is one{others}.", field="init_images")
    return functools.partial(
        decode_files,
        images[0],
        body.mask or None,
        "alpha or white",
        inverts_mask=bool(body.inpainting_mask_invert),
        control_images=control_images(controls),
    )


def as_image_body(
    body: Txt2Img,
    settings: Mapping[str, Any],
    model: str | None,
    controls: tuple[ControlField, ...],
    *,
    has_start_image: bool,
) -> ImageRequestBody:
    """Convert `body` with its `settings`, which passed `check_settings`. Raises InvalidField."""
    for name in ("batch_size", "n_iter"):
        got = getattr(body, name)
        if got is not None and got < 1:
            raise InvalidField(f"{name} is {got}; allowed is 1 or more.", field=name)
    prompt, loras = split_loras(body.prompt or "")
    return ImageRequestBody(
        prompt=prompt,
        negative_prompt=body.negative_prompt or None,  # A1111 guides SDXL by zeros then, too
        model=model,
        seed=None if body.seed == -1 else body.seed,
        width=body.width,
        height=body.height,
        inference_steps=body.steps,
        guidance_scale=body.cfg_scale,
        n=(body.batch_size or 1) * (body.n_iter or 1),
        scheduler=_scheduler(body),
        format=FILE_FORMATS[settings.get("samples_format") or "png"],  # type: ignore[arg-type]
        stream=True,  # for GET /progress
        partial_images=_NUM_PREVIEWS,
        priority=body.priority,
        deadline_ms=body.deadline_ms,
        metadata=settings.get("enable_pnginfo") is not False if body.metadata is None else body.metadata,
        loras=loras,
        strength=_strength(body) if has_start_image else None,
        controls=controls,
        refiner=_refiner(body),
    )


def _refiner(body: Txt2Img) -> Refinement | None:
    """Return what a body says of a refiner, whose title may have a hash, as A1111 lists it."""
    checkpoint, start = body.refiner_checkpoint or "", body.refiner_switch_at
    if checkpoint.lower() in ("", "none") or (start is not None and start >= 1):
        return None
    name = re.sub(r" \[\w+\]\Z", "", checkpoint).removesuffix(".safetensors")
    return Refinement(name=name) if start is None else Refinement(start, name)


def _strength(body: Txt2Img) -> float | None:
    if not isinstance(body, Img2Img):
        return None
    return _DEFAULT_DENOISING_STRENGTH if body.denoising_strength is None else body.denoising_strength


def _scheduler(body: Txt2Img) -> str | None:
    sampler, schedule_type = body.sampler_name or body.sampler_index, body.scheduler or AUTOMATIC
    if not sampler and schedule_type.lower() == AUTOMATIC.lower():
        return None
    return scheduler_for(sampler or _DEFAULT_SAMPLER, schedule_type)


def error_in_a1111_terms(error: RequestError) -> RequestError:
    """Return `error`, which names a field of `ImageRequestBody`, with the name of A1111's field."""
    noria_field, a1111_field = error.field or "", _A1111_FIELD_NAMES.get(error.field or "")
    if a1111_field is None:
        return error
    message = (
        a1111_field + error.message.removeprefix(noria_field)
        if error.message.startswith(noria_field)
        else error.message
    )
    return type(error)(message, field=a1111_field)


def title(spec: DiffusionModelSpec) -> str:
    """Return a model's title as A1111 lists it: the name and, in brackets, the hash."""
    return f"{spec.name} [{spec.fingerprint}]"


def find_model_name(checkpoint: str, models: Mapping[str, DiffusionModelSpec]) -> str:
    """Return the name of the model whose title, name, file name or hash is `checkpoint`, or else `checkpoint`."""
    for spec in models.values():
        files = {f"{spec.name}{extension}" for extension in (".safetensors", ".ckpt")}
        if checkpoint in {title(spec), spec.name, spec.fingerprint} | files:
            return spec.name
    return checkpoint
