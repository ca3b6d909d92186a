"""Turns and limits of the requests that wait for a compilation."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from noria.engine.compile_queue import CompileQueue, CompileTask
from noria.testing.requests import make_image_request


def task(client="", steps=20, name="a", connection=b"1"):
    request = make_image_request(name, "noria-shapes", inference_steps=steps)
    return CompileTask(connection, msgspec.structs.replace(request, client=client), None, 0.0)


def taken(waiting):
    return [(each.request.client, each.request.payload.num_steps) for each in iter(waiting.take, None)]


def test_clients_take_turns_and_of_each_the_fewest_steps_are_next():
    waiting = CompileQueue()
    for client, steps in [("a", 30), ("a", 10), ("a", 20), ("b", 90), ("c", 50), ("b", 5)]:
        assert waiting.put(task(client, steps)) is None
    assert taken(waiting) == [("a", 10), ("b", 5), ("c", 50), ("a", 20), ("b", 90), ("a", 30)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9))))
def test_the_rejected_one_is_the_costliest_of_the_client_that_has_most(added):
    waiting, held = CompileQueue(max_waiting=4), []
    for client, steps in added:
        held.append((client, steps))
        rejected = waiting.put(task(client, steps))
        assert (rejected is None) == (len(held) <= 4)
        if rejected is not None:
            counts = Counter(each for each, _ in held)
            name = rejected.request.client
            assert counts[name] == max(counts.values())
            assert rejected.request.payload.num_steps == max(steps for each, steps in held if each == name)
            held.remove((name, rejected.request.payload.num_steps))
    assert sorted(taken(waiting)) == sorted(held)


def test_cancelled_requests_are_removed():
    waiting = CompileQueue()
    for name, connection in [("a", b"1"), ("b", b"1"), ("a", b"2"), ("c", b"1")]:
        waiting.put(task(name=name, connection=connection))
    assert [each.request.attempt_id for each in waiting.discard(b"1", "a")] == ["a"]
    assert [each.request.attempt_id for each in waiting.discard(b"1", None)] == ["b", "c"]
    assert waiting.discard(b"1", None) == []
    assert [each.connection for each in iter(waiting.take, None)] == [b"2"]
