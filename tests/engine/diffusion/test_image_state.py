"""Running images that move from one executor to another."""

import msgspec
import numpy as np
import pytest

from generating import generate, load, loop_of, moved_image
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.loop import RequestEnded, RequestHandedOver, ResultReady
from noria.engine.resumption import InvalidStateError, read_resumption
from noria.protocol.messages import Resume
from noria.testing.requests import make_image_request


@pytest.fixture(scope="module")
def engines(tiny_folder):
    """Two executors of one model, each call of which has one number of rows."""
    _, first = load(tiny_folder, buckets=(4,))
    return [first, DiffusionExecutor(first.model, first.config)]


def make_request(scheduler, number=1, **fields):
    defaults = {"prompt": "a red circle", "seed": 5, "width": 32, "height": 32, "inference_steps": 7}
    return make_image_request(f"r{number}", scheduler=scheduler, guidance_scale=3.0, **defaults | fields)


# The number of places, at most 9, that later calls weigh.
PLACES = {"ddim": 1, "euler": 1, "euler-a": 1, "heun": 2, "dpm++2m": 3, "lms": 4, "pndm": 5, "unipc": 5}


@pytest.mark.parametrize("scheduler", [name for name in PLACES if name != "euler"])
def test_a_moved_image_is_that_of_an_undisturbed_run_bit_by_bit(engines, scheduler):
    """At the first call, the last and one between, and into a batch whose history has other columns."""
    executor, _ = engines
    request = make_request(scheduler)
    undisturbed = generate(executor, [request])["r1", 0]
    num_calls = executor.prepare(request).num_calls
    others = [make_request(name, 2, seed=9, inference_steps=num_calls) for name in ("ddim", "lms")]
    for call in (1, num_calls // 2, num_calls - 1):
        image = moved_image(executor, request, call, company=others[call % 2 :][:1])
        assert np.array_equal(image, undisturbed), call


@pytest.mark.parametrize(("scheduler", "places"), PLACES.items())
def test_a_state_has_only_what_later_calls_weigh(engines, scheduler, places):
    executor, _ = engines
    table = executor.prepare(make_request(scheduler, inference_steps=20)).table
    assert max(sum(map(len, table.weighed_from(call))) for call in range(table.num_calls)) == places


def test_of_a_request_with_several_images_each_goes_on_where_it_is(engines):
    source, target = engines
    request = make_request("euler-a", n=4)
    undisturbed = generate(source, [request])
    source_loop, events = loop_of(source, num_slots=2)
    source_loop.submit(source.prepare(request))
    for _ in range(9):
        source_loop.run_iteration()
    source_loop.hand_over("r1")
    done = {event.index: event.result.pixels.rgb() for event in events if isinstance(event, ResultReady)}
    assert sorted(done) == [0, 1]
    (handed_over,) = [event for event in events if isinstance(event, RequestHandedOver)]
    assert [(state.index, state.call) for state, _ in handed_over.states] == [(2, 2), (3, 2)]
    states, data = [state for state, _ in handed_over.states][1:], handed_over.states[1][1]  # image 2 begins anew
    resumption, _ = read_resumption(Resume(request, tuple(states), tuple(done)), memoryview(data))
    target_loop, events = loop_of(target)
    target_loop.submit(target.resume(target.prepare(request), resumption.states), None, resumption)
    steps = []
    while (iteration := target_loop.run_iteration()) is not None:
        steps += [step.image.index for step in iteration.plan.steps]
    assert (steps.count(2), steps.count(3), len(steps)) == (7, 5, 12)
    done |= {event.index: event.result.pixels.rgb() for event in events if isinstance(event, ResultReady)}
    for index in range(4):
        assert np.array_equal(np.frombuffer(done[index], np.uint8), undisturbed["r1", index].ravel())
    (ended,) = [event for event in events if isinstance(event, RequestEnded)]
    assert ended.event.timings.num_calls == 7


@pytest.fixture
def state(engines):
    """A request with a state and its bytes."""
    source, _ = engines
    request = make_request("lms")
    loop, events = loop_of(source)
    loop.submit(source.prepare(request))
    for _ in range(5):
        loop.run_iteration()
    loop.hand_over("r1")
    (((state, data),),) = [event.states for event in events if isinstance(event, RequestHandedOver)]
    return request, state, data


NOT_FINITE = np.array([np.nan], "<f4").tobytes()


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"call": 0}, None, "call 0 is none of 7"),
        ({"call": 8}, None, "call 8 is none of 7"),
        ({"call": 3}, None, "latents of call 3 are missing"),
        ({"outputs": (2, 3)}, None, "are not 3 places"),
        ({"samples": (-1,)}, None, "latents of call 5 are missing"),
        ({"outputs": (0, 1, 2)}, None, "latents of call 3 are missing"),
        ({}, lambda data: data[:-4], "bytes are not 4 places"),
        ({}, lambda data: b"", "0 bytes are not 4 places"),
        ({}, lambda data: data[:-4] + NOT_FINITE, "not finite"),
        ({}, lambda data: NOT_FINITE + data[4:], "another one"),
        ({}, lambda data: data[4:8] + data[4:], "another one"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(engines, state, fields, change, message):
    _, target = engines
    request, found, data = state
    prepared = target.prepare(request)
    assert target.resume(prepared, [(found, memoryview(data))]).begun[0].call == 5
    changed = msgspec.structs.replace(found, **fields)
    with pytest.raises(InvalidStateError, match=message):
        target.resume(prepared, [(changed, memoryview(change(data) if change else data))])


@pytest.mark.parametrize("other", [{"scheduler": "pndm"}, {"inference_steps": 8}, {"width": 48}])
def test_a_state_of_another_request_is_refused(engines, state, other):
    _, target = engines
    _, found, data = state
    prepared = target.prepare(make_request(**{"scheduler": "lms"} | other))
    with pytest.raises(InvalidStateError):
        target.resume(prepared, [(found, memoryview(data))])


@pytest.mark.parametrize(
    ("images", "done", "frame", "message"),
    [
        ((), (0, 1), b"", "all 2 images are done"),
        ((), (2,), b"", "image 2 of 2 cannot be done"),
        ((), (0, 0), b"", "image 0 of 2 cannot be done"),
        (({"index": 2},), (), b"", "image 2 of 2 cannot have begun"),
        (({"index": -1},), (), b"", "image -1 of 2 cannot have begun"),
        (({"index": 0},), (0,), b"", "image 0 of 2 cannot have begun"),
        (({"index": 0}, {"index": 0}), (), b"", "image 0 of 2 cannot have begun"),
        (({"index": 0, "num_bytes": 5},), (), b"four", "5 bytes, and 4 are left"),
        (({"index": 0, "num_bytes": -1},), (), b"four", "-1 bytes"),
    ],
)
def test_a_message_that_contradicts_itself_is_refused(state, images, done, frame, message):
    _, found, _ = state
    states = tuple(msgspec.structs.replace(found, **{"num_bytes": 0} | each) for each in images)
    with pytest.raises(InvalidStateError, match=message):
        read_resumption(Resume(make_request("ddim", n=2), states, done), memoryview(frame))
