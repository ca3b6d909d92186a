"""An engine as a front end sees it: its state, its load and the attempts in flight at it.

`receive` takes the engine's messages. When the engine ends, every attempt fails with `AttemptLostError`; `retries.py`
decides about retries.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec
import zmq

from noria.errors import GenerationFailed
from noria.frontend.engines.attempt import Attempt, AttemptLostError, MoveReason, count_moves_from_zero
from noria.frontend.engines.crash_attribution import ExitReport
from noria.frontend.engines.results import EngineResult, OnUpdate, RawImage
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import RequestLogRecord
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import (
    AboutAttempt,
    Cancel,
    CancelMount,
    EngineLoad,
    EngineState,
    EngineView,
    FromEngine,
    HandedOver,
    Hello,
    LoadAck,
    Mount,
    MountResult,
    Pong,
    Release,
    Resume,
    ToEngine,
)
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import AnyRequest, EngineRequest
from noria.protocol.transport import EngineConnection, EngineEndpoint

log = logging.getLogger("noria.frontend")

_LEASE_S = 20.0
"""An engine on another machine cancels this front end's requests when it has been silent for so long: the machine may
be lost, and another front end may never have its name. `EnginePool` pings more often than that."""

# For the reply to a `Cancel`, which has the timings of the cancelled request. Most iterations are shorter.
_CANCEL_REPLY_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class EngineStatus:
    """An engine in the response of /readyz. "unknown": not connected, or its state has not arrived yet."""

    state: Literal["unknown", "loading", "ready", "draining"]
    device: str | None
    incarnation: str | None


class EngineClient:
    """Talks to one engine through its connection."""

    def __init__(self, connection: EngineConnection, name: str, endpoint: EngineEndpoint) -> None:
        """`name` is this front end's, `endpoint` is the engine's."""
        self._name = name
        self.connection, self.endpoint = connection, endpoint
        self.is_leaving = False  # it ends soon: it gets no more requests, and finishes those that it has
        self.load: EngineLoad | None = None
        self.known_models: tuple[ModelSpec, ...] = ()  # as it last reported them, also while it restarts
        self.is_connected = False
        self._last_state: EngineState | None = None  # None: no state since the connection was made
        self._lost_incarnation: str | None = None
        # Pending while the engine's process is gone and its successor has not reported yet.
        self._exit_report: asyncio.Future[ExitReport] | None = None
        self._lost_attempts: frozenset[str] = frozenset()  # that were in flight when it was lost
        self._attempts: dict[str, Attempt] = {}
        self._mounts: dict[str, asyncio.Future[str]] = {}  # by change_id
        self._load_at_move: EngineLoad | None = None  # when it last handed a request over
        self.num_results_in_flight = 0  # that the requests in flight at it ask for
        self.num_results_since_load = 0  # that this front end has asked for since its last load
        self.result_s = 0.0  # seconds of its backlog for each result, as it last had any
        # Together unique among all attempts of all front ends; random bytes for each would cost a system call.
        self._nonce, self._numbers = secrets.token_hex(6), itertools.count()

    @property
    def ready(self) -> bool:
        """Whether it accepts requests."""
        return self._last_state is not None and self._last_state.state == "ready"

    @property
    def is_restarting(self) -> bool:
        """Whether it was ready before and is to be so again, as far as is known."""
        is_absent = self._last_state is None or self._last_state.state == "loading"  # one that drains ends by request
        return bool(self.known_models) and is_absent and not self.is_leaving

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models that it holds for new requests; none unless it is ready."""
        state = self._last_state
        return () if state is None or state.state != "ready" or self.is_leaving else state.models

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
        log_record: RequestLogRecord | None = None,
    ) -> EngineResult:
        """Generate the images of `request` at this engine; `data` is what its payload has beside it.

        Cancelling this call cancels the request there. With `resume`, the engine goes on with what others have begun;
        `images` are done already. What a failed attempt took is added to `log_record`.

        Raises:
            AttemptLostError: the engine ended.
            AttemptMovedError: another engine has to go on.
            AttemptNotHeldError: the request's checkpoint has left.
            StateRefusedError: the engine cannot `resume`.
            NoriaError: the engine's rejection or failure.
        """
        attempt_id = f"{request.request_id}.{self._nonce}{next(self._numbers):x}"
        request = msgspec.structs.replace(request, attempt_id=attempt_id)
        message = request if resume is None else msgspec.structs.replace(resume, request=request)
        loop = asyncio.get_running_loop()
        attempt = Attempt(request, loop.create_future(), on_update, dict(images), began=loop.time())
        self._attempts[attempt_id] = attempt
        num_results = request.payload.num_results
        self.num_results_in_flight += num_results
        self.num_results_since_load += num_results
        try:
            self.connection.send(message, data)
            return await attempt.outcome
        except zmq.Again as error:  # it was lost after it was chosen
            attempt.outcome.cancel()
            self.handle_disconnect()
            raise AttemptLostError(attempt_id, None, is_remote=self.endpoint.is_remote) from error
        except asyncio.CancelledError:
            await self._cancel(attempt)
            raise
        finally:
            self._attempts.pop(attempt_id, None)
            self.num_results_in_flight -= num_results
            if attempt.failure is not None and log_record is not None:
                attempt.add_to(log_record)

    async def _cancel(self, attempt: Attempt) -> None:
        """Cancel the request at the engine and wait a moment for the reply, which has its timings."""
        attempt.on_update = None
        if attempt.outcome.cancelled():  # with the call; not if a message has arrived since
            attempt.outcome = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(zmq.ZMQError):
                self.connection.send(Cancel(attempt.request.attempt_id))
                await asyncio.wait([attempt.outcome], timeout=_CANCEL_REPLY_TIMEOUT_S)
        finally:  # also if this is cancelled again
            if not attempt.outcome.cancel():
                attempt.outcome.exception()  # retrieved here, or asyncio warns that it never was

    def release(self, is_served: Callable[[AnyRequest], bool]) -> None:
        """Have it hand over the requests whose model it holds no longer for new ones, if another engine can take them.

        `is_served` returns whether there is such an engine.
        """
        for attempt in list(self._attempts.values()):
            request = attempt.request
            is_held = any(spec.matches(request.model, request.model_version) for spec in self.models)
            if not is_held and self._last_state is not None and is_served(request):
                self._release(attempt, "leave")

    def _release(self, attempt: Attempt, reason: MoveReason) -> None:
        """Have it hand a request over, unless it was asked to already."""
        if attempt.released_for is None:
            attempt.released_for = reason
            self.tell(Release(attempt.request.attempt_id))

    def movable_requests(self, now: float) -> list[AnyRequest]:
        """Return the requests that it may hand over to a less busy engine, the newest first.

        None until it has reported its load after the last ones.
        """
        if self.load is self._load_at_move or any(each.released_for for each in self._attempts.values()):
            return []
        return [each.request for each in reversed(self._attempts.values()) if each.is_movable(now)]

    def move(self, requests: Iterable[AnyRequest]) -> None:
        """Have it hand over these of its requests, because another engine has less to do."""
        for request in requests:
            if (attempt := self._attempts.get(request.attempt_id)) is not None:
                self._release(attempt, "backlog")

    async def mount(self, spec: AnyModelSpec, max_loaded: int) -> str:
        """Have it hold a checkpoint, one of `max_loaded` at most; return why it does not, empty if it does.

        Cancelling this call cancels a load that has not begun.
        """
        change_id = f"{self._nonce}-{next(self._numbers):x}"
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._mounts[change_id] = result
        try:
            self.connection.send(Mount(change_id, spec, max_loaded=max_loaded))
            return await result
        except zmq.Again:  # disconnected
            return f"{self.endpoint.name} has ended"
        except asyncio.CancelledError:
            self.tell(CancelMount(change_id))
            raise
        finally:
            self._mounts.pop(change_id, None)

    def _end_mount(self, change_id: str, error: str) -> None:
        result = self._mounts.pop(change_id, None)
        if result is not None and not result.done():
            result.set_result(error)

    def send_hello(self) -> None:
        """Introduce this front end on a new connection."""
        self.is_connected = True
        self.tell(Hello(self._name, _LEASE_S if self.endpoint.is_remote else None))

    def tell(self, message: ToEngine) -> None:
        """Send a message, unless the engine is disconnected: its next process knows nothing of this front end."""
        with contextlib.suppress(zmq.Again):
            self.connection.send(message)

    def handle_disconnect(self, unsent: Iterable[ToEngine] = ()) -> None:
        """Mark the engine as lost and fail every attempt in flight; those of `unsent` are no part of its end."""
        requests = [each.request if isinstance(each, Resume) else each for each in unsent]
        never_sent = {each.attempt_id for each in requests if isinstance(each, EngineRequest)}
        if self._exit_report is None and self._last_state is not None:
            self._exit_report = asyncio.get_running_loop().create_future()
            self._lost_incarnation = self._last_state.incarnation
            self._lost_attempts = frozenset(self._attempts)
        self.is_connected = False
        self._last_state = self.load = None
        for change_id in list(self._mounts):
            self._end_mount(change_id, f"{self.endpoint.name} has ended")
        for attempt_id, attempt in self._attempts.items():
            if not attempt.outcome.done():
                exit_report = None if attempt_id in never_sent else self._exit_report
                lost = AttemptLostError(attempt_id, exit_report, is_remote=self.endpoint.is_remote)
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
        if not self.is_connected:
            return False
        match message:
            case EngineState():
                self._update_state(message)
            case EngineLoad():
                self._on_load(message)
                self.tell(LoadAck())  # so that it sends the next one
            case MountResult(change_id, error):
                self._end_mount(change_id, error)
            case Pong() | EngineView():  # messages for other clients; views are passed on by the pool
                pass
            case _:
                self._dispatch(message, data)
        return True

    def _dispatch(self, message: AboutAttempt, data: memoryview | None) -> None:
        if isinstance(message, HandedOver):
            self._load_at_move = self.load
        attempt = self._attempts.get(message.attempt_id)
        if attempt is not None and attempt.outcome.cancelled():  # its call is about to wait for this reply
            attempt.outcome = asyncio.get_running_loop().create_future()
        if attempt is None or attempt.outcome.done():
            return
        try:
            attempt.receive(message, data)
        except Exception:  # an invalid reply fails this request, not the connection
            request_id = attempt.request.request_id
            extra = fields(event="invalid_engine_reply", request_id=request_id, attempt_id=message.attempt_id)
            log.exception("%s: invalid reply from its engine", request_id, extra=extra)
            attempt.outcome.set_exception(GenerationFailed("the engine's reply is invalid; the log has the details."))

    def _update_state(self, state: EngineState) -> None:
        self._last_state = state
        if self.ready:
            self.known_models = (*state.models, *state.replaced)
            for spec in state.models:
                if isinstance(spec, DiffusionModelSpec):
                    count_moves_from_zero(spec.name)
        if self._exit_report is not None:
            if state.incarnation == self._lost_incarnation:  # only the connection was lost: no request caused it
                report = ExitReport("killed", frozenset())
            else:
                report = ExitReport(state.previous_exit, frozenset(state.in_flight))
            self._exit_report.set_result(report)
            self._exit_report = None
