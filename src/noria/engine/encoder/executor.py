"""The encoder executor: each session is a thread that computes one batch of texts after the other.

Batches are those that the scheduler planned: of one model, padded to the longest text. What comes out is cut and
normalized as each request asks.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import psutil

from noria.engine.encoder.request import PreparedTextRequest, prepare
from noria.engine.resources.out_of_memory import is_out_of_memory
from noria.engine.resumption import InvalidStateError, StateWithBytes
from noria.engine.runtime import FinishedBatch
from noria.models.encoder.token_rows import FloatArray, Session
from noria.observe.logs.log_record import fields
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import TextRequest
from noria.protocol.text import EncoderModelSpec, TextPayload
from noria.scheduling.types import BatchPlan, ItemId, IterationResult

_log = logging.getLogger(__name__)
_MIN_NORM = 1e-12  # as torch.nn.functional.normalize

OnDone = Callable[[FinishedBatch], None]
Members = Sequence[tuple[PreparedTextRequest, int]]
"""The request of each row of a batch, and which of its texts the row is."""


class EncoderExecutor:
    """The `BatchExecutor` of the encoders on one device."""

    def __init__(self, models: Mapping[ModelKey, tuple[EncoderModelSpec, Sequence[Session]]]) -> None:
        """`models` have equally many sessions each; session k of all models is one thread."""
        (self.num_sessions,) = {len(sessions) for _, sessions in models.values()}
        self._models = models  # replaced, never changed, since the receiver reads it
        self._requests: dict[str, PreparedTextRequest] = {}
        self._threads = [_SessionThread(number) for number in range(self.num_sessions)]
        for thread in self._threads:
            thread.start()

    def add(self, spec: EncoderModelSpec, sessions: Sequence[Session]) -> None:
        """Add a model with as many sessions as the others, on the loop's thread."""
        assert len(sessions) == self.num_sessions
        self._models = {**self._models, spec.key: (spec, sessions)}

    def remove(self, key: ModelKey) -> None:
        """Remove a model of which there is no request and no batch, on the loop's thread."""
        self._models = {other: model for other, model in self._models.items() if other != key}

    @property
    def is_faster_alone(self) -> bool:
        """Whether the sessions of all models use more threads for a batch that runs alone."""
        return all(sessions[0].is_faster_alone for _, sessions in self._models.values())

    def prepare(self, request: TextRequest, data: memoryview | None = None) -> PreparedTextRequest:  # noqa: ARG002
        """Check a request. Raises `errors.InvalidField`."""
        spec = next(spec for spec, _ in self._models.values() if spec.matches(request.model, request.model_version))
        if request.model_version != spec.fingerprint:
            request = msgspec.structs.replace(request, model_version=spec.fingerprint)
        return prepare(request, spec)

    def resume(self, prepared: PreparedTextRequest, states: Sequence[StateWithBytes]) -> PreparedTextRequest:
        """Return `prepared`: texts have no state. Raises InvalidStateError if there is one."""
        if states:
            raise InvalidStateError("texts have no state")
        return prepared

    def is_compiled(self, request: TextRequest) -> bool:  # noqa: ARG002
        """True."""
        return True

    def accept(self, prepared: PreparedTextRequest) -> None:
        """Keep a request until `forget`."""
        self._requests[prepared.request.attempt_id] = prepared

    def forget(self, attempt_id: str) -> None:
        """Drop a request that has ended; results of a batch that still runs are lost with it."""
        del self._requests[attempt_id]

    def memory_bytes(self) -> int:
        """The resident memory of this process."""
        resident: int = psutil.Process().memory_info().rss
        return resident

    def start(self, plan: BatchPlan, on_done: OnDone) -> None:
        """Execute a batch in its session."""
        members = [(self._requests[row.attempt_id], row.index) for row in plan.rows]
        spec, sessions = self._models[plan.batch_key.model]
        self._threads[plan.session].jobs.put((plan, members, spec, sessions[plan.session], on_done))

    def close(self) -> None:
        """End the sessions, once they are idle."""
        for thread in self._threads:
            thread.jobs.put(None)
        for thread in self._threads:
            thread.join()


_Job = tuple[BatchPlan, Members, EncoderModelSpec, Session, OnDone]


class _SessionThread(threading.Thread):
    def __init__(self, number: int) -> None:
        super().__init__(name=f"session-{number}", daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            plan, members, spec, session, on_done = job
            began = time.perf_counter()
            result = execute(plan, members, spec, session)
            on_done(FinishedBatch(plan, result, time.perf_counter() - began))
            del job, members, session  # not kept until the next batch comes


def execute(plan: BatchPlan, members: Members, spec: EncoderModelSpec, session: Session) -> IterationResult:
    """Compute a batch and keep the results in its requests.

    If the model fails, each text is tried alone, so that a text fails no other.
    """
    try:
        results = session.run([prepared.rows[index] for prepared, index in members], plan.is_alone)
    except BaseException as error:  # of many types, also of a panic in Rust or of SystemExit; none may end the thread
        fits = not is_out_of_memory(error)
        extra = fields(
            event="iteration_failed" if fits else "out_of_memory",
            num_images=len(members),
            request_ids=sorted({prepared.request.request_id for prepared, _ in members}),
        )
        if not fits:
            _log.warning("%d texts do not fit the memory: %s", len(members), _first_line(error), extra=extra)
            return IterationResult(oom_phase="steps")
        if len(members) == 1:
            _log.exception("a text failed", extra=extra)
            return IterationResult({plan.rows[0]: f"the model failed: {_first_line(error)}"})
        _log.warning("a batch failed; its texts are tried alone: %s", _first_line(error), extra=extra)
        return _execute_alone(plan, members, spec, session)
    return IterationResult(_keep_results(plan, members, results, spec))


def _execute_alone(plan: BatchPlan, members: Members, spec: EncoderModelSpec, session: Session) -> IterationResult:
    failed: dict[ItemId, str] = {}
    for row, member in zip(plan.rows, members, strict=True):
        single = BatchPlan(plan.session, plan.batch_key, (row,), (len(member[0].rows[member[1]].ids),))
        result = execute(single, [member], spec, session)
        failed |= result.failed
        if result.oom_phase is not None:
            failed[row] = "it does not fit the device's memory"
    return IterationResult(failed, is_timed=False)


def _keep_results(
    plan: BatchPlan, members: Members, results: Sequence[FloatArray], spec: EncoderModelSpec
) -> dict[ItemId, str]:
    """Return the texts whose results are not finite."""
    failed = {}
    for row, (prepared, index), result in zip(plan.rows, members, results, strict=True):
        if not np.isfinite(result).all():
            failed[row] = "the model's result is not finite"
        is_embedding = spec.task == "embedding"
        prepared.results[index] = _finish_embedding(result, prepared.request.payload) if is_embedding else result
    return failed


def _finish_embedding(vector_D: FloatArray, payload: TextPayload) -> FloatArray:
    vector_D = vector_D[: payload.dimensions]
    if not payload.normalize:
        return vector_D
    return vector_D / max(float(np.sqrt(np.dot(vector_D, vector_D))), _MIN_NORM)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
