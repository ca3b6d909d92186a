"""Copies requests to the shadow of their endpoint, compares its answers with the control's, and discards them.

A copy is made when the control has answered, so it never delays its own request. It has the lowest priority, and a
small share of the engine; at most one is in flight, and it is sent only while no request waits at the engine. The
others wait in a short queue, and what finds it full is dropped. A copy is no request: it is in no log line, trace,
quota or job, and is not retried.

The copy is prepared anew for the shadow, with its own defaults, limits and tokenizer: it is what its version would get.
"""

import asyncio
import contextvars
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from noria.canary.shadow import ShadowCounts, ShadowReport
from noria.errors import (
    DeadlineUnmeetable,
    EngineUnavailable,
    GenerationFailed,
    InternalError,
    NoriaError,
    QueueFull,
)
from noria.frontend.access.shares import SHADOWS
from noria.frontend.engines.attempt import AttemptLostError, AttemptMovedError
from noria.frontend.engines.client import EngineClient
from noria.frontend.engines.results import EngineResult
from noria.frontend.engines.versions.output_distance import output_distance
from noria.frontend.engines.versions.version_choice import RequestVersions, VersionChooser
from noria.observe.logs.log_record import fields
from noria.observe.metrics import declarations, outcomes
from noria.protocol.messages import Timings
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import AnyRequest
from noria.protocol.routes import Target

_MAX_QUEUED = 16
_MAX_QUEUED_BYTES = 32 * 2**20  # bytes of the control's answers: ten images of 1024 × 1024
_RETRY_S = 0.1  # until an engine is asked again whether requests wait
_OF_LOAD = (QueueFull, DeadlineUnmeetable, EngineUnavailable)  # say nothing of the version
_DROPPED = "dropped"

PrepareCopy = Callable[[ModelSpec], Awaitable[AnyRequest]]
"""Returns a request as another version of its model would get it. Raises NoriaError if that allows it not."""

log = logging.getLogger("noria.frontend")


@dataclass(frozen=True)
class _Copy:
    endpoint: str
    target: Target
    prepare: PrepareCopy
    answer: EngineResult | None  # the control's; None: it failed
    data: bytes | None  # what the request's payload has beside it

    @property
    def num_bytes(self) -> int:
        num_bytes = len(self.data or b"")
        if self.answer is not None:
            num_bytes += sum(image.rgb.nbytes for image in self.answer.images)
            num_bytes += (self.answer.data or memoryview(b"")).nbytes
        return num_bytes


class ShadowMirror:
    """The copies that one front end makes."""

    def __init__(
        self,
        versions: VersionChooser,
        find: Callable[[str, str], ModelSpec | None],
        route: Callable[[str, str], EngineClient | None],
    ) -> None:
        """`find` returns the model of a name and fingerprint if a ready engine holds it; `route` chooses an engine."""
        self._versions, self._find, self._route = versions, find, route
        self._queue: deque[_Copy] = deque()
        self._num_queued_bytes = 0
        self._task: asyncio.Task[None] | None = None  # while there are copies
        self._counts: dict[int, ShadowCounts] = {}  # by deployment, since `take_counts`

    async def answer(
        self,
        spec: ModelSpec,
        versions: RequestVersions,
        answering: Awaitable[EngineResult],
        prepare: PrepareCopy,
        data: bytes | None,
    ) -> EngineResult:
        """Return what `answering` does, the control's answer; a share of the requests is copied then, with their data.

        What ends an engine, is cancelled or is rejected is not copied.
        """
        try:
            result = await answering
        except GenerationFailed:
            self._offer(spec, versions, prepare, None, data)
            raise
        self._offer(spec, versions, prepare, result, data)
        return result

    def take_counts(self) -> tuple[ShadowReport, ...]:
        """Return what was counted since the last call."""
        taken, self._counts = self._counts, {}
        return tuple(ShadowReport(deployment, counts) for deployment, counts in taken.items())

    async def aclose(self) -> None:
        """Cancel what is in flight."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _offer(
        self,
        spec: ModelSpec,
        versions: RequestVersions,
        prepare: PrepareCopy,
        answer: EngineResult | None,
        data: bytes | None,
    ) -> None:
        shadow = self._versions.shadow_of(spec, versions)
        if shadow is None or random.random() >= shadow[1]:  # noqa: S311 - no secret
            return
        copy = _Copy(spec.name, shadow[0], prepare, answer, data)
        if len(self._queue) >= _MAX_QUEUED or self._num_queued_bytes + copy.num_bytes > _MAX_QUEUED_BYTES:
            self._count(copy, _DROPPED, ShadowCounts(num_dropped=1))
            return
        self._queue.append(copy)
        self._num_queued_bytes += copy.num_bytes
        if self._task is None:  # in a context of its own: it belongs to no request, log line or span
            self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    async def _run(self) -> None:
        """Send the copies one by one, until there is none."""
        try:
            while self._queue:
                copy = self._queue.popleft()
                self._num_queued_bytes -= copy.num_bytes
                try:
                    await self._send(copy)
                except Exception:  # a bug; the next copy may succeed
                    log.exception("a copy for the shadow %s failed", copy.target.version)
                    self._count(copy, InternalError.code, ShadowCounts(num_dropped=1))
        finally:
            self._task = None

    async def _send(self, copy: _Copy) -> None:
        """Send a copy when no request waits for its engine, and count what becomes of it."""
        is_control_error = int(copy.answer is None)
        lost = 0
        try:
            result = await self._submit(copy)
        except AttemptLostError:
            lost, outcome = 1, "engine_lost"
        except (*_OF_LOAD, AttemptMovedError):
            self._count(copy, _DROPPED, ShadowCounts(num_dropped=1))
            return
        except NoriaError as error:
            outcome = error.code
            extra = fields(event="shadow_failed", deployment=copy.target.deployment, outcome=outcome)
            log.info("shadow %s: %s", copy.target.version, error.message, extra=extra)
        else:
            counts = ShadowCounts(num_answers=1, num_control_errors=is_control_error)
            if copy.answer is not None:
                counts += await self._compare(copy, copy.answer, result)
            self._count(copy, outcomes.OK, counts)
            return
        counts = ShadowCounts(num_answers=1, num_errors=1, num_control_errors=is_control_error, num_lost=lost)
        self._count(copy, outcome, counts)

    async def _submit(self, copy: _Copy) -> EngineResult:
        """Raises NoriaError, AttemptLostError and AttemptMovedError."""
        spec = self._find(copy.endpoint, copy.target.fingerprint)
        if spec is None:
            raise EngineUnavailable("no engine holds the shadow")
        request = await copy.prepare(spec)
        request = msgspec.structs.replace(
            request,
            model_version=spec.fingerprint,
            priority="low",
            deadline_s=None,
            stream_progress=False,
            client="",
            share_client=SHADOWS.client,
            share_weight=SHADOWS.weight,
        )
        while True:
            if (engine := self._route(request.model, request.model_version)) is None:
                raise EngineUnavailable("no engine holds the shadow")
            if engine.load is None or engine.load.num_waiting == 0:
                return await engine.submit(request, None, copy.data)
            await asyncio.sleep(_RETRY_S)

    async def _compare(self, copy: _Copy, control: EngineResult, shadow: EngineResult) -> ShadowCounts:
        distance = await asyncio.to_thread(output_distance, control, shadow)
        labels = copy.endpoint, copy.target.version
        seconds = _computing_s(control), _computing_s(shadow)
        for arm, arm_s in zip(("control", "shadow"), seconds, strict=True):
            declarations.SHADOW_SECONDS.labels(*labels, arm).observe(arm_s)
        counts = ShadowCounts(num_timed=1, control_s=seconds[0], shadow_s=seconds[1])
        if distance is None:
            return counts
        declarations.SHADOW_DISTANCE.labels(*labels).observe(distance)
        return counts + ShadowCounts(num_distances=1, distance=distance, max_distance=distance)

    def _count(self, copy: _Copy, outcome: str, counts: ShadowCounts) -> None:
        declarations.SHADOW_REQUESTS.labels(copy.endpoint, copy.target.version, outcome).inc()
        deployment = copy.target.deployment
        self._counts[deployment] = self._counts.get(deployment, ShadowCounts()) + counts


def _computing_s(result: EngineResult) -> float:
    """Return the time without the wait in queues, which is longer at the lowest priority."""
    timings = result.timings
    if isinstance(timings, Timings):
        return timings.image_encode_s + timings.text_encode_s + timings.denoise_s + timings.decode_s
    return timings.infer_s
