"""A request for images after its validation, and what it results in, for routes of any protocol and for jobs."""

from dataclasses import dataclass
from urllib.parse import quote

from msgspec import Struct

from noria.frontend.access.quotas import ApiClient
from noria.frontend.services.images.request_validation import NO_IMAGES
from noria.images.start_image import RequestImageFacts
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageFormat, ImageRequest, ImageRequestBody


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


@dataclass(frozen=True)
class AdmittedRequest:
    """A validated request, its model, and the requested form of its images."""

    request: ImageRequest
    spec: ModelSpec
    file_format: ImageFormat
    quality: int | None  # of WebP and JPEG, 0 to 100; None: the default of `image_writer.py`
    metadata: bool  # whether the files contain their generation metadata
    # Whose quota the images count in; None for jobs, which are charged at submission.
    api_client: ApiClient | None = None
    body: ImageRequestBody | None = None  # as the client sent it, without images; None for jobs
    images: RequestImageFacts = NO_IMAGES  # of its body; none for jobs
    data: bytes | None = None  # the pixels of its images, as the engine gets them


@dataclass(frozen=True)
class GenerationResult:
    """A request's image files and measurements, for a response of any protocol."""

    admitted: AdmittedRequest
    files: list[bytes]
    timings: ResponseTimings
    num_steps_run: int
    mean_batch: float  # mean number of images in its steps' batches, its own included

    @property
    def request(self) -> ImageRequest:
        """The validated request."""
        return self.admitted.request

    @property
    def headers(self) -> dict[str, str]:
        """Response headers, the same for every protocol."""
        stages = ("queue", "image_encode", "text_encode", "denoise", "decode", "postprocess", "predicted")
        server_timing = ", ".join(f"{stage};dur={getattr(self.timings, stage + '_s') * 1000:.1f}" for stage in stages)
        return {
            "X-Noria-Seed": str(self.request.payload.seed),
            "X-Noria-Model": quote(self.admitted.spec.name, safe="/:@+ "),  # headers allow neither é nor line ends
            "X-Noria-Mean-Batch": f"{self.mean_batch:.2f}",
            "Server-Timing": server_timing,
        }
