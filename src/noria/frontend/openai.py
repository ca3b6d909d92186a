"""OpenAI's image route, for clients that speak it already: `POST /v1/images/generations`, `GET /v1/models`.

The unmodified openai-python client works. What OpenAI has and a diffusion model has not (quality, style, …) is accepted and
ignored; what would change the answer's form (url, stream) is refused in words; Noria's own fields come by `extra_body`.
"""

import re
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidField, ModelNotFound, shown
from noria.frontend.bodies import read_json
from noria.frontend.images import AnswerTimings, Drawing, Images
from noria.request import ImageBody, ImageFormat

ALIAS = "noria"  # a name that is always served, for clients that cannot leave `model` out


class GenerationsBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/images/generations`: OpenAI's fields, then Noria's own."""

    prompt: str
    model: str | None = None
    n: int | None = None
    size: str | None = None
    output_format: ImageFormat | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    partial_images: int | None = None
    quality: str | None = None
    style: str | None = None
    background: str | None = None
    moderation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    negative_prompt: str = ""
    inference_steps: int | None = None
    guidance_scale: float | None = None
    scheduler: str | None = None


IGNORED = ("quality", "style", "background", "moderation", "user", "safety_identifier")


class GeneratedImage(Struct, frozen=True):
    """One image of a `GenerationsAnswer`."""

    b64_json: str
    seed: int


class GenerationsAnswer(Struct, frozen=True):
    """OpenAI's answer, with Noria's additions at the end."""

    created: int  # Unix time, s
    data: list[GeneratedImage]
    output_format: ImageFormat
    size: str
    model: str
    request_id: str
    timings: AnswerTimings


class ModelCard(Struct, frozen=True):
    """A model as OpenAI describes one."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "noria"


class ModelList(Struct, frozen=True):
    """The answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class OpenAI:
    """The routes under /v1."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._created = int(time.time())

    async def generations(self, http: Request) -> Response:
        """Images for a prompt, in base64."""
        body = await read_json(http, GenerationsBody, self._images.max_body_bytes)
        self._check_model(body.model)
        wish = _as_image_body(body)
        try:
            drawing = await self._images.draw(http, wish, quality=body.output_compression)
        except InvalidField as error:
            if error.field in ("width", "height"):  # this body has no such fields
                error.field = "size"
            raise
        return _json(_answer(drawing, http.state.request_id, await self._images.in_base64(drawing)), drawing.headers)

    async def models(self, _: Request) -> Response:
        """The model served."""
        return _json(ModelList([self._card()]))

    async def model(self, http: Request) -> Response:
        """One model by its name, or by the alias."""
        self._check_model(http.path_params["model"])
        return _json(self._card())

    def _card(self) -> ModelCard:
        return ModelCard(self._images.spec.name, self._created)

    def _check_model(self, name: str | None) -> None:
        served = self._images.spec.name
        if name not in (None, served, ALIAS):
            raise ModelNotFound(
                f"model {shown(name)} is not served here; {served!r} is (or leave it out, or say {ALIAS!r}).",
                field="model",
            )


def _as_image_body(body: GenerationsBody) -> ImageBody:
    if body.response_format == "url":
        raise InvalidField(
            'response_format is "url"; only "b64_json" is served: images are not stored.', field="response_format"
        )
    if body.stream:
        raise InvalidField("stream is true; streaming is not supported yet, leave it out.", field="stream")
    if body.partial_images:
        raise InvalidField(
            f"partial_images is {body.partial_images}; they are not supported yet, leave it out.",
            field="partial_images",
        )
    width, height = _sides(body.size)
    return ImageBody(
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
    )


def _sides(size: str | None) -> tuple[int | None, int | None]:
    if size in (None, "auto"):
        return None, None
    sides = re.fullmatch(r"(\d{1,6})x(\d{1,6})", size, re.ASCII)
    if sides is None:
        raise InvalidField(
            f'size is {shown(size)}; allowed are "auto" and widthxheight, such as "512x512".', field="size"
        )
    return int(sides[1]), int(sides[2])


def _answer(drawing: Drawing, request_id: str, texts: list[str]) -> GenerationsAnswer:
    request = drawing.request
    return GenerationsAnswer(
        created=int(time.time()),
        data=[GeneratedImage(text, request.seed + index) for index, text in enumerate(texts)],
        output_format=drawing.file_format,
        size=f"{request.width_px}x{request.height_px}",
        model=drawing.model,
        request_id=request_id,
        timings=drawing.timings,
    )


def _json(answer: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)
