"""The CPU priorities of threads."""

import os
import threading

import pytest

from noria.engine.resources.priority import add_niceness, run_apart


def test_every_thread_of_an_engine_gets_the_niceness(monkeypatch):
    before = os.getpriority(os.PRIO_PROCESS, 0)
    calls = []
    monkeypatch.setattr(os, "setpriority", lambda *call: calls.append(call))
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    add_niceness(7)
    ended.set()
    thread.join()
    expected = {(os.PRIO_PROCESS, each, before + 7) for each in (threading.get_native_id(), thread.native_id)}
    assert expected <= set(calls)


def own_priority():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("niceness", [19, 0])
def test_only_the_thread_that_runs_apart_gets_the_niceness(niceness):
    before = own_priority()
    threads = []
    seen = run_apart(lambda: threads.append(threading.current_thread()) or own_priority(), niceness)
    assert seen == max(niceness, before)
    assert own_priority() == before
    assert not threads[0].is_alive()


def test_what_is_raised_apart_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 // 0)
