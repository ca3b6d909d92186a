"""`POST /v1/images/metadata`: reads the settings in an image file and checks which of them this server supports.

The file is untrusted: its size is limited, its pixels are never decoded (`images/metadata_io.py`), and each setting is
validated as in a request. A setting that fails is returned with the reason.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.config import FrontendConfig
from noria.errors import (
    BodyTooLarge,
    EngineUnavailable,
    ImageFileError,
    InvalidBody,
    InvalidField,
    ModelNotFound,
    RateLimited,
    UnreadableImage,
    short_repr,
)
from noria.frontend.access.auth import client_id_of
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.access.fair_threads import FairThreads
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.http.body import read_bytes
from noria.frontend.http.operations import IMAGE_CONTENT, Operation
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.images.request_validation import validate
from noria.images.metadata import GenerationMetadata
from noria.images.metadata_io import read_metadata
from noria.models.adapters.adapter_folders import AdapterFolders
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.request import ImageRequestBody

# A PNG of 2048 × 2048 incompressible pixels has 12.6 MB.
MAX_BYTES = 16 * 2**20
# In memory at once, including those still being received: 256 MiB of a front end.
MAX_UPLOADS = 16
MAX_UPLOADS_PER_CLIENT = 4
# Receiving a body takes up to 30 s; most take less than one.
_RETRY_AFTER_S = 5.0
# A malicious file takes seconds of a core, which a front end needs for other requests.
_MAX_CONCURRENT_READS = 2
_SETTINGS = (
    "prompt_syntax",
    "clip_skip",
    "prompt",
    "negative_prompt",
    "seed",
    "width",
    "height",
    "inference_steps",
    "guidance_scale",
    "scheduler",
    "calls",
    "loras",
    "refiner",
)


T = TypeVar("T")


class RejectedSetting(Struct, frozen=True):
    """A setting of the file that this server does not support, and why."""

    field: str
    value: Any
    reason: str


class RecoveredSettings(Struct, frozen=True):
    """The response of `POST /v1/images/metadata`; `settings` is a body of `POST /t2i`."""

    source: Literal["noria", "a1111"]  # the metadata format that was read
    settings: dict[str, Any]
    rejected: list[RejectedSetting]
    model_version: str | None  # a fingerprint, or another program's equivalent
    noria: str | None  # the version of Noria that wrote the file; null: another program did
    other: dict[str, str]  # settings of another program that Noria does not have


class UploadedImages:
    """Reads the metadata of image files that are bodies of requests; all routes share the limits."""

    def __init__(self) -> None:
        self.limiter = ConcurrencyLimiter("uploads of image files", MAX_UPLOADS, MAX_UPLOADS_PER_CLIENT, _RETRY_AFTER_S)
        self._threads = FairThreads(_MAX_CONCURRENT_READS)

    async def read(self, http: Request, use: Callable[[GenerationMetadata], T]) -> T:
        """Return what `use` returns, in a thread, of the metadata in the body.

        Raises:
            RateLimited: before it reads the body.
            UnreadableImage: the body is no image with metadata.

        """
        with self.limiter.hold(client_id_of(http)):
            file = await read_bytes(http, MAX_BYTES)
            return await self._threads.run(client_id_of(http), lambda: use(_read_metadata(file)))


class ImageMetadataRoute:
    """The route `POST /v1/images/metadata`."""

    def __init__(self, generation_service: GenerationService, uploads: UploadedImages) -> None:
        self._generation_service, self._uploads = generation_service, uploads

    @property
    def operations(self) -> list[Operation]:
        """The operation to serve."""
        return [
            Operation(
                method="POST",
                path="/v1/images/metadata",
                handler=self._metadata,
                group="Generate",
                scopes=("generate",),
                summary="Read an image file's settings",
                description=f"The body is the file, at most {MAX_BYTES // 2**20} MiB of PNG, WebP or JPEG with the "
                "metadata of Noria or A1111. `settings` is a body of `POST /t2i`; `rejected` has the settings that "
                "this server does not support, with reasons. Other bytes are rejected.",
                body=IMAGE_CONTENT,
                response=RecoveredSettings,
                errors=[InvalidBody, BodyTooLarge, UnreadableImage, RateLimited, EngineUnavailable],
            )
        ]

    async def _metadata(self, http: Request) -> Response:
        context = http.state.context
        self._generation_service.resolve_model(None, context)  # raises while no model is known: its bounds are needed
        response = await self._uploads.read(
            http, lambda metadata: msgspec.json.encode(self._recover(context, metadata))
        )
        return Response(response, media_type="application/json")

    def _recover(self, context: RequestContext, metadata: GenerationMetadata) -> RecoveredSettings:
        rejected = list(_rejected_images(metadata))
        try:
            spec = self._generation_service.resolve_model(metadata.model, context)
        except ModelNotFound as error:
            spec = self._generation_service.resolve_model(None, context)
            rejected.append(RejectedSetting("model", metadata.model, error.message))
        else:
            rejected += _rejected_version(metadata, spec)
        settings, rejected_values = usable_settings(
            metadata,
            spec,
            self._generation_service.config,
            self._generation_service.folders,
        )
        return RecoveredSettings(
            source="a1111" if metadata.noria is None else "noria",
            settings=settings | {"model": spec.name},
            rejected=rejected + rejected_values,
            model_version=metadata.model_version,
            noria=metadata.noria,
            other=metadata.other,
        )


def usable_settings(
    metadata: GenerationMetadata,
    spec: DiffusionModelSpec,
    config: FrontendConfig,
    folders: AdapterFolders,
) -> tuple[dict[str, Any], list[RejectedSetting]]:
    """Split `metadata` into the settings that `spec` supports and the rejected ones, with the error each would get.

    There is always a prompt, since `POST /t2i` requires one. Images are not among the settings.
    """
    spec = msgspec.structs.replace(spec, needs_mask=False)
    settings: dict[str, Any] = {"prompt": ""}
    rejected = []
    for field in _SETTINGS:
        value = getattr(metadata, field)
        if value in (None, ()):
            continue
        try:
            single_setting: dict[str, Any] = {"prompt": "", field: value}
            if field == "calls":  # whether any can be skipped is up to these
                beside = ("scheduler", "inference_steps")
                single_setting |= {name: settings[name] for name in beside if name in settings}
            if field in ("prompt", "negative_prompt") and "prompt_syntax" in settings:
                single_setting["prompt_syntax"] = settings["prompt_syntax"]
            body = ImageRequestBody(**single_setting)
            validate(body, spec, config, "", lambda: 0, folders=folders)
        except InvalidField as error:
            rejected.append(RejectedSetting(field, value, error.message))
        else:
            settings[field] = value
    return settings, rejected


def _rejected_images(metadata: GenerationMetadata) -> Iterator[RejectedSetting]:
    """Yield the controls, the images that the file was made from, which it does not contain, and a second pass."""
    absent = "which it does not contain: send"
    for control in metadata.controls:
        made = f"the file was made with the ControlNet {short_repr(control.name)}, whose image it does not contain"
        yield RejectedSetting("controls", control, f"{made}: send it in controls.")
    if (adapter := metadata.ip_adapter) is not None:
        made = f"the file was made with the IP-Adapter {short_repr(adapter.name)}, whose image it does not contain"
        yield RejectedSetting("ip_adapter", adapter, f"{made}: send it in ip_adapter.")
    if metadata.reference_images:
        reason = f"the file was made from reference images, {absent} them in reference_images."
        yield RejectedSetting("reference_images", [each.digest for each in metadata.reference_images], reason)
    if metadata.second_pass is not None:
        reason = "the file had a second pass, which /t2i does not make: use /sdapi/v1/txt2img or noria generate --like."
        yield RejectedSetting("second_pass", metadata.second_pass, reason)
    if metadata.strength is not None:
        reason = f"the file was made from a start image, {absent} that as image, with strength {metadata.strength}."
        yield RejectedSetting("image", metadata.image_digest, reason)
        if metadata.mask_digest is not None:
            reason = f"the file was made with a mask, {absent} that as mask."
            yield RejectedSetting("mask", metadata.mask_digest, reason)


def _rejected_version(metadata: GenerationMetadata, spec: DiffusionModelSpec) -> list[RejectedSetting]:
    if metadata.model is None or metadata.model_version in (None, spec.fingerprint):
        return []
    return [
        RejectedSetting(
            "model_version",
            metadata.model_version,
            f"the file was generated by version {short_repr(metadata.model_version)} of {spec.name}; this server has "
            f"{spec.fingerprint!r}, which may generate another image.",
        )
    ]


def _read_metadata(file: bytes) -> GenerationMetadata:
    try:
        return read_metadata(io.BytesIO(file), "the file")
    except ImageFileError as error:
        raise UnreadableImage(error.message) from error
