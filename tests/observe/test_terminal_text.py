"""Text from elsewhere cannot control a terminal."""

import pytest

from noria.observe.terminal_text import escape_for_terminal, escape_unprintable


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a\x1b[2J", r"a\x1b[2J"),
        ("a\rb\tc", r"a\rb\tc"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("\u202egnp.exe\u200f", r"\u202egnp.exe\u200f"),
        ("\ud800", r"\ud800"),
        ("ünï 日本 \U0001f600", "ünï 日本 \U0001f600"),
    ],
)
def test_control_characters_are_escaped_and_other_text_is_kept(text, escaped):
    assert escape_unprintable(text) == escape_for_terminal(text) == escaped


def test_only_for_a_terminal_line_ends_are_kept():
    assert escape_unprintable("a\nb") == r"a\nb"
    assert escape_for_terminal("a\nb\x1b\n") == "a\nb\\x1b\n"
