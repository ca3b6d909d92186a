"""The parts of error messages: the received value, and the nearest allowed one."""

import tracemalloc

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
