"""`POST /t2i`: a prompt in, an image out.

A request's way: `bodies.py` (JSON to `ImageBody`), `studio.py` (to files), and back as the file itself, as JSON where there are
several or the client accepts only that, or as a stream of events where it asks for one.
"""

import time

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.frontend import streaming
from noria.frontend.admission import heed
from noria.frontend.bodies import Bodies
from noria.frontend.encoding import base64_texts, encode_preview
from noria.frontend.engine_link import PreviewImage, Progress, Update
from noria.frontend.leaving import unless_disconnected
from noria.frontend.studio import AnswerTimings, Drawing, Studio, Wish
from noria.request import ImageBody, ImageFormat


class AnsweredImage(Struct, frozen=True):
    """One image of an `ImagesAnswer`: the file in base64, and the seed that draws it again."""

    index: int
    seed: int
    format: ImageFormat
    width: int
    height: int
    b64_json: str


class ImagesAnswer(Struct, frozen=True):
    """The JSON answer of `POST /t2i`; the settings are those used, defaults filled in."""

    request_id: str
    model: str
    created: int  # Unix time, s
    inference_steps: int
    guidance_scale: float
    scheduler: str
    num_steps_run: int
    mean_batch: float
    timings: AnswerTimings
    images: list[AnsweredImage]


class AnsweredPreview(Struct, frozen=True):
    """An event of a stream: what image `index` is going to be, as far as `step` tells; a few pixels wide, to be shown enlarged."""

    index: int
    step: int
    format: ImageFormat
    width: int
    height: int
    b64_json: str


class Images:
    """The route `POST /t2i`."""

    def __init__(self, studio: Studio, bodies: Bodies) -> None:
        self._studio, self._bodies = studio, bodies

    async def t2i(self, http: Request) -> Response:
        """One image as a file; several, or one for a client that takes no image, as `ImagesAnswer`."""
        body = await self._bodies.read_json(http, ImageBody)
        wish = self._studio.admit(heed(body, http.headers), http.state.caller, http.state.request_id)
        if body.stream:
            return await streaming.watch(http, self._studio, wish, lambda happening: self._frames(happening, wish))
        drawing = await unless_disconnected(http, self._studio.draw(wish))
        if body.n == 1 and not _wants_json(http.headers.get("accept", "")):
            return Response(drawing.files[0], media_type=f"image/{wish.file_format}", headers=drawing.headers)
        answer = images_answer(drawing, http.state.request_id, await self._studio.in_base64(drawing))
        return Response(msgspec.json.encode(answer), media_type="application/json", headers=drawing.headers)

    async def _frames(self, happening: Update | Drawing, wish: Wish) -> list[bytes]:
        match happening:
            case Progress():
                return [streaming.event("progress", happening)]
            case PreviewImage():
                (text,) = base64_texts([encode_preview(happening, wish.file_format)])
                size = happening.width_px, happening.height_px
                shown = AnsweredPreview(happening.index, happening.step, wish.file_format, *size, text)
                return [streaming.event("preview", shown)]
            case Drawing():
                texts = await self._studio.in_base64(happening)
                return [streaming.event("finished", images_answer(happening, wish.request.request_id, texts))]


def _wants_json(accept: str) -> bool:
    """Whether a client that sent this Accept header takes JSON but no image; most take anything, whatever they name first."""
    kinds = {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}
    return "application/json" in kinds and not any(kind == "*/*" or kind.startswith("image/") for kind in kinds)


def images_answer(drawing: Drawing, request_id: str, texts: list[str]) -> ImagesAnswer:
    """`drawing` as JSON; `texts` are its files in base64."""
    request = drawing.request
    images = [
        AnsweredImage(index, request.seed + index, drawing.wish.file_format, request.width_px, request.height_px, text)
        for index, text in enumerate(texts)
    ]
    return ImagesAnswer(
        request_id=request_id,
        model=drawing.wish.spec.name,
        created=int(time.time()),
        inference_steps=request.num_steps,
        guidance_scale=request.guidance_scale,
        scheduler=request.scheduler,
        num_steps_run=drawing.num_steps_run,
        mean_batch=round(drawing.mean_batch, 2),
        timings=drawing.timings,
        images=images,
    )
