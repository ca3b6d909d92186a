"""A request for images after its validation, and what it results in, for routes of any protocol and for jobs."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from msgspec import UNSET, Struct, UnsetType

from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.results import RawImage
from noria.images.start_image import RequestImageFacts
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageFormat, ImageRequest, ImageRequestBody
from noria.statistics.values import Values

Written = tuple[list[bytes], Values]
"""Files of images, and the values of the variables of their pixels."""

Paste = Callable[[RawImage, Callable[[Sequence[RawImage]], Written]], Awaitable[Written]]
"""Pastes what was generated into the start image; returns what the function returns for the result."""


class ResponseTimings(Struct, frozen=True):
    """How long each stage took, in seconds. `decode_s` is latents to pixels, `postprocess_s` pixels to files.

    `predicted_s` is the engine's prediction, when it accepted the request, of queue to decode together.
    """

    queue_s: float
    image_encode_s: float
    text_encode_s: float
    denoise_s: float
    decode_s: float
    postprocess_s: float
    total_s: float
    predicted_s: float


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """A validated request, its model, and the requested form of its images; a job's as it is stored."""

    request: ImageRequest
    spec: ModelSpec
    file_format: ImageFormat
    quality: int | None  # quality of WebP and JPEG, 0 to 100; None: the default of `image_writer.py`
    metadata: bool  # whether the files contain their generation metadata
    data: bytes | None  # the pixels of its images, as the engine gets them
    paste: Paste | None = None  # None: the images are the result

    def shape(self) -> str:
        """The shape by which the judge of a canary compares times; empty of a job, which is not judged."""
        return ""


@dataclass(frozen=True, kw_only=True)
class AdmittedRequest(ImageTask):
    """The request of a client that waits, or submits a job."""

    context: RequestContext
    body: ImageRequestBody  # as the client sent it, without images
    images: RequestImageFacts  # facts about the images of its body

    def shape(self) -> str:
        """How much work the client asked for. A version's own defaults are no part: they are what is judged."""
        body, payload = self.body, self.request.payload
        parts = [f"{payload.width}x{payload.height}", f"{body.inference_steps or 'default'} steps", f"{body.n} images"]
        if payload.strength is not None:
            parts.append("default strength" if body.strength is None else f"strength {body.strength:.1f}")
        if body.calls is not None:
            parts.append(f"{body.calls:.2f} of the calls")
        if body.controls:
            parts.append(f"{len(body.controls)} controls")
        if payload.reference_images:
            parts.append(f"{payload.num_reference_pixels / 1e6:.1f} megapixels of references")
        if body.refiner is not None:
            parts.append(f"refiner from {body.refiner.start:g}")
        if (second := payload.second_pass) is not None:
            parts.append(f"second pass of {second.width}x{second.height}, {second.inference_steps} steps")
        if payload.upscaling is not None:
            parts.append("enlarged to {}x{}".format(*payload.result_px))
        return ", ".join(parts)


class ImageFacts(Struct, frozen=True):
    """An image of a request, beside its pixels."""

    index: int
    seed: int
    safety_score: float | UnsetType = UNSET  # 0 to 1; absent if the model has no safety classifier


@dataclass(frozen=True)
class GenerationResult:
    """A request's image files and measurements, for a response of any protocol."""

    task: ImageTask
    files: list[bytes]
    images: list[ImageFacts]  # those of the files
    refused: list[ImageFacts]  # those that have no file: the model's safety classifier has refused them
    timings: ResponseTimings
    num_steps_run: int
    mean_batch: float  # mean number of images in its steps' batches, its own included
    num_truncated_tokens: int = 0  # at the ends of the prompts: the model is not shown them

    @property
    def request(self) -> ImageRequest:
        """The validated request."""
        return self.task.request

    @property
    def safety_scores(self) -> list[float]:
        """The scores of all images, refused ones included; empty if the model has no safety classifier."""
        facts = sorted([*self.images, *self.refused], key=lambda each: each.index)
        return [each.safety_score for each in facts if each.safety_score is not UNSET]

    @property
    def headers(self) -> dict[str, str]:
        """Response headers, the same for every protocol."""
        stages = ("queue", "image_encode", "text_encode", "denoise", "decode", "postprocess", "predicted")
        server_timing = ", ".join(f"{stage};dur={getattr(self.timings, stage + '_s') * 1000:.1f}" for stage in stages)
        payload = self.request.payload
        if payload.num_calls is not None:
            made = f"{payload.num_calls} of {payload.inference_steps - payload.first_step} calls"
            server_timing = server_timing.replace("denoise;", f'denoise;desc="{made}";')
        cut = {"X-Noria-Truncated-Tokens": str(self.num_truncated_tokens)} if self.num_truncated_tokens else {}
        refused = {"X-Noria-Refused-Images": str(len(self.refused))} if self.refused else {}
        return {
            **cut,
            **refused,
            "X-Noria-Seed": str(self.request.payload.seed),
            "X-Noria-Model": quote(self.task.spec.name, safe="/:@+ "),  # headers allow neither é nor line ends
            "X-Noria-Mean-Batch": f"{self.mean_batch:.2f}",
            "Server-Timing": server_timing,
        }
