"""The requests whose samplers are to be compiled or whose LoRAs are to be loaded, and which of them is next. Pure.

A sampler takes up to 1.5 s to compile, LoRAs as long as reading their files, and a client may request any number of
different ones. So clients take turns, of a client the one with the fewest steps is next, and the queue is bounded in
requests and in the bytes of their start images: beyond a limit, the one with the most steps of the client that has most
is rejected. A client is an API key; clients without a key share one turn, in which a usual request is prepared before
the costly ones. Requests that another engine has handed over count in no limit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from noria.engine.resumption import Resumption
from noria.protocol.model_spec import ModelKey
from noria.protocol.request import AnyRequest
from noria.protocol.transport import ClientId

MAX_WAITING = 64
"""Beyond a burst of usual requests."""

MAX_WAITING_BYTES = 2**28
"""Of frames of data: 64 start images of 1024 × 1024 with a mask, or 16 of 2048 × 2048."""


@dataclass(frozen=True)
class CompileTask:
    """A request to prepare, as it arrived."""

    connection: ClientId
    request: AnyRequest
    data: memoryview | None
    arrived: float  # monotonic seconds
    resumption: Resumption | None = None

    @property
    def model(self) -> ModelKey:
        """Name and version of the request's model."""
        return ModelKey(self.request.model, self.request.model_version)


class CompileQueue:
    """At most `max_waiting` new requests, with at most `max_bytes` of data. Not thread-safe."""

    def __init__(self, max_waiting: int = MAX_WAITING, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting, self._max_bytes = max_waiting, max_bytes
        self._tasks: dict[str, list[CompileTask]] = {}  # by client, in the order of their turns; no list is empty

    def put(self, task: CompileTask) -> list[CompileTask]:
        """Add a request; return those that are rejected if there are too many, possibly the new one."""
        self._tasks.setdefault(task.request.client, []).append(task)
        rejected = []
        if sum(map(_num_new, self._tasks.values())) > self._max_waiting:
            rejected.append(self._reject(_num_new, _is_new, task.request.client))
        while sum(map(_num_bytes, self._tasks.values())) > self._max_bytes:
            rejected.append(self._reject(_num_bytes, _has_new_data, task.request.client))
        return rejected

    def _reject(
        self, size: Callable[[list[CompileTask]], int], counts: Callable[[CompileTask], bool], newest_client: str
    ) -> CompileTask:
        """Remove the request with the most steps of those that count, of the client whose requests have most `size`."""
        client = max(self._tasks, key=lambda client: (size(self._tasks[client]), client == newest_client))
        rejected = max(filter(counts, reversed(self._tasks[client])), key=_num_steps)
        self._remove(rejected)
        return rejected

    def take(self) -> CompileTask | None:
        """Remove and return the next request, or None; the next turn is another client's."""
        if not self._tasks:
            return None
        client = next(iter(self._tasks))
        task = min(self._tasks[client], key=_num_steps)
        self._remove(task)
        if client in self._tasks:
            self._tasks[client] = self._tasks.pop(client)
        return task

    def discard(self, connection: ClientId, attempt_id: str | None) -> list[CompileTask]:
        """Remove and return a cancelled request of a connection, or (None) all of its requests."""
        discarded = [
            task
            for tasks in self._tasks.values()
            for task in tasks
            if task.connection == connection and attempt_id in (None, task.request.attempt_id)
        ]
        for task in discarded:
            self._remove(task)
        return discarded

    def _remove(self, task: CompileTask) -> None:
        tasks = self._tasks[task.request.client]
        tasks[:] = [each for each in tasks if each is not task]
        if not tasks:
            del self._tasks[task.request.client]


def _is_new(task: CompileTask) -> bool:
    return not task.request.was_moved


def _has_new_data(task: CompileTask) -> bool:
    return _is_new(task) and task.data is not None


def _num_new(tasks: Iterable[CompileTask]) -> int:
    return sum(map(_is_new, tasks))


def _num_bytes(tasks: Iterable[CompileTask]) -> int:
    return sum(task.data.nbytes for task in tasks if task.data is not None and _is_new(task))


def _num_steps(task: CompileTask) -> int:
    num_steps: int = task.request.payload.num_steps
    return num_steps
