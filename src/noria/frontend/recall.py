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
from noria.errors import ImageFileError, InvalidField, ModelNotFound, UnreadableImage, shown
from noria.frontend.admission import admit
from noria.frontend.bodies import read_bytes
from noria.frontend.places import Places, client_of
from noria.frontend.studio import Studio
from noria.image_files import read_parameters
from noria.parameters import Parameters
from noria.request import ImageBody
from noria.spec import ModelSpec

MOST_BYTES = 16 * 2**20  # a PNG of 2048 × 2048 incompressible pixels has 12.6 MB
MOST_UPLOADS = 16  # held at once, also those still being received: 256 MiB of a front end
MOST_OF_A_CLIENT = 4
_COME_AGAIN_S = 5.0  # a body takes up to 30 s, most take less than one
_AT_ONCE = 2  # a file made to hurt takes seconds of a core, and front ends have other work for theirs
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


class Unusable(Struct, frozen=True):
    """A setting that the file has and that is of no use here, and why."""

    field: str
    value: Any
    reason: str


class Recalled(Struct, frozen=True):
    """The answer of `POST /v1/images/parameters`; `settings` is a body of `POST /t2i`."""

    source: Literal["noria", "a1111"]  # whose text was read
    settings: dict[str, Any]
    unusable: list[Unusable]
    model_version: str | None  # that drew it: a fingerprint, or what another program takes for one
    noria: str | None  # the version that drew it; null: another program did
    other: dict[str, str]  # what else another program's file says: things that Noria has not


class Recall:
    """The route."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._uploads = Places("uploads to /v1/images/parameters", MOST_UPLOADS, MOST_OF_A_CLIENT, _COME_AGAIN_S)
        self._readers = asyncio.Semaphore(_AT_ONCE)

    async def parameters(self, http: Request) -> Response:
        """What the file in the body says, as `Recalled`. Raises RateLimited before anything of the body is asked for."""
        self._studio.spec()  # refuses while no model is known: nobody could say what is usable
        with self._uploads.one(client_of(http)):
            file = await read_bytes(http, MOST_BYTES)
            async with self._readers:
                answer = await asyncio.to_thread(self._answer, file)
        return Response(answer, media_type="application/json")

    def _answer(self, file: bytes) -> bytes:
        return msgspec.json.encode(self._recalled(_said(file)))

    def _recalled(self, said: Parameters) -> Recalled:
        unusable = []
        try:
            spec = self._studio.spec(said.model)
        except ModelNotFound as error:
            spec = self._studio.spec()
            unusable.append(Unusable("model", said.model, error.message))
        else:
            unusable += _of_another_version(said, spec)
        settings, refused = usable(said, spec, self._studio.config)
        return Recalled(
            source="a1111" if said.noria is None else "noria",
            settings=settings | {"model": spec.name},
            unusable=unusable + refused,
            model_version=said.model_version,
            noria=said.noria,
            other=said.other,
        )


def usable(said: Parameters, spec: ModelSpec, config: FrontendConfig) -> tuple[dict[str, Any], list[Unusable]]:
    """The settings of `said` that `spec` can be asked for, and the others with the refusal that each would get.

    The prompt is there in any case, since no body of `POST /t2i` is without one.
    """
    settings: dict[str, Any] = {"prompt": ""}
    unusable = []
    for field in _SETTINGS:
        value = getattr(said, field)
        if value is None or (field == "negative_prompt" and not value):
            continue
        try:
            alone: dict[str, Any] = {"prompt": "", field: value}
            admit(ImageBody(**alone), spec, config, "", lambda: 0)
        except InvalidField as error:
            unusable.append(Unusable(field, value, error.message))
        else:
            settings[field] = value
    return settings, unusable


def _of_another_version(said: Parameters, spec: ModelSpec) -> list[Unusable]:
    if said.model is None or said.model_version in (None, spec.fingerprint):
        return []
    return [
        Unusable(
            "model_version",
            said.model_version,
            f"the file was drawn by version {shown(said.model_version)} of {spec.name}; served is {spec.fingerprint!r}, "
            "which may draw another image.",
        )
    ]


def _said(file: bytes) -> Parameters:
    try:
        return read_parameters(io.BytesIO(file), "the file")
    except ImageFileError as error:
        raise UnreadableImage(error.message) from error
