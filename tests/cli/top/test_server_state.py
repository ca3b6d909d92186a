"""What is remembered of what a server said."""

from showing import SERVER_TIME, engine_view

from noria.cli.top.events import EngineInfo, EnginesEvent, EngineViewEvent, ServerInfo
from noria.cli.top.server_state import ServerState
from noria.protocol.live_views import DepartureView


def engines_event(*incarnations, state="ready"):
    engine_infos = tuple(
        EngineInfo(f"engine-{k}", state, "cpu", incarnation) for k, incarnation in enumerate(incarnations)
    )
    return EnginesEvent(engine_infos, ServerInfo("9.9"))


def test_iterations_follow_each_other_and_none_is_counted_twice():
    board = ServerState()
    for number in (100, 150, 150, 160):
        board.apply(EngineViewEvent("engine-0", engine_view(number=number)), 0.0)
    assert [turn.number for turn in board.histories["engine-0"].iterations] == list(range(1, 161))
    assert len(board.histories["engine-0"].images_per_s) == 4


def test_a_new_incarnation_begins_anew():
    board = ServerState()
    board.apply(EngineViewEvent("engine-0", engine_view(number=500)), 0.0)
    board.apply(EngineViewEvent("engine-0", engine_view(number=100, incarnation="life-2")), 1.0)
    assert [turn.number for turn in board.histories["engine-0"].iterations] == list(range(1, 101))


def test_an_engine_that_is_not_ready_any_more_has_no_view():
    board = ServerState()
    board.apply(engines_event("life-1", "life-1"), 0.0)
    for name in ("engine-0", "engine-1"):
        board.apply(EngineViewEvent(name, engine_view()), 0.0)
    board.apply(engines_event("life-1", "life-2"), 0.0)
    assert list(board.histories) == ["engine-0"]
    board.apply(engines_event("life-1", state="loading"), 0.0)
    assert board.histories == {}


def test_a_dead_engines_view_that_comes_after_its_state_change_is_dropped():
    board = ServerState()
    board.apply(engines_event("life-1"), 0.0)
    board.apply(EngineViewEvent("engine-0", engine_view()), 0.0)
    for news in (
        engines_event(None, state="unknown"),
        engines_event("life-2", state="loading"),
        engines_event("life-2"),
    ):
        board.apply(news, 0.0)
        board.apply(EngineViewEvent("engine-0", engine_view(number=200)), 0.0)
        assert board.histories == {}
    board.apply(EngineViewEvent("engine-0", engine_view(incarnation="life-2")), 0.0)
    assert list(board.histories) == ["engine-0"]


def test_a_state_is_complete_when_every_ready_engine_has_sent_a_view():
    board = ServerState()
    assert not board.is_complete
    board.apply(engines_event("life-1", "life-1"), 0.0)
    board.apply(EngineViewEvent("engine-0", engine_view()), 0.0)
    assert not board.is_complete
    board.apply(EngineViewEvent("engine-1", engine_view()), 0.0)
    assert board.is_complete
    board.apply(engines_event("life-1", state="loading"), 0.0)
    assert board.is_complete


def test_the_servers_clock_goes_on_between_two_views():
    board = ServerState()
    board.apply(EngineViewEvent("engine-0", engine_view()), 50.0)
    assert board.histories["engine-0"].server_time_s(52.5) == SERVER_TIME + 2.5


def test_the_last_departure_of_a_slot_is_kept_with_its_time():
    board = ServerState()
    board.apply(EngineViewEvent("engine-0", engine_view(left=())), 0.0)
    left = DepartureView(100, 3, "a", 0, "cancelled")
    board.apply(EngineViewEvent("engine-0", engine_view(left=(left,))), 7.0)
    assert board.histories["engine-0"].last_departures[3] == (left, 7.0)
