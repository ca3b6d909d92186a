"""The types that only diffusion models have: bounds and defaults of a model, and the settings of images.

The settings are as callers give them, or complete, as the payload of a request to an engine. Every name of a setting is
the one of `POST /t2i`; the API, image files, logs, spans and views use no other.
"""

import math
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct

from noria.protocol.model_spec import ModelSpec

ReferenceSize = Literal["area", "preferred", "vision", "joint"]
"""The rule of `images/reference_size.py` by which reference images are resized for a model."""

MaskFill = Literal["noise", "nothing"]
"""The latents of the repainted part of a start image, in place of its own: noise, or zeros."""

LatentUpscaler = Literal[
    "bilinear", "bilinear antialiased", "bicubic", "bicubic antialiased", "nearest", "nearest-exact"
]
"""How latents are enlarged, by the modes of torch's `interpolate`."""

PromptSyntax = Literal["plain", "a1111"]
"""The syntax of prompts: none, or that of `models/diffusion/prompts/a1111_syntax.py`."""


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
    default_calls: float = 1.0  # the share of calls that are made for a request that does not say it, where it can be
    prompt_syntaxes: tuple[PromptSyntax, ...] = ("plain",)  # those that it reads
    default_prompt_syntax: PromptSyntax = "plain"
    max_clip_skip: int = 0  # layers of its CLIP text encoder; 0: which one is read cannot be chosen
    family_clip_skip: int = 0  # the layer from the end that its family reads; 0 likewise
    default_clip_skip: int = 0  # that of a request that does not say it
    # From noria.json: a folder with an image classifier, and the labels and the least score that are refused.
    safety_classifier: str = ""  # empty: only the operator's, if there is one
    safety_labels: tuple[str, ...] = ()  # empty: those of the settings
    safety_threshold: float = 1.0  # at most that of the settings counts
    default_strength: float = 0.8  # the strength of a request with a start image; as in most of diffusers' pipelines


class Lora(Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter, and how strongly it changes the image."""

    name: str  # name of its file, without .safetensors
    weight: float = 1.0
    digest: str | None = None  # the file's, by `models/adapters/lora_folders.py`; None in a request: any


class Embedding(Struct, frozen=True):
    """An embedding that a prompt names."""

    name: str  # name of its file, without .safetensors
    digest: str  # the file's, by `models/adapters/lora_folders.py`


class Control(Struct, frozen=True, forbid_unknown_fields=True):
    """A ControlNet that steers an image by an image of its own."""

    name: str  # name of its folder
    scale: float = 1.0
    start: float = 0.0  # a part of the steps, from 0 to 1: it steers those that are wholly between start and end
    end: float = 1.0
    digest: str | None = None  # digest of the ControlNet; None in a request
    image_digest: str | None = None  # digest of the image's file, likewise


class IpAdapter(Struct, frozen=True):
    """An IP-Adapter, which conditions an image on an image of its own."""

    name: str  # name of its file, without .safetensors
    scale: float = 1.0
    digest: str | None = None  # digest of the file and of its image encoder
    image_digest: str | None = None  # digest of the image's file
    image_px: int = 0  # both sides of the image as the encoder takes it


class Reference(Struct, frozen=True, omit_defaults=True):
    """An image that a model is shown beside the prompt."""

    width: int  # px, as the model is shown it
    height: int
    digest: str | None = None  # digest of its file
    prompt_width: int = 0  # px, as the text encoder reads it with the prompt; 0: it does not
    prompt_height: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of its pixels in the frame of data, RGB: as the denoiser is shown it, then as the text encoder."""
        return 3 * (self.width * self.height + self.prompt_width * self.prompt_height)


class Refinement(Struct, frozen=True, forbid_unknown_fields=True):
    """The making of an image's last steps by the model's refiner."""

    start: float = 0.8  # after which part of the noise's times, as `denoising_end` and `denoising_start` of diffusers
    name: str | None = None  # name of the refiner's folder; None in a request: that of the model
    digest: str | None = None  # digest of the folder; None in a request: whatever it is


class PixelUpscaler(Struct, frozen=True, forbid_unknown_fields=True):
    """An upscaler of the pixels of an image: a file of `engine.upscalers`, or a filter."""

    name: str  # name of the file without its suffix, or `Lanczos` or `Nearest`
    digest: str | None = None  # digest of the file; None: it is a filter


class Upscaling(Struct, frozen=True):
    """The enlarging of an image that is sent, in place of the generation of one."""

    width: int  # px of the result; of other proportions, the image is cut on both sides
    height: int  # px
    upscaler: PixelUpscaler


class SecondPass(Struct, frozen=True, forbid_unknown_fields=True):
    """A second pass of an image, in another size, which begins with the latents of the first one."""

    width: int  # px
    height: int  # px
    inference_steps: int  # the last ones of them are made, by the strength
    strength: float  # as that of a start image
    upscaler: LatentUpscaler = "bilinear"
    pixel_upscaler: PixelUpscaler | None = None  # in its place: latents are decoded, enlarged and encoded

    def num_made(self, scheduler: str) -> int:
        """Return the number of steps that it makes; `scheduler` is a short name."""
        return self.inference_steps - num_skipped_steps(scheduler, self.inference_steps, self.strength)


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
    calls: float = 1.0  # the share of the model's calls that are made
    # None: plain, and the family's, which are the model's defaults.
    prompt_syntax: PromptSyntax | None = None
    clip_skip: int | None = None  # the layer of the text encoder that is read, from the end
    loras: tuple[Lora, ...] = ()  # with digests
    # The share of a start image that is replaced, above 0 to 1; None: there is none. Its pixels are the request's
    # frame of data: [height, width, 3] uint8 RGB and, with a mask, [height, width] uint8, 255 (repainted) or 0 (kept).
    strength: float | None = None
    has_mask: bool = False
    # With digests. Their images, [height, width, 3] uint8 RGB each, follow the start image in the frame of data; each
    # in the size of every pass.
    controls: tuple[Control, ...] = ()
    refiner: Refinement | None = None  # with name and digest; None: the model makes all steps
    # Their images are next in the frame of data, each of its own sizes.
    reference_images: tuple[Reference, ...] = ()
    ip_adapter: IpAdapter | None = None  # with digests; its image comes last in the frame of data


class DiffusionPayload(ImageSettingsView, frozen=True, tag="diffusion", kw_only=True):
    """The complete settings of `n` images of one prompt; image k has the seed `seed` + k."""

    prompt: str
    negative_prompt: str | None
    seed: int
    n: int = 1
    partial_images: int = 0  # previews of each image
    image_digest: str | None = None  # digests of the files as they were sent, for the metadata of the images
    mask_digest: str | None = None
    mask_fill: MaskFill | None = None  # None: the latents of the start image
    embeddings: tuple[Embedding, ...] = ()  # those that its prompts name
    second_pass: SecondPass | None = None
    # Its image, [height, width, 3] uint8 RGB, is the frame of data; other settings have no effect.
    upscaling: Upscaling | None = None
    start_px: tuple[int, int] | None = None  # width and height of a start image whose latents are resized; None: as it

    @property
    def has_images(self) -> bool:
        """Whether it has a frame of data."""
        return self.strength is not None or bool(self.controls or self.reference_images or self.ip_adapter)

    @property
    def num_reference_pixels(self) -> int:
        """The pixels of all its reference images."""
        return sum(each.width * each.height for each in self.reference_images)

    @property
    def num_reference_bytes(self) -> int:
        """The bytes of all its reference images in the frame of data."""
        return sum(each.num_bytes for each in self.reference_images)

    @property
    def first_step(self) -> int:
        """The number of steps that a start image leaves out."""
        return 0 if self.strength is None else num_skipped_steps(self.scheduler, self.inference_steps, self.strength)

    @property
    def result_px(self) -> tuple[int, int]:
        """Width and height of the images that result."""
        last = self.second_pass or self.upscaling or self
        return last.width, last.height

    @property
    def sizes_of_passes(self) -> tuple[tuple[int, int], ...]:
        """Width and height of each pass, px."""
        first = self.width, self.height
        return (first,) if self.second_pass is None else (first, self.result_px)

    @property
    def num_control_bytes(self) -> int:
        """The bytes of the images of all its controls in the frame of data."""
        return 3 * len(self.controls) * sum(map(math.prod, self.sizes_of_passes))

    @property
    def first_step_of_second_pass(self) -> int:
        """The number of steps that a second pass leaves out, which there is."""
        assert self.second_pass is not None
        return num_skipped_steps(self.scheduler, self.second_pass.inference_steps, self.second_pass.strength)

    @property
    def num_results(self) -> int:
        """The number of images."""
        return self.n

    @property
    def num_calls(self) -> int | None:
        """How many calls are made, the others skipped; None: all of them."""
        num_steps = self.inference_steps - self.first_step
        return None if self.calls == 1 else math.ceil(self.calls * num_steps - _ROUNDING)

    @property
    def num_steps(self) -> int:
        """The number of steps requested, for the progress of a request that no engine has accepted yet.

        Of one with skipped calls it is the number of calls.
        """
        num_steps = self.num_calls or self.inference_steps - self.first_step
        if self.second_pass is not None:
            num_steps += self.second_pass.num_made(self.scheduler)
        return num_steps

    @property
    def settings_view(self) -> ImageSettingsView:
        """The settings that live views show: without digests of its images."""
        view = ImageSettingsView(**{name: getattr(self, name) for name in ImageSettingsView.__struct_fields__})
        return msgspec.structs.replace(
            view,
            controls=tuple(msgspec.structs.replace(each, image_digest=None) for each in self.controls),
            reference_images=tuple(msgspec.structs.replace(each, digest=None) for each in self.reference_images),
            ip_adapter=self.ip_adapter and msgspec.structs.replace(self.ip_adapter, image_digest=None),
        )


# A third. With a quarter, the worst of 20 images of the bundled model is further from the full one than with fewer
# steps.
MIN_CALLS = 0.33
MIN_CALLS_MADE = 6  # 4 of 12 break images: docs/benchmarks/calls.md
MIN_STEPS_TO_SKIP = 12  # with fewer, the calls that are left are too far apart to extrapolate from
_ROUNDING = 1e-6  # 0.55 · 20 is 11.000000000000002


def num_skipped_steps(scheduler: str, inference_steps: int, strength: float) -> int:
    """Return the number of steps that a start image leaves out, as diffusers counts them; `scheduler` is a short name.

    Its pipelines round the steps that are made down, those of flow models those that are left out.
    """
    made = min(inference_steps * strength, inference_steps)
    return int(inference_steps - (made if scheduler.startswith("flow-") else int(made)))


def min_strength(inference_steps: int) -> float:
    """Return the least strength that leaves a step of a start image, rounded up to four places."""
    return -(-10_000 // inference_steps) / 10_000
