"""Lines in, events out."""

import pathlib

import msgspec
import pytest
from fake_live_server import engine_view, engines_event, event, slot_view, view_event

from noria.cli.top.events import EngineInfo, EnginesEvent, EngineViewEvent, LiveEventParser, ServerInfo


def parse(content):
    parser = LiveEventParser()
    events = [parser.feed_line(line) for line in content.decode().split("\n")]
    return [event for event in events if event is not None]


def test_the_engines_and_a_view_are_read():
    view = engine_view(slots=[slot_view(2)], num_waiting=3)
    assert parse(engines_event("engine-0") + view_event("engine-0", view)) == [
        EnginesEvent((EngineInfo("engine-0", "ready", "cpu", "incarnation-1"),), ServerInfo("9.9", ("noria-shapes",))),
        EngineViewEvent("engine-0", view),
    ]


def test_comments_and_unknown_events_are_ignored():
    assert parse(b": still here\n\n" + event("news", {"a": 1}) + b"id: 3\n\n") == []


def test_unknown_fields_of_a_newer_server_are_ignored():
    data = msgspec.to_builtins(engine_view()) | {"engine": "engine-0", "new": {"a": 1}, "type": "EngineView"}
    assert parse(event("engine_view", data)) == [EngineViewEvent("engine-0", engine_view())]


def test_data_on_several_lines_are_joined():
    assert parse(engines_event("engine-0").replace(b', "server"', b',\ndata: "server"')) == parse(
        engines_event("engine-0")
    )


def test_an_invalid_view_is_an_error():
    with pytest.raises(msgspec.MsgspecError):
        parse(event("engine_view", {"engine": "engine-0", "last_iteration": "many"}))


def test_a_recorded_stream_of_a_real_server_is_read_with_all_its_thumbnails():
    recorded = pathlib.Path(__file__).parents[2] / "data" / "live-stream.txt"
    events = parse(recorded.read_bytes())
    assert isinstance(events[0], EnginesEvent)
    view_events = [event for event in events if isinstance(event, EngineViewEvent)]
    assert len(view_events) > 10
    assert any(received.view.slots for received in view_events)
