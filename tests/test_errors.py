"""The parts of error messages: the received value, and the nearest allowed one."""

import tracemalloc

import pytest

from noria.errors import InvalidField, NoriaError, did_you_mean, short_list, short_repr
from noria.errors.problems import Problems, each_part


def test_a_misspelt_word_gets_a_suggestion():
    assert did_you_mean("pictres", ["pictures", "seed"]) == " Did you mean 'pictures'?"
    assert did_you_mean("xyz", ["pictures", "seed"]) == ""


NAMES = (
    "prompt", "model", "n", "size", "output_format", "response_format", "quality", "style", "user", "input", "top_k",
    "seed", "inference_steps", "guidance_scale", "scheduler",
)  # fmt: skip


@pytest.mark.parametrize(
    ("got", "meant"),
    [
        ("prmopt", "prompt"), ("Seed", "seed"), ("sede", "seed"), ("modle", "model"), ("qualty", "quality"),
        ("steps", "inference_steps"), ("num_inference_steps", "inference_steps"), ("guidance", "guidance_scale"),
        ("width", "size"),  # by the meanings
        ("input_type", None), ("styles_of_art", None), ("format", None), ("top_p", None), ("role", None), ("m", None),
        ("noise", None), ("messages", None), ("", None), ("_", None),
    ],
)  # fmt: skip
def test_a_suggestion_is_what_was_meant(got, meant):
    assert did_you_mean(got, NAMES, {"width": "size"}) == (f" Did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize(
    ("got", "meant"),
    [
        ("/v1/image/generations", "/v1/images/generations"), ("/images/generations", "/v1/images/generations"),
        ("/v1/predictions", None), ("/v1/completions", None), ("/api/embed", None), ("/v1/responses", None),
        ("/", None),
    ],
)  # fmt: skip
def test_a_path_is_suggested_only_if_it_was_meant(got, meant):
    paths = ["/predict", "/v1/images/generations", "/v1/images/edits", "/embed", "/sdapi/v1/options", "/v1/endpoints"]
    assert did_you_mean(got, paths) == (f" Did you mean {meant!r}?" if meant else "")


def test_a_very_long_word_gets_no_suggestion():
    """For a scheduler name of a megabyte, counting edits would take seconds, in the event loop."""
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


@pytest.mark.parametrize("nest", [lambda text: text, lambda text: {"a": [{"b": [text]}]}, lambda text: text.encode()])
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


def test_a_short_value_is_formatted_as_by_repr_but_in_the_form_of_json():
    assert short_repr([None, True, {"a": False}, (), (1,)]) == "[null, true, {'a': false}, [], [1]]"
    for value in ({"b": [1, [2.5]], "a": {3: "é"}}, [[[[[[[[1]]]]]]]], {1, 2}, b"x", [], 10**70, "x" * 78):
        assert short_repr(value) == repr(value)
    for value in ({k: k for k in range(50)}, list(range(50)), 10**90):
        assert short_repr(value) == repr(value)[:79] + "…"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("it cannot be loaded: no space left.. Free some.", "it cannot be loaded: no space left. Free some."),
        ("it is damaged: 'a.b'..", "it is damaged: 'a.b'."),
        ("links have no .. in them, nor a/../b", "links have no .. in them, nor a/../b"),
        ("wait... Then go.", "wait... Then go."),
    ],
)
def test_a_quoted_sentence_adds_no_second_full_stop(message, shown):
    error = NoriaError(message)
    assert (error.message, str(error)) == (shown, shown)


def test_an_error_of_many_fields_says_the_first_of_them():
    problems = Problems()
    problems.add(*(InvalidField(f"a{k} is wrong.", field=f"a{k}") for k in [*range(10_000), *range(10_000)]))
    error = problems.as_one()
    assert error.message.startswith("a0 is wrong. a1 is wrong. ")
    assert error.message.endswith(" a19 is wrong. And 9980 more.")
    renamed = each_part(error, lambda part: InvalidField(part.message.upper(), field="b"))
    assert renamed.message.endswith(" A19 IS WRONG. And 9980 more.")


@pytest.mark.parametrize("num_parts", [1, 2])
def test_other_words_of_an_error_of_the_form_are_one_of_the_form(num_parts):
    for is_of_form in (False, True):
        problems = Problems()
        problems.add(InvalidField("a is wrong.", field="a"), are_of_form=is_of_form)
        problems.add(*[InvalidField("b is wrong.", field="b")] * (num_parts - 1))
        renamed = each_part(problems.as_one(), lambda part: InvalidField(part.message.upper(), field="c"))
        assert renamed.is_of_form == is_of_form


def test_of_a_long_list_the_first_are_named_and_the_others_counted():
    assert short_list(map(str, range(8))) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert short_list(map(str, range(20_000))) == "0, 1, 2, 3, 4, 5, 6, 7 and 19992 more"
    assert short_list(["a", "b", "c"], 2) == "a, b and 1 more"
    assert short_list([]) == ""
