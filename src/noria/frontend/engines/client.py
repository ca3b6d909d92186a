"""One engine as a front end sees it: its state, its load and the attempts in flight at it.

`receive` takes the engine's messages. When the engine ends, every attempt fails with `AttemptLostError`; `retries.py`
decides about retries.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import msgspec
import zmq

from noria.errors import GenerationFailed, NoriaError, all_codes
from noria.frontend.engines.crash_attribution import ExitReport
from noria.frontend.engines.results import EngineResult, OnUpdate, PreviewImage, ProgressUpdate, RawImage
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import current_log_record
from noria.protocol import messages
from noria.protocol.messages import (
    AboutAttempt,
    Cancel,
    EngineLoad,
    EngineState,
    EngineView,
    Failed,
    Finished,
    FromEngine,
    HandedOver,
    Hello,
    ImageDone,
    LoadAck,
    MountResult,
    Ping,
    Pong,
    Preview,
    Release,
    Resume,
    StateRefused,
    Submit,
    ViewRequest,
)
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import AnyRequest
from noria.protocol.transport import EngineConnection, EngineEndpoint

log = logging.getLogger("noria.frontend")

_LEASE_S = 20.0
"""An engine on another machine cancels this front end's requests when it has been silent for so long: the machine may
be lost, and another front end may never have its name. `EnginePool` pings more often than that."""

# For the reply to a `Cancel`, which has the timings of the cancelled request. Most iterations are shorter.
_CANCEL_REPLY_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class EngineStatus:
    """One engine in the response of /readyz. "unknown": not connected, or its state has not arrived yet."""

    state: Literal["unknown", "loading", "ready", "draining"]
    device: str | None
    incarnation: str | None


class AttemptLostError(Exception):
    """The engine ended with an attempt in flight.

    `exit_report` is done when the engine's next process has reported how it ended; None if the attempt was never sent.
    `is_remote`: it may be that the engine's machine was lost, which reports nothing.
    """

    def __init__(
        self, attempt_id: str, exit_report: "asyncio.Future[ExitReport] | None", *, is_remote: bool = False
    ) -> None:
        super().__init__(attempt_id)
        self.attempt_id = attempt_id
        self.exit_report = exit_report
        self.is_remote = is_remote


class AttemptMovedError(Exception):
    """The engine has handed the attempt over. `images` are those that are done, `data` is the frame beside `message`.

    `predicted_s` is when it would have been finished there.
    """

    def __init__(
        self, message: HandedOver, data: memoryview | None, images: Mapping[int, RawImage], predicted_s: float | None
    ) -> None:
        super().__init__(message.attempt_id)
        self.message, self.data, self.images, self.predicted_s = message, data, images, predicted_s


class StateRefusedError(Exception):
    """The engine cannot go on from what another one has handed over."""


@dataclass
class _Attempt:
    """One request at one engine, until its `outcome` is done."""

    request: AnyRequest
    outcome: asyncio.Future[EngineResult]
    on_update: OnUpdate | None
    images: dict[int, RawImage] = field(default_factory=dict)
    predicted_s: float | None = None
    failure: Failed | None = None  # the engine's message, if it failed
    is_released: bool = False  # whether the engine was asked to hand it over

    def add_to_request_log(self) -> None:
        """Add the timings of a failed attempt to the request's log record, if the engine sent them."""
        if self.failure is None or self.failure.timings is None:
            return
        current_log_record().add(
            **msgspec.structs.asdict(self.failure.timings),
            predicted_s=self.predicted_s,
            mean_batch=self.failure.mean_batch,
            steps_run=self.failure.num_steps_run,
        )


class EngineClient:
    """Talks to one engine through its connection."""

    def __init__(self, connection: EngineConnection, name: str, endpoint: EngineEndpoint) -> None:
        """`name` is this front end's, `endpoint` is the engine's."""
        self._name = name
        self.connection, self.endpoint = connection, endpoint
        self.is_leaving = False  # it ends soon: it gets no more requests, and finishes those that it has
        self.load: EngineLoad | None = None
        self.known_models: tuple[ModelSpec, ...] = ()  # as it last reported them, also while it restarts
        self._connected = False
        self._last_state: EngineState | None = None  # None: no state since the connection was made
        self._lost_incarnation: str | None = None
        # Pending while the engine's process is gone and its successor has not reported yet.
        self._exit_report: asyncio.Future[ExitReport] | None = None
        self._lost_attempts: frozenset[str] = frozenset()  # that were in flight when it was lost
        self._attempts: dict[str, _Attempt] = {}
        self.num_results_in_flight = 0  # that the requests in flight at it ask for
        self.num_results_since_load = 0  # that this front end has asked for since its last load
        self.result_s = 0.0  # of its backlog for each result, as it last had any
        # Together unique among all attempts of all front ends; random bytes for each would cost a system call.
        self._nonce, self._numbers = secrets.token_hex(6), itertools.count()

    @property
    def ready(self) -> bool:
        """Whether it accepts requests."""
        return self._last_state is not None and self._last_state.state == "ready"

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models that it holds for new requests; none unless it is ready."""
        if self._last_state is None or not self.ready or self.is_leaving:
            return ()
        return self._last_state.models

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._connected

    @property
    def reported_backlog_s(self) -> float:
        """Its backlog as it last reported it; 0 if it has not."""
        return 0.0 if self.load is None else self.load.backlog_s

    def _on_load(self, load: EngineLoad) -> None:
        self.load, self.num_results_since_load = load, 0
        if num_results := load.num_running + load.num_waiting:
            self.result_s = load.backlog_s / num_results

    def status(self) -> EngineStatus:
        """Return its state for /readyz."""
        if self._last_state is None:
            return EngineStatus("unknown", None, None)
        state = self._last_state
        device = None if state.device == "auto" else state.device  # an engine resolves "auto" when it loads its model
        return EngineStatus(state.state, device, state.incarnation)

    async def submit(
        self,
        request: AnyRequest,
        on_update: OnUpdate | None,
        data: bytes | None = None,
        resume: Resume | None = None,
        images: Mapping[int, RawImage] = MappingProxyType({}),
    ) -> EngineResult:
        """Generate the images of `request` at this engine; `data` is what its payload has beside it.

        Cancelling this call cancels the request there. With `resume`, the engine goes on with what others have begun;
        `images` are done already.

        Raises:
            AttemptLostError: the engine ended.
            AttemptMovedError: another engine has to go on.
            StateRefusedError: the engine cannot `resume`.
            NoriaError: the engine's rejection or failure.

        """
        attempt_id = f"{request.request_id}.{self._nonce}{next(self._numbers):x}"
        request = msgspec.structs.replace(request, attempt_id=attempt_id)
        message = Submit(request) if resume is None else msgspec.structs.replace(resume, request=request)
        attempt = _Attempt(request, asyncio.get_running_loop().create_future(), on_update, dict(images))
        self._attempts[attempt_id] = attempt
        self.num_results_in_flight += request.payload.num_results
        self.num_results_since_load += request.payload.num_results
        try:
            await self.connection.send(message, data)
            # Shielded: what arrives between a cancellation and the handling of it is not lost.
            return await asyncio.shield(attempt.outcome)
        except zmq.Again as error:  # the engine ended, and `Disconnected` has not arrived yet
            attempt.outcome.cancel()
            self.handle_disconnect()
            raise AttemptLostError(attempt_id, None, is_remote=self.endpoint.is_remote) from error
        except asyncio.CancelledError:
            await self._cancel(attempt)
            raise
        finally:
            self._attempts.pop(attempt_id, None)
            self.num_results_in_flight -= request.payload.num_results
            attempt.add_to_request_log()

    async def _cancel(self, attempt: _Attempt) -> None:
        """Cancel the request at the engine and wait a moment for the reply, which has its timings."""
        attempt.on_update = None
        try:
            with contextlib.suppress(zmq.ZMQError):
                await self.connection.send(Cancel(attempt.request.attempt_id))
                await asyncio.wait([attempt.outcome], timeout=_CANCEL_REPLY_TIMEOUT_S)
        finally:  # also if this is cancelled again
            if not attempt.outcome.cancel():
                attempt.outcome.exception()  # retrieved here, or asyncio warns that it never was

    async def release(self, is_served: Callable[[AnyRequest], bool]) -> None:
        """Have it hand over the requests whose model it holds no longer for new ones, if another engine can take them.

        `is_served` returns whether there is such an engine.
        """
        for attempt_id, attempt in list(self._attempts.items()):
            request = attempt.request
            is_held = any(spec.matches(request.model, request.model_version) for spec in self.models)
            if not is_held and not attempt.is_released and self._last_state is not None and is_served(request):
                attempt.is_released = True
                with contextlib.suppress(zmq.Again):  # disconnected
                    await self.connection.send(Release(attempt_id))

    async def send_hello(self) -> None:
        """Introduce this front end on a new connection."""
        self._connected = True
        with contextlib.suppress(zmq.Again):  # disconnected again: another `Connected` follows
            await self.connection.send(Hello(self._name, _LEASE_S if self.endpoint.is_remote else None))

    async def ping(self) -> None:
        """Renew the lease of this front end's requests."""
        with contextlib.suppress(zmq.Again):  # disconnected
            await self.connection.send(Ping())

    async def ack_load(self) -> None:
        """Acknowledge the last `EngineLoad`, so that the engine sends the next one."""
        with contextlib.suppress(zmq.Again):  # disconnected
            await self.connection.send(LoadAck())

    async def request_view(self, message: ViewRequest) -> None:
        """Ask for a view of its running batch. Does nothing if it is not ready."""
        if self.ready:
            with contextlib.suppress(zmq.Again):  # disconnected
                await self.connection.send(message)

    def handle_disconnect(self) -> None:
        """Mark the engine as lost and fail every attempt in flight."""
        if self._exit_report is None and self._last_state is not None:
            self._exit_report = asyncio.get_running_loop().create_future()
            self._lost_incarnation = self._last_state.incarnation
            self._lost_attempts = frozenset(self._attempts)
        self._connected = False
        self._last_state = self.load = None
        for attempt_id, attempt in self._attempts.items():
            if not attempt.outcome.done():
                lost = AttemptLostError(attempt_id, self._exit_report, is_remote=self.endpoint.is_remote)
                attempt.outcome.set_exception(lost)

    def remove(self) -> None:
        """Close the connection, because there is no such engine any more.

        Its process, its machine or the cluster's scheduler has ended it, so its requests count as not at fault.
        """
        self.handle_disconnect()
        if self._exit_report is not None:
            self._exit_report.set_result(ExitReport("killed", self._lost_attempts))
            self._exit_report = None
        self.connection.close()

    def receive(self, message: FromEngine, data: memoryview | None) -> bool:
        """Process a message. Returns False, and ignores the message, if it arrives after the engine's disconnect."""
        if not self._connected:
            return False
        match message:
            case EngineState():
                self._update_state(message)
            case EngineLoad():
                self._on_load(message)
            case Pong() | MountResult() | EngineView():  # of other clients; views are passed on by the pool
                pass
            case _:
                self._dispatch(message, data)
        return True

    def _dispatch(self, message: AboutAttempt, data: memoryview | None) -> None:
        attempt = self._attempts.get(message.attempt_id)
        if attempt is None or attempt.outcome.done():  # cancelled
            return
        try:
            _apply_message(attempt, message, data)
        except Exception:  # an invalid reply fails this request, not the connection
            request_id = attempt.request.request_id
            extra = fields(event="invalid_engine_reply", request_id=request_id, attempt_id=message.attempt_id)
            log.exception("%s: invalid reply from its engine", request_id, extra=extra)
            attempt.outcome.set_exception(GenerationFailed("the engine's reply is invalid; the log has the details."))

    def _update_state(self, state: EngineState) -> None:
        self._last_state = state
        if self.ready:
            self.known_models = (*state.models, *state.replaced)
        if self._exit_report is not None:
            if state.incarnation == self._lost_incarnation:  # only the connection was lost: no request caused it
                report = ExitReport("killed", frozenset())
            else:
                report = ExitReport(state.previous_exit, frozenset(state.in_flight))
            self._exit_report.set_result(report)
            self._exit_report = None


def _apply_message(attempt: _Attempt, message: AboutAttempt, data: memoryview | None) -> None:
    match message:
        case messages.Progress(queue_position=position, call=call, num_calls=num_calls, finish_in_s=finish_in_s):
            if attempt.predicted_s is None:
                attempt.predicted_s = finish_in_s
            if attempt.on_update is not None:
                attempt.on_update(ProgressUpdate(position, call, num_calls, finish_in_s))
        case Preview(index=index, call=call, width_px=width_px, height_px=height_px):
            assert data is not None, "a preview comes with its pixels"
            if attempt.on_update is not None:
                attempt.on_update(PreviewImage(index, call, width_px, height_px, bytes(data)))
        case ImageDone(index=index, seed=seed, width_px=width_px, height_px=height_px):
            assert data is not None, "an image comes with its pixels"
            attempt.images[index] = RawImage(seed, width_px, height_px, data)
        case Finished(timings=timings, num_steps_run=num_steps_run, mean_batch=mean_batch, result=final):
            num_images = attempt.request.payload.num_results if final is None else 0
            images = tuple(attempt.images[index] for index in range(num_images))
            predicted_s = attempt.predicted_s if message.predicted_s is None else message.predicted_s
            assert predicted_s is not None, "a request is accepted before it is finished"
            assert (final is None) == (data is None), "results come with their description"
            result = EngineResult(images, timings, num_steps_run, mean_batch, predicted_s, final, data)
            attempt.outcome.set_result(result)
        case Failed(code=code, message=text, field=field_name, retry_after_s=retry_after_s):
            attempt.failure = message
            kind: type[NoriaError] = all_codes().get(code, GenerationFailed)
            attempt.outcome.set_exception(kind(text, field=field_name, retry_after_s=retry_after_s))
        case HandedOver():
            attempt.outcome.set_exception(AttemptMovedError(message, data, attempt.images, attempt.predicted_s))
        case StateRefused(message=text):
            attempt.outcome.set_exception(StateRefusedError(text))
