"""Prepares requests for the loop: known ones at once, others one at a time in a thread.

A new sampler takes up to 1.5 s to compile, and LoRAs that are not loaded as long as reading their files: neither pings
nor other requests wait for that. Which one is next, and how many wait, is `CompileQueue`'s to decide.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from noria.engine.compile_queue import CompileQueue, CompileTask
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.monitoring.watchdog import HangWatchdog
from noria.engine.resumption import InvalidStateError, Resumption
from noria.engine.runtime import Executor, PreparedRequest
from noria.errors import QueueFull, RequestError
from noria.observe.logs.log_record import fields
from noria.protocol.messages import Failed, StateRefused
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import AnyRequest
from noria.protocol.transport import ClientId

_log = logging.getLogger("noria.engine")
_COMPILE_RETRY_AFTER_S = 5.0  # half of a full queue with the usual 20 to 50 steps takes as long

Prepared = PreparedRequest | Failed | StateRefused
"""A prepared request, or why it cannot be prepared."""


class RequestPreparer:
    """The requests that are being prepared, and the thread that does it. Callers hold `lock`."""

    def __init__(
        self,
        lock: threading.RLock,
        watchdog: HangWatchdog,
        crash_journal: CrashJournal,
        on_done: Callable[[CompileTask, Prepared], None],
        on_cancelled: Callable[[CompileTask], None],
    ) -> None:
        """`on_done` is called with `lock` held, once for each request of `enqueue` that is not cancelled.

        `on_cancelled` is called for each that is, when it leaves the queue or the thread has prepared it.
        """
        self._lock, self._watchdog, self._crash_journal = lock, watchdog, crash_journal
        self._on_done, self._on_cancelled = on_done, on_cancelled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compiler")
        self._queue = CompileQueue()
        self._tasks: dict[tuple[ClientId, str], CompileTask] = {}  # that wait or are being prepared, by attempt
        self._changed = threading.Condition(lock)  # notified when one has left `_tasks`

    @property
    def attempts(self) -> list[tuple[ClientId, str]]:
        """The attempts that are being prepared, and their clients."""
        return list(self._tasks)

    def enqueue(self, executor: Executor[Any], task: CompileTask) -> None:
        """Prepare a request in the thread; it, or another one in its place, is rejected if too many wait."""
        self._tasks[task.connection, task.request.attempt_id] = task
        rejected = self._queue.put(task)
        if task not in rejected:
            self._thread.submit(self._prepare_next, executor)
        message = "too many requests wait for new combinations of scheduler, inference_steps and strength, or for LoRAs"
        for each in rejected:
            self._remove(each)
            code, retry_after_s = QueueFull.code, _COMPILE_RETRY_AFTER_S
            self._on_done(each, Failed(each.request.attempt_id, code, message, retry_after_s=retry_after_s))

    def _prepare_next(self, executor: Executor[Any]) -> None:
        with self._lock:
            task = self._queue.take()
        if task is None:  # it was cancelled or rejected
            return
        with self._crash_journal.preparing(task.request.attempt_id):
            prepared = self.prepare(executor, task.request, task.data, task.resumption)
        with self._lock:
            if self._remove(task):
                self._on_done(task, prepared)
            else:  # cancelled meanwhile, and answered
                self._on_cancelled(task)

    def _remove(self, task: CompileTask) -> bool:
        """Remove a request; return whether it was there."""
        was_there = self._tasks.pop((task.connection, task.request.attempt_id), None) is not None
        self._changed.notify_all()
        return was_there

    def cancel(self, client: ClientId, attempt_id: str) -> CompileTask | None:
        """Stop preparing a request and return it; None: it is not being prepared."""
        task = self._tasks.get((client, attempt_id))
        if task is not None:
            self._remove(task)
            self._discard(client, attempt_id)
        return task

    def forget(self, client: ClientId) -> None:
        """Stop preparing the requests of a client."""
        self._tasks = {key: task for key, task in self._tasks.items() if key[0] != client}
        self._changed.notify_all()
        self._discard(client, None)

    def _discard(self, client: ClientId, attempt_id: str | None) -> None:
        for task in self._queue.discard(client, attempt_id):
            self._on_cancelled(task)

    def wait_until_prepared(self, model: ModelKey) -> None:
        """Wait until no request of a model is being prepared."""
        with self._changed:
            self._changed.wait_for(lambda: all(task.model != model for task in self._tasks.values()))

    def prepare(
        self, executor: Executor[Any], request: AnyRequest, data: memoryview | None, resumption: Resumption | None
    ) -> Prepared:
        """Prepare a request on the calling thread, with or without the lock."""
        attempt_id = request.attempt_id
        try:
            prepared: PreparedRequest = executor.prepare(request, data)
            if resumption is not None and resumption.states:
                resumption.check_version(request.model_version)
                prepared = executor.resume(prepared, resumption.states)
        except InvalidStateError as error:
            return StateRefused(attempt_id, str(error))
        except (RequestError, QueueFull) as error:
            return Failed(attempt_id, error.code, error.message, error.field, retry_after_s=error.retry_after_s)
        except BaseException:  # a panic in Rust (safetensors) is no Exception, and would end the channel's thread
            log_fields = fields(
                event="request_preparation_failed",
                request_id=request.request_id,
                attempt_id=attempt_id,
                key=request.client or None,
            )
            _log.exception("request %s cannot be prepared", request.request_id, extra=log_fields)
            return Failed(attempt_id, "generation_failed", "the request could not be prepared")
        self._watchdog.expect_iteration(prepared.longest_iteration_s)
        return prepared
