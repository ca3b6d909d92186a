"""`POST /t2i`: generates images from a prompt.

`http/body.py` decodes the body to an `ImageRequestBody`, or `forms.py` does if it is a form with files;
`services/images/generation.py` generates the files. The response is the file itself, JSON for several images or for a
client that accepts JSON only, or a stream of events if the request asks for one.
"""

import contextlib
import time

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from noria.errors.problems import Problems
from noria.frontend.bodies.forms import is_form, read_form
from noria.frontend.bodies.image_fields import IMAGE_FIELDS, describe_t2i
from noria.frontend.bodies.image_stream import stream_generation
from noria.frontend.engines.results import PreviewImage, ProgressUpdate, Update
from noria.frontend.http import sse
from noria.frontend.http.body import FORM, JSON, JsonBodyReader, apply_headers, decode
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import EVENT_STREAM, IMAGE_CONTENT, REQUEST_ID, Operation
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import (
    AdmittedRequest,
    GenerationResult,
    ImageFacts,
    ResponseTimings,
)
from noria.frontend.services.images.image_writer import preview_as_base64
from noria.protocol.request import ImageFormat, ImageRequestBody


class ResponseImage(Struct, frozen=True):
    """An image of an `ImagesResponse`: the file in base64, and the seed that generates it again."""

    index: int
    seed: int
    format: ImageFormat
    width: int
    height: int
    b64_json: str
    safety_score: float | UnsetType = UNSET  # 0 to 1, of a model with a safety classifier


class ImagesResponse(Struct, frozen=True):
    """The JSON response of `POST /t2i`; the settings are those used, with the defaults filled in."""

    request_id: str
    model: str
    created: int  # Unix time, s
    inference_steps: int
    guidance_scale: float
    scheduler: str
    num_steps_run: int
    mean_batch: float
    num_truncated_tokens: int
    timings: ResponseTimings
    images: list[ResponseImage]
    refused_images: list[ImageFacts] | UnsetType = UNSET  # by the model's safety classifier; absent: none


class PreviewEvent(Struct, frozen=True):
    """An event of a stream: a preview of image `index` after `step` steps, a few pixels wide, to be shown enlarged."""

    index: int
    step: int
    format: ImageFormat
    width: int
    height: int
    b64_json: str


class ImageRoutes:
    """The route `POST /t2i`."""

    def __init__(self, generation_service: GenerationService, body_reader: JsonBodyReader) -> None:
        self._generation_service, self._body_reader = generation_service, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operation to serve."""
        return [
            Operation(
                method="POST",
                path="/t2i",
                handler=self._t2i,
                group="Generate",
                scopes=("generate",),
                summary="Generate images",
                description="One image is a file, with its seed in X-Noria-Seed; several, or one for a client that "
                "accepts JSON but no image, are JSON.",
                parameters=[REQUEST_ID],
                body={JSON: ImageRequestBody, FORM: {"$ref": "#/components/schemas/ImageRequestForm"}},
                fields=IMAGE_FIELDS,
                example={"prompt": "a red circle above a blue square", "seed": 7},
                response=IMAGE_CONTENT | {JSON: ImagesResponse} | EVENT_STREAM,
                describe=describe_t2i,
            )
        ]

    async def _t2i(self, http: Request) -> Response:
        admitted = await self._admit(http)
        if admitted.body.stream:
            return await stream_generation(
                http, self._generation_service, admitted, lambda update: self._frames(update, admitted)
            )
        result = await self._generation_service.generate(admitted)
        if admitted.body.n == 1 and not _wants_json(http.headers.get("accept", "")):
            return Response(result.files[0], media_type=f"image/{admitted.file_format}", headers=result.headers)
        response = images_response(
            result, http.state.request_id, await self._generation_service.as_base64(result.files)
        )
        return json_response(response, headers=result.headers)

    async def _admit(self, http: Request) -> AdmittedRequest:
        service, load_files, problems = self._generation_service, None, Problems()
        with contextlib.ExitStack() as slots:
            raw = await self._body_reader.receive(http, slots, JSON, FORM)
            if is_form(http):
                body, load_files = await read_form(
                    http, service.upload_threads, raw, ImageRequestBody, problems, "white"
                )
            else:
                body = decode(raw, ImageRequestBody, problems=problems)
                if not problems.are_there:  # images in invalid fields are no longer known
                    self._body_reader.check_length(raw, *body.images)
            admitting = service.admit(
                apply_headers(body, http.headers), http.state.context, load_files=load_files, problems=problems
            )
            del raw, body, load_files  # with images they are long
            return await admitting

    async def _frames(self, update: Update | GenerationResult, admitted: AdmittedRequest) -> list[bytes]:
        match update:
            case ProgressUpdate():
                return [sse.serialize_event("progress", update)]
            case PreviewImage():
                b64_file = await preview_as_base64(update, admitted.file_format)
                size = update.width_px, update.height_px
                preview_event = PreviewEvent(update.index, update.step, admitted.file_format, *size, b64_file)
                return [sse.serialize_event("preview", preview_event)]
            case GenerationResult():
                b64_files = await self._generation_service.as_base64(update.files)
                return [
                    sse.serialize_event("finished", images_response(update, admitted.request.request_id, b64_files))
                ]


def _wants_json(accept: str) -> bool:
    """Whether this Accept header allows JSON but no image. Most clients allow `*/*` besides what they list."""
    media_types = {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}
    return "application/json" in media_types and not any(
        kind == "*/*" or kind.startswith("image/") for kind in media_types
    )


def images_response(result: GenerationResult, request_id: str, b64_files: list[str]) -> ImagesResponse:
    """Build the JSON response; `b64_files` are the result's files in base64."""
    request = result.request
    images = [
        ResponseImage(
            image.index,
            image.seed,
            result.task.file_format,
            request.payload.width,
            request.payload.height,
            b64_file,
            image.safety_score,
        )
        for image, b64_file in zip(result.images, b64_files, strict=True)
    ]
    return ImagesResponse(
        request_id=request_id,
        model=result.task.spec.name,
        created=int(time.time()),
        inference_steps=request.payload.inference_steps,
        guidance_scale=request.payload.guidance_scale,
        scheduler=request.payload.scheduler,
        num_steps_run=result.num_steps_run,
        mean_batch=round(result.mean_batch, 2),
        num_truncated_tokens=result.num_truncated_tokens,
        timings=result.timings,
        images=images,
        refused_images=result.refused or UNSET,
    )
