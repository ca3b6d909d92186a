"""The endpoints of a front end: preprocess, encode, postprocess; and the calls of their code to endpoints and models.

An exception of the code is the error of its request alone: the client gets the name of its class, the log its
traceback. Code that is not async runs in threads (`threads.py`), other code in an event loop of its own
(`event_loop.py`), each call within its time limit and the client's deadline.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from opentelemetry.trace import Span, Tracer

from noria.config import EndpointConfig
from noria.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    ModelNotFound,
    NoriaError,
    RequestCancelled,
    RequestError,
    RouteNotFound,
    ServingError,
    UserCodeBusy,
    UserCodeFailed,
    did_you_mean,
    short_repr,
)
from noria.folders import file_version
from noria.frontend.engines.request_context import RequestContext
from noria.frontend.engines.versions.version_choice import RequestVersions
from noria.frontend.protocols.t2i.routes import images_response
from noria.frontend.services.images.generation import GenerationService
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.text_request import TextRequestSettings
from noria.frontend.statistics.recorder import StatisticsRecorder
from noria.frontend.user_code.event_loop import UserEventLoop, call_in
from noria.frontend.user_code.loading import LoadedCode, Method, load_code
from noria.frontend.user_code.threads import UserThreads
from noria.frontend.user_code.values import EncodeBody, RecordedValues, body_as, inputs_of, to_json
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations, outcomes
from noria.observe.request_scope import CURRENT_REQUEST, RequestScope
from noria.observe.traces.tracer import fail
from noria.protocol.request import ImageRequestBody, Priority
from noria.protocol.text import EncoderModelSpec
from noria.statistics.windows import NO_VERSION
from noria.user_code import Context, Result, State

_log = logging.getLogger("noria.user_code")
_POLL_INTERVAL_S = 2.0
_MAX_DEPTH = 4  # endpoints that call each other within one request


@dataclass(frozen=True)
class CallContext:
    """The request that code runs for; its calls to other endpoints and models have the same."""

    request: RequestContext
    priority: Priority | None = None
    ends_at: float | None = None  # the client's deadline, monotonic
    depth: int = 1

    def remaining_s(self) -> float | None:
        """Return what is left of the deadline; None: there is none. Raises DeadlineExceeded."""
        if self.ends_at is None:
            return None
        remaining_s = self.ends_at - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the endpoint was done.")
        return remaining_s

    def remaining_ms(self, wanted: int | None = None) -> int | None:
        """Return a `deadline_ms` for a call: `wanted`, at most what is left. Raises DeadlineExceeded."""
        remaining_s = self.remaining_s()
        if remaining_s is None:
            return wanted
        remaining_ms = max(1, int(1000 * remaining_s))
        return remaining_ms if wanted is None else min(wanted, remaining_ms)


class Endpoint:
    """An endpoint and its code, which is replaced as a whole: a request keeps the one that it began with."""

    def __init__(self, config: EndpointConfig, model: EncoderModelSpec | None, statistics: StatisticsRecorder) -> None:
        self.config, self._statistics = config, statistics
        self.model = model
        self._context = Context(config.name, config.file.parent, config.settings, model)
        self._version: tuple[int, ...] = ()
        self.code = LoadedCode(None, None, {})

    def is_changed(self) -> bool:
        """Return whether the file is another one than when it was last read; blocks."""
        return file_version(self.config.file) != self._version

    async def load(self, user_loop: UserEventLoop) -> None:
        """Load the code and use it from now on. Raises ConfigError; then what was loaded stays in use."""
        self._version = await asyncio.to_thread(file_version, self.config.file)
        code = await load_code(self.config, self._context, user_loop)
        self._statistics.declare_code(self.config.name, code.variables)
        self.code = code


class UserEndpoints:
    """All endpoints of a front end."""

    def __init__(
        self,
        configs: Sequence[EndpointConfig],
        models: Mapping[str, EncoderModelSpec],
        encoding_service: EncodingService,
        generation_service: GenerationService,
        max_threads: int,
        tracer: Tracer,
        statistics: StatisticsRecorder,
    ) -> None:
        """`models` are those of the endpoints' texts, by the endpoint's name; `load` is called before any request."""
        self._statistics = statistics
        self._endpoints = {
            config.name: Endpoint(config, models.get(config.name), self._statistics) for config in configs
        }
        self._encoding_service, self._generation_service = encoding_service, generation_service
        self._threads, self._user_loop = UserThreads(max_threads), UserEventLoop()
        self._tracer = tracer
        for name in self._endpoints:
            for outcome in (outcomes.OK, UserCodeFailed.code, UserCodeBusy.code, DeadlineExceeded.code):
                declarations.ENDPOINT_REQUESTS.labels(name, outcome)

    async def load(self) -> None:
        """Load the code of all endpoints. Raises ConfigError."""
        for endpoint in self._endpoints.values():
            await endpoint.load(self._user_loop)
            _log.info("endpoint %s is loaded", endpoint.config.name, extra=_log_fields("user_code_loaded", endpoint))

    async def follow(self) -> None:
        """Load the code whose file has changed, until cancelled; code that cannot be loaded changes nothing.

        At the end, async calls are cancelled, and the threads end when their calls have ended.
        """
        try:
            while self._endpoints:
                await asyncio.sleep(_POLL_INTERVAL_S)
                for endpoint in self._endpoints.values():
                    if await asyncio.to_thread(endpoint.is_changed):
                        await self._replace(endpoint)
        finally:
            self._threads.close()
            self._user_loop.close()

    async def _replace(self, endpoint: Endpoint) -> None:
        try:
            await endpoint.load(self._user_loop)
        except ConfigError as error:
            message = "%s The code of before stays in use."
            _log.error(message, error.message, extra=_log_fields("user_code_rejected", endpoint))
        else:
            message = "endpoint %s has new code"
            _log.info(message, endpoint.config.name, extra=_log_fields("user_code_loaded", endpoint))

    async def answer(self, name: str, body: dict[str, Any], call: CallContext) -> bytes:
        """Return the response of an endpoint, as JSON.

        Raises:
            RouteNotFound: there is no such endpoint.
            NoriaError: the code rejected the request or failed, or a call that it made.
        """
        if name not in self._endpoints:
            names = ", ".join(map(repr, self._endpoints)) or "none"
            hint = did_you_mean(name, self._endpoints)
            raise RouteNotFound(f"there is no endpoint {short_repr(name)}.{hint} This server has {names}.")
        endpoint, started = self._endpoints[name], time.perf_counter()
        log_record = call.request.log_record
        log_record.add(endpoint=name)
        try:
            content: bytes = await self._run(endpoint, body, call, as_json=True)
        except NoriaError as error:
            log_record.add(outcome=error.code, error=error.message, total_s=time.perf_counter() - started)
            raise
        except asyncio.CancelledError:
            log_record.add(outcome=RequestCancelled.code)
            raise
        log_record.add(outcome=outcomes.OK, total_s=time.perf_counter() - started)
        return content

    async def _run(self, endpoint: Endpoint, body: dict[str, Any], call: CallContext, *, as_json: bool = False) -> Any:
        """Run an endpoint and count its outcome. Returns what its `postprocess` returned, or that as JSON."""
        name, outcome = endpoint.config.name, InternalError.code
        try:
            returned = await self._run_stages(endpoint, body, call)
            if as_json:
                try:
                    returned = await asyncio.to_thread(to_json, returned)
                except Exception as error:
                    raise _log_failure(endpoint, "the response", error, call.request.request_id) from error
            outcome = outcomes.OK
            return returned
        except NoriaError as error:
            outcome = error.code
            raise
        except asyncio.CancelledError:
            outcome = RequestCancelled.code
            raise
        finally:
            declarations.ENDPOINT_REQUESTS.labels(name, outcome).inc()

    async def _run_stages(self, endpoint: Endpoint, body: dict[str, Any], call: CallContext) -> Any:
        code, name = endpoint.code, endpoint.config.name
        recorded = RecordedValues(self._statistics.variables_at(name), self._statistics.wanted(name))
        own_loop = asyncio.get_running_loop()

        def call_other(name: str, body: Mapping[str, Any]) -> Awaitable[Any]:
            return call_in(own_loop, self._call(name, body, call))

        state = State(call.request.request_id, recorded.add, call_other)
        try:
            return await self._run_methods(endpoint, code, body, call, state)
        finally:
            if recorded.values:
                version = self._version_of(endpoint, call.request.versions)
                self._statistics.record(name, version, recorded.wanted, recorded.values, call.request.versions)

    def _version_of(self, endpoint: Endpoint, versions: RequestVersions) -> str:
        """Return the version of the model that answered a request to an endpoint."""
        choice = (None if endpoint.model is None else versions.of(endpoint.model.name)) or versions.choice
        if choice is None:
            return NO_VERSION
        return choice.version if choice.target is None else choice.target.version

    async def _run_methods(
        self, endpoint: Endpoint, code: LoadedCode, body: dict[str, Any], call: CallContext, state: State
    ) -> Any:
        if code.preprocess is None:
            inputs = body_as(EncodeBody, body)
        else:
            inputs = inputs_of(
                await self._run_method(endpoint, code.preprocess, call, body, state), endpoint.config.name
            )
        result = None if inputs is None else await self._encode(endpoint.config.model or None, inputs, call)
        if code.postprocess is None:
            return None if result is None else result.rows
        return await self._run_method(endpoint, code.postprocess, call, result, state)

    async def _encode(self, model: str | None, inputs: EncodeBody, call: CallContext) -> Result:
        service = self._encoding_service
        settings = TextRequestSettings(
            inputs=inputs.texts,
            model=model,
            dimensions=inputs.dimensions,
            normalize=inputs.normalize,
            truncate=inputs.truncate,
            prompt_name=inputs.prompt_name,
            priority=call.priority,
            deadline_ms=call.remaining_ms(),
        )
        result = await service.encode(settings, (), call.request)
        return Result(result.arrays().copy(), result.spec, result.num_tokens, result.num_truncated)

    async def _call(self, name: str, body: Mapping[str, Any], call: CallContext) -> Any:
        """Call an endpoint or a model for the code of `call`. Has no log line of its own."""
        call = replace(call, request=msgspec.structs.replace(call.request, log_record=RequestLogRecord()))
        with self._span(f"call {name}"):
            if name in self._endpoints:
                if call.depth == _MAX_DEPTH:
                    raise UserCodeFailed(f"endpoint {name!r} was not called: {_MAX_DEPTH} endpoints already wait.")
                return await self._run(self._endpoints[name], dict(body), replace(call, depth=call.depth + 1))
            if name in self._encoding_service.models:
                return await self._encode(name, body_as(EncodeBody, body), call)
            if name in self._generation_service.models:
                return await self._generate(name, body, call)
            known = [*self._endpoints, *self._encoding_service.models, *self._generation_service.models]
            raise ModelNotFound(
                f"{short_repr(name)} is no endpoint or model of this server; it has {', '.join(map(repr, known))}."
            )

    async def _generate(self, model: str, body: Mapping[str, Any], call: CallContext) -> Any:
        service, wanted = self._generation_service, body_as(ImageRequestBody, body)
        wanted = msgspec.structs.replace(
            wanted,
            model=model,
            stream=False,
            priority=wanted.priority or call.priority,
            deadline_ms=call.remaining_ms(wanted.deadline_ms),
        )
        admitted = await service.admit(wanted, call.request)
        result = await service.generate(admitted)
        files = await service.as_base64(result.files)
        return msgspec.to_builtins(images_response(result, call.request.request_id, files))

    async def _run_method(self, endpoint: Endpoint, method: Method, call: CallContext, *arguments: Any) -> Any:
        """Return what a method returns. Raises DeadlineExceeded, UserCodeBusy, UserCodeFailed, and its NoriaErrors."""
        name = endpoint.config.name
        remaining_s, limit_s = call.remaining_s(), endpoint.config.timeout_s
        timeout_s = limit_s if remaining_s is None else min(limit_s, remaining_s)
        started = time.perf_counter()
        with self._span(f"{name} {method.name}"):
            try:
                runner = self._user_loop if method.is_async else self._threads
                returned, error = await runner.run(timeout_s, method.function, *arguments)
            except TimeoutError:
                message = f"{method.name} of endpoint {name!r} did not return within {timeout_s:.3g} s."
                _log.warning("%s", message, extra=_log_fields("user_code_late", endpoint))
                raise DeadlineExceeded(message) from None
            finally:
                seconds = time.perf_counter() - started
                declarations.USER_CODE_SECONDS.labels(name, method.name).observe(seconds)
            if error is None:
                return returned
            if isinstance(error, RequestError | ServingError):
                raise error
            raise _log_failure(endpoint, method.name, error, call.request.request_id) from error

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[Span]:
        span = self._tracer.start_span(name)
        with RequestScope(CURRENT_REQUEST.get(), span):
            try:
                yield span
            except ServingError as error:
                fail(span, error.code)
                raise
            finally:
                span.end()


def _log_failure(endpoint: Endpoint, where: str, error: BaseException, request_id: str) -> UserCodeFailed:
    """Log an exception of the code, and return the error that the client gets."""
    _log.error(
        "the code of endpoint %s failed in %s",
        endpoint.config.name,
        where,
        exc_info=error,
        extra=_log_fields("user_code_failed", endpoint),
    )
    return UserCodeFailed(
        f"the code of endpoint {endpoint.config.name!r} failed in {where} with {type(error).__name__}; the server's "
        f"log has the details under {request_id}."
    )


def _log_fields(event: str, endpoint: Endpoint) -> Mapping[str, object]:
    return fields(event=event, endpoint=endpoint.config.name)


def check_deadline(deadline_ms: int | None, request_timeout_s: float) -> float | None:
    """Return when a request must be done, monotonic; None: it has no deadline. Raises InvalidField."""
    if deadline_ms is None:
        return None
    max_deadline_ms = int(request_timeout_s * 1000)
    if not 1 <= deadline_ms <= max_deadline_ms:
        raise InvalidField(f"deadline_ms is {deadline_ms}; allowed are 1 to {max_deadline_ms}.", field="deadline_ms")
    return time.monotonic() + deadline_ms / 1000
