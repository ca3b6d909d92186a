"""Admission: turns the body of a request into an `EngineRequest`, with defaults filled in and all limits checked.

The model's limits, the operator's limits and the source of seeds are arguments. A request that is rejected here
reaches no engine. /openapi.json publishes the same `limits`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from noria.config import FrontendConfig
from noria.errors import InvalidField, did_you_mean, short_repr
from noria.errors.problems import Problems
from noria.frontend.services.images.request_images import (
    check_controls,
    check_ip_adapter,
    check_needed_images,
    check_references,
    check_second_pass,
    check_strength,
    default_size,
    own_size,
)
from noria.images import scheduler_names
from noria.images.a1111_metadata import split_networks
from noria.images.start_image import RequestImageFacts, StartImageFacts
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.models.adapters.lora_folders import LoraFolders
from noria.models.adapters.refiner_folders import RefinerFolders
from noria.models.diffusion.prompts.a1111_schedule import PromptSteps, read_schedules
from noria.models.diffusion.prompts.a1111_syntax import parse
from noria.protocol.diffusion import (
    MIN_CALLS,
    MIN_CALLS_MADE,
    MIN_STEPS_TO_SKIP,
    Control,
    DiffusionModelSpec,
    DiffusionPayload,
    Lora,
    PromptSyntax,
    Reference,
    Refinement,
)
from noria.protocol.request import EngineRequest, ImageRequest, ImageRequestBody, TwoPassRequestBody

# torch's generators take a signed 64-bit seed; image k takes seed + k. Equal to MAX_SEED of sampling/noise.py, which a
# front end cannot import because it imports torch; a test compares them.
_MAX_SEED = 2**63 - 1
_MAX_PREVIEWS = 10  # per image: more look alike, and each costs an encoded file
# Published pipelines stay below 30; beyond that images saturate and half precision overflows.
_MAX_GUIDANCE = 50.0
MAX_LORAS = 8  # adapters of a request: each adds its rank to the work of a step
MAX_LORA_WEIGHT = 10.0  # published ones are used from -2 to 2; beyond that images saturate

NO_IMAGES, NO_FOLDERS = RequestImageFacts(), AdapterFolders()


class Limits(NamedTuple):
    """The allowed values of a number: min ≤ value ≤ max, and a multiple of `multiple` if that is above 1.

    `default` is the value if none is given; None if there is no fixed default.
    """

    min: float
    max: float
    default: float | None
    multiple: int = 1


@functools.lru_cache
def limits(spec: DiffusionModelSpec, config: FrontendConfig) -> Mapping[str, Limits]:
    """Return the limits of each numeric field of `ImageRequestBody`, by its name."""
    return {
        "n": Limits(1, config.max_images, 1),
        "seed": Limits(0, _MAX_SEED - config.max_images, None),
        "width": Limits(spec.min_side_px, spec.max_side_px, spec.default_width_px, spec.multiple_px),
        "height": Limits(spec.min_side_px, spec.max_side_px, spec.default_height_px, spec.multiple_px),
        "inference_steps": Limits(1, config.max_steps, min(spec.default_steps, config.max_steps)),
        "guidance_scale": Limits(0.0, _MAX_GUIDANCE, spec.default_guidance),
        "calls": Limits(MIN_CALLS, 1.0, spec.default_calls),
        "deadline_ms": Limits(1, int(config.request_timeout_s * 1000), None),
        "partial_images": Limits(0, _MAX_PREVIEWS, 0),
        **({"clip_skip": Limits(1, spec.max_clip_skip, spec.default_clip_skip)} if spec.max_clip_skip else {}),
        "strength": Limits(1 / config.max_steps, 1.0, None),  # with less no step would be left
    }


def validate(
    body: ImageRequestBody,
    spec: DiffusionModelSpec,
    config: FrontendConfig,
    request_id: str,
    draw_seed: Callable[[], int],
    client: str = "",
    folders: AdapterFolders = NO_FOLDERS,
    images: RequestImageFacts | None = NO_IMAGES,
    problems: Problems | None = None,
) -> ImageRequest:
    """Return `body` as a complete, valid request of `client` (the name of an API key, or "") for an engine.

    `folders` are read if the body names LoRAs, ControlNets, an IP-Adapter or the refiner. `images` are those of `body`,
    whose own fields of them are not read; the size of the first is the default one. None: they are not known yet, and
    what depends on them is not checked. `problems` are those that were found before.

    Raises:
        InvalidField: names all fields whose values are not allowed; it has the name of the first.

    """
    allowed, problems = limits(spec, config), problems or Problems()
    attempt = problems.attempt

    def checked(field: str, got: float | None) -> float:
        limit = allowed[field]
        if got is None and limit.default is not None:
            return limit.default
        # After an error: a value that causes no further one.
        return attempt(lambda: check_range(field, got, limit), limit.max)

    syntax = attempt(lambda: _check_syntax(body.prompt_syntax, spec), None)

    facts = images or NO_IMAGES
    start_image = facts.start
    references: tuple[Reference, ...] = ()
    controls: Sequence[Control] = ()
    if spec.needs_mask and images is not None:
        attempt(lambda: check_needed_images(spec, start_image), None)
    if facts.references:
        references = attempt(lambda: check_references(facts.references, spec), ())
    if body.controls or facts.controls:
        controls = attempt(lambda: check_controls(body.controls, images and images.controls), ())
    ip_adapter = attempt(lambda: check_ip_adapter(body.ip_adapter, images), None)
    default_size_px = default_size(facts, references, spec)
    width_px, height_px = (None, None) if default_size_px is None else default_size_px
    num_steps = int(checked("inference_steps", body.inference_steps))
    scheduler = attempt(lambda: _resolve_scheduler(body.scheduler, spec), spec.default_scheduler)
    second_pass = body.second_pass if isinstance(body, TwoPassRequestBody) else None
    steps = PromptSteps(num_steps, 0 if second_pass is None else second_pass.num_made(scheduler))
    texts = [
        text
        for field, prompt in (("prompt", body.prompt), ("negative_prompt", body.negative_prompt or ""))
        for text in attempt(functools.partial(_check_prompt, field, prompt, syntax, steps, config), ())
    ]
    payload = DiffusionPayload(
        prompt=body.prompt,
        negative_prompt=body.negative_prompt,
        prompt_syntax=syntax,
        embeddings=attempt(lambda: folders.embeddings.used_in(texts, spec.name), ())
        if syntax == "a1111" and folders.embeddings
        else (),
        clip_skip=attempt(lambda: _check_clip_skip(body.clip_skip, spec), None),
        n=int(checked("n", body.n)),
        seed=draw_seed() if body.seed is None else int(checked("seed", body.seed)),
        width=int(checked("width", width_px if body.width is None else body.width)),
        height=int(checked("height", height_px if body.height is None else body.height)),
        inference_steps=num_steps,
        guidance_scale=float(checked("guidance_scale", body.guidance_scale)),
        scheduler=scheduler,
        partial_images=attempt(lambda: _check_previews(body, checked), 0) if body.partial_images else 0,
        loras=attempt(lambda: _complete_loras(body.loras, spec, folders.loras), ()) if body.loras else (),
        strength=None
        if body.strength is None and start_image is None
        else attempt(lambda: check_strength(body.strength, images, spec, scheduler, num_steps, checked), None),
        has_mask=start_image is not None and start_image.mask_digest is not None,
        image_digest=None if start_image is None else start_image.digest,
        mask_digest=None if start_image is None else start_image.mask_digest,
        mask_fill=None if start_image is None else start_image.mask_fill,
        controls=attempt(lambda: folders.controlnets.complete(controls, spec), ()) if controls else (),
        reference_images=references,
        ip_adapter=ip_adapter and attempt(lambda: folders.ip_adapters.complete(ip_adapter, spec), None),
        refiner=None
        if (refiner := body.refiner) is None
        else attempt(lambda: _complete_refiner(refiner, start_image, spec, scheduler, folders.refiners), None),
        second_pass=second_pass,
    )
    deadline_s = None if body.deadline_ms is None else checked("deadline_ms", body.deadline_ms) / 1000
    start_px = attempt(lambda: own_size(start_image, (payload.width, payload.height), spec), None)
    if second_pass is not None:
        has_images = start_image is not None or bool(references)
        attempt(lambda: check_second_pass(payload, spec, has_images=has_images), None)
    calls = attempt(lambda: _check_calls(body.calls, payload, spec, checked), 1.0)
    problems.raise_all()
    return EngineRequest(
        request_id=request_id,
        model=spec.name,
        payload=msgspec.structs.replace(payload, calls=calls, start_px=start_px),
        timeout_s=config.request_timeout_s,
        model_version=spec.fingerprint,
        client=client,
        priority=body.priority or "normal",
        deadline_s=deadline_s,
        stream_progress=body.stream,
    )


def _check_prompt(
    field: str, got: str, syntax: PromptSyntax | None, steps: PromptSteps, config: FrontendConfig
) -> tuple[str, ...]:
    """Return the texts of a prompt at all steps. Raises InvalidField: it is too long, or not in its syntax."""
    if len(got) > config.max_prompt_chars:
        raise InvalidField(
            f"{field} has {len(got)} characters; at most {config.max_prompt_chars} are allowed.", field=field
        )
    if syntax == "a1111":
        networks = split_networks(got)[1] if field == "prompt" else []
        if networks:
            raise InvalidField(
                f"{field} has {short_repr(networks[0].tag)}, which is not read here: name LoRAs in loras.", field=field
            )
        schedules = read_schedules(got, steps, field, is_joined=field == "prompt")
        texts = tuple(dict.fromkeys(text for each in schedules for text in each.by_step))
        if (num_chars := sum(map(len, texts))) > 2 * config.max_prompt_chars:
            raise InvalidField(
                f"{field} makes {len(texts)} texts with {num_chars} characters together; at most "
                f"{2 * config.max_prompt_chars} are allowed. Edit less, or shorten what stays.",
                field=field,
            )
        for text in texts:
            parse(text, field)
        return texts
    return (got,)


def _check_syntax(got: PromptSyntax | None, spec: DiffusionModelSpec) -> PromptSyntax | None:
    """Return the syntax of a request's prompts; None: it is plain, which is the model's default."""
    syntax = got or spec.default_prompt_syntax
    if syntax not in spec.prompt_syntaxes:
        raise InvalidField(
            f"prompt_syntax is {short_repr(syntax)}, but {spec.name} reads prompts as they are: weights of words have "
            f"a meaning in Stable Diffusion 1, 2 and XL, not in its family, {spec.family}. Leave it out.",
            field="prompt_syntax",
        )
    return None if syntax == spec.default_prompt_syntax == "plain" else syntax


def _check_clip_skip(got: int | None, spec: DiffusionModelSpec) -> int | None:
    """Return the layer that is read; None: the family's, which is the model's default."""
    if got is not None and not spec.max_clip_skip:
        raise InvalidField(
            f"clip_skip is {short_repr(got)}, but {spec.name} has no choice of layers: only Stable Diffusion 1, 2 and "
            f"XL have one, not its family, {spec.family}. Leave it out.",
            field="clip_skip",
        )
    clip_skip = spec.default_clip_skip if got is None else got
    if clip_skip == spec.family_clip_skip == spec.default_clip_skip:
        return None
    if not 1 <= clip_skip <= spec.max_clip_skip:
        raise InvalidField(
            f"clip_skip is {short_repr(got)}; allowed are 1 (the last layer) to {spec.max_clip_skip}. {spec.name} "
            f"reads {spec.default_clip_skip} by default.",
            field="clip_skip",
        )
    return clip_skip


def _check_previews(body: ImageRequestBody, checked: Callable[[str, float | None], float]) -> int:
    if body.partial_images and not body.stream:
        raise InvalidField(
            f"partial_images is {body.partial_images}, but stream is not true; only a stream carries them.",
            field="partial_images",
        )
    return int(checked("partial_images", body.partial_images))


def _check_calls(
    got: float | None,
    payload: DiffusionPayload,
    spec: DiffusionModelSpec,
    checked: Callable[[str, float | None], float],
) -> float:
    """Return the share of the calls that are made for `payload`: the model's default, unless that cannot be."""
    calls = checked("calls", got)
    try:
        if calls < 1:
            _check_skipped_calls(calls, payload, spec)
    except InvalidField:
        if got is not None:
            raise
        return 1.0
    return float(calls)


def _check_skipped_calls(calls: float, payload: DiffusionPayload, spec: DiffusionModelSpec) -> None:
    scheduler_names.check_skipped_calls(payload.scheduler, spec.schedulers)
    reason = None
    if payload.num_steps < MIN_STEPS_TO_SKIP:
        reason = (
            f"there are {payload.num_steps} steps; of fewer than {MIN_STEPS_TO_SKIP} none can be skipped. Use more "
            "inference_steps"
        )
        if payload.strength is not None:
            reason += " or strength"
    elif (num_calls := msgspec.structs.replace(payload, calls=calls).num_calls or 0) < MIN_CALLS_MADE:
        smallest = math.floor(100 * (MIN_CALLS_MADE - 1) / payload.num_steps) / 100 + 0.01
        reason = (
            f"it leaves {num_calls} calls, and fewer than {MIN_CALLS_MADE} break images; with {payload.num_steps} "
            f"steps allowed are {smallest:.2f} to 1.0. Use more calls"
        )
    elif payload.refiner is not None:
        reason = "with a refiner no calls can be skipped. Leave the refiner out"
    elif payload.second_pass is not None:
        reason = "with a second pass no calls can be skipped. Leave the second pass out"
    elif spec.guidance_rescale and payload.guidance_scale > 1:
        reason = (
            f"{spec.name} rescales its guided outputs (guidance_rescale of its noria.json), so none can be "
            "extrapolated. Use more or fewer inference_steps instead"
        )
    if reason is not None:
        raise InvalidField(f"calls is {short_repr(calls)}, but {reason}, or leave calls out.", field="calls")


def _complete_refiner(
    got: Refinement,
    start_image: StartImageFacts | None,
    spec: DiffusionModelSpec,
    scheduler: str,
    refiners: RefinerFolders,
) -> Refinement:
    if not 0 < got.start < 1:  # also true for NaN
        raise InvalidField(
            f"refiner: its start is {short_repr(got.start)}; allowed are numbers above 0 and below 1: after which part "
            "of the noise's times it makes the steps.",
            field="refiner",
        )
    if start_image is not None and start_image.mask_digest is not None:
        raise InvalidField("refiner: images with a mask cannot be refined; leave one of them out.", field="refiner")
    scheduler_names.check_refiner(scheduler, spec.schedulers)
    return refiners.complete(got, spec)


def _complete_loras(loras: Sequence[Lora], spec: DiffusionModelSpec, folders: LoraFolders) -> tuple[Lora, ...]:
    if not spec.takes_loras:
        raise InvalidField(
            f"loras: {spec.name} takes none: diffusers has no loader for LoRAs of its family, {spec.family}. "
            "Leave them out.",
            field="loras",
        )
    if len(loras) > MAX_LORAS:
        raise InvalidField(f"loras has {len(loras)} entries; at most {MAX_LORAS} are allowed.", field="loras")
    for lora in loras:
        if not abs(lora.weight) <= MAX_LORA_WEIGHT:  # also true for NaN
            raise InvalidField(
                f"loras: the weight of {short_repr(lora.name)} is {short_repr(lora.weight)}; allowed are "
                f"{-MAX_LORA_WEIGHT} to {MAX_LORA_WEIGHT}.",
                field="loras",
            )
    return folders.complete(loras, spec.name)


def check_range(field: str, got: float | None, limits: Limits) -> float:
    """Return `got`. Raises InvalidField if the limits of a field do not allow it."""
    assert got is not None, f"{field} has no default"
    if not limits.min <= got <= limits.max:  # also true for NaN
        raise InvalidField(
            f"{field} is {short_repr(got)}; allowed are {limits.min} to {limits.max}"
            + (f" in multiples of {limits.multiple}." if limits.multiple > 1 else "."),
            field=field,
        )
    if limits.multiple > 1 and got % limits.multiple:
        below = int(got // limits.multiple * limits.multiple)
        nearest = " or ".join(
            str(value) for value in (below, below + limits.multiple) if limits.min <= value <= limits.max
        )
        raise InvalidField(
            f"{field} is {got}; it must be a multiple of {limits.multiple}, such as {nearest}.", field=field
        )
    return got


def _resolve_scheduler(got: str | None, spec: DiffusionModelSpec) -> str:
    if got is None:
        return spec.default_scheduler
    name = scheduler_names.find(got).name
    if (of_flow := f"flow-{name}") in spec.schedulers:  # clients that know only the names of Stable Diffusion
        return of_flow
    if name not in spec.schedulers:
        raise InvalidField(
            f"scheduler is {short_repr(got)}, which {spec.name} cannot be sampled with."
            f"{did_you_mean(name, spec.schedulers)} Allowed are: {', '.join(spec.schedulers)}.",
            field="scheduler",
        )
    return name
