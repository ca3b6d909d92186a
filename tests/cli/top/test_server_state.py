"""The state kept from a server's events."""

from fake_live_server import SERVER_TIME, engine_view

from noria.cli.top.events import EngineInfo, EnginesEvent, EngineViewEvent, ServerInfo
from noria.cli.top.server_state import ServerState
from noria.protocol.live_views import DepartureView


def engines_event(*incarnations, state="ready"):
    engine_infos = tuple(
        EngineInfo(f"engine-{k}", state, "cpu", incarnation) for k, incarnation in enumerate(incarnations)
    )
    return EnginesEvent(engine_infos, ServerInfo("9.9"))


def test_iterations_are_appended_once_each():
    state = ServerState()
    for number in (100, 150, 150, 160):
        state.apply(EngineViewEvent("engine-0", engine_view(number=number)), 0.0)
    assert [iteration.number for iteration in state.histories["engine-0"].iterations] == list(range(1, 161))
    assert len(state.histories["engine-0"].images_per_s) == 4


def test_a_new_incarnation_resets_the_history():
    state = ServerState()
    state.apply(EngineViewEvent("engine-0", engine_view(number=500)), 0.0)
    state.apply(EngineViewEvent("engine-0", engine_view(number=100, incarnation="incarnation-2")), 1.0)
    assert [iteration.number for iteration in state.histories["engine-0"].iterations] == list(range(1, 101))


def test_an_engine_that_is_no_longer_ready_has_no_view():
    state = ServerState()
    state.apply(engines_event("incarnation-1", "incarnation-1"), 0.0)
    for name in ("engine-0", "engine-1"):
        state.apply(EngineViewEvent(name, engine_view()), 0.0)
    state.apply(engines_event("incarnation-1", "incarnation-2"), 0.0)
    assert list(state.histories) == ["engine-0"]
    state.apply(engines_event("incarnation-1", state="loading"), 0.0)
    assert state.histories == {}


def test_a_dead_engines_view_that_comes_after_its_state_change_is_dropped():
    state = ServerState()
    state.apply(engines_event("incarnation-1"), 0.0)
    state.apply(EngineViewEvent("engine-0", engine_view()), 0.0)
    for news in (
        engines_event(None, state="unknown"),
        engines_event("incarnation-2", state="loading"),
        engines_event("incarnation-2"),
    ):
        state.apply(news, 0.0)
        state.apply(EngineViewEvent("engine-0", engine_view(number=200)), 0.0)
        assert state.histories == {}
    state.apply(EngineViewEvent("engine-0", engine_view(incarnation="incarnation-2")), 0.0)
    assert list(state.histories) == ["engine-0"]


def test_a_state_is_complete_when_every_ready_engine_has_sent_a_view():
    state = ServerState()
    assert not state.is_complete
    state.apply(engines_event("incarnation-1", "incarnation-1"), 0.0)
    state.apply(EngineViewEvent("engine-0", engine_view()), 0.0)
    assert not state.is_complete
    state.apply(EngineViewEvent("engine-1", engine_view()), 0.0)
    assert state.is_complete
    state.apply(engines_event("incarnation-1", state="loading"), 0.0)
    assert state.is_complete


def test_the_servers_clock_advances_between_two_views():
    state = ServerState()
    state.apply(EngineViewEvent("engine-0", engine_view()), 50.0)
    assert state.histories["engine-0"].server_time_s(52.5) == SERVER_TIME + 2.5


def test_the_last_departure_of_a_slot_is_kept_with_its_time():
    state = ServerState()
    state.apply(EngineViewEvent("engine-0", engine_view(departures=())), 0.0)
    departure = DepartureView(100, 3, "a", 0, "cancelled")
    state.apply(EngineViewEvent("engine-0", engine_view(departures=(departure,))), 7.0)
    assert state.histories["engine-0"].last_departures[3] == (departure, 7.0)
