"""Enlarges images that are sent: by a filter here, in threads, or by an upscaler in an engine, among its steps."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from PIL import Image, ImageOps

from noria.errors import BodyTooLarge, InvalidField
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.results import RawImage
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.generation_types import AdmittedRequest, GenerationResult
from noria.frontend.services.images.image_writer import write_images
from noria.frontend.services.images.request_validation import NO_IMAGES
from noria.frontend.services.images.start_images import decode_file
from noria.images.start_image import ImageFiles, StartImage
from noria.models.upscaler_folders import NEAREST
from noria.protocol.diffusion import DiffusionModelSpec, DiffusionPayload, PixelUpscaler, Upscaling
from noria.protocol.request import EngineRequest, ImageFormat, ImageRequestBody

MAX_RESULT_PIXELS = 2**24
"""Pixels of a result: 4096 × 4096, whose file takes seconds to write."""

Size = tuple[int, int]
"""Width and height in pixels."""

Generate = Callable[[AdmittedRequest], Awaitable[GenerationResult]]


class EnlargingSettings(NamedTuple):
    """How images are enlarged."""

    upscaler: PixelUpscaler | None  # None: not at all
    size_of: Callable[[Size], Size]  # the size of the result, by that of the image
    file_format: ImageFormat


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
    """Return the file of an image, sent in base64, in another size; none if the safety classifier refuses it.

    An upscaler that has a file runs in an engine of the model that `spec_of` returns.

    Raises:
        UnreadableImage: it is no image.
        BodyTooLarge: its file is too large.
        InvalidField: its result would be too large, or the upscaler cannot be used.
        NoriaError: as `generate`.

    """
    upscaler, threads = settings.upscaler, service.upload_threads
    opened = await threads.run(context.client, _open, text, settings, service.config.max_image_bytes)
    is_larger = any(new > old for new, old in zip(opened.result_px, opened.size_px, strict=True))
    if upscaler is None or upscaler.digest is None or not is_larger:
        return await threads.run(context.client, _resize, opened, upscaler, settings.file_format)
    spec = spec_of()
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
            upscaling=Upscaling(*opened.result_px, upscaler),
        ),
        timeout_s=service.config.request_timeout_s,
        model_version=spec.fingerprint,
        client=context.api_client.name or "",
        priority=context.api_client.allowed_priority(None) or "normal",
    )
    context.api_client.images.check_rate(1)
    admitted = AdmittedRequest(
        request=request,
        spec=spec,
        file_format=settings.file_format,
        quality=None,
        metadata=False,
        data=opened.rgb,
        context=context,
        body=ImageRequestBody(prompt=""),
        images=NO_IMAGES,
    )
    return (await generate(admitted)).files


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
    """Return a file of an image, resized by a filter."""
    image = Image.frombytes("RGB", opened.size_px, opened.rgb)
    if opened.result_px != opened.size_px:
        is_nearest = upscaler is not None and upscaler.name == NEAREST
        resampling = Image.Resampling.NEAREST if is_nearest else Image.Resampling.LANCZOS
        image = ImageOps.fit(image, opened.result_px, resampling)
    return write_images([RawImage(0, *image.size, memoryview(image.tobytes()))], file_format)
