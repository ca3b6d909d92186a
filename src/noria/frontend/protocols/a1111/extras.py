"""A1111's extras: images that are only enlarged, and the list of what enlarges them."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidField, NoriaError, RequestError, short_repr
from noria.errors.problems import Problems, each_part
from noria.frontend.http.body import JsonBodyReader, apply_headers, decode_with_ignored
from noria.frontend.http.json_response import json_response
from noria.frontend.protocols.a1111.off_values import Feature, features_on, is_empty, is_off
from noria.frontend.protocols.a1111.tasks import A1111Tasks
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.request_validation import Limits, check_range
from noria.frontend.services.images.upscaling import EnlargingSettings, Size, check_urgency, enlarge
from noria.images.image_file import MAX_SIDE_PX
from noria.models.adapters.upscaler_folders import FILTERS
from noria.protocol.diffusion import DiffusionModelSpec, PixelUpscaler
from noria.protocol.request import ImageFormat, ImageRequestBody

EXTRAS_LIMITS: Mapping[str, Limits] = {
    "resize_mode": Limits(0, 1, 0),
    "upscaling_resize": Limits(1, 8, 2),  # as A1111's page has it
    "upscaling_resize_w": Limits(1, MAX_SIDE_PX, 512),
    "upscaling_resize_h": Limits(1, MAX_SIDE_PX, 512),
}
_MULTIPLE_PX = 8  # to which A1111 rounds sides down that it scales
_UNSUPPORTED: Mapping[str, Feature] = {
    "gfpgan_visibility": ("face restoration", ()),
    "codeformer_visibility": ("face restoration", ()),
}
_NO_BODY = ImageRequestBody(prompt="")
_SECOND = "extras_upscaler_2_visibility"


class Extras(Struct, frozen=True):
    """The supported fields of A1111's extras, besides images; `None` means A1111's default."""

    resize_mode: int | None = None
    upscaling_resize: float | None = None
    upscaling_resize_w: int | None = None
    upscaling_resize_h: int | None = None
    upscaling_crop: bool | None = None
    upscaler_1: str | None = None


class ExtraSingleImage(Extras, frozen=True):
    """The supported fields of `POST /sdapi/v1/extra-single-image`."""

    image: str | None = None


class ExtraFile(Struct, frozen=True):
    """An image of `ExtraBatchImages`."""

    data: str
    name: str = ""


class ExtraBatchImages(Extras, frozen=True):
    """The supported fields of `POST /sdapi/v1/extra-batch-images`."""

    imageList: list[ExtraFile] | None = None


class ExtraSingleImageResponse(Struct, frozen=True):
    """The enlarged image, a file in base64."""

    image: str
    html_info: str = ""


class ExtraBatchImagesResponse(Struct, frozen=True):
    """The enlarged images, files in base64."""

    images: list[str]
    html_info: str = ""


EXTRAS_FIELDS = {
    "image": "a PNG, WebP or JPEG file in base64, or as a data: URL",
    "imageList": "such files as `data`",
    "resize_mode": "0: by `upscaling_resize`, 1: to `upscaling_resize_w` and `upscaling_resize_h`",
    "upscaling_resize": "how many times as wide and high the result is; sides are rounded down to multiples of 8",
    "upscaling_resize_w": "the width of the result in pixels; 512 by default",
    "upscaling_resize_h": "its height",
    "upscaling_crop": "whether an image of other proportions is cut to this size; else one of its sides is larger. "
    "True by default",
    "upscaler_1": "a name of `upscalers`; None: the image keeps its size",
}

BodyT = TypeVar("BodyT", bound=Extras)


class ExtrasRoutes:
    """The routes of A1111's extras."""

    def __init__(
        self,
        generation_service: GenerationService,
        body_reader: JsonBodyReader,
        tasks: A1111Tasks,
        selected_model: Callable[[Request], DiffusionModelSpec],
        file_format_of: Callable[[Request], ImageFormat],
    ) -> None:
        """The functions return the model and the file format that a client has selected."""
        self._generation_service, self._body_reader, self._tasks = generation_service, body_reader, tasks
        self._selected_model, self._file_format_of = selected_model, file_format_of
        self._folders = generation_service.folders.upscalers

    async def upscalers(self, _: Request) -> Response:
        """List the upscalers of pixels, without their folders."""
        files = await asyncio.to_thread(self._folders.files)
        of_filter = {
            "model_name": None,
            "model_path": None,
            "model_url": None,
            "scale": 4,
        }  # A1111's scale of all three
        of_file = {"model_url": None, "scale": None}
        return json_response(
            [{"name": name} | of_filter for name in ("None", *FILTERS)]
            + [{"name": name, "model_name": name, "model_path": each.name} | of_file for name, each in files.items()]
        )

    async def single_image(self, http: Request) -> Response:
        """Enlarge an image; returns it in base64."""
        (image,) = await self._enlarge(http, ExtraSingleImage, _single_image)
        return json_response(ExtraSingleImageResponse(image))

    async def batch_images(self, http: Request) -> Response:
        """Enlarge images; returns them in base64."""
        return json_response(ExtraBatchImagesResponse(await self._enlarge(http, ExtraBatchImages, self._batch_images)))

    async def _enlarge(
        self, http: Request, body_type: type[BodyT], images_of: Callable[[BodyT], list[str]]
    ) -> list[str]:
        problems, service, started = Problems(), self._generation_service, time.monotonic()
        context = http.state.context
        with contextlib.ExitStack() as slots:
            raw = await self._body_reader.receive(http, slots)
            body, sent = decode_with_ignored(
                raw,
                body_type,
                strict=False,
                prepare=lambda fields: _without_empty(fields, body_type),
                problems=problems,
            )
            problems.add(*_features_on(sent), are_of_form=True)
            images = problems.attempt(functools.partial(images_of, body), [])
            urgency = problems.attempt(
                lambda: check_urgency(apply_headers(_NO_BODY, http.headers), context, service.config.request_timeout_s),
                _NO_BODY,
            )
            upscaler, size_of = await asyncio.to_thread(self._settings, body, problems)
            try:
                problems.raise_all()
            except NoriaError as error:
                service.record_rejection(context, urgency, None, error)
                raise
            self._body_reader.check_length(raw, *images)
            del raw, sent, body
        settings, files = EnlargingSettings(upscaler, size_of, self._file_format_of(http), urgency, started), []
        for image in images:  # one after the other: their pixels take memory
            try:
                files += await enlarge(
                    service, context, lambda: self._selected_model(http), self._tasks.generate, image, settings
                )
            except RequestError as error:
                raise each_part(error, _in_a1111_terms) from None
        return await service.as_base64(files)

    def _batch_images(self, body: ExtraBatchImages) -> list[str]:
        images, limit = [each.data for each in body.imageList or ()], self._generation_service.config.max_images
        if not 1 <= len(images) <= limit:
            raise InvalidField(f"imageList has {len(images)} images; allowed are 1 to {limit}.", field="imageList")
        return images

    def _settings(self, body: Extras, problems: Problems) -> tuple[PixelUpscaler | None, Callable[[Size], Size]]:
        """Return by what, and to which size, the images of `body` are enlarged; adds to `problems`."""

        def checked(name: str) -> float:
            limit, got = EXTRAS_LIMITS[name], getattr(body, name)
            return problems.attempt(lambda: check_range(name, limit.default if got is None else got, limit), 1)

        scale, sides = checked("upscaling_resize"), tuple(map(checked, ("upscaling_resize_w", "upscaling_resize_h")))
        is_to_size, crops = checked("resize_mode") == 1, body.upscaling_crop is not False

        def size_of(size_px: Size) -> Size:
            if is_to_size and crops:
                return int(sides[0]), int(sides[1])
            times = max(new / old for new, old in zip(sides, size_px, strict=True)) if is_to_size else scale
            width, height = (max(_MULTIPLE_PX, int(side * times) // _MULTIPLE_PX * _MULTIPLE_PX) for side in size_px)
            return width, height

        name = body.upscaler_1 or ""
        upscaler = None if is_off(name) else problems.attempt(lambda: self._folders.complete(name, "upscaler_1"), None)
        return upscaler, size_of


def _without_empty(fields: Mapping[str, Any], body_type: type[Extras]) -> dict[str, Any]:
    known = body_type.__struct_fields__
    return {name: value for name, value in fields.items() if name in known and (value == [] or not is_empty(value))}


def _features_on(sent: Mapping[str, Any]) -> list[InvalidField]:
    """Return an error for each feature of a body that is not supported."""
    errors = features_on(sent, _UNSUPPORTED)
    second = sent.get("upscaler_2")
    if not is_off(second) and not is_off(sent.get(_SECOND)):
        message = (
            f"upscaler_2 is {short_repr(second)}; a second upscaler is not supported: send 'None', or {_SECOND} 0."
        )
        errors.append(InvalidField(message, field="upscaler_2"))
    return errors


def _single_image(body: ExtraSingleImage) -> list[str]:
    if body.image is None:
        raise InvalidField("image is missing; send a PNG, WebP or JPEG file in base64.", field="image")
    return [body.image]


def _in_a1111_terms(error: RequestError) -> RequestError:
    """Return an error of an engine, which names the field of a payload, with A1111's field."""
    if error.field != "upscaling":
        return error
    return type(error)("upscaler_1" + error.message.removeprefix("upscaling"), field="upscaler_1")
