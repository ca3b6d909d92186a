"""Lines in, events out."""

import pathlib

import msgspec
import pytest
from showing import a_seat, a_view, engines_said, event, wheel_said

from noria.top.events import Engines, EngineSaid, Reader, ServerSaid, Wheel


def read(content):
    reader = Reader()
    events = [reader.line(line) for line in content.decode().split("\n")]
    return [event for event in events if event is not None]


def test_the_engines_and_a_wheel_are_read():
    view = a_view(seats=[a_seat(2)], num_waiting=3)
    assert read(engines_said("engine-0") + wheel_said("engine-0", view)) == [
        Engines((EngineSaid("engine-0", "ready", "cpu", "life-1"),), ServerSaid("9.9", ("noria-shapes",))),
        Wheel("engine-0", view),
    ]


def test_comments_and_events_of_other_names_are_passed_over():
    assert read(b": still here\n\n" + event("news", {"a": 1}) + b"id: 3\n\n") == []


def test_what_a_newer_server_says_besides_is_passed_over():
    told = msgspec.to_builtins(a_view()) | {"engine": "engine-0", "new": {"a": 1}, "type": "WheelView"}
    assert read(event("wheel", told)) == [Wheel("engine-0", a_view())]


def test_data_on_several_lines_are_one():
    assert read(engines_said("engine-0").replace(b', "server"', b',\ndata: "server"')) == read(engines_said("engine-0"))


def test_what_is_no_wheel_is_an_error():
    with pytest.raises(msgspec.MsgspecError):
        read(event("wheel", {"engine": "engine-0", "number": "many"}))


def test_a_recorded_stream_of_a_real_wheel_is_read_with_all_its_pictures():
    recorded = pathlib.Path(__file__).parents[1] / "data" / "live-stream.txt"
    events = read(recorded.read_bytes())
    assert isinstance(events[0], Engines)
    wheels = [event for event in events if isinstance(event, Wheel)]
    assert len(wheels) > 10
    assert any(wheel.view.seats for wheel in wheels)
