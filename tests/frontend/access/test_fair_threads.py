import asyncio
import threading

import pytest

from noria.frontend.access.fair_threads import FairThreads
from waiting import wait_until


class Calls:
    """Calls that end when they are told to."""

    def __init__(self):
        self.started, self._ends = [], {}

    def make(self, name):
        self._ends[name] = threading.Event()
        return lambda: (self.started.append(name), self._ends[name].wait(30), name)[-1]

    def end(self, name):
        self._ends[name].set()

    async def until_started(self, *names):
        await asyncio.to_thread(wait_until, lambda: self.started == list(names))


async def test_clients_take_turns_and_one_with_many_calls_delays_others_by_one_each():
    threads, calls = FairThreads(1), Calls()
    tasks = [asyncio.create_task(threads.run(name[0], calls.make(name))) for name in ("a1", "a2", "a3", "b1", "c1")]
    order = ["a1", "a2", "b1", "c1", "a3"]
    for number, name in enumerate(order, 1):
        await calls.until_started(*order[:number])
        calls.end(name)
    assert sorted(await asyncio.gather(*tasks)) == sorted(order)


async def test_a_cancelled_call_that_waits_is_not_made_and_one_that_runs_keeps_its_thread():
    threads, calls = FairThreads(1), Calls()
    running, waiting, last = (asyncio.create_task(threads.run("a", calls.make(name))) for name in "123")
    await calls.until_started("1")
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert calls.started == ["1"]
    calls.end("1")
    await calls.until_started("1", "3")
    calls.end("3")
    assert await last == "3"
    assert await threads.run("b", lambda: "free") == "free"


async def test_a_call_that_is_cancelled_just_when_its_turn_comes_passes_it_on():
    threads, calls = FairThreads(1), Calls()
    await threads._turns.acquire("a")
    second, third = (asyncio.create_task(threads.run("a", calls.make(name))) for name in "23")
    await asyncio.sleep(0)
    threads._turns.release()
    second.cancel()
    calls.end("3")
    assert await third == "3"
    assert (calls.started, second.cancelled()) == (["3"], True)
    assert await threads.run("b", lambda: "free") == "free"


async def test_errors_are_raised():
    threads = FairThreads(1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 / 0)
