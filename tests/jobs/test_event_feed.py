"""The events of running jobs, read once for all who watch them."""

import asyncio
import contextlib

import pytest

from noria.errors import InternalError, JobNotFound, JobsUnavailable
from noria.jobs import event_feed
from noria.jobs.event_feed import JobEventFeed
from noria.jobs.records import JobEvent, JobState
from waiting import wait_until_async


class FakeStore:
    """The events of a job; counts their readings."""

    def __init__(self, number=0):
        self.events, self.status, self.error, self.num_reads = [], "processing", None, 0
        self.add(number)

    def add(self, number=1, status=None):
        for _ in range(number):
            self.events.append(JobEvent(len(self.events) + 1, 0.0, "progress", "{}"))
        if status is not None:
            self.status = status
            self.events.append(JobEvent(len(self.events) + 1, 0.0, "status", f'{{"status": "{status}"}}'))

    @property
    def state(self):
        return JobState(self.status, len(self.events), "alice")

    async def read_states(self, job_ids):
        if self.error is not None:
            raise self.error
        return dict.fromkeys(job_ids, self.state) if self.events else {}

    async def read_events(self, job_id, after):
        self.num_reads += 1
        return self.events[after:]


@pytest.fixture
def store():
    return FakeStore(2)


@pytest.fixture
async def feed(store, monkeypatch):
    monkeypatch.setattr(event_feed, "POLL_INTERVAL_S", 0.01)
    feed = JobEventFeed(store.read_states, store.read_events)
    yield feed
    await feed.close()


def stream(feed, store, after=0, idle_s=60.0):
    return feed.follow("job", store.state, after, idle_s)


def numbers(events):
    return [event.seq for event in events]


async def test_a_stream_has_what_was_there_then_what_comes_and_ends_with_the_job(feed, store):
    events = stream(feed, store, after=1)
    assert numbers(await anext(events)) == [2]
    assert feed.state("job") == store.state
    store.add(1, "processing")
    assert numbers(await anext(events)) == [3, 4]
    store.add(0, "succeeded")
    assert numbers(await anext(events)) == [5]
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    assert feed.state("job") is None
    assert [each async for each in stream(feed, store, after=5)] == []


async def test_streams_of_a_job_share_what_is_read(feed, store):
    streams = [stream(feed, store) for _ in range(3)]
    for events in streams:
        assert numbers(await anext(events)) == [1, 2]
    assert store.num_reads == 1
    store.add()
    for events in streams:
        assert numbers(await anext(events)) == [3]
    assert store.num_reads == 2
    assert numbers(await anext(stream(feed, store, after=1))) == [2, 3]
    assert store.num_reads == 2


async def test_a_stream_that_is_far_behind_reads_by_itself(feed, store, monkeypatch):
    monkeypatch.setattr(event_feed, "_MAX_RECENT", 2)
    first = stream(feed, store, after=2)
    waiting = asyncio.create_task(anext(first))
    await wait_until_async(lambda: feed.state("job"))
    store.add(3)
    assert numbers(await waiting) in ([3, 4, 5], [4, 5])  # as many as are kept, or all
    assert numbers(await anext(stream(feed, store))) == [1, 2, 3, 4, 5]


async def test_a_silent_stream_yields_nothing_and_a_job_that_nobody_watches_is_not_read(feed, store):
    events = stream(feed, store, after=2, idle_s=0.001)
    assert await anext(events) == []
    assert feed.state("job") is not None
    await events.aclose()
    assert feed.state("job") is None
    await wait_until_async(lambda: feed._poller is None)
    assert store.num_reads == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, JobNotFound("job job was deleted.")),
        (JobsUnavailable("away", retry_after_s=1.0), JobsUnavailable("away", retry_after_s=1.0)),
        (RuntimeError("a bug"), InternalError("the events could not be read; the server's log has the details.")),
    ],
    ids=["deleted", "away", "bug"],
)
async def test_streams_end_with_the_error_of_the_query(feed, store, error, expected):
    streams = [stream(feed, store, after=2) for _ in range(2)]
    waiting = [asyncio.create_task(anext(events)) for events in streams]
    await wait_until_async(lambda: feed.state("job"))
    store.error = error
    store.events.clear()
    for task in waiting:
        with contextlib.suppress(StopAsyncIteration), pytest.raises(type(expected), match=expected.message):
            await task
    assert feed.state("job") is None
