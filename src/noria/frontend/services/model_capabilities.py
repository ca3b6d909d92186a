"""The capabilities of a model here: minimum, maximum and default of every setting, and its schedulers.

Pure. The limits are those that `request_validation.py` enforces, so a form built from them sends nothing that is
rejected.
"""

from collections.abc import Iterable

from msgspec import Struct

from noria.config import FrontendConfig
from noria.frontend.services.images.request_images import MAX_CONTROL_SCALE, MAX_CONTROLS
from noria.frontend.services.images.request_validation import MAX_LORA_WEIGHT, MAX_LORAS, limits
from noria.images import scheduler_names
from noria.images.image_file import MAX_PIXELS, MAX_SIDE_PX
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.text import EncoderModelSpec, EncoderTask


class Bounds(Struct, frozen=True):
    """The allowed values of a setting: `min` to `max`, in multiples of `multiple`. `default` is null if it varies."""

    min: float
    max: float
    multiple: int
    default: float | None


class SchedulerInfo(Struct, frozen=True):
    """A scheduler that the model supports."""

    name: str
    description: str


class StartImageLimits(Struct, frozen=True):
    """The limits of a start image and its mask; `settings` has the bounds of their strength."""

    max_bytes: int  # bytes of all images of a request together
    max_pixels: int  # pixels of each image
    max_side_px: int
    default_strength: float  # if there is an image
    needs_mask: bool  # whether each request needs an image and a mask, as those of a model for inpainting do


class ModelCapabilities(Struct, frozen=True, tag_field="kind", tag="diffusion"):
    """Facts about an image model that forms and clients need. The keys of `settings` are fields of `POST /t2i`."""

    version: str  # the model's fingerprint
    pipeline: str  # its diffusers class
    settings: dict[str, Bounds]
    default_scheduler: str
    schedulers: list[SchedulerInfo]
    max_prompt_chars: int
    loras: list[str]  # names of adapters
    max_loras: int  # adapters of a request
    max_lora_weight: float  # and its negative is the least
    start_image: StartImageLimits | None  # None: it cannot begin with one
    controlnets: list[str]  # their names
    ip_adapters: list[str]  # likewise
    max_references: int  # reference images of a request; 0: it takes none
    refiner: str | None  # its name; null: there is none
    max_controls: int  # controls of a request
    max_control_scale: float  # also of an IP-Adapter


class EncoderCapabilities(Struct, frozen=True, tag_field="kind", tag="encoder"):
    """Facts about a text encoder that clients need."""

    version: str  # the model's fingerprint
    task: EncoderTask
    architecture: str  # its transformers class
    dimensions: int  # length of an embedding, or the number of labels
    max_length: int  # tokens of a text, special tokens included
    max_texts: int  # texts of a request
    prompts: list[str]  # names
    default_prompt: str | None
    labels: list[str]


def encoder_capabilities_of(spec: EncoderModelSpec, config: FrontendConfig) -> EncoderCapabilities:
    """Return what the encoder accepts behind a front end with this `config`."""
    return EncoderCapabilities(
        version=spec.fingerprint,
        task=spec.task,
        architecture=spec.architecture,
        dimensions=spec.dimensions,
        max_length=spec.max_length,
        max_texts=config.max_texts,
        prompts=[name for name, _ in spec.prompts],
        default_prompt=spec.default_prompt,
        labels=list(spec.labels),
    )


def capabilities_of(
    spec: DiffusionModelSpec,
    config: FrontendConfig,
    loras: Iterable[str],
    controlnets: Iterable[str],
    refiner: str | None = None,
    ip_adapters: Iterable[str] = (),
) -> ModelCapabilities:
    """Return what the model accepts behind a front end with this `config`.

    `loras`, `controlnets` and `ip_adapters` are the names of its adapters, `refiner` is that of its refiner.
    """
    return ModelCapabilities(
        version=spec.fingerprint,
        pipeline=spec.pipeline,
        settings={
            field: Bounds(allowed.min, allowed.max, allowed.multiple, allowed.default)
            for field, allowed in limits(spec, config).items()
        },
        default_scheduler=spec.default_scheduler,
        schedulers=[SchedulerInfo(name, scheduler_names.find(name).description) for name in spec.schedulers],
        max_prompt_chars=config.max_prompt_chars,
        loras=list(loras) if spec.takes_loras else [],
        max_loras=MAX_LORAS,
        max_lora_weight=MAX_LORA_WEIGHT,
        start_image=StartImageLimits(
            config.max_image_bytes, MAX_PIXELS, MAX_SIDE_PX, spec.default_strength, spec.needs_mask
        )
        if spec.takes_start_images
        else None,
        controlnets=list(controlnets),
        ip_adapters=list(ip_adapters),
        max_references=spec.max_references,
        refiner=refiner,
        max_controls=MAX_CONTROLS,
        max_control_scale=MAX_CONTROL_SCALE,
    )
