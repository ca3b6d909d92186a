"""What messages are made of: the value got, and the nearest of those allowed."""

import tracemalloc

from noria.errors import did_you_mean, short_repr


def test_a_slip_of_the_pen_is_told_its_neighbour_and_nothing_else_is():
    assert did_you_mean("pictres", ["pictures", "seed"]) == " Did you mean 'pictures'?"
    assert did_you_mean("xyz", ["pictures", "seed"]) == ""


def test_a_hostile_word_is_not_compared_with_anything():
    """Of a scheduler of a megabyte difflib would note the place of every letter: 40 MB and 0.1 s, in the event loop."""
    word = "ddim" + "x" * 300_000
    tracemalloc.start()
    try:
        assert did_you_mean(word, ["ddim"]) == ""
        _, max_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max_bytes < 1_000_000


def test_what_is_shown_is_of_bounded_length():
    assert short_repr("a\nb") == r"'a\nb'"
    assert len(short_repr("x" * 300)) == 80
