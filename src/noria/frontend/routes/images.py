"""`POST /t2i`: a prompt in, an image out.

A request's way: `bodies.py` (JSON to `ImageBody`), `studio.py` (to files), and back as the file itself, as JSON where there are
several or the client accepts only that, or as a stream of events where it asks for one.
"""

import time

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.frontend.engines.pool import PreviewImage, ProgressUpdate, Update
from noria.frontend.http import sse
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.disconnects import cancel_on_disconnect
from noria.frontend.services.admission import apply_headers
from noria.frontend.services.generation import AdmittedRequest, GenerationResult, GenerationService, ResponseTimings
from noria.frontend.services.image_writer import to_base64, write_preview
from noria.protocol.request import ImageFormat, ImageRequestBody


class ResponseImage(Struct, frozen=True):
    """One image of an `ImagesAnswer`: the file in base64, and the seed that draws it again."""

    index: int
    seed: int
    format: ImageFormat
    width: int
    height: int
    b64_json: str


class ImagesResponse(Struct, frozen=True):
    """The JSON answer of `POST /t2i`; the settings are those used, defaults filled in."""

    request_id: str
    model: str
    created: int  # Unix time, s
    inference_steps: int
    guidance_scale: float
    scheduler: str
    num_steps_run: int
    mean_batch: float
    timings: ResponseTimings
    images: list[ResponseImage]


class PreviewEvent(Struct, frozen=True):
    """An event of a stream: what image `index` is going to be, as far as `step` tells; a few pixels wide, to be shown enlarged."""

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

    async def t2i(self, http: Request) -> Response:
        """One image as a file; several, or one for a client that takes no image, as `ImagesAnswer`."""
        body = await self._body_reader.read_json(http, ImageRequestBody)
        admitted = self._generation_service.admit(
            apply_headers(body, http.headers), http.state.caller, http.state.request_id
        )
        if body.stream:
            return await sse.stream_generation(
                http, self._generation_service, admitted, lambda update: self._frames(update, admitted)
            )
        result = await cancel_on_disconnect(http, self._generation_service.generate(admitted))
        if body.n == 1 and not _wants_json(http.headers.get("accept", "")):
            return Response(result.files[0], media_type=f"image/{admitted.file_format}", headers=result.headers)
        response = images_response(
            result, http.state.request_id, await self._generation_service.files_as_base64(result)
        )
        return Response(msgspec.json.encode(response), media_type="application/json", headers=result.headers)

    async def _frames(self, update: Update | GenerationResult, admitted: AdmittedRequest) -> list[bytes]:
        match update:
            case ProgressUpdate():
                return [sse.serialize_event("progress", update)]
            case PreviewImage():
                (b64_file,) = to_base64([write_preview(update, admitted.file_format)])
                size = update.width_px, update.height_px
                preview_event = PreviewEvent(update.index, update.step, admitted.file_format, *size, b64_file)
                return [sse.serialize_event("preview", preview_event)]
            case GenerationResult():
                b64_files = await self._generation_service.files_as_base64(update)
                return [
                    sse.serialize_event("finished", images_response(update, admitted.request.request_id, b64_files))
                ]


def _wants_json(accept: str) -> bool:
    """Whether a client that sent this Accept header takes JSON but no image; most take anything, whatever they name first."""
    media_types = {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}
    return "application/json" in media_types and not any(
        kind == "*/*" or kind.startswith("image/") for kind in media_types
    )


def images_response(result: GenerationResult, request_id: str, b64_files: list[str]) -> ImagesResponse:
    """`drawing` as JSON; `texts` are its files in base64."""
    request = result.request
    images = [
        ResponseImage(
            index, request.seed + index, result.admitted.file_format, request.width_px, request.height_px, text
        )
        for index, text in enumerate(b64_files)
    ]
    return ImagesResponse(
        request_id=request_id,
        model=result.admitted.spec.name,
        created=int(time.time()),
        inference_steps=request.num_steps,
        guidance_scale=request.guidance_scale,
        scheduler=request.scheduler,
        num_steps_run=result.num_steps_run,
        mean_batch=round(result.mean_batch, 2),
        timings=result.timings,
        images=images,
    )
