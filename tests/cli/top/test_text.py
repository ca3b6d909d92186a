"""Lines, bars and numbers of a fixed width."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.cli.top.text import bar, elide_middle, flow, format_number, format_seconds, level, line, sparkline


@given(st.lists(st.text()), st.integers(1, 80))
def test_a_line_has_the_requested_width_and_no_control_characters(texts, width):
    made = line([(text, "red") for text in texts], width)
    assert made.cell_len == width
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in made.plain)


def test_control_characters_are_escaped():
    assert line([("a\x1b[2J\nb\r\u202e\ud800", "")], 40).plain.rstrip() == r"a\x1b[2J\nb\r\u202e\ud800"


def test_rich_markup_is_not_interpreted():
    assert line([("[red]x[/]", "")], 9).plain == "[red]x[/]"


@given(st.floats(-1, 2), st.integers(0, 40))
def test_a_bar_has_the_requested_width(fraction, width):
    assert len(bar(fraction, width)) == width


def test_a_bar_has_eighths():
    assert [bar(fraction, 4) for fraction in (0, 0.03125, 0.5, 1)] == ["····", "▏···", "██··", "████"]


def test_a_level_is_blank_only_for_zero():
    assert [level(fraction) for fraction in (0, 1e-9, 0.5, 1, 7)] == [" ", "▁", "▄", "█", "█"]


def test_a_sparkline_shows_the_last_values_at_the_right():
    assert sparkline([8, 1, 2, 4, 8], 8, 3) == "▂▄█"
    assert sparkline([8], 8, 3) == "  █"
    assert sparkline([0, 0], 0, 3) == "   "
    assert sparkline([1], 1, 0) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("inf"), "–"),
        (-1, "now"),
        (0.0234, "23 ms"),
        (0.0999, "0.1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (99.6, "2 min"),
        (7200, "2 h"),
    ],
)
def test_durations_are_short(value, text):
    assert format_seconds(value) == text


def test_numbers_have_three_digits():
    assert [format_number(value) for value in (0, 9.994, 9.996, 99.96)] == ["0.00", "9.99", "10.0", "100"]


def test_items_that_do_not_fit_are_omitted():
    items = [[(word, "")] for word in ("one", "two", "three", "four")]
    assert [row.plain.rstrip() for row in flow(items, 10, 2)] == ["one · two", "three"]


@given(st.text(), st.integers(1, 40))
def test_elided_text_fits_and_keeps_both_ends(text, width):
    made = elide_middle(text, width)
    assert len(made) <= width
    assert made == text or (text.startswith(made.partition("…")[0]) and text.endswith(made.rpartition("…")[2]))


def test_names_that_differ_at_an_end_differ_when_elided():
    assert [elide_middle(f"diffusion-{end}", 10) for end in ("v1-5", "xl-base")] == ["diffu…v1-5", "diffu…base"]
