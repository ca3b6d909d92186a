"""Turns and limits of the requests that wait for a compilation."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from noria.engine.compile_queue import CompileQueue, CompileTask
from noria.testing.requests import make_image_request


def task(client="", steps=20, name="a", connection=b"1", num_bytes=0, was_moved=False):
    request = make_image_request(name, "noria-shapes", inference_steps=steps)
    request = msgspec.structs.replace(request, client=client, was_moved=was_moved)
    return CompileTask(connection, request, memoryview(bytes(num_bytes)) if num_bytes else None, 0.0)


def taken(waiting):
    return [(each.request.client, each.request.payload.num_steps) for each in iter(waiting.take, None)]


def test_clients_take_turns_and_of_each_the_fewest_steps_are_next():
    waiting = CompileQueue()
    for client, steps in [("a", 30), ("a", 10), ("a", 20), ("b", 90), ("c", 50), ("b", 5)]:
        assert waiting.put(task(client, steps)) == []
    assert taken(waiting) == [("a", 10), ("b", 5), ("c", 50), ("a", 20), ("b", 90), ("a", 30)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9))))
def test_the_rejected_one_is_the_costliest_of_the_client_that_has_most(added):
    waiting, held = CompileQueue(max_waiting=4), []
    for client, steps in added:
        held.append((client, steps))
        rejected = waiting.put(task(client, steps))
        assert len(rejected) == (len(held) > 4)
        for each in rejected:
            counts = Counter(client for client, _ in held)
            name, num_steps = each.request.client, each.request.payload.num_steps
            assert counts[name] == max(counts.values())
            assert num_steps == max(steps for client, steps in held if client == name)
            held.remove((name, num_steps))
    assert sorted(taken(waiting)) == sorted(held)


def test_the_bytes_of_start_images_are_bounded_and_the_client_with_most_of_them_loses_its_own():
    waiting = CompileQueue(max_bytes=100)
    for each in (task("a", 9), task("a", 8), task("b", 20, num_bytes=40), task("b", 30, num_bytes=20)):
        assert waiting.put(each) == []
    assert waiting.put(task("c", 5, num_bytes=40)) == []
    (rejected,) = waiting.put(task("c", 50, num_bytes=1))
    assert (rejected.request.client, rejected.request.payload.num_steps) == ("b", 30)
    rejections = waiting.put(task("d", 99, num_bytes=90))
    assert [each.request.client for each in rejections] == ["d"]
    rejections = waiting.put(task("d", 1, num_bytes=30))
    assert [(each.request.client, each.data.nbytes) for each in rejections] == [("c", 1), ("b", 40)]
    assert sorted(taken(waiting)) == [("a", 8), ("a", 9), ("c", 5), ("d", 1)]


def test_what_another_engine_has_accepted_is_not_rejected_and_takes_no_room_of_others():
    waiting = CompileQueue(max_waiting=1, max_bytes=10)
    for steps in (70, 80, 90):
        assert waiting.put(task("a", steps, num_bytes=9, was_moved=True)) == []
    assert waiting.put(task("b", 5, num_bytes=9)) == []
    (rejected,) = waiting.put(task("a", 6))
    assert (rejected.request.client, rejected.request.payload.num_steps) == ("a", 6)
    (rejected,) = waiting.put(task("b", 4, num_bytes=9))
    assert (rejected.request.client, rejected.request.payload.num_steps) == ("b", 5)
    assert sorted(taken(waiting)) == [("a", 70), ("a", 80), ("a", 90), ("b", 4)]


def test_cancelled_requests_are_removed():
    waiting = CompileQueue()
    for name, connection in [("a", b"1"), ("b", b"1"), ("a", b"2"), ("c", b"1")]:
        waiting.put(task(name=name, connection=connection))
    assert [each.request.attempt_id for each in waiting.discard(b"1", "a")] == ["a"]
    assert [each.request.attempt_id for each in waiting.discard(b"1", None)] == ["b", "c"]
    assert waiting.discard(b"1", None) == []
    assert [each.connection for each in iter(waiting.take, None)] == [b"2"]
