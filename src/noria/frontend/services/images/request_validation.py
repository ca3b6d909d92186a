"""Admission: turns the body of a request into an `EngineRequest`, with defaults filled in and all limits checked.

Pure: the model's limits, the operator's limits and the source of seeds are arguments. A request that is rejected here
reaches no engine. /openapi.json publishes the same `limits`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from noria.config import FrontendConfig
from noria.errors import ControlNetNotFound, InvalidField, LoraNotFound, did_you_mean, short_repr
from noria.frontend.services.images.request_images import (
    check_controls,
    check_needed_images,
    check_references,
    default_size,
)
from noria.images import scheduler_names
from noria.images.start_image import RequestImageFacts, StartImageFacts
from noria.models.controlnet_folders import NO_CONTROLNETS
from noria.models.lora_folders import NO_LORAS
from noria.models.refiner_folders import no_refiner
from noria.protocol.diffusion import (
    Control,
    DiffusionModelSpec,
    DiffusionPayload,
    Lora,
    Refinement,
    min_strength,
    num_skipped_steps,
)
from noria.protocol.request import EngineRequest, ImageRequest, ImageRequestBody

# torch's generators take a signed 64-bit seed; image k takes seed + k. Equal to MAX_SEED of sampling/noise.py, which a
# front end cannot import because it imports torch; a test compares them.
_MAX_SEED = 2**63 - 1
_MAX_PREVIEWS = 10  # per image: more look alike, and each costs an encoded file
# Published pipelines stay below 30; beyond that images saturate and half precision overflows.
_MAX_GUIDANCE = 50.0
MAX_LORAS = 8  # of a request: each adds its rank to the work of a step
MAX_LORA_WEIGHT = 10.0  # published ones are used from -2 to 2; beyond that images saturate

CompleteLoras = Callable[[Sequence[Lora], str], tuple[Lora, ...]]
"""Returns adapters for a model by its name, with their digests; raises LoraNotFound or InvalidField."""


def no_loras(loras: Sequence[Lora], model: str) -> tuple[Lora, ...]:
    """Raise LoraNotFound: the server has no adapters."""
    raise LoraNotFound(f"loras: {model} has no LoRA {short_repr(loras[0].name)}; {NO_LORAS}.", field="loras")


CompleteControls = Callable[[Sequence[Control], DiffusionModelSpec], tuple[Control, ...]]
"""Returns controls for a model, with the digests of their ControlNets; raises ControlNetNotFound."""


def no_controls(controls: Sequence[Control], spec: DiffusionModelSpec) -> tuple[Control, ...]:
    """Raise ControlNetNotFound: the server has no ControlNets."""
    raise ControlNetNotFound(
        f"controls[0]: {spec.name} has no ControlNet {short_repr(controls[0].name)}; {NO_CONTROLNETS}.",
        field="controls",
    )


CompleteRefiner = Callable[[Refinement, DiffusionModelSpec], Refinement]
"""Returns what a request says of the refiner of a model, with its name and digest; raises InvalidField."""


def reject_refiner(_: Refinement, spec: DiffusionModelSpec) -> Refinement:
    """Raise InvalidField: the server has no refiners."""
    raise no_refiner(spec)


NO_IMAGES = RequestImageFacts()


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
        "deadline_ms": Limits(1, int(config.request_timeout_s * 1000), None),
        "partial_images": Limits(0, _MAX_PREVIEWS, 0),
        "strength": Limits(1 / config.max_steps, 1.0, None),  # with less no step would be left
    }


def validate(
    body: ImageRequestBody,
    spec: DiffusionModelSpec,
    config: FrontendConfig,
    request_id: str,
    draw_seed: Callable[[], int],
    client: str = "",
    complete_loras: CompleteLoras = no_loras,
    complete_controls: CompleteControls = no_controls,
    images: RequestImageFacts = NO_IMAGES,
    complete_refiner: CompleteRefiner = reject_refiner,
) -> ImageRequest:
    """Return `body` as a complete, valid request of `client` (the name of an API key, or "") for an engine.

    Without `complete_loras`, there are no adapters, without `complete_controls` no ControlNets, without
    `complete_refiner` no refiner. `images` are those of `body`, whose own fields of them are not read; the size of the
    first is the default one.

    Raises:
        InvalidField: names the first field whose value is not allowed.

    """
    allowed = limits(spec, config)

    def checked(field: str, got: float | None) -> float:
        return _check_range(field, got, allowed[field])

    start_image = images.start
    check_needed_images(spec, start_image)
    references = check_references(images.references, spec)
    controls = check_controls(body.controls, images.controls)
    default_size_px = default_size(images, references, spec)
    width_px, height_px = (None, None) if default_size_px is None else default_size_px
    num_steps = int(checked("inference_steps", body.inference_steps))
    scheduler = _resolve_scheduler(body.scheduler, spec)
    return EngineRequest(
        request_id=request_id,
        model=spec.name,
        payload=DiffusionPayload(
            prompt=_check_length("prompt", body.prompt, config),
            negative_prompt=None
            if body.negative_prompt is None
            else _check_length("negative_prompt", body.negative_prompt, config),
            n=int(checked("n", body.n)),
            seed=draw_seed() if body.seed is None else int(checked("seed", body.seed)),
            width=int(checked("width", width_px if body.width is None else body.width)),
            height=int(checked("height", height_px if body.height is None else body.height)),
            inference_steps=num_steps,
            guidance_scale=float(checked("guidance_scale", body.guidance_scale)),
            scheduler=scheduler,
            partial_images=_check_previews(body, checked),
            loras=complete_loras(_check_loras(body.loras, spec), spec.name) if body.loras else (),
            strength=_check_strength(body.strength, start_image, spec, scheduler, num_steps, checked),
            has_mask=start_image is not None and start_image.mask_digest is not None,
            image_digest=None if start_image is None else start_image.digest,
            mask_digest=None if start_image is None else start_image.mask_digest,
            controls=complete_controls(controls, spec) if controls else (),
            reference_images=references,
            refiner=None
            if body.refiner is None
            else complete_refiner(_check_refiner(body.refiner, start_image, spec, scheduler), spec),
        ),
        timeout_s=config.request_timeout_s,
        model_version=spec.fingerprint,
        client=client,
        priority=body.priority or "normal",
        deadline_s=None if body.deadline_ms is None else checked("deadline_ms", body.deadline_ms) / 1000,
        stream_progress=body.stream,
    )


def _check_previews(body: ImageRequestBody, checked: Callable[[str, float | None], float]) -> int:
    if body.partial_images and not body.stream:
        raise InvalidField(
            f"partial_images is {body.partial_images}, but stream is not true; only a stream carries them.",
            field="partial_images",
        )
    return int(checked("partial_images", body.partial_images))


def _check_strength(
    got: float | None,
    start_image: StartImageFacts | None,
    spec: DiffusionModelSpec,
    scheduler: str,
    num_steps: int,
    checked: Callable[[str, float | None], float],
) -> float | None:
    if start_image is None:
        if got is not None:
            raise InvalidField(
                f"strength is {short_repr(got)}, but there is no image; it is how much of a start image is replaced.",
                field="strength",
            )
        return None
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


def _check_refiner(
    got: Refinement, start_image: StartImageFacts | None, spec: DiffusionModelSpec, scheduler: str
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
    return got


def _check_loras(loras: Sequence[Lora], spec: DiffusionModelSpec) -> Sequence[Lora]:
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
    return loras


def _check_range(field: str, got: float | None, limits: Limits) -> float:
    if got is None:
        assert limits.default is not None, f"{field} has no default"
        return limits.default
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


def _check_length(field: str, got: str, config: FrontendConfig) -> str:
    if len(got) > config.max_prompt_chars:
        raise InvalidField(
            f"{field} has {len(got)} characters; at most {config.max_prompt_chars} are allowed.", field=field
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
