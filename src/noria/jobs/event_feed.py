"""The events of running jobs, read once for all who watch them in one front end.

While jobs are watched, one query every `POLL_INTERVAL_S` reads the states of all of them, and one more the new events
of each that has any, however many streams there are. A stream that joins others of its job reads only the events that
they have not kept.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping

import msgspec

from noria.errors import InternalError, JobNotFound, NoriaError
from noria.jobs.records import TERMINAL_STATUSES, JobEvent, JobState, StatusEventData

POLL_INTERVAL_S = 0.5  # progress is stored at most this often
_MAX_RECENT = 100  # events kept of a watched job; a stream that is further behind reads the database

ReadStates = Callable[[Collection[str]], Awaitable[Mapping[str, JobState]]]
"""Returns the states of those of the jobs that exist."""
ReadEvents = Callable[[str, int], Awaitable[list[JobEvent]]]
"""Returns the events of a job after an event number, in order."""

log = logging.getLogger("noria.jobs")


class _WatchedJob:
    """A job with at least one stream."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self.num_streams = 0
        self.recent: deque[JobEvent] = deque(maxlen=_MAX_RECENT)
        self.error: NoriaError | None = None  # ends its streams
        self.changed = asyncio.Event()  # another one after each change

    def publish(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class JobEventFeed:
    """Follows jobs. Call `close` at the end."""

    def __init__(self, read_states: ReadStates, read_events: ReadEvents) -> None:
        self._read_states, self._read_events = read_states, read_events
        self._watched: dict[str, _WatchedJob] = {}
        self._poller: asyncio.Task[None] | None = None

    def state(self, job_id: str) -> JobState | None:
        """Return the state of a job that is watched, as of the last query; None: it is not watched."""
        watched = self._watched.get(job_id)
        return None if watched is None else watched.state

    async def follow(
        self, job_id: str, state: JobState, after: int, idle_s: float
    ) -> AsyncGenerator[list[JobEvent], None]:
        """Yield a job's events after event number `after`, until it has ended; nothing at each silence of `idle_s`.

        `state` is what the caller has just read, or `state()`.
        Raises NoriaError: JobNotFound if the job is deleted meanwhile.
        """
        watched = self._watched.setdefault(job_id, _WatchedJob(state))
        watched.num_streams += 1
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name="poll the events of jobs")
        try:
            while True:
                state, changed = watched.state, watched.changed  # the state before the events, which may be newer
                if watched.error is not None:
                    raise watched.error
                while after < state.last_event and (events := await self._events_after(watched, job_id, after)):
                    yield events
                    after = events[-1].seq
                    if _is_terminal(events[-1]):
                        return
                if state.status in TERMINAL_STATUSES:
                    return
                try:
                    async with asyncio.timeout(idle_s):
                        await changed.wait()
                except TimeoutError:
                    yield []
        finally:
            watched.num_streams -= 1
            if not watched.num_streams and self._watched.get(job_id) is watched:
                del self._watched[job_id]

    async def close(self) -> None:
        """Stop reading."""
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller

    async def _events_after(self, watched: _WatchedJob, job_id: str, after: int) -> list[JobEvent]:
        if watched.recent and watched.recent[0].seq <= after + 1:
            return [event for event in watched.recent if event.seq > after]
        events = await self._read_events(job_id, after)
        if not watched.recent and events and events[-1].seq >= watched.state.last_event:
            watched.recent += events  # for the streams that join
        return events

    async def _poll(self) -> None:
        try:
            while self._watched:
                await asyncio.sleep(POLL_INTERVAL_S)
                await self._update(dict(self._watched))
        finally:
            self._poller = None

    async def _update(self, watched_jobs: Mapping[str, _WatchedJob]) -> None:
        try:
            states = await self._read_states(watched_jobs)
            for job_id, watched in watched_jobs.items():
                if (state := states.get(job_id)) is None:
                    self._fail({job_id: watched}, JobNotFound(f"job {job_id} was deleted."))
                elif state != watched.state:
                    last_read = max(watched.state.last_event, watched.recent[-1].seq if watched.recent else 0)
                    events = await self._read_events(job_id, last_read)
                    newest = watched.recent[-1].seq if watched.recent else 0  # a stream may have read some meanwhile
                    watched.recent += [event for event in events if event.seq > newest]
                    watched.state = state
                    watched.publish()
        except NoriaError as error:
            self._fail(watched_jobs, error)
        except Exception:
            log.exception("the events of watched jobs could not be read")
            self._fail(watched_jobs, InternalError("the events could not be read; the server's log has the details."))

    def _fail(self, watched_jobs: Mapping[str, _WatchedJob], error: NoriaError) -> None:
        """End the streams of these jobs; new streams of them begin anew."""
        for job_id, watched in watched_jobs.items():
            watched.error = error
            watched.publish()
            self._watched.pop(job_id, None)


def _is_terminal(event: JobEvent) -> bool:
    return event.type == "status" and msgspec.json.decode(event.data, type=StatusEventData).status in TERMINAL_STATUSES
