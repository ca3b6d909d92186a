"""`POST /v1/images/parameters`: an image file in, the settings that draw it again out, as far as they can be had here.

The file is not trusted: it is bounded, its pixels are never unpacked (`image_files.py`), and each setting passes the admission that
a request with it would. What does not pass is told with the reason, not dropped.
"""

import asyncio
import io
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.config import FrontendConfig
from noria.errors import ImageFileError, InvalidField, ModelNotFound, UnreadableImage, short_repr
from noria.frontend.http.body import read_bytes
from noria.frontend.http.concurrency_limits import ConcurrencyLimiter, client_id_of
from noria.frontend.services.admission import validate
from noria.frontend.services.generation import GenerationService
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import read_metadata
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequestBody

MAX_BYTES = 16 * 2**20  # a PNG of 2048 × 2048 incompressible pixels has 12.6 MB
MAX_UPLOADS = 16  # held at once, also those still being received: 256 MiB of a front end
MAX_UPLOADS_PER_CLIENT = 4
_RETRY_AFTER_S = 5.0  # a body takes up to 30 s, most take less than one
_MAX_CONCURRENT_READS = 2  # a file made to hurt takes seconds of a core, and front ends have other work for theirs
_SETTINGS = (
    "prompt",
    "negative_prompt",
    "seed",
    "width",
    "height",
    "inference_steps",
    "guidance_scale",
    "scheduler",
)


class RejectedSetting(Struct, frozen=True):
    """A setting that the file has and that is of no use here, and why."""

    field: str
    value: Any
    reason: str


class RecoveredSettings(Struct, frozen=True):
    """The answer of `POST /v1/images/parameters`; `settings` is a body of `POST /t2i`."""

    source: Literal["noria", "a1111"]  # whose text was read
    settings: dict[str, Any]
    rejected: list[RejectedSetting]
    model_version: str | None  # that drew it: a fingerprint, or what another program takes for one
    noria: str | None  # the version that drew it; null: another program did
    other: dict[str, str]  # what else another program's file says: things that Noria has not


class ImageMetadataRoute:
    """The route."""

    def __init__(self, generation_service: GenerationService) -> None:
        self._generation_service = generation_service
        self._upload_limiter = ConcurrencyLimiter(
            "uploads to /v1/images/parameters", MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT, _RETRY_AFTER_S
        )
        self._read_semaphore = asyncio.Semaphore(_MAX_CONCURRENT_READS)

    async def metadata(self, http: Request) -> Response:
        """What the file in the body says, as `Recalled`. Raises RateLimited before anything of the body is asked for."""
        self._generation_service.resolve_model()  # refuses while no model is known: nobody could say what is usable
        with self._upload_limiter.hold(client_id_of(http)):
            file = await read_bytes(http, MAX_BYTES)
            async with self._read_semaphore:
                response = await asyncio.to_thread(self._encode_response, file)
        return Response(response, media_type="application/json")

    def _encode_response(self, file: bytes) -> bytes:
        return msgspec.json.encode(self._recover(_read_metadata(file)))

    def _recover(self, metadata: GenerationMetadata) -> RecoveredSettings:
        rejected = []
        try:
            spec = self._generation_service.resolve_model(metadata.model)
        except ModelNotFound as error:
            spec = self._generation_service.resolve_model()
            rejected.append(RejectedSetting("model", metadata.model, error.message))
        else:
            rejected += _rejected_version(metadata, spec)
        settings, rejected_values = usable_settings(metadata, spec, self._generation_service.config)
        return RecoveredSettings(
            source="a1111" if metadata.noria is None else "noria",
            settings=settings | {"model": spec.name},
            rejected=rejected + rejected_values,
            model_version=metadata.model_version,
            noria=metadata.noria,
            other=metadata.other,
        )


def usable_settings(
    metadata: GenerationMetadata, spec: ModelSpec, config: FrontendConfig
) -> tuple[dict[str, Any], list[RejectedSetting]]:
    """The settings of `said` that `spec` can be asked for, and the others with the refusal that each would get.

    The prompt is there in any case, since no body of `POST /t2i` is without one.
    """
    settings: dict[str, Any] = {"prompt": ""}
    rejected = []
    for field in _SETTINGS:
        value = getattr(metadata, field)
        if value is None or (field == "negative_prompt" and not value):
            continue
        try:
            single_setting: dict[str, Any] = {"prompt": "", field: value}
            validate(ImageRequestBody(**single_setting), spec, config, "", lambda: 0)
        except InvalidField as error:
            rejected.append(RejectedSetting(field, value, error.message))
        else:
            settings[field] = value
    return settings, rejected


def _rejected_version(metadata: GenerationMetadata, spec: ModelSpec) -> list[RejectedSetting]:
    if metadata.model is None or metadata.model_version in (None, spec.fingerprint):
        return []
    return [
        RejectedSetting(
            "model_version",
            metadata.model_version,
            f"the file was drawn by version {short_repr(metadata.model_version)} of {spec.name}; served is {spec.fingerprint!r}, "
            "which may draw another image.",
        )
    ]


def _read_metadata(file: bytes) -> GenerationMetadata:
    try:
        return read_metadata(io.BytesIO(file), "the file")
    except ImageFileError as error:
        raise UnreadableImage(error.message) from error
