"""`POST /t2i`: a prompt in, an image out. `Images.draw` is what every route that makes images calls.

A request's way: `bodies.py` (JSON to `ImageBody`), `admission.py` (to `ImageRequest`), `engine_link.py` (to pixels), `encoding.py`
(to a file), and back as the file itself, or as JSON where there are several or the client accepts only that.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.config import FrontendConfig
from noria.errors import InternalError, NoriaError, RequestCancelled
from noria.frontend.admission import admit
from noria.frontend.bodies import read_json
from noria.frontend.encoding import base64_texts, encode_images
from noria.frontend.engine_link import EngineLink
from noria.observe import metrics
from noria.request import ImageBody, ImageFormat, ImageRequest
from noria.spec import ModelSpec

T = TypeVar("T")


class AnswerTimings(Struct, frozen=True):
    """Where the time went, in seconds. `encode_s` is the prompt's, `decode_s` latents to pixels, `postprocess_s` pixels to files."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    postprocess_s: float
    total_s: float


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
    timings: AnswerTimings
    images: list[AnsweredImage]


@dataclass(frozen=True)
class Drawing:
    """A request and its finished files, ready to be answered in any protocol."""

    request: ImageRequest
    model: str
    file_format: ImageFormat
    files: list[bytes]
    timings: AnswerTimings
    num_steps_run: int

    @property
    def headers(self) -> dict[str, str]:
        """What every answer with images carries, whatever its body."""
        stages = ("queue", "encode", "denoise", "decode", "postprocess")
        spent = ", ".join(f"{stage};dur={getattr(self.timings, stage + '_s') * 1000:.1f}" for stage in stages)
        return {
            "X-Noria-Seed": str(self.request.seed),
            "X-Noria-Model": quote(self.model, safe="/:@+ "),  # a header bears neither é nor a line's end
            "Server-Timing": spent,
        }


def _random_seed() -> int:
    return secrets.randbelow(2**32)  # short enough to survive JavaScript's numbers and copying by hand


class Images:
    """Draws images for the routes, and is the route `POST /t2i` itself."""

    def __init__(self, link: EngineLink, config: FrontendConfig, draw_seed: Callable[[], int] = _random_seed) -> None:
        self._link = link
        self._config = config
        self._draw_seed = draw_seed
        # Few: encoding is all CPU, and the engine wants the cores too.
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="encode")

    async def t2i(self, http: Request) -> Response:
        """One image as a file; several, or one for a client that takes no image, as `ImagesAnswer`."""
        body = await read_json(http, ImageBody, self._config.max_body_bytes)
        drawing = await self.draw(http, body)
        if body.n == 1 and not _wants_json(http.headers.get("accept", "")):
            return Response(drawing.files[0], media_type=f"image/{drawing.file_format}", headers=drawing.headers)
        answer = _answer(drawing, http.state.request_id, await self.in_base64(drawing))
        return Response(msgspec.json.encode(answer), media_type="application/json", headers=drawing.headers)

    async def draw(self, http: Request, body: ImageBody, quality: int | None = None) -> Drawing:
        """Everything between a decoded body and finished files; `quality` is the WebP's or JPEG's.

        Raises:
            NoriaError: any refusal or failure; RequestCancelled when the client of `http` left.

        """
        spec = self.spec
        with _counted(spec.name):
            started = time.perf_counter()
            request = admit(body, spec, self._config, http.state.request_id, self._draw_seed)
            result = await _unless_disconnected(http, self._link.submit(request))
            drawn = time.perf_counter()
            loop = asyncio.get_running_loop()
            files = await loop.run_in_executor(self._pool, encode_images, result.images, body.format, quality)
            done = time.perf_counter()
            engine = msgspec.structs.asdict(result.timings)
            timings = AnswerTimings(**engine, postprocess_s=done - drawn, total_s=done - started)
            _record(spec, timings, len(files))
            return Drawing(request, spec.name, body.format, files, timings, result.num_steps_run)

    async def in_base64(self, drawing: Drawing) -> list[str]:
        """The drawing's files as JSON carries them."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, base64_texts, drawing.files)

    @property
    def spec(self) -> ModelSpec:
        """The model served; raises EngineUnavailable while no engine has told."""
        if self._link.spec is None:
            raise self._link.unavailable()
        return self._link.spec

    @property
    def max_body_bytes(self) -> int:
        """The longest body that any route reads."""
        return self._config.max_body_bytes


def _wants_json(accept: str) -> bool:
    """Whether a client that sent this Accept header takes JSON but no image; most take anything, whatever they name first."""
    kinds = {kind.partition(";")[0].strip().lower() for kind in accept.split(",")}
    return "application/json" in kinds and not any(kind == "*/*" or kind.startswith("image/") for kind in kinds)


def _answer(drawing: Drawing, request_id: str, texts: list[str]) -> ImagesAnswer:
    request = drawing.request
    images = [
        AnsweredImage(index, request.seed + index, drawing.file_format, request.width_px, request.height_px, text)
        for index, text in enumerate(texts)
    ]
    return ImagesAnswer(
        request_id=request_id,
        model=drawing.model,
        created=int(time.time()),
        inference_steps=request.num_steps,
        guidance_scale=request.guidance_scale,
        scheduler=request.scheduler,
        num_steps_run=drawing.num_steps_run,
        timings=drawing.timings,
        images=images,
    )


async def _unless_disconnected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; the body of `http` must have been read."""

    async def client_left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(client_left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestCancelled("the client closed the connection.")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


@contextlib.contextmanager
def _counted(model: str) -> Iterator[None]:
    """Count the request that runs inside, by its outcome."""
    outcome = InternalError.code
    try:
        with metrics.INFLIGHT.track_inprogress():
            yield
        outcome = "ok"
    except NoriaError as error:
        outcome = error.code
        raise
    except asyncio.CancelledError:
        outcome = RequestCancelled.code
        raise
    finally:
        metrics.REQUESTS.labels(model, outcome).inc()


def _record(spec: ModelSpec, timings: AnswerTimings, num_images: int) -> None:
    metrics.IMAGES.labels(spec.name).inc(num_images)
    metrics.REQUEST_SECONDS.labels(spec.name).observe(timings.total_s)
    for stage in ("queue", "encode", "denoise", "decode", "postprocess"):
        metrics.STAGE_SECONDS.labels(stage).observe(getattr(timings, f"{stage}_s"))
