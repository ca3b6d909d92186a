"""The parts of error messages: the received value, and the nearest allowed one."""

import tracemalloc

import pytest

from noria.errors import did_you_mean, short_repr


def test_a_misspelt_word_gets_a_suggestion():
    assert did_you_mean("pictres", ["pictures", "seed"]) == " Did you mean 'pictures'?"
    assert did_you_mean("xyz", ["pictures", "seed"]) == ""


def test_a_very_long_word_gets_no_suggestion():
    """For a scheduler name of a megabyte, difflib would take 40 MB and 0.1 s, in the event loop."""
    word = "ddim" + "x" * 300_000
    tracemalloc.start()
    try:
        assert did_you_mean(word, ["ddim"]) == ""
        _, max_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max_bytes < 1_000_000


def test_a_quoted_value_has_a_bounded_length():
    assert short_repr("a\nb") == r"'a\nb'"
    assert len(short_repr("x" * 300)) == 80


@pytest.mark.parametrize("nest", [lambda text: text, lambda text: {"a": [{"b": (text,)}]}, lambda text: text.encode()])
def test_of_a_long_value_only_the_start_is_formatted(nest):
    """The repr of 21 MB took 165 ms in the event loop."""
    value = nest("x" * 3_000_000)
    tracemalloc.start()
    try:
        text = short_repr(value)
        _, max_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert text == repr(value)[:79] + "…"
    assert max_bytes < 100_000


def test_a_short_value_is_formatted_as_by_repr():
    for value in ({"b": [1, (2.5,), None], "a": {True: "é"}}, [[[[[[[[1]]]]]]]], {1, 2}, b"x", (), 10**70, "x" * 78):
        assert short_repr(value) == repr(value)
    for value in ({k: k for k in range(50)}, list(range(50)), 10**90):
        assert short_repr(value) == repr(value)[:79] + "…"
