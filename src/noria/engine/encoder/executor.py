"""The encoder executor: each session is a thread that computes one batch of texts after the other.

Batches are those that the scheduler planned: of one model, padded to the longest text. What comes out is cut and
normalized as each request asks.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noria.engine.encoder.request import PreparedTextRequest, prepare
from noria.engine.resources.memory import used_memory_bytes
from noria.engine.resources.out_of_memory import first_line, is_out_of_memory
from noria.engine.resumption import InvalidStateError, StateWithBytes
from noria.engine.runtime import FinishedBatch
from noria.models.encoder.tokenizers.token_rows import FloatArray, Session, TokenRow
from noria.observe.logs.log_record import fields
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import TextRequest
from noria.protocol.text import EncoderModelSpec, TextPayload
from noria.scheduling.types import BatchPlan, BatchResult, ItemId

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

    def prepare(self, request: TextRequest, data: memoryview | None = None) -> PreparedTextRequest:
        """Check a request, whose images are `data`. Raises `errors.InvalidField`."""
        spec, _ = self._models[ModelKey(request.model, request.model_version)]
        return prepare(request, spec, data)

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
        return used_memory_bytes("cpu")

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


def execute(plan: BatchPlan, members: Members, spec: EncoderModelSpec, session: Session) -> BatchResult:
    """Compute a batch and keep the results in its requests.

    If the model fails, each text is tried alone, so that a text fails no other.
    """
    try:
        results = session.run([prepared.rows[index] for prepared, index in members], plan.is_alone)
    except BaseException as error:  # many types, also a panic in Rust or SystemExit; none may end the thread
        fits = not is_out_of_memory(error)
        extra = fields(
            event="iteration_failed" if fits else "out_of_memory",
            num_texts=len(members),
            request_ids=sorted({prepared.request.request_id for prepared, _ in members}),
        )
        if not fits:
            _log.warning("%d texts do not fit the memory: %s", len(members), first_line(error), extra=extra)
            return BatchResult(fits=False)
        if len(members) == 1:
            _log.exception("a text failed", extra=extra)
            return BatchResult({plan.rows[0]: f"the model failed: {first_line(error)}"})
        _log.warning("a batch failed; its texts are tried alone: %s", first_line(error), extra=extra)
        return _execute_alone(plan, members, spec, session)
    return BatchResult(_keep_results(plan, members, results, spec))


def _execute_alone(plan: BatchPlan, members: Members, spec: EncoderModelSpec, session: Session) -> BatchResult:
    failed: dict[ItemId, str] = {}
    for row, member in zip(plan.rows, members, strict=True):
        single = BatchPlan(plan.session, plan.batch_key, (row,), (member[0].request.payload.lengths[member[1]],))
        result = execute(single, [member], spec, session)
        failed |= result.failed
        if not result.fits:
            failed[row] = "it does not fit the device's memory"
    return BatchResult(failed, is_timed=False)


def _keep_results(
    plan: BatchPlan, members: Members, results: Sequence[FloatArray], spec: EncoderModelSpec
) -> dict[ItemId, str]:
    """Return the texts whose results are not finite."""
    whole = np.concatenate(results)
    failed = {}
    if not np.isfinite(whole).all():
        finite = (np.isfinite(result).all() for result in results)
        failed = {row: "the model's result is not finite" for row, ok in zip(plan.rows, finite, strict=True) if not ok}
    if spec.task == "embedding":
        results = _finish_embeddings(whole.reshape(len(results), -1), [each.request.payload for each, _ in members])
    if spec.task == "sparse_embedding":
        rows = (prepared.rows[index] for prepared, index in members)
        results = [
            _weights(each[:, 0], row.ids, spec.unweighted_ids)
            if each.ndim == 2 and isinstance(row, TokenRow)
            else _non_zero(each)
            for each, row in zip(results, rows, strict=True)
        ]
    for (prepared, index), result in zip(members, results, strict=True):
        prepared.results[index] = result
    return failed


def _non_zero(numbers_V: FloatArray) -> FloatArray:
    """Return the numbers that are not 0 as rows [token id, number]; float32 has all integers up to 16 million."""
    ids = np.flatnonzero(numbers_V)
    return np.stack([ids.astype(np.float32), numbers_V[ids]], axis=1)


def _weights(numbers_T: FloatArray, ids_T: NDArray[Any], unweighted: Sequence[int]) -> FloatArray:
    """Return rows likewise: of each token the largest of its numbers that is above 0."""
    counts = (numbers_T > 0) & ~np.isin(ids_T, unweighted)
    ids, places = np.unique(ids_T[counts], return_inverse=True)
    largest = np.zeros(len(ids), np.float32)
    np.maximum.at(largest, places, numbers_T[counts])
    return np.stack([ids.astype(np.float32), largest], axis=1)


def _finish_embeddings(vectors_RD: FloatArray, payloads: Sequence[TextPayload]) -> list[FloatArray]:
    """Return the rows, cut and normalized as each request asks."""
    wishes = [(payload.dimensions, payload.normalize) for payload in payloads]
    finished = {wish: _finish(vectors_RD, *wish) for wish in set(wishes)}
    return [finished[wish][row] for row, wish in enumerate(wishes)]


def _finish(vectors_RD: FloatArray, dimensions: int | None, normalize: bool) -> FloatArray:
    vectors_RD = vectors_RD[:, :dimensions]
    if not normalize:
        return vectors_RD
    norms_R = np.sqrt(np.einsum("rd,rd->r", vectors_RD, vectors_RD))
    normalized_RD: FloatArray = vectors_RD / np.maximum(norms_R, _MIN_NORM)[:, None]
    return normalized_RD
