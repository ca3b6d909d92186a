"""From a request to its result: attempts at engines until a reply arrives or `crash_attribution.py` allows no more.

An engine that leaves hands its requests over, and another one goes on with them (`carried.py`). If the engine's process
ends without that, the request is sent again, with the same seed and so for the same images, to another
engine or to the same one after its restart. `crash_attribution.py` decides, from how the engine ended, whether the
retry shares the engine with other requests, is exclusive, or does not happen. Exclusive retries run one at a time; new
requests are served meanwhile.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from noria.errors import DeadlineExceeded, EngineCrashed, EngineLost, EngineUnavailable, QueueFull
from noria.frontend.engines.attempt import AttemptLostError, AttemptMovedError, StateRefusedError
from noria.frontend.engines.carried import MAX_STATE_BYTES, CarriedImages
from noria.frontend.engines.client import EngineClient
from noria.frontend.engines.crash_attribution import MAX_NOT_AT_FAULT_SHARED, AttemptHistory, LossCause
from noria.frontend.engines.results import EngineResult, OnUpdate, ProgressUpdate
from noria.observe.logs.log_record import fields
from noria.protocol.request import AnyRequest

RETRY_AFTER_S = 5.0  # an engine restarts within seconds with a small model, within a minute with a large one
# Engines report a missed deadline themselves; these are for an engine that does not answer.
_GRACE_S = 5.0
_DEADLINE_GRACE_S = 0.5  # of a request with a deadline of its client
_EXIT_REPORT_TIMEOUT_S = 5.0  # for the report of an engine's next process, which starts within 1 s
_FULL_RETRY_S = 1.0  # of a request that has moved, while its LoRAs do not fit the engine's memory

log = logging.getLogger("noria.frontend")


class RetryingSubmitter:
    """Submits requests to engines, and again if engines end."""

    def __init__(
        self,
        route: Callable[[AnyRequest], EngineClient | None],
        unavailable_error: Callable[[str], EngineUnavailable],
        engines_changed: asyncio.Condition,
        restart_wait_s: float,
    ) -> None:
        """`route` returns the ready engine that gets a request; None: no ready engine holds its model.

        `unavailable_error` returns a request's error in that case, `engines_changed` is notified when an engine's state
        has changed, and `restart_wait_s` is how long a request whose engine ended waits for one that is ready.
        """
        self._route, self._unavailable_error = route, unavailable_error
        self._engines_changed, self._restart_wait_s = engines_changed, restart_wait_s
        self._exclusive_lock = asyncio.Lock()  # held by the one exclusive attempt in flight
        self._stopping = False
        self._timers: set[asyncio.Timeout] = set()  # of all running calls of `submit`
        self._carried: set[CarriedImages] = set()  # of those that have moved

    async def submit(
        self, request: AnyRequest, on_update: OnUpdate | None = None, data: bytes | None = None
    ) -> EngineResult:
        """Generate the images of `request`; `data` is what its payload has beside it.

        Cancelling this call removes the request from its engine at the next step.

        Raises:
            EngineUnavailable: no engine that holds the model is ready, or `stop` was called.
            EngineLost: the engine ended with the request in flight, and no engine came back in time, or this happened
                too often.
            EngineCrashed: the request crashes engines.
            DeadlineExceeded: `timeout_s` or `deadline_s` has passed.
            NoriaError: the engine's rejection or failure.

        """
        if self._stopping:
            raise _stopped_error()
        if (engine := self._route(request)) is None:
            raise self._unavailable_error(f"{request.model!r} in version {request.model_version or 'any'}")
        started, limit_s = asyncio.get_running_loop().time(), _limit_s(request)
        timer = asyncio.timeout_at(started + limit_s + (_GRACE_S if request.deadline_s is None else _DEADLINE_GRACE_S))
        self._timers.add(timer)
        carried = CarriedImages()
        try:
            async with timer:
                return await self._submit_with_retries(engine, request, started, on_update, data, carried)
        except TimeoutError as error:
            if self._stopping:
                raise _stopped_error() from error
            raise DeadlineExceeded(f"not done after {limit_s:g} s.") from error
        finally:
            self._timers.discard(timer)
            self._carried.discard(carried)
            carried.drop_states()  # at once: tracebacks may keep `carried` until a garbage collection

    def stop(self) -> None:
        """Fail every request in flight, and all later ones, with EngineUnavailable. Called at the end of a drain."""
        self._stopping = True
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0.0)

    async def _submit_with_retries(
        self,
        engine: EngineClient,
        request: AnyRequest,
        started: float,
        on_update: OnUpdate | None,
        data: bytes | None,
        carried: CarriedImages,
    ) -> EngineResult:
        """Attempt until a reply arrives or `crash_attribution.py` allows no further attempt."""
        history = AttemptHistory(num_not_at_fault=MAX_NOT_AT_FAULT_SHARED) if request.exclusive else AttemptHistory()
        attempt = (
            self._submit_exclusive(request, started, on_update, data, carried)
            if request.exclusive
            else engine.submit(request, on_update, data)
        )
        while True:
            try:
                return await attempt
            except AttemptMovedError as moved:
                room_bytes = MAX_STATE_BYTES - sum(each.num_bytes for each in self._carried)
                carried.update(moved, request, room_bytes)
                self._carried.add(carried)
                moved.data = None  # which would stay until a garbage collection: its traceback refers to itself
            except StateRefusedError as refused:
                carried.begin_anew(refused, request)
            except QueueFull:
                if not carried.was_moved:
                    raise
                await asyncio.sleep(_FULL_RETRY_S)  # it was accepted
            except AttemptLostError as lost:
                if on_update is not None:  # at once: the report of how the engine ended may take seconds
                    on_update(ProgressUpdate(0, 0, request.payload.num_steps, None))
                cause = await self._classify_loss(lost, request, history.needs_exclusive)
                history = _with_loss(history, cause, request)
                if cause == "suspected":
                    carried.drop_states()  # which may be what crashed it
            attempt = (self._submit_exclusive if history.needs_exclusive else self._resubmit)(
                request, started, on_update, data, carried
            )

    async def _resubmit(
        self,
        request: AnyRequest,
        started: float,
        on_update: OnUpdate | None,
        data: bytes | None,
        carried: CarriedImages,
    ) -> EngineResult:
        engine = await self._wait_for_engine(request, carried)
        return await carried.submit(engine, _remaining(request, started), on_update, data, _passed_s(started))

    async def _submit_exclusive(
        self,
        request: AnyRequest,
        started: float,
        on_update: OnUpdate | None,
        data: bytes | None,
        carried: CarriedImages,
    ) -> EngineResult:
        while True:
            await self._wait_for_engine(request, carried)
            async with self._exclusive_lock:  # the request's timeout also bounds the wait for the lock
                engine = self._route(request)
                if engine is not None:  # None: the previous exclusive attempt has crashed it
                    exclusive = _remaining(msgspec.structs.replace(request, exclusive=True), started)
                    return await carried.submit(engine, exclusive, on_update, data, _passed_s(started))

    async def _wait_for_engine(self, request: AnyRequest, carried: CarriedImages) -> EngineClient:
        """Wait until an engine can serve the request and return it. Raises EngineLost if none is ready in time."""
        while (engine := self._route(request)) is None:
            try:
                async with asyncio.timeout(self._restart_wait_s), self._engines_changed:
                    await self._engines_changed.wait_for(lambda: self._route(request) is not None)
            except TimeoutError as error:
                raise self._lost_error(request, carried) from error
        return engine

    def _lost_error(self, request: AnyRequest, carried: CarriedImages) -> EngineLost:
        """Return the error of a request for which no engine was ready in time."""
        what, todo = "the engine ended while it generated this request, and none that holds its model", ""
        if carried.was_moved:
            wanted = f"{request.model!r} in version {request.model_version or 'any'}"
            what = f"the engine of this request has ended or released {wanted}, and no other one that holds it"
            todo = " Send the request again: a version that is served by then answers it."
        return EngineLost(f"{what} was ready after {self._restart_wait_s:g} s.{todo}", retry_after_s=RETRY_AFTER_S)

    async def _classify_loss(self, lost: AttemptLostError, request: AnyRequest, was_exclusive: bool) -> LossCause:
        """Wait for the report of how the engine ended. Return how the loss counts.

        If no report comes in time, it is "suspected" on this machine, whose engines always report; the requests of an
        engine elsewhere are "not_at_fault", because a lost machine would else convict them. If another engine is ready,
        the wait ends after a few seconds; but a request whose attempt was exclusive waits as long as for a restart, so
        that it does not crash a second engine.
        """
        if lost.exit_report is None:
            return "not_started"
        exit_report = lost.exit_report
        timeout_s = self._restart_wait_s if was_exclusive else min(_EXIT_REPORT_TIMEOUT_S, self._restart_wait_s)
        await asyncio.wait([exit_report], timeout=timeout_s)
        if not exit_report.done() and not was_exclusive:
            try:
                async with asyncio.timeout(self._restart_wait_s - timeout_s), self._engines_changed:
                    await self._engines_changed.wait_for(lambda: exit_report.done() or self._route(request) is not None)
            except TimeoutError:
                log.debug("%s: no report of how its engine ended", lost.attempt_id)
        if exit_report.done():
            return exit_report.result().loss_cause(lost.attempt_id)
        return "not_at_fault" if lost.is_remote else "suspected"


def _limit_s(request: AnyRequest) -> float:
    """Return after how many seconds the result is of no use to the client."""
    return request.timeout_s if request.deadline_s is None else min(request.timeout_s, request.deadline_s)


def _remaining(request: AnyRequest, started: float) -> AnyRequest:
    """Return the request for its next attempt, with the time that is left: engines count from the arrival.

    It was accepted once, so it is not checked against its deadline again: the deadline becomes a timeout and high
    priority.
    """
    return msgspec.structs.replace(
        request,
        timeout_s=max(_limit_s(request) - _passed_s(started), 0.0),
        deadline_s=None,
        priority=request.priority if request.deadline_s is None else "high",
    )


def _passed_s(started: float) -> float:
    return asyncio.get_running_loop().time() - started


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
    """Raise if a request with these losses is not retried."""
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
