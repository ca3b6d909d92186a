"""The Open Inference Protocol over REST, below /v2. The unmodified tritonclient works."""

import functools
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from noria.frontend.http.body import JsonBodyReader, decode
from noria.frontend.http.json_response import JsonResponse, json_response
from noria.frontend.protocols.open_inference.model_metadata import SERVER_METADATA, VERSION, metadata
from noria.frontend.protocols.open_inference.rest_body import HEADER, parse, serialize
from noria.frontend.protocols.open_inference.service import OpenInferenceService
from noria.protocol.text import EncoderModelSpec


class RepositoryIndexBody(Struct, frozen=True):
    """The body of `POST /v2/repository/index`, which may be empty."""

    ready: bool | None = None  # only models that are ready


class OpenInferenceRoutes:
    """The functions that serve the operations below /v2."""

    def __init__(self, service: OpenInferenceService, body_reader: JsonBodyReader) -> None:
        self._service, self._body_reader = service, body_reader

    async def live(self, _: Request) -> Response:
        """Return 200 as long as this process answers at all."""
        return json_response({"live": True})

    async def ready(self, _: Request) -> Response:
        """Return 200 if of each kind of model an engine is ready, else 503."""
        return _readiness({}, is_ready=self._service.is_ready)

    async def server_metadata(self, _: Request) -> Response:
        """Return the server's name, version and extensions."""
        return json_response(SERVER_METADATA)

    async def model_ready(self, http: Request) -> Response:
        """Return 200 if an engine that holds the model is ready, else 503."""
        spec = self._spec(http)
        return _readiness({"name": spec.name}, is_ready=self._service.is_model_ready(spec))

    async def metadata(self, http: Request) -> Response:
        """Return the model's inputs and outputs."""
        return json_response(metadata(self._spec(http)))

    async def config(self, http: Request) -> Response:
        """Return the model's configuration, in Triton's form."""
        return json_response(self._service.config(self._spec(http)))

    async def statistics(self, http: Request) -> Response:
        """Return the model's statistics."""
        return json_response(await self._service.statistics([self._spec(http)]))

    async def all_statistics(self, _: Request) -> Response:
        """Return the statistics of all text encoders."""
        return json_response(await self._service.statistics(self._service.models))

    async def index(self, http: Request) -> Response:
        """Return the text encoders and their states."""
        raw = await self._body_reader.read(http, any_type=True)
        body = decode(raw, RepositoryIndexBody) if raw else RepositoryIndexBody()
        return json_response(self._service.index(only_ready=bool(body.ready)))

    async def load(self, _: Request) -> Response:
        """Reject: models are loaded at the start."""
        self._service.reject_model_control()

    async def infer(self, http: Request) -> Response:
        """Return the tensors of a request's texts or tokens."""
        raw, spec = await self._body_reader.read(http, any_type=True), self._spec(http)
        request = parse(raw, http.headers.get(HEADER.lower()))
        context = http.state.context
        result, outputs = await self._service.infer(spec, request.inference, context, http.headers)
        make = functools.partial(serialize, request, result.spec.name, VERSION, outputs)
        (content, json_length), headers = await self._service.respond(result, make)
        if json_length is None:
            return JsonResponse(content, headers=headers)
        headers = {**headers, HEADER: str(json_length)}
        return Response(content, headers=headers, media_type="application/octet-stream")

    def _spec(self, http: Request) -> EncoderModelSpec:
        return self._service.find(http.state.context, http.path_params["model"], http.path_params.get("version", ""))


def _readiness(body: dict[str, Any], *, is_ready: bool) -> Response:
    return json_response(body | {"ready": is_ready}, 200 if is_ready else 503)
