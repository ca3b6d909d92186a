"""What is remembered of what a server said."""

from showing import AT, a_view

from noria.top.board import Board
from noria.top.events import Engines, EngineSaid, ServerSaid, Wheel
from noria.views import LeftView


def engines(*lives, state="ready"):
    said = tuple(EngineSaid(f"engine-{k}", state, "cpu", life) for k, life in enumerate(lives))
    return Engines(said, ServerSaid("9.9"))


def test_turns_follow_each_other_and_none_is_counted_twice():
    board = Board()
    for number in (100, 150, 150, 160):
        board.take(Wheel("engine-0", a_view(number=number)), 0.0)
    assert [turn.number for turn in board.wheels["engine-0"].turns] == list(range(1, 161))
    assert len(board.wheels["engine-0"].images_per_s) == 4


def test_a_new_life_begins_anew():
    board = Board()
    board.take(Wheel("engine-0", a_view(number=500)), 0.0)
    board.take(Wheel("engine-0", a_view(number=100, incarnation="life-2")), 1.0)
    assert [turn.number for turn in board.wheels["engine-0"].turns] == list(range(1, 101))


def test_an_engine_that_is_not_ready_any_more_shows_no_wheel():
    board = Board()
    board.take(engines("life-1", "life-1"), 0.0)
    for name in ("engine-0", "engine-1"):
        board.take(Wheel(name, a_view()), 0.0)
    board.take(engines("life-1", "life-2"), 0.0)
    assert list(board.wheels) == ["engine-0"]
    board.take(engines("life-1", state="loading"), 0.0)
    assert board.wheels == {}


def test_a_dead_engines_last_view_that_comes_after_the_news_is_not_shown():
    board = Board()
    board.take(engines("life-1"), 0.0)
    board.take(Wheel("engine-0", a_view()), 0.0)
    for news in (engines(None, state="unknown"), engines("life-2", state="loading"), engines("life-2")):
        board.take(news, 0.0)
        board.take(Wheel("engine-0", a_view(number=200)), 0.0)
        assert board.wheels == {}
    board.take(Wheel("engine-0", a_view(incarnation="life-2")), 0.0)
    assert list(board.wheels) == ["engine-0"]


def test_a_board_is_whole_when_every_ready_engine_has_shown_its_wheel():
    board = Board()
    assert not board.is_whole
    board.take(engines("life-1", "life-1"), 0.0)
    board.take(Wheel("engine-0", a_view()), 0.0)
    assert not board.is_whole
    board.take(Wheel("engine-1", a_view()), 0.0)
    assert board.is_whole
    board.take(engines("life-1", state="loading"), 0.0)
    assert board.is_whole


def test_the_servers_clock_goes_on_between_two_views():
    board = Board()
    board.take(Wheel("engine-0", a_view()), 50.0)
    assert board.wheels["engine-0"].server_s(52.5) == AT + 2.5


def test_who_left_a_slot_last_is_remembered_with_when():
    board = Board()
    board.take(Wheel("engine-0", a_view(left=())), 0.0)
    left = LeftView(100, 3, "a", 0, "cancelled")
    board.take(Wheel("engine-0", a_view(left=(left,))), 7.0)
    assert board.wheels["engine-0"].left[3] == (left, 7.0)
