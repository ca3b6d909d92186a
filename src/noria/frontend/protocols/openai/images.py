"""OpenAI's image API: `POST /v1/images/generations`.

The unmodified openai-python client works. Fields that have no meaning for a diffusion model (quality, style, …) are
accepted and ignored; `response_format: "url"` is rejected; Noria's own fields are sent in `extra_body`. The body may
also be a form, whose files `control` are the images of `controls`, in their order, and `ip_adapter_image` is that of
`ip_adapter`.
"""

import contextlib
import copy
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidField, RequestError, short_repr
from noria.errors.problems import Problems, each_part
from noria.frontend.bodies.forms import is_form, read_form
from noria.frontend.bodies.image_fields import IMAGE_FIELDS, describe_form, describe_settings
from noria.frontend.bodies.image_stream import stream_generation
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.results import PreviewImage, Update
from noria.frontend.http import sse
from noria.frontend.http.body import FORM, JSON, JsonBodyReader, apply_headers, decode
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import EVENT_STREAM, REQUEST_ID, JsonObject, Operation, Served
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import (
    AdmittedRequest,
    GenerationResult,
    ImageFacts,
    ResponseTimings,
)
from noria.frontend.services.images.image_writer import preview_as_base64
from noria.frontend.services.images.start_images import LoadFiles
from noria.protocol.diffusion import Lora, PromptSyntax, Refinement
from noria.protocol.request import (
    ControlField,
    ImageFormat,
    ImageRequest,
    ImageRequestBody,
    IpAdapterField,
    Priority,
)

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
    calls: float | None = None
    prompt_syntax: PromptSyntax | None = None
    clip_skip: int | None = None
    priority: Priority | None = None
    deadline_ms: int | None = None
    metadata: bool = True
    loras: tuple[Lora, ...] = ()
    controls: tuple[ControlField, ...] = ()
    reference_images: tuple[str, ...] = ()
    ip_adapter: IpAdapterField | None = None
    refiner: Refinement | None = None


_SAME_FIELDS = tuple(set(GenerationsRequestBody.__struct_fields__) & set(ImageRequestBody.__struct_fields__))
"""The fields that `POST /t2i` has under the same names."""

IGNORED_FIELDS = ("quality", "style", "background", "moderation", "user", "safety_identifier")

OPENAI_FIELDS = (
    IMAGE_FIELDS
    | {
        "size": "`WIDTHxHEIGHT` in pixels, or `auto` for the model's default",
        "output_format": "the image file's format",
        "output_compression": "quality of webp and jpeg, 0 to 100; no effect on png",
        "response_format": "`b64_json`; `url` is rejected, because only images of jobs are stored",
    }
    | dict.fromkeys((*IGNORED_FIELDS, "input_fidelity"), "accepted for OpenAI's clients and ignored")
    | {"user": "whose share of an engine the request takes, on a server without API keys"}
)
"""The descriptions of the fields of bodies of OpenAI's images."""


class GeneratedImage(Struct, frozen=True):
    """An image of a `GenerationsResponse`."""

    b64_json: str
    seed: int
    safety_score: float | UnsetType = UNSET  # 0 to 1, of a model with a safety classifier


class GenerationsResponse(Struct, frozen=True):
    """OpenAI's response, with Noria's additions at the end."""

    created: int  # Unix time, s
    data: list[GeneratedImage]
    output_format: ImageFormat
    size: str
    model: str
    request_id: str
    num_truncated_tokens: int
    timings: ResponseTimings
    refused_images: list[ImageFacts] | UnsetType = UNSET  # by the model's safety classifier; absent: none


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
    num_truncated_tokens: int
    timings: ResponseTimings
    usage: dict[str, Any]
    quality: str = "auto"
    background: str = "opaque"
    safety_score: float | UnsetType = UNSET
    refused_images: list[ImageFacts] | UnsetType = UNSET  # those of the whole request
    type: str  # image_generation.completed or image_edit.completed


_NO_INPUT = {"image_tokens": 0, "text_tokens": 0}
NO_USAGE = {"input_tokens": 0, "input_tokens_details": _NO_INPUT, "output_tokens": 0, "total_tokens": 0}


def describe_openai_settings(body: JsonObject, served: Served) -> None:
    """Add bounds, samplers, sizes and the `response_format` to the schema of a body of OpenAI's images."""
    describe_settings(body, served)
    sides, properties = "[0-9]{1,6}", body["properties"]
    if (spec := served.spec) is not None:
        sides = f"({'|'.join(map(str, range(spec.min_side_px, spec.max_side_px + 1, spec.multiple_px)))})"
    properties["size"] |= {"anyOf": [{"type": "string", "pattern": f"^(auto|{sides}x{sides})?$"}, {"type": "null"}]}
    properties["response_format"]["anyOf"] = [{"enum": ["b64_json"]}, {"type": "null"}]


def _describe_generations(schemas: dict[str, JsonObject], served: Served) -> None:
    body = schemas[GenerationsRequestBody.__name__]
    describe_openai_settings(body, served)
    schemas["GenerationsRequestForm"] = form = copy.deepcopy(body)
    describe_form(form, starts=False)


class GenerationRoutes:
    """The route `POST /v1/images/generations`."""

    def __init__(self, generation_service: GenerationService, body_reader: JsonBodyReader) -> None:
        self._generation_service, self._body_reader = generation_service, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operation to serve."""
        return [
            Operation(
                method="POST",
                path="/v1/images/generations",
                handler=self._generations,
                group="Generate",
                scopes=("generate",),
                summary="Generate images with OpenAI's API",
                description="The unmodified OpenAI clients work; send Noria's own fields in `extra_body`.",
                parameters=[REQUEST_ID],
                body={JSON: GenerationsRequestBody, FORM: {"$ref": "#/components/schemas/GenerationsRequestForm"}},
                fields=OPENAI_FIELDS,
                example={"prompt": "a red circle above a blue square", "n": 2, "output_format": "webp"},
                response={JSON: GenerationsResponse} | EVENT_STREAM,
                describe=_describe_generations,
            )
        ]

    async def _generations(self, http: Request) -> Response:
        service, load_files, problems = self._generation_service, None, Problems()
        with contextlib.ExitStack() as slots:
            raw = await self._body_reader.receive(http, slots, JSON, FORM)
            if is_form(http):
                body, load_files = await read_form(http, service.upload_threads, raw, GenerationsRequestBody, problems)
            else:
                body = decode(raw, GenerationsRequestBody, problems=problems)
                images = [*(control.image for control in body.controls), body.ip_adapter and body.ip_adapter.image]
                if not problems.are_there:
                    self._body_reader.check_length(raw, *images, *body.reference_images)
                del images
            admitting = admit_generation(service, body, http.state.context, http.headers, problems, load_files)
            del raw, body, load_files  # with images they are long
            admitted = await admitting
        return await respond(http, self._generation_service, admitted, "image_generation")


async def respond(
    http: Request, generation_service: GenerationService, admitted: AdmittedRequest, event_prefix: EventPrefix
) -> Response:
    """Generate the images; return them in base64 or, if the request asks for it, as a stream of events."""
    if admitted.body.stream:
        frames = _EventFrames(generation_service, admitted, event_prefix)
        return await stream_generation(http, generation_service, admitted, frames)
    result = await generation_service.generate(admitted)
    b64_files = await generation_service.as_base64(result.files)
    return json_response(_generations_response(result, http.state.request_id, b64_files), headers=result.headers)


async def admit_generation(
    generation_service: GenerationService,
    body: GenerationsRequestBody,
    context: RequestContext,
    headers: Mapping[str, str],
    problems: Problems,
    load_files: LoadFiles | None = None,
    strength: float | None = None,
    job_id: str | None = None,
) -> AdmittedRequest:
    """Validate `body`; raises as `GenerationService.admit` does, with the field names of this body.

    `load_files` and `strength` are of a start image; `problems` are those that were found before.
    """
    context.name_user(body.user)
    image_body = apply_headers(_as_image_body(body, strength, problems), headers)
    admitting = generation_service.admit(
        image_body, context, body.output_compression, load_files, job_id=job_id, problems=problems
    )
    del body, image_body, load_files  # with images they are long
    try:
        return await admitting
    except InvalidField as error:
        raise each_part(error, _in_terms_of_generations) from None


def _in_terms_of_generations(error: RequestError) -> RequestError:
    """Return `error` with the name of this body's field in place of those of its sides."""
    return type(error)(error.message, field="size") if error.field in ("width", "height") else error


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
                b64_files = await self._generation_service.as_base64(update.files)
                return [self._completed(update, *each) for each in zip(update.images, b64_files, strict=True)]
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

    def _completed(self, result: GenerationResult, image: ImageFacts, b64_file: str) -> bytes:
        completed = CompletedImage(
            b64_json=b64_file,
            index=image.index,
            seed=image.seed,
            safety_score=image.safety_score,
            refused_images=result.refused or UNSET,
            created_at=int(time.time()),
            size=_size(result.request),
            output_format=self._admitted.file_format,
            model=self._admitted.spec.name,
            request_id=result.request.request_id,
            num_truncated_tokens=result.num_truncated_tokens,
            timings=result.timings,
            usage=NO_USAGE,
            type=f"{self._prefix}.completed",
        )
        return sse.serialize_event(completed.type, completed)


def _size(request: ImageRequest) -> str:
    return f"{request.payload.width}x{request.payload.height}"


def _as_image_body(body: GenerationsRequestBody, strength: float | None, problems: Problems) -> ImageRequestBody:
    if body.response_format == "url":
        stored = "because only images of jobs are stored (POST /v1/jobs)"
        problems.add(
            InvalidField(f'response_format is "url"; allowed is "b64_json", {stored}.', field="response_format")
        )
    width, height = problems.attempt(lambda: _parse_size(body.size), (None, None))
    changed = {
        "width": width,
        "height": height,
        "n": 1 if body.n is None else body.n,
        "scheduler": body.scheduler or None,
        "format": body.output_format or "png",
        "stream": bool(body.stream),
        "partial_images": body.partial_images or 0,
        "strength": strength,
    }
    return ImageRequestBody(**{name: getattr(body, name) for name in _SAME_FIELDS} | changed)


def _parse_size(size: str | None) -> tuple[int | None, int | None]:
    if size in (None, "", "auto"):
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
        data=[
            GeneratedImage(b64_file, image.seed, image.safety_score)
            for image, b64_file in zip(result.images, b64_files, strict=True)
        ],
        output_format=result.task.file_format,
        size=_size(request),
        model=result.task.spec.name,
        request_id=request_id,
        num_truncated_tokens=result.num_truncated_tokens,
        timings=result.timings,
        refused_images=result.refused or UNSET,
    )
