"""Enlarges images that are sent: by a filter here, in threads, or by an upscaler in an engine, among its steps."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
from PIL import Image, ImageOps

from noria.errors import BodyTooLarge, InvalidField, NoriaError
from noria.frontend.access.quotas import InFlight
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.results import RawImage
from noria.frontend.engines.submission import RequestOutcome
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult
from noria.frontend.services.images.image_writer import write_images
from noria.frontend.services.images.request_validation import NO_IMAGES, Limits, check_range
from noria.frontend.services.images.start_images import decode_file, with_less_time
from noria.images.start_image import ImageFiles, StartImage
from noria.models.adapters.upscaler_folders import NEAREST
from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload, PixelUpscaler, Upscaling
from noria.protocol.request import EngineRequest, ImageFormat, ImageRequestBody

MAX_RESULT_PIXELS = 2**24
"""Pixels of a result: 4096 × 4096, whose file takes seconds to write."""

_RETRY_AFTER_S = 1.0  # as long as a filter takes

Size = tuple[int, int]
"""Width and height in pixels."""

Generate = Callable[[AdmittedRequest], Awaitable[GenerationResult]]


class EnlargingSettings(NamedTuple):
    """How images are enlarged."""

    upscaler: PixelUpscaler | None  # None: not at all
    size_of: Callable[[Size], Size]  # the size of the result, by that of the image
    file_format: ImageFormat
    body: ImageRequestBody  # its priority and deadline
    started: float  # when the request came, monotonic


class _OpenedImage(NamedTuple):
    rgb: bytes
    size_px: Size
    result_px: Size


async def enlarge(
    service: GenerationService,
    context: RequestContext,
    spec_of: Callable[[], DiffusionModelSpec],
    generate: Generate,
    text: str,
    settings: EnlargingSettings,
) -> list[bytes]:
    """Return the file of an image, sent in base64, in another size.

    An upscaler that has a file runs in an engine of the model that `spec_of` returns. A rejection is counted and
    logged, and each image counts for the quota.

    Raises:
        UnreadableImage: it is no image.
        BodyTooLarge: its file is too large.
        InvalidField: its result would be too large, or the upscaler cannot be used.
        ImageRefused: the model's safety classifier refuses the result.
        NoriaError: as `generate`.

    """
    upscaler, quota = settings.upscaler, context.api_client.images
    try:
        with quota.hold(1, time.monotonic(), _retry_after_s, in_flight=True):
            opened = await service.upload_threads.run(
                context.client, _open, text, settings, service.config.max_image_bytes
            )
        is_larger = any(new > old for new, old in zip(opened.result_px, opened.size_px, strict=True))
        if upscaler is not None and upscaler.digest is not None and is_larger:
            admitted = _admit(service, context, spec_of(), settings, opened, Upscaling(*opened.result_px, upscaler))
        else:
            admitted = None
    except NoriaError as error:
        service.record_rejection(context, settings.body, None, error)
        raise
    if admitted is not None:
        return (await generate(admitted)).files
    held, log_record = InFlight(quota, 1, time.monotonic(), _retry_after_s), context.log_record
    width, height = opened.size_px
    log_record.add(n=1, width=width, height=height)
    if upscaler is not None:
        log_record.add(upscaling="{}x{}:{}".format(*opened.result_px, upscaler.name))
    with RequestOutcome("", log_record, context.versions), held:
        loop, threads = asyncio.get_running_loop(), service.write_threads
        return await loop.run_in_executor(threads, _resize, opened, upscaler, settings.file_format)


def check_urgency(body: ImageRequestBody, context: RequestContext, request_timeout_s: float) -> ImageRequestBody:
    """Return `body` with the priority that its key allows. Raises InvalidField for it, and for its deadline."""
    if body.deadline_ms is not None:
        check_range("deadline_ms", body.deadline_ms, Limits(1, int(request_timeout_s * 1000), None))
    return msgspec.structs.replace(body, priority=context.api_client.allowed_priority(body.priority))


def _retry_after_s() -> float:
    return _RETRY_AFTER_S


def _admit(
    service: GenerationService,
    context: RequestContext,
    spec: DiffusionModelSpec,
    settings: EnlargingSettings,
    opened: _OpenedImage,
    upscaling: Upscaling,
) -> AdmittedRequest:
    """Return the request for an engine. Raises DeadlineExceeded."""
    body = settings.body
    request = EngineRequest(
        request_id=context.request_id,
        model=spec.name,
        payload=DiffusionPayload(
            prompt="",
            negative_prompt=None,
            seed=0,
            width=opened.size_px[0],
            height=opened.size_px[1],
            inference_steps=1,
            guidance_scale=1.0,
            scheduler=spec.default_scheduler,
            upscaling=upscaling,
        ),
        timeout_s=service.config.request_timeout_s,
        model_version=spec.fingerprint,
        client=context.api_client.name or "",
        priority=body.priority or "normal",
        deadline_s=None if body.deadline_ms is None else body.deadline_ms / 1000,
    )
    return AdmittedRequest(
        request=with_less_time(request, time.monotonic() - settings.started),
        spec=spec,
        file_format=settings.file_format,
        quality=None,
        metadata=False,
        data=opened.rgb,
        context=context,
        body=body,
        images=NO_IMAGES,
    )


def _open(text: str, settings: EnlargingSettings, max_bytes: int) -> _OpenedImage:
    file = decode_file("image", text)
    if len(file) > max_bytes:
        raise BodyTooLarge(
            f"image has {len(file)} bytes; at most {max_bytes} are allowed (frontend.max_image_bytes).", field="image"
        )
    image = StartImage(ImageFiles(file))
    size_px = image.facts.width_px, image.facts.height_px
    width, height = size_px if settings.upscaler is None else settings.size_of(size_px)
    if width * height > MAX_RESULT_PIXELS:
        raise InvalidField(
            f"upscaling_resize: the result would have {width} × {height} pixels; at most {MAX_RESULT_PIXELS} are "
            "allowed. Enlarge it less.",
            field="upscaling_resize",
        )
    return _OpenedImage(image.pixels(*size_px), size_px, (width, height))


def _resize(opened: _OpenedImage, upscaler: PixelUpscaler | None, file_format: ImageFormat) -> list[bytes]:
    image = Image.frombytes("RGB", opened.size_px, opened.rgb)
    if opened.result_px != opened.size_px:
        is_nearest = upscaler is not None and upscaler.name == NEAREST
        resampling = Image.Resampling.NEAREST if is_nearest else Image.Resampling.LANCZOS
        image = ImageOps.fit(image, opened.result_px, resampling)
    return write_images([RawImage(0, *image.size, memoryview(image.tobytes()))], file_format)
