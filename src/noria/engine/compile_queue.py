"""The requests whose samplers are to be compiled, and which of them is next. Pure.

A sampler takes up to 1.5 s to compile, and a client may request any number of different ones. So clients take turns, of
a client the one with the fewest steps is next, and the queue is bounded: beyond the limit, the one with the most steps
of the client with the most requests is rejected. A client is an API key; clients without a key share one turn, in which
a usual request is compiled before the costly ones.
"""

from dataclasses import dataclass

from noria.protocol.request import AnyRequest
from noria.protocol.transport import ClientId

MAX_WAITING = 64
"""Beyond a burst of usual requests; each keeps its frame of data in memory."""


@dataclass(frozen=True)
class CompileTask:
    """A request to prepare, as it arrived."""

    connection: ClientId
    request: AnyRequest
    data: memoryview | None
    arrived: float  # monotonic seconds


class CompileQueue:
    """At most `max_waiting` requests. Not thread-safe."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._tasks: dict[str, list[CompileTask]] = {}  # by client, in the order of their turns; no list is empty

    def put(self, task: CompileTask) -> CompileTask | None:
        """Add a request; return the one that is rejected if there are too many, which may be the new one."""
        self._tasks.setdefault(task.request.client, []).append(task)
        if sum(map(len, self._tasks.values())) <= self._max_waiting:
            return None
        longest = max(self._tasks, key=lambda client: (len(self._tasks[client]), client == task.request.client))
        rejected = max(reversed(self._tasks[longest]), key=_num_steps)
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


def _num_steps(task: CompileTask) -> int:
    num_steps: int = task.request.payload.num_steps
    return num_steps
