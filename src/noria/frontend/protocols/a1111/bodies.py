"""Converts the bodies of A1111's clients to `ImageRequestBody`, or rejects them with A1111's field names.

Features that would change the image and that Noria does not have (styles, scripts, …) are rejected unless
they are off (`off_values.py`). Like A1111, this ignores unknown fields, and says which (`ignored.py`).
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from noria.errors import InvalidField, RequestError, short_repr
from noria.errors.problems import Problems, each_part
from noria.frontend.protocols.a1111.controlnet import FIELD, SCRIPT
from noria.frontend.protocols.a1111.ignored import ignored_fields, ignored_weights
from noria.frontend.protocols.a1111.off_values import Feature, features_on, is_empty, is_off, is_script_off
from noria.images.a1111_metadata import loras_of, split_networks
from noria.images.a1111_names import AUTOMATIC, select_scheduler
from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload, Refinement, SecondPass
from noria.protocol.request import ControlField, ImageFormat, Priority, TwoPassRequestBody

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
    disable_extra_networks: bool | None = None
    scheduler: str | None = None
    override_settings: dict[str, Any] | None = None
    send_images: bool | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None
    calls: float | None = None
    metadata: bool | None = None
    refiner_checkpoint: str | None = None
    refiner_switch_at: float | None = None
    enable_hr: bool | None = None
    hr_scale: float | None = None
    hr_resize_x: int | None = None
    hr_resize_y: int | None = None
    hr_second_pass_steps: int | None = None
    hr_upscaler: str | None = None
    denoising_strength: float | None = None


class Img2Img(Txt2Img, frozen=True):
    """The supported fields of `POST /sdapi/v1/img2img`."""

    init_images: list[str] | None = None
    resize_mode: int | str | None = None
    mask: str | None = None
    mask_blur: float | None = None
    mask_blur_x: float | None = None
    mask_blur_y: float | None = None
    inpainting_fill: int | None = None
    inpaint_full_res: bool | None = None
    inpaint_full_res_padding: int | None = None
    inpainting_mask_invert: bool | None = None


DESCRIPTIONS = {
    "prompt": "what the image shows, in A1111's syntax, and `<lora:NAME:WEIGHT>`; weights of words have an effect "
    "in Stable Diffusion 1, 2 and XL",
    "negative_prompt": "what it should not show",
    "seed": "of the first image; the following images count up; -1 is a random one",
    "steps": "denoising steps",
    "cfg_scale": "how strongly the prompt guides the image (classifier-free guidance)",
    "width": "in pixels",
    "height": "in pixels",
    "batch_size": "number of images",
    "n_iter": "multiplies batch_size; all images are generated in one request",
    "sampler_name": "A1111's name, such as `DPM++ 2M` or `DPM++ 2M Karras`, or any that `/t2i` knows",
    "sampler_index": "the same, as older clients name it; ignored beside sampler_name",
    "disable_extra_networks": "whether the LoRAs of the prompt are left out",
    "scheduler": "A1111's schedule type: `Automatic`, `Uniform` or `Karras`",
    "override_settings": "supported are `sd_model_checkpoint`, `samples_format` and `CLIP_stop_at_last_layers` "
    "(1 to 12: which layer of the text encoder is read, from the end; of SDXL always the last but one)",
    "send_images": "whether the response has the images",
    "priority": "Noria's extension: `low`, `normal` or `high`, as in `/t2i`",
    "deadline_ms": "Noria's extension, as in `/t2i`",
    "calls": "Noria's extension, as in `/t2i`: the share of the model's calls that are made",
    "init_images": "one image: a PNG, WebP or JPEG file in base64, or as a data: URL; of a model that takes reference "
    "images these, with denoising_strength 1 and without a mask",
    "mask": "likewise, of the image's size; white is repainted or, if it is not opaque, what is opaque",
    "inpainting_mask_invert": "whether the mask is inverted",
    "resize_mode": "how the image and its mask get other proportions: 0 stretched, 1 cut, 2 with the colours of their "
    "edges beside them, 3 by its latents, stretched, without a mask",
    "mask_blur": "standard deviation in pixels by which the mask's edge is blurred, across and down; 4 by default",
    "mask_blur_x": "that across, without mask_blur",
    "mask_blur_y": "that down, without mask_blur",
    "inpainting_fill": "what the repainted part is before: 0 the colours around it (the default), 1 the image, "
    "2 latents of noise, 3 latents of zeros",
    "inpaint_full_res": "whether the part around the mask alone is repainted, in the request's size; true by default",
    "inpaint_full_res_padding": "pixels of the image that this part has around the mask; 0 by default",
    "denoising_strength": "how much of the image is replaced; 0.75 by default, 0.7 in a second pass",
    "refiner_checkpoint": "the name of the model's refiner, which makes the last steps",
    "refiner_switch_at": "after which part of the noise's times it makes the steps (0.8); 1 is never",
    "enable_hr": "whether there is a second pass, which begins with the enlarged image of the first one",
    "hr_scale": "how many times as wide and high the second pass is, with neither hr_resize_x nor hr_resize_y: 1 to 4, "
    "2 by default",
    "hr_resize_x": "its width in pixels; 0: by the proportions",
    "hr_resize_y": "its height in pixels; 0: by the proportions",
    "hr_second_pass_steps": "the steps that it makes; 0: steps",
    "hr_upscaler": "how it is enlarged: latents by a name of `latent-upscale-modes`, pixels by one of `upscalers`",
    "metadata": "Noria's extension: whether files contain their settings, as `enable_pnginfo` of `override_settings`",
}

# Features that would change the image and are not supported.
_UNSUPPORTED_FIELDS: Mapping[str, Feature] = {
    "restore_faces": ("face restoration", ()),
    "tiling": ("tiling", ()),
    "styles": ("styles", ()),
    "subseed_strength": ("variation seeds", ()),
    "seed_resize_from_w": ("a seed of another size", ()),
    "seed_resize_from_h": ("a seed of another size", ()),
    "script_name": ("scripts", ()),
    "alwayson_scripts": ("a script besides controlnet", ()),
    "s_churn": ("churn", ()),
    "s_noise": ("another amount of noise", (1,)),
    "s_min_uncond": ("skipping the negative prompt", ()),
    "eta": ("another eta than the sampler's own", (1,)),  # webuiapi sends 1 with every sampler
    "infotext": ("settings as a text", ()),
}
_UNSUPPORTED_WITH_IMAGE: Mapping[str, Feature] = {
    "enable_hr": ("the hires fix of an image", ()),
    "initial_noise_multiplier": ("another amount of noise", (1,)),
    "latent_mask": ("a mask of latents", ()),
}
_DEFAULT_DENOISING_STRENGTH = 0.75  # A1111's
_UNSUPPORTED_SETTINGS: Mapping[str, Feature] = {
    "sd_vae": ("another VAE", ("Automatic",)),
    "sd_hypernetwork": ("hypernetworks", ()),
    "forge_additional_modules": ("other modules", ()),
    "eta_noise_seed_delta": ("an offset of the noise's seed", ()),
    "token_merging_ratio": ("token merging", ()),
}
CLIP_SKIP = "CLIP_stop_at_last_layers"
_MAX_CLIP_SKIP = 12  # layers of the text encoder of Stable Diffusion 1
FILE_FORMATS: Mapping[str, ImageFormat] = {"png": "png", "webp": "webp", "jpg": "jpeg", "jpeg": "jpeg"}
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
    "clip_skip": CLIP_SKIP,
    "second_pass": "enable_hr",
}


# Fields in which 0, false and -1 say nothing, too.
_TEXTS_AND_OBJECTS = frozenset({
    "enable_hr", "hr_upscaler", "init_images", "mask", "override_settings", "refiner_checkpoint", "sampler_index",
    "sampler_name", "scheduler",
})  # fmt: skip
_PROMPTS = frozenset({"prompt", "negative_prompt"})


def drop_off_values(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields of a body that say something, unlike "None" for a number or 0 for a text."""
    kept = {}
    for name, value in sent.items():
        if name not in Img2Img.__struct_fields__:
            continue
        has_entries = isinstance(value, list | dict) and len(value) > 0
        says_nothing = is_off(value) if name in _TEXTS_AND_OBJECTS else is_empty(value)
        if name in _PROMPTS or has_entries or not says_nothing:
            kept[name] = value
    if "sampler_name" in kept:
        kept.pop("sampler_index", None)  # which may be a number, as in old versions of A1111
    return kept


def check_body(sent: Mapping[str, Any], problems: Problems, *, has_image: bool = False) -> None:
    """Add the unsupported features that the body `sent` turns on to `problems`."""
    scripts = sent.get("alwayson_scripts")
    if is_off(scripts):
        scripts = {}
    if not isinstance(scripts, dict):
        message = f'alwayson_scripts is {short_repr(scripts)}; an object is expected: {{"{SCRIPT}": {{"args": […]}}}}.'
        problems.add(InvalidField(message, field="alwayson_scripts"), are_of_form=True)
        scripts = {}
    others = {name: each for name, each in scripts.items() if name.lower() != SCRIPT and not is_script_off(each)}
    for features in [_UNSUPPORTED_FIELDS, *[_UNSUPPORTED_WITH_IMAGE] * has_image]:
        problems.add(*features_on({**sent, "alwayson_scripts": others}, features), are_of_form=True)


def check_settings(settings: Mapping[str, Any], problems: Problems) -> None:
    """Add the unsupported features that `settings`, the server's or a request's, turn on to `problems`."""
    problems.add(*features_on(settings, _UNSUPPORTED_SETTINGS), are_of_form=True)
    try:
        clip_skip_of(settings)
    except InvalidField as error:
        problems.add(error, are_of_form=True)
    if is_off(file_format := settings.get("samples_format")):
        return
    if not (isinstance(file_format, str) and file_format in FILE_FORMATS):
        message = f"samples_format is {short_repr(file_format)}; allowed are {', '.join(FILE_FORMATS)}."
        problems.add(InvalidField(message, field="samples_format"), are_of_form=True)


def clip_skip_of(settings: Mapping[str, Any]) -> int | None:
    """Return which layer from the end is to be read; None: `settings` do not say it.

    Raises:
        InvalidField: it is no such number.

    """
    got = settings.get(CLIP_SKIP)
    if is_off(got):
        return None
    for number in range(1, _MAX_CLIP_SKIP + 1):
        if is_off(got, number):  # in any form
            return number
    raise InvalidField(
        f"{CLIP_SKIP} is {short_repr(got)}; allowed are 1 (the last layer) to {_MAX_CLIP_SKIP}.", field=CLIP_SKIP
    )


def has_clip_skip(spec: DiffusionModelSpec) -> bool:
    """Whether A1111 has a choice of layers for a model: Stable Diffusion 1 alone; 2 has 23 layers."""
    return spec.family_clip_skip == 1 and spec.max_clip_skip <= _MAX_CLIP_SKIP


def own_settings(body: Txt2Img) -> dict[str, Any]:
    """Return the settings of a request that are in place of the client's: those that are not off, or may be false."""
    own = (body.override_settings or {}).items()
    return {name: value for name, value in own if name == "enable_pnginfo" or not is_off(value)}


def ignored_in(body: Txt2Img, sent: Mapping[str, Any]) -> list[str]:
    """Return what of a body has no effect on any model: fields, and networks other than LoRAs."""
    _, networks = split_networks(body.prompt or "")
    known = {*type(body).__struct_fields__, *_UNSUPPORTED_FIELDS, *_UNSUPPORTED_WITH_IMAGE}
    settings = frozenset({"sd_model_checkpoint", "samples_format", "enable_pnginfo", CLIP_SKIP, *_UNSUPPORTED_SETTINGS})
    return [
        *ignored_fields(sent, frozenset(known | set(Img2Img.__struct_fields__))),
        *ignored_fields(body.override_settings or {}, settings, "override_settings."),
        *dict.fromkeys(network.tag for network in networks if network.lora is None),
    ]


def ignored_by_model(payload: DiffusionPayload, settings: Mapping[str, Any], spec: DiffusionModelSpec) -> list[str]:
    """Return what of a request has no effect on its model: weights of words, and a choice of layers."""
    ignored: list[str] = []
    if payload.prompt_syntax != "a1111":
        ignored += ignored_weights("prompt", payload.prompt)
        ignored += ignored_weights("negative_prompt", payload.negative_prompt or "")
    if not has_clip_skip(spec) and clip_skip_of(settings) not in (None, 1, spec.family_clip_skip):
        ignored.append(f"override_settings.{CLIP_SKIP}")
    return ignored


def as_image_body(
    body: Txt2Img,
    settings: Mapping[str, Any],
    spec: DiffusionModelSpec | None,
    model: str | None,
    controls: tuple[ControlField, ...],
    problems: Problems,
    second_pass: SecondPass | None,
    *,
    has_start_image: bool,
) -> TwoPassRequestBody:
    """Convert `body` with its `settings`, for a model; `spec` is None if it is not served. Adds to `problems`."""
    for name in ("batch_size", "n_iter"):
        got = getattr(body, name)
        if got is not None and got < 1:
            problems.add(InvalidField(f"{name} is {short_repr(got)}; allowed is 1 or more.", field=name))
    prompt, networks = split_networks(body.prompt or "")
    loras = () if body.disable_extra_networks else tuple(problems.attempt(lambda: loras_of(networks), []))
    pnginfo = settings.get("enable_pnginfo")
    return TwoPassRequestBody(
        prompt=prompt,
        negative_prompt=body.negative_prompt or None,  # A1111 guides SDXL by zeros then, too
        model=model,
        seed=None if body.seed == -1 else body.seed,
        width=body.width,
        height=body.height,
        inference_steps=body.steps,
        guidance_scale=body.cfg_scale,
        calls=body.calls,
        prompt_syntax="a1111" if spec is not None and "a1111" in spec.prompt_syntaxes else None,
        clip_skip=problems.attempt(lambda: clip_skip_of(settings), None)
        if spec is not None and has_clip_skip(spec)
        else None,
        n=max(body.batch_size or 1, 1) * max(body.n_iter or 1, 1),
        scheduler=None if spec is None else problems.attempt(lambda: _scheduler(body, spec), None),
        format=file_format_of(settings),
        stream=True,  # for GET /progress
        partial_images=_NUM_PREVIEWS,
        priority=body.priority,
        deadline_ms=body.deadline_ms,
        metadata=(is_empty(pnginfo) or not is_off(pnginfo)) if body.metadata is None else body.metadata,
        loras=loras,
        strength=_strength(body) if has_start_image else None,
        controls=controls,
        refiner=_refiner(body),
        second_pass=second_pass,
    )


def file_format_of(settings: Mapping[str, Any]) -> ImageFormat:
    """Return the file format that `settings` say, PNG by default."""
    return FILE_FORMATS.get(str(settings.get("samples_format")), "png")


def _refiner(body: Txt2Img) -> Refinement | None:
    """Return what a body says of a refiner, whose title may have a hash, as A1111 lists it."""
    checkpoint, start = body.refiner_checkpoint or "", body.refiner_switch_at
    if is_off(checkpoint) or (start is not None and start >= 1):
        return None
    name = re.sub(r" \[\w+\]\Z", "", checkpoint).removesuffix(".safetensors")
    return Refinement(name=name) if start is None else Refinement(start, name)


def _strength(body: Txt2Img) -> float | None:
    if not isinstance(body, Img2Img):
        return None
    return _DEFAULT_DENOISING_STRENGTH if body.denoising_strength is None else body.denoising_strength


def _scheduler(body: Txt2Img, spec: DiffusionModelSpec) -> str | None:
    sampler, schedule_type = body.sampler_name or body.sampler_index, body.scheduler or AUTOMATIC
    if not sampler and schedule_type.lower() == AUTOMATIC.lower():
        return None
    return select_scheduler(sampler or _DEFAULT_SAMPLER, schedule_type, spec.schedulers, spec.name)


def error_in_a1111_terms(error: RequestError) -> RequestError:
    """Return `error`, which names fields of `ImageRequestBody`, with the names of A1111's fields."""
    return each_part(error, _in_a1111_terms)


def _in_a1111_terms(error: RequestError) -> RequestError:
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
