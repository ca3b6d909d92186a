"""From a request to its result: attempts at engines until a reply arrives or `crash_attribution.py` allows no more.

An engine that leaves hands its requests over, and another one goes on with them (`carried.py`). If the engine's process
ends without that, the request is sent again, with the same seed and so for the same images, to another
engine or to the same one after its restart. `crash_attribution.py` decides, from how the engine ended, whether the
retry shares the engine with other requests, is exclusive, or does not happen. Exclusive retries run one at a time; new
requests are served meanwhile.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from noria.errors import DeadlineExceeded, EngineCrashed, EngineLost, EngineUnavailable, QueueFull
from noria.frontend.engines.attempt import AttemptLostError, AttemptMovedError, AttemptNotHeldError, StateRefusedError
from noria.frontend.engines.carried import MAX_STATE_BYTES, CarriedImages
from noria.frontend.engines.client import EngineClient
from noria.frontend.engines.crash_attribution import MAX_NOT_AT_FAULT_SHARED, AttemptHistory, LossCause
from noria.frontend.engines.results import EngineResult, OnUpdate, ProgressUpdate
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import RequestLogRecord
from noria.protocol.request import AnyRequest

RETRY_AFTER_S = 5.0  # an engine restarts within seconds with a small model, within a minute with a large one
# The new requests of a front end that may wait for a restart, and their bytes; `MAX_STATE_BYTES` is as much.
_MAX_WAITING, _MAX_WAITING_BYTES = 512, 2**28
# Engines report a missed deadline themselves; these are for an engine that does not answer.
_GRACE_S = 5.0
_DEADLINE_GRACE_S = 0.5  # grace for a request with a deadline of its client
_EXIT_REPORT_TIMEOUT_S = 5.0  # for the report of an engine's next process, which starts within 1 s
_FULL_RETRY_S = 1.0  # pause before a moved request is sent again, while its LoRAs do not fit the engine's memory

log = logging.getLogger("noria.frontend")


class RetryingSubmitter:
    """Submits requests to engines, and again if engines end."""

    def __init__(
        self,
        route: Callable[[str, str], EngineClient | None],
        restarts: Callable[[str, str], bool],
        unavailable_error: Callable[[str], EngineUnavailable],
        engines_changed: asyncio.Condition,
        restart_wait_s: float,
    ) -> None:
        """`route` returns the ready engine that gets requests for a version of a model; None: none holds it.

        `restarts` is whether an engine that held it is restarting then. `unavailable_error` returns a request's error
        in that case, `engines_changed` is notified when an engine's state has changed, and `restart_wait_s` is how long
        a request whose engine ended waits for one that is ready.
        """
        self.route, self._restarts, self._unavailable_error = route, restarts, unavailable_error
        self._engines_changed, self.restart_wait_s = engines_changed, restart_wait_s
        # Whether a model in a version is a checkpoint that a ready engine can load, and what has it loaded: raises
        # ModelNotLoaded. `Checkpoints` sets both.
        self.can_load: Callable[[str, str], bool] = lambda *_: False
        self.load: Callable[[str, str], Awaitable[None]] = _load_nothing
        self.exclusive_lock = asyncio.Lock()  # held by the one exclusive attempt in flight
        self.carried: set[CarriedImages] = set()  # images of the requests that have moved
        self._stopping = False
        self._timers: set[asyncio.Timeout] = set()  # timers of all running calls of `submit`
        self._num_waiting = self._waiting_bytes = 0  # number and bytes of new requests that wait for a restart

    async def submit(
        self,
        request: AnyRequest,
        on_update: OnUpdate | None = None,
        data: bytes | None = None,
        log_record: RequestLogRecord | None = None,
    ) -> EngineResult:
        """Generate the images of `request`; `data` is what its payload has beside it.

        Cancelling this call removes the request from its engine at the next step. What failed attempts took is added to
        `log_record`.

        Raises:
            EngineUnavailable: no engine that holds the model is ready, or was after a moment if one is restarting, for
                which not too many wait; or `stop` was called.
            ModelNotLoaded: the model is a checkpoint, and no engine can load it.
            EngineLost: the engine ended with the request in flight, and no engine came back in time, or this happened
                too often.
            EngineCrashed: the request crashes engines.
            DeadlineExceeded: `timeout_s` or `deadline_s` has passed.
            NoriaError: the engine's rejection or failure.
        """
        if self._stopping:
            raise _stopped_error()
        wanted = request.model, request.model_version
        engine = self.route(*wanted)
        if engine is None and not self.can_load(*wanted) and not self._restarts(*wanted):
            raise self._no_engine_error(request)
        started, limit_s, first = asyncio.get_running_loop().time(), _limit_s(request), request
        timer = asyncio.timeout_at(started + limit_s + (_GRACE_S if request.deadline_s is None else _DEADLINE_GRACE_S))
        self._timers.add(timer)
        try:
            async with timer:
                ended: AttemptMovedError | AttemptLostError | None = None
                while ended is None:
                    if engine is None:
                        engine = await self._wait_for_new(request, data)
                        first = _with_time_left(request, asyncio.get_running_loop().time() - started)
                    if request.exclusive:
                        break
                    try:
                        return await engine.submit(first, on_update, data, log_record=log_record)
                    except AttemptNotHeldError:
                        engine = None
                    except (AttemptMovedError, AttemptLostError) as error:
                        ended = error
                return await _Retries(self, request, on_update, data, log_record, started).run(ended)
        except TimeoutError as error:
            if self._stopping:
                raise _stopped_error() from error
            raise DeadlineExceeded(f"not done after {limit_s:g} s.") from error
        finally:
            self._timers.discard(timer)

    async def _wait_for_new(self, request: AnyRequest, data: bytes | None) -> EngineClient:
        """Wait a moment for an engine that is restarting, or until a checkpoint is loaded: nothing was sent.

        Raises EngineUnavailable, or ModelNotLoaded.
        """
        num_bytes = len(msgspec.msgpack.encode(request)) + len(data or b"")
        if self._num_waiting >= _MAX_WAITING or self._waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
            raise self._no_engine_error(request)
        self._num_waiting, self._waiting_bytes = self._num_waiting + 1, self._waiting_bytes + num_bytes
        try:
            engine = await self.wait_for_engine(request, min(RETRY_AFTER_S, self.restart_wait_s))
        finally:
            self._num_waiting, self._waiting_bytes = self._num_waiting - 1, self._waiting_bytes - num_bytes
        if engine is None:
            raise self._no_engine_error(request)
        return engine

    async def wait_for_engine(self, request: AnyRequest, timeout_s: float) -> EngineClient | None:
        """Wait until an engine holds the model of a request, and have it loaded if it is a checkpoint.

        None: no engine was ready within `timeout_s`. Raises ModelNotLoaded.
        """
        wanted = request.model, request.model_version
        while (engine := self.route(*wanted)) is None:
            if not await self.wait_for_change(
                lambda: self.route(*wanted) is not None or self.can_load(*wanted), timeout_s
            ):
                return None
            if self.route(*wanted) is None:
                await self.load(*wanted)
        return engine

    async def wait_for_change(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a change of engines makes `condition` true. Returns whether it did within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._engines_changed:
                return await self._engines_changed.wait_for(condition)
        return False

    def _no_engine_error(self, request: AnyRequest) -> EngineUnavailable:
        return self._unavailable_error(f"{request.model!r} in version {request.model_version or 'any'}")

    def stop(self) -> None:
        """Fail every request in flight, and all later ones, with EngineUnavailable. Called at the end of a drain."""
        self._stopping = True
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0.0)


@dataclass(eq=False)
class _Retries:
    """The further attempts at a request whose first one has ended without a reply, or that is exclusive from the start.

    They go on until a reply arrives or `crash_attribution.py` allows no further one.
    """

    submitter: RetryingSubmitter
    request: AnyRequest
    on_update: OnUpdate | None
    data: bytes | None
    log_record: RequestLogRecord | None
    started: float  # seconds of the event loop's clock
    carried: CarriedImages = field(default_factory=CarriedImages)
    history: AttemptHistory = AttemptHistory()

    async def run(self, ended: AttemptMovedError | AttemptLostError | None) -> EngineResult:
        """Return the reply; `ended` is how the first attempt has ended; None: the request is exclusive."""
        if ended is None:
            self.history = AttemptHistory(num_not_at_fault=MAX_NOT_AT_FAULT_SHARED)
        try:
            while True:
                if ended is not None:
                    await self._take(ended)
                    ended = None
                try:
                    if self.history.needs_exclusive:
                        return await self._submit_exclusive()
                    return await self._submit_to(await self._wait_for_engine())
                except (AttemptMovedError, AttemptLostError) as error:
                    ended = error
                except AttemptNotHeldError:
                    pass  # it waits for the load again
                except StateRefusedError as refused:
                    self.carried.begin_anew(refused, self.request)
                except QueueFull:
                    if not self.carried.was_moved:
                        raise
                    await asyncio.sleep(_FULL_RETRY_S)  # it was accepted
        finally:
            self.submitter.carried.discard(self.carried)
            self.carried.drop_states()  # at once: tracebacks may keep `carried` until a garbage collection

    async def _take(self, ended: AttemptMovedError | AttemptLostError) -> None:
        """Keep what an engine has handed over, or note how it was lost. Raises NoriaError if there is no retry."""
        if isinstance(ended, AttemptMovedError):
            room_bytes = MAX_STATE_BYTES - sum(each.num_bytes for each in self.submitter.carried)
            self.carried.update(ended, self.request, room_bytes)
            self.submitter.carried.add(self.carried)
            ended.data = None  # which would stay until a garbage collection: its traceback refers to itself
            return
        if self.on_update is not None:  # at once: the report of how the engine ended may take seconds
            self.on_update(ProgressUpdate(0, 0, self.request.payload.num_steps, None))
        cause = await self._classify_loss(ended)
        self.history = _with_loss(self.history, cause, self.request)
        if cause == "suspected":
            self.carried.drop_states()  # which may be what crashed it

    def _route(self) -> EngineClient | None:
        return self.submitter.route(self.request.model, self.request.model_version)

    async def _submit_exclusive(self) -> EngineResult:
        while True:
            await self._wait_for_engine()
            async with self.submitter.exclusive_lock:  # the request's timeout also bounds the wait for the lock
                engine = self._route()
                if engine is not None:  # None: the previous exclusive attempt has crashed it
                    return await self._submit_to(engine, exclusive=True)

    async def _submit_to(self, engine: EngineClient, *, exclusive: bool = False) -> EngineResult:
        """Submit the request with the time that is left: engines count from the arrival.

        It was accepted once, so it is not checked against its deadline again: the deadline becomes a timeout and high
        priority.
        """
        request, passed_s = self.request, asyncio.get_running_loop().time() - self.started
        request = msgspec.structs.replace(
            request,
            timeout_s=max(_limit_s(request) - passed_s, 0.0),
            deadline_s=None,
            priority=request.priority if request.deadline_s is None else "high",
            exclusive=exclusive or request.exclusive,
        )
        return await self.carried.submit(engine, request, self.on_update, self.data, passed_s, self.log_record)

    async def _wait_for_engine(self) -> EngineClient:
        """Wait until an engine can serve the request and return it. Raises EngineLost if none is ready in time."""
        engine = await self.submitter.wait_for_engine(self.request, self.submitter.restart_wait_s)
        if engine is None:
            raise self._lost_error()
        return engine

    def _lost_error(self) -> EngineLost:
        """Return the error of a request for which no engine was ready in time."""
        what, todo = "the engine ended while it generated this request, and none that holds its model", ""
        if self.carried.was_moved:
            wanted = f"{self.request.model!r} in version {self.request.model_version or 'any'}"
            what = f"the engine of this request has ended or released {wanted}, and no other one that holds it"
            todo = " Send the request again: a version that is served by then answers it."
        wait_s = self.submitter.restart_wait_s
        return EngineLost(f"{what} was ready after {wait_s:g} s.{todo}", retry_after_s=RETRY_AFTER_S)

    async def _classify_loss(self, lost: AttemptLostError) -> LossCause:
        """Wait for the report of how the engine ended. Return how the loss counts.

        If no report comes in time, it is "suspected" on this machine, whose engines always report; the requests of an
        engine elsewhere are "not_at_fault", because a lost machine would else convict them. If another engine is ready,
        the wait ends after a few seconds; but a request whose attempt was exclusive waits as long as for a restart, so
        that it does not crash a second engine.
        """
        if lost.exit_report is None:
            return "not_started"
        exit_report, restart_wait_s = lost.exit_report, self.submitter.restart_wait_s
        was_exclusive = self.history.needs_exclusive
        timeout_s = restart_wait_s if was_exclusive else min(_EXIT_REPORT_TIMEOUT_S, restart_wait_s)
        await asyncio.wait([exit_report], timeout=timeout_s)
        if not exit_report.done() and not was_exclusive:
            await self.submitter.wait_for_change(
                lambda: exit_report.done() or self._route() is not None, restart_wait_s - timeout_s
            )
        if exit_report.done():
            return exit_report.result().loss_cause(lost.attempt_id)
        return "not_at_fault" if lost.is_remote else "suspected"


async def _load_nothing(*_: str) -> None:
    """Do nothing."""


def _with_time_left(request: AnyRequest, passed_s: float) -> AnyRequest:
    """Return the request with the time that is left after a wait: engines count from the arrival."""
    deadline_s = None if request.deadline_s is None else max(request.deadline_s - passed_s, 0.0)
    return msgspec.structs.replace(request, timeout_s=max(request.timeout_s - passed_s, 0.0), deadline_s=deadline_s)


def _limit_s(request: AnyRequest) -> float:
    """Return after how many seconds the result is of no use to the client."""
    return request.timeout_s if request.deadline_s is None else min(request.timeout_s, request.deadline_s)


def _with_loss(history: AttemptHistory, cause: LossCause, request: AnyRequest) -> AttemptHistory:
    """Return the history of a request with one more loss, and log it. Raises if it is not retried."""
    history = history.with_loss(cause)
    extra = fields(
        event="engine_lost",
        request_id=request.request_id,
        key=request.client or None,
        loss_cause=cause,
        exclusive=history.needs_exclusive,
    )
    log.warning("%s: its engine ended; cause of the loss: %s", request.request_id, cause, extra=extra)
    _raise_if_exhausted(history)
    return history


def _raise_if_exhausted(history: AttemptHistory) -> None:
    if history.crashes_engines:
        raise EngineCrashed(
            f"the engine crashed {history.num_crashes} times while it generated this request, the last time with "
            "nothing else in flight."
        )
    if history.retries_exhausted:
        num_kills = history.num_not_at_fault + history.num_not_at_fault_exclusive
        raise EngineLost(
            f"the engine was killed {num_kills} times while it generated this request.", retry_after_s=RETRY_AFTER_S
        )


def _stopped_error() -> EngineUnavailable:
    return EngineUnavailable("the server is stopping; send the request again.", retry_after_s=RETRY_AFTER_S)
