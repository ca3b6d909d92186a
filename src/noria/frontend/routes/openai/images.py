"""OpenAI's image API: `POST /v1/images/generations`.

The unmodified openai-python client works. Fields that have no meaning for a diffusion model (quality, style, …) are
accepted and ignored; `response_format: "url"` is rejected; Noria's own fields are sent in `extra_body`. The body may
also be a form, whose files `control` are the images of `controls`, in their order.
"""

import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.errors import InvalidField, short_repr
from noria.frontend.access.concurrency_limits import client_id_of
from noria.frontend.access.quotas import ApiClient
from noria.frontend.engines.results import PreviewImage, Update
from noria.frontend.http import sse
from noria.frontend.http.body import FORM, JSON, JsonBodyReader, decode
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.http.json_response import json_response
from noria.frontend.routes.images.forms import is_form, read_form
from noria.frontend.routes.images.stream import stream_generation
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult, ResponseTimings
from noria.frontend.services.images.image_writer import preview_as_base64
from noria.frontend.services.images.start_images import LoadFiles
from noria.frontend.services.priority_headers import apply_headers
from noria.protocol.diffusion import Lora, Refinement
from noria.protocol.request import ControlField, ImageFormat, ImageRequest, ImageRequestBody, Priority

MAX_IGNORED_CHARS = 1024
IgnoredText = Annotated[str, Meta(max_length=MAX_IGNORED_CHARS)]
EventPrefix = Literal["image_generation", "image_edit"]


class GenerationsRequestBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/images/generations`: OpenAI's fields, then Noria's."""

    prompt: str
    model: str | None = None
    n: int | None = None
    size: str | None = None
    output_format: ImageFormat | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    partial_images: int | None = None
    quality: IgnoredText | None = None
    style: IgnoredText | None = None
    background: IgnoredText | None = None
    moderation: IgnoredText | None = None
    user: IgnoredText | None = None
    safety_identifier: IgnoredText | None = None
    seed: int | None = None
    negative_prompt: str | None = None
    inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None
    metadata: bool = True
    loras: tuple[Lora, ...] = ()
    controls: tuple[ControlField, ...] = ()
    reference_images: tuple[str, ...] = ()
    refiner: Refinement | None = None


IGNORED_FIELDS = ("quality", "style", "background", "moderation", "user", "safety_identifier")


class GeneratedImage(Struct, frozen=True):
    """One image of a `GenerationsResponse`."""

    b64_json: str
    seed: int


class GenerationsResponse(Struct, frozen=True):
    """OpenAI's response, with Noria's additions at the end."""

    created: int  # Unix time, s
    data: list[GeneratedImage]
    output_format: ImageFormat
    size: str
    model: str
    request_id: str
    timings: ResponseTimings


class PartialImage(Struct, frozen=True, kw_only=True):
    """OpenAI's event for a preview; `index` is the image of the request."""

    b64_json: str
    partial_image_index: int
    index: int
    created_at: int
    size: str
    output_format: ImageFormat
    quality: str = "auto"
    background: str = "opaque"
    type: str  # image_generation.partial_image or image_edit.partial_image


class CompletedImage(Struct, frozen=True, kw_only=True):
    """OpenAI's event for a finished image; one for each image. `usage` counts tokens, so all of it is 0."""

    b64_json: str
    index: int
    seed: int
    created_at: int
    size: str
    output_format: ImageFormat
    model: str
    request_id: str
    timings: ResponseTimings
    usage: dict[str, Any]
    quality: str = "auto"
    background: str = "opaque"
    type: str  # image_generation.completed or image_edit.completed


_NO_INPUT = {"image_tokens": 0, "text_tokens": 0}
NO_USAGE = {"input_tokens": 0, "input_tokens_details": _NO_INPUT, "output_tokens": 0, "total_tokens": 0}


class GenerationRoutes:
    """The route `POST /v1/images/generations`."""

    def __init__(self, generation_service: GenerationService, body_reader: JsonBodyReader) -> None:
        self._generation_service, self._body_reader = generation_service, body_reader

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [Route("/v1/images/generations", self.generations, methods=["POST"])]

    async def generations(self, http: Request) -> Response:
        """Generate images; returns them in base64, or as a stream of events."""
        service, state, load_files = self._generation_service, http.state, None
        async with self._body_reader.receive(http, JSON, FORM) as raw:
            if is_form(http):
                body, load_files = await read_form(http, service.upload_threads, raw, GenerationsRequestBody)
            else:
                body = decode(raw, GenerationsRequestBody)
                of_controls = (control.image for control in body.controls)
                self._body_reader.check_length(raw, *of_controls, *body.reference_images)
            admitting = admit_generation(
                service,
                body,
                state.api_client,
                state.request_id,
                http.headers,
                load_files,
                client=client_id_of(http),
            )
            del raw, body, load_files  # with images they are long
            admitted = await cancel_on_disconnect(http, admitting)
        return await respond(http, self._generation_service, admitted, "image_generation")


async def respond(
    http: Request, generation_service: GenerationService, admitted: AdmittedRequest, event_prefix: EventPrefix
) -> Response:
    """Generate the images; return them in base64 or, if the request asks for it, as a stream of events."""
    assert admitted.body is not None, "it is no job"
    if admitted.body.stream:
        frames = _EventFrames(generation_service, admitted, event_prefix)
        return await stream_generation(http, generation_service, admitted, frames)
    result = await cancel_on_disconnect(http, generation_service.generate(admitted))
    b64_files = await generation_service.files_as_base64(result)
    return json_response(_generations_response(result, http.state.request_id, b64_files), headers=result.headers)


async def admit_generation(
    generation_service: GenerationService,
    body: GenerationsRequestBody,
    api_client: ApiClient,
    request_id: str,
    headers: Mapping[str, str],
    load_files: LoadFiles | None = None,
    strength: float | None = None,
    *,
    client: str,
    is_job: bool = False,
) -> AdmittedRequest:
    """Validate `body`; raises as `GenerationService.admit` does, with the field names of this body.

    `load_files` and `strength` are of a start image.
    """
    image_body = apply_headers(_as_image_body(body, strength), headers)
    admitting = generation_service.admit(
        image_body, api_client, request_id, body.output_compression, load_files, client=client, is_job=is_job
    )
    del body, image_body, load_files  # with images they are long
    try:
        return await admitting
    except InvalidField as error:
        if error.field in ("width", "height"):  # this body has no such fields
            error.field = "size"
        raise


class _EventFrames:
    """Formats updates as OpenAI's events, which are previews and finished images; progress has none."""

    def __init__(self, generation_service: GenerationService, admitted: AdmittedRequest, prefix: EventPrefix) -> None:
        self._generation_service, self._admitted, self._prefix = generation_service, admitted, prefix
        self._num_sent: dict[int, int] = {}  # previews sent, by image index

    async def __call__(self, update: Update | GenerationResult) -> list[bytes]:
        match update:
            case PreviewImage():
                return [await self._partial(update)]
            case GenerationResult():
                b64_files = await self._generation_service.files_as_base64(update)
                return [self._completed(update, index, b64_file) for index, b64_file in enumerate(b64_files)]
        return []

    async def _partial(self, preview: PreviewImage) -> bytes:
        request = self._admitted.request
        number = self._num_sent.get(preview.index, 0)
        self._num_sent[preview.index] = number + 1
        size = request.payload.width, request.payload.height
        b64_file = await preview_as_base64(preview, self._admitted.file_format, size)
        partial = PartialImage(
            b64_json=b64_file,
            partial_image_index=number,
            index=preview.index,
            created_at=int(time.time()),
            size=_size(request),
            output_format=self._admitted.file_format,
            type=f"{self._prefix}.partial_image",
        )
        return sse.serialize_event(partial.type, partial)

    def _completed(self, result: GenerationResult, index: int, b64_file: str) -> bytes:
        completed = CompletedImage(
            b64_json=b64_file,
            index=index,
            seed=result.request.payload.seed + index,
            created_at=int(time.time()),
            size=_size(result.request),
            output_format=self._admitted.file_format,
            model=self._admitted.spec.name,
            request_id=result.request.request_id,
            timings=result.timings,
            usage=NO_USAGE,
            type=f"{self._prefix}.completed",
        )
        return sse.serialize_event(completed.type, completed)


def _size(request: ImageRequest) -> str:
    return f"{request.payload.width}x{request.payload.height}"


def _as_image_body(body: GenerationsRequestBody, strength: float | None) -> ImageRequestBody:
    if body.response_format == "url":
        raise InvalidField(
            'response_format is "url"; allowed is "b64_json", because only images of jobs are stored (POST /v1/jobs).',
            field="response_format",
        )
    width, height = _parse_size(body.size)
    return ImageRequestBody(
        prompt=body.prompt,
        negative_prompt=body.negative_prompt,
        seed=body.seed,
        width=width,
        height=height,
        inference_steps=body.inference_steps,
        guidance_scale=body.guidance_scale,
        n=1 if body.n is None else body.n,
        scheduler=body.scheduler,
        format=body.output_format or "png",
        model=body.model,
        priority=body.priority,
        deadline_ms=body.deadline_ms,
        metadata=body.metadata,
        stream=bool(body.stream),
        partial_images=body.partial_images or 0,
        loras=body.loras,
        controls=body.controls,
        reference_images=body.reference_images,
        refiner=body.refiner,
        strength=strength,
    )


def _parse_size(size: str | None) -> tuple[int | None, int | None]:
    if size in (None, "auto"):
        return None, None
    sides = re.fullmatch(r"(\d{1,6})x(\d{1,6})", size, re.ASCII)
    if sides is None:
        raise InvalidField(
            f'size is {short_repr(size)}; allowed are "auto" and widthxheight, such as "512x512".', field="size"
        )
    return int(sides[1]), int(sides[2])


def _generations_response(result: GenerationResult, request_id: str, b64_files: list[str]) -> GenerationsResponse:
    request = result.request
    return GenerationsResponse(
        created=int(time.time()),
        data=[GeneratedImage(b64_file, request.payload.seed + index) for index, b64_file in enumerate(b64_files)],
        output_format=result.admitted.file_format,
        size=_size(request),
        model=result.admitted.spec.name,
        request_id=request_id,
        timings=result.timings,
    )
