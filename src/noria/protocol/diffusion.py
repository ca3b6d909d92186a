"""What only diffusion models have: bounds and defaults of a model, and the settings of images.

The settings are as callers give them, or complete, as the payload of a request to an engine. Every name of a setting is
the one of `POST /t2i`; the API, image files, logs, spans and views use no other.
"""

from typing import ClassVar, Literal

from msgspec import Struct

from noria.protocol.model_spec import ModelSpec

ReferenceSize = Literal["area", "preferred"]
"""What of `images/references.py` a model is shown."""


class DiffusionModelSpec(ModelSpec, frozen=True, kw_only=True, tag_field="kind", tag="diffusion"):
    """A diffusion model: the bounds and defaults of its requests."""

    kind: ClassVar[Literal["diffusion"]] = "diffusion"

    pipeline: str  # its diffusers class, such as "StableDiffusionPipeline"
    default_width_px: int
    default_height_px: int
    min_side_px: int
    max_side_px: int
    multiple_px: int  # widths and heights are multiples of this
    default_scheduler: str
    schedulers: tuple[str, ...]  # short names of those that the model supports
    default_steps: int
    default_guidance: float
    max_references: int = 0  # reference images of a request
    reference_size: ReferenceSize = "area"  # how they are resized
    guidance_rescale: float = 0.0  # see `sampling/guidance.py`, also for the next
    cfg_normalization: float = 0.0
    takes_start_images: bool = True
    takes_loras: bool = True
    needs_mask: bool = False  # whether all its requests have a start image and a mask, as a model for inpainting does
    default_strength: float = 0.8  # of a request with a start image; as in most of diffusers' pipelines


class Lora(Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter, and how strongly it changes the image."""

    name: str  # of its file, without .safetensors
    weight: float = 1.0
    digest: str | None = None  # of the file, by `models/lora_folders.py`; None in a request: whatever the file is now


class Control(Struct, frozen=True, forbid_unknown_fields=True):
    """A ControlNet that steers an image by an image of its own."""

    name: str  # of its folder
    scale: float = 1.0
    start: float = 0.0  # of the steps, as a part of them: it steers those that are wholly between start and end
    end: float = 1.0
    digest: str | None = None  # of the ControlNet; None in a request
    image_digest: str | None = None  # of the image's file, likewise


class Reference(Struct, frozen=True):
    """An image that a model is shown beside the prompt."""

    width: int  # px, as the model is shown it
    height: int
    digest: str | None = None  # of its file


class Refinement(Struct, frozen=True, forbid_unknown_fields=True):
    """That the model's refiner makes the last steps of an image."""

    start: float = 0.8  # after which part of the noise's times, as `denoising_end` and `denoising_start` of diffusers
    name: str | None = None  # of the refiner's folder; None in a request: that of the model
    digest: str | None = None  # of the folder; None in a request: whatever it is


class ImageSettings(Struct, frozen=True):
    """The settings of one image as far as they are given; `None` means not given."""

    prompt: str
    negative_prompt: str | None = None  # absent is not empty: SDXL is guided by zeros then
    seed: int | None = None
    width: int | None = None  # px
    height: int | None = None  # px
    inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None  # a name of images/scheduler_names.py


class ImageSettingsView(Struct, frozen=True, tag="diffusion"):
    """The complete settings without prompts and seed, as live views show them."""

    width: int  # px
    height: int  # px
    scheduler: str  # a short name of images/scheduler_names.py
    guidance_scale: float
    inference_steps: int
    loras: tuple[Lora, ...] = ()  # with digests


class DiffusionPayload(ImageSettingsView, frozen=True, tag="diffusion", kw_only=True):
    """The complete settings of `n` images of one prompt; image k has the seed `seed` + k."""

    prompt: str
    negative_prompt: str | None
    seed: int
    n: int = 1
    partial_images: int = 0  # previews of each image
    # Of a start image: how much of it is replaced, above 0 to 1; None: there is none. Its pixels are the request's
    # frame of data: [height, width, 3] uint8 RGB and, with a mask, [height, width] uint8, 255 (repainted) or 0 (kept).
    strength: float | None = None
    has_mask: bool = False
    image_digest: str | None = None  # of the files as they were sent, for the metadata of the images
    mask_digest: str | None = None
    # With digests. Their images, [height, width, 3] uint8 RGB each, follow the start image in the frame of data.
    controls: tuple[Control, ...] = ()
    refiner: Refinement | None = None  # with name and digest; None: the model makes all steps
    # Their images come last in the frame of data, each of its own size.
    reference_images: tuple[Reference, ...] = ()

    @property
    def has_images(self) -> bool:
        """Whether it has a frame of data."""
        return self.strength is not None or bool(self.controls or self.reference_images)

    @property
    def num_reference_pixels(self) -> int:
        """The pixels of all its reference images."""
        return sum(each.width * each.height for each in self.reference_images)

    @property
    def first_step(self) -> int:
        """The number of steps that a start image leaves out."""
        return 0 if self.strength is None else num_skipped_steps(self.scheduler, self.inference_steps, self.strength)

    @property
    def num_results(self) -> int:
        """The number of images."""
        return self.n

    @property
    def num_steps(self) -> int:
        """The number of steps requested, for the progress of a request that no engine has accepted yet."""
        return self.inference_steps - self.first_step

    @property
    def settings_view(self) -> ImageSettingsView:
        """What live views show of it."""
        return ImageSettingsView(
            self.width, self.height, self.scheduler, self.guidance_scale, self.inference_steps, self.loras
        )


def num_skipped_steps(scheduler: str, inference_steps: int, strength: float) -> int:
    """Return the number of steps that a start image leaves out, as diffusers counts them; `scheduler` is a short name.

    Its pipelines round the steps that are made down, those of flow models those that are left out.
    """
    made = min(inference_steps * strength, inference_steps)
    return int(inference_steps - (made if scheduler.startswith("flow-") else int(made)))


def min_strength(inference_steps: int) -> float:
    """Return the least strength that leaves a step of a start image, rounded up to four places."""
    return -(-10_000 // inference_steps) / 10_000
