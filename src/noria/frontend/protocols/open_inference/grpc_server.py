"""The Open Inference Protocol over gRPC, on a port of its own, for tritonclient and others. Needs the extra `grpc`.

It runs in the event loop of the front end. Calls have request ids, keys, metrics, log lines, spans and versions as HTTP
requests have. A call whose client cancels it, or whose deadline passes, is cancelled at the engine.
"""

import asyncio
import functools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from opentelemetry.trace import Tracer
from starlette.requests import Request

from noria.config import FrontendConfig
from noria.errors import ConfigError, InvalidBody, InvalidField, NoriaError, short_repr
from noria.frontend.access.auth import ClientDirectory
from noria.frontend.access.rejection_log import RejectionLog
from noria.frontend.http import request_spans
from noria.frontend.http.errors import internal_error
from noria.frontend.http.middleware import open_versions, record_http_request, request_id_of, version_headers
from noria.frontend.http.request_head import RequestHeaders
from noria.frontend.protocols.open_inference.grpc_limits import CallLimiter, read_message, server_options
from noria.frontend.protocols.open_inference.grpc_messages import (
    HEALTH_SERVICE,
    NOT_SERVING,
    PACKAGE,
    SERVICE,
    SERVING,
    message,
)
from noria.frontend.protocols.open_inference.inference import InferenceRequest, check_tensor_parameters
from noria.frontend.protocols.open_inference.model_metadata import SERVER_METADATA, VERSION, metadata
from noria.frontend.protocols.open_inference.operations import SCOPES
from noria.frontend.protocols.open_inference.service import OpenInferenceService
from noria.frontend.protocols.open_inference.tensors import InputTensor, OutputTensor, invalid_inputs
from noria.frontend.routing import open_context
from noria.frontend.server.tls import tls_context
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.request_scope import RequestScope
from noria.observe.traces.tracer import fail

_CANCEL_GRACE_S = 1.0  # after `frontend.drain_s`, when calls in flight are answered UNAVAILABLE
_OPEN_METHODS = frozenset({"Check", "ServerLive", "ServerReady"})  # their messages are not read
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}  # by the HTTP status of an error
_CONTENTS = {"BYTES": "bytes_contents", "INT32": "int_contents", "INT64": "int64_contents", "FP32": "fp32_contents"}

log = logging.getLogger("noria.frontend")


class _Route(NamedTuple):
    path: str


class _Call(NamedTuple):
    request: Any  # the message
    scope: dict[str, Any]  # as ASGI's
    metadata: dict[str, str]
    context: Any
    trailing: list[tuple[str, str]]  # metadata of its response


class _Method(NamedTuple):
    name: str
    respond: Callable[[_Call], Any]  # returns the response, or it as a dictionary; or is a coroutine that does
    service: str = SERVICE


class GrpcServer:
    """Listens while its context is entered. `drain` begins the end: no new calls, those in flight may finish."""

    def __init__(
        self,
        service: OpenInferenceService,
        clients: ClientDirectory,
        rejection_log: RejectionLog,
        config: FrontendConfig,
        tracer: Tracer,
    ) -> None:
        self._service, self._clients, self._rejection_log = service, clients, rejection_log
        self._config, self._tracer = config, tracer
        self._call_limiter = CallLimiter()
        self._stopping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Listen. Raises ConfigError if that is not possible."""
        methods: Mapping[str, Callable[[_Call], Any]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": self._service.is_ready},
            "ServerMetadata": lambda _: SERVER_METADATA,
            "ModelReady": lambda call: {"ready": self._service.is_model_ready(self._spec(call))},
            "ModelMetadata": lambda call: metadata(self._spec(call)),
            "ModelConfig": lambda call: {"config": self._service.config(self._spec(call))},
            "ModelStatistics": self._statistics,
            "ModelInfer": self._infer,
            "RepositoryIndex": lambda call: {"models": self._service.index(only_ready=call.request.ready)},
            "RepositoryModelLoad": lambda _: self._service.reject_model_control(),
            "RepositoryModelUnload": lambda _: self._service.reject_model_control(),
        }
        # Their handlers run when the metadata has arrived, those of `unary_unary` when the message has; on the wire
        # both are the same.
        served = [_Method(name, respond) for name, respond in methods.items()]
        served.append(_Method("Check", self._check, HEALTH_SERVICE))
        options = server_options(self._config.max_body_bytes, self._config.request_timeout_s)
        self._server = grpc.aio.server(options=options)
        for service in (SERVICE, HEALTH_SERVICE):
            handlers = {
                method.name: grpc.stream_unary_rpc_method_handler(functools.partial(self._serve, method))
                for method in served
                if method.service == service
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.grpc_port}"
        try:
            if self._config.ssl_certfile:
                self._server.add_secure_port(address, _credentials(self._config))
            else:
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address} for gRPC (frontend.grpc_port): {error}.") from error
        await self._server.start()
        return self

    def drain(self) -> None:
        """Accept no more calls. Those in flight fail when the engine pool stops, and are cancelled a moment later."""
        self._stop(self._config.drain_s + _CANCEL_GRACE_S)

    async def retire(self, limit_s: float) -> None:
        """Accept no more calls; return when those in flight have ended, the last cancelled after `limit_s` seconds."""
        await asyncio.wait([self._stop(limit_s)])

    def _stop(self, grace_s: float) -> asyncio.Task[None]:
        self._stopping = self._stopping or asyncio.create_task(self._server.stop(grace_s))
        return self._stopping

    async def __aexit__(self, *_: object) -> None:
        """Wait for the end of the drain."""
        self.drain()
        assert self._stopping is not None
        await self._stopping

    async def _serve(self, method: _Method, _: object, context: Any) -> bytes:
        """Serve a call; return the bytes of its response. Aborts it with the status of its error."""
        started = time.perf_counter()
        call = self._open_call(method, context)
        scope, state = call.scope, call.scope["state"]
        headers = state["headers"]
        span = request_spans.begin(self._tracer, scope, headers, state["request_id"])
        status, content, error = 499, b"", None
        versions = state["versions"] = open_versions(headers, self._config.sticky_header)
        log_record = state["log_record"] = RequestLogRecord()
        with RequestScope(state["request_id"], span), versions:
            try:
                content, status = await self._respond(method, call), 200
            except NoriaError as raised:
                error = raised
                self._rejection_log.record(Request(scope), error)
            except Exception:
                log.exception("%s failed with an unexpected exception", state["request_id"])
                error = internal_error(state["request_id"])
                fail(span, error.code)
            finally:
                if error is not None:
                    state["error_code"], status = error.code, error.http_status
                    versions.error = error
                record_http_request(scope, status, time.perf_counter() - started, log_record)
                request_spans.finish(span, scope, status)
        trailing = [("x-request-id", state["request_id"]), *call.trailing]
        trailing += [(name.decode(), value.decode()) for name, value in version_headers(versions.choice)]
        if error is not None:
            if error.retry_after_s is not None:
                trailing.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
            code = _CODES.get(error.http_status, grpc.StatusCode.INVALID_ARGUMENT)
            await context.abort(code, error.message, tuple(trailing))
        context.set_trailing_metadata(tuple(trailing))
        return content

    def _open_call(self, method: _Method, context: Any) -> _Call:
        """Return a call as HTTP requests are described, for metrics, logs and spans."""
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        raw_headers = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in metadata.items()]
        headers = RequestHeaders(raw_headers)
        path = f"/{method.service}/{method.name}"
        scope = {
            "type": "http",
            "method": "POST",
            "scheme": "https" if self._config.ssl_certfile else "http",
            "path": path,
            "raw_path": path.encode(),
            "route": _Route(path),
            "headers": raw_headers,
            "client": (unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]"), 0),
            "state": {"request_id": request_id_of(headers), "headers": headers},
        }
        return _Call(None, scope, metadata, context, [])

    async def _respond(self, method: _Method, call: _Call) -> bytes:
        """Check the key of a call, read its message, and return the bytes of its response. Raises NoriaError."""
        raw = b""
        if method.name not in _OPEN_METHODS:
            http = Request(call.scope)
            open_context(http, SCOPES, self._clients)
            self._call_limiter.acquire(http, call.context)
            raw = await read_message(call.context)
        try:
            request = message(f"{method.name}Request").FromString(raw)
        except DecodeError as error:
            raise InvalidBody(f"the message is no {PACKAGE}.{method.name}Request: {error}.") from error
        result = method.respond(call._replace(request=request))
        if asyncio.iscoroutine(result):
            result = await result
        response = ParseDict(result, message(f"{method.name}Response")()) if isinstance(result, dict) else result
        content: bytes = response.SerializeToString()
        return content

    def _check(self, _: _Call) -> dict[str, Any]:
        """Return the health of the whole server, whichever service a probe asks for."""
        return {"status": SERVING if self._service.is_ready else NOT_SERVING}

    def _spec(self, call: _Call) -> Any:
        return self._service.find(call.scope["state"]["context"], call.request.name, call.request.version)

    async def _statistics(self, call: _Call) -> dict[str, Any]:
        specs = [self._spec(call)] if call.request.name else self._service.models
        return await self._service.statistics(specs)

    async def _infer(self, call: _Call) -> Any:
        request, context = call.request, call.scope["state"]["context"]
        spec = self._service.find(context, request.model_name, request.model_version)
        result, outputs = await self._service.infer(
            spec, as_request(request), context, call.metadata, call.context.time_remaining
        )
        make = functools.partial(as_response, request, result.spec.name, outputs)
        response, headers = await self._service.respond(result, make)
        call.trailing.extend((name.lower(), value) for name, value in headers.items())
        return response


def as_request(request: Any) -> InferenceRequest:
    """Return what a ModelInferRequest has. Raises InvalidField."""
    raw, inputs = request.raw_input_contents, []
    if raw and len(raw) != len(request.inputs):
        raise InvalidField(
            f"raw_input_contents has {len(raw)} elements; it needs one for each of the {len(request.inputs)} inputs, "
            "or none.",
            field="raw_input_contents",
        )
    for index, tensor in enumerate(request.inputs):
        if raw and tensor.HasField("contents"):
            raise invalid_inputs(
                f"input {short_repr(tensor.name)} has contents, and raw_input_contents; send one of both."
            )
        values = [] if raw else list(getattr(tensor.contents, _CONTENTS.get(tensor.datatype, "bytes_contents")))
        data = raw[index] if raw else values
        inputs.append(InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    for kind, tensors in (("input", request.inputs), ("output", request.outputs)):
        for tensor in tensors:
            check_tensor_parameters(kind, tensor.name, _values_of(tensor.parameters))
    parameters = _values_of(request.parameters)
    return InferenceRequest(inputs, [output.name for output in request.outputs], parameters, request.id)


def _values_of(parameters: Any) -> dict[str, Any]:
    choices = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in choices.items() if choice is not None}


def as_response(request: Any, model: str, outputs: list[OutputTensor]) -> Any:
    """Return a ModelInferResponse, in binary form if the request's tensors were."""
    response = message("ModelInferResponse")(model_name=model, model_version=VERSION, id=request.id)
    for output in outputs:
        described = response.outputs.add(name=output.name, datatype=output.datatype, shape=output.values.shape)
        if request.raw_input_contents:
            response.raw_output_contents.append(output.binary)
        else:
            getattr(described.contents, _CONTENTS[output.datatype]).extend(output.values.ravel().tolist())
    return response


def _credentials(config: FrontendConfig) -> Any:
    """Return credentials with the certificate of HTTPS; new connections get a changed one, if it can be used."""

    def read() -> tuple[bytes, bytes]:
        tls_context(config.ssl_certfile, config.ssl_keyfile)  # raises ConfigError
        certificate = pathlib.Path(config.ssl_certfile).read_bytes()
        return pathlib.Path(config.ssl_keyfile or config.ssl_certfile).read_bytes(), certificate

    used = read()

    def configuration() -> Any:
        nonlocal used
        try:
            changed = read()
        except (ConfigError, OSError):  # `http/tls.py` logs it
            return None
        if changed == used:
            return None
        used = changed
        return grpc.ssl_server_certificate_configuration([changed])

    return grpc.dynamic_ssl_server_credentials(grpc.ssl_server_certificate_configuration([used]), configuration)
