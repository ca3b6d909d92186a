"""Prompts in A1111's syntax that change between steps, and those that AND joins."""

import contextlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import InvalidField
from noria.models.diffusion.prompts.a1111_schedule import PromptSteps, read_schedules


def runs(prompt: str, num_first: int = 10, num_second: int = 0) -> list[tuple[str, int]]:
    """Return the texts of a prompt, each with how many steps it has at a time."""
    (found,) = read_schedules(prompt, PromptSteps(num_first, num_second))
    grouped: list[tuple[str, int]] = []
    for text in found.by_step:
        before = grouped[-1][1] if grouped and grouped[-1][0] == text else 0
        grouped[-1 if before else len(grouped) :] = [(text, before + 1)]
    return grouped


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a [cat:dog:4] b", [("a cat b", 4), ("a dog b", 6)]),
        ("[cat:dog:0.35]", [("cat", 3), ("dog", 7)]),
        ("[cat:dog:.5]", [("cat", 5), ("dog", 5)]),
        ("[cat:dog:1]", [("cat", 1), ("dog", 9)]),
        ("[cat:dog:1.0]", [("cat", 1)]),  # a part of all: never
        ("[cat:dog:0]", [("dog", 1)]),
        ("[cat:dog:-3]", [("dog", 1)]),
        ("[cat:dog:20]", [("cat", 1)]),
        ("[cat:dog: 4 ]", [("cat", 4), ("dog", 6)]),
        ("a [cat:4]", [("a ", 4), ("a cat", 6)]),
        ("a [cat::4]", [("a cat", 4), ("a ", 6)]),
        ("[:cat:4]", [("", 4), ("cat", 6)]),
        ("[(cat:1.2):[dog]:4]", [("(cat:1.2)", 4), ("[dog]", 6)]),
        ("(a [cat:dog:4]:1.3)", [("(a cat:1.3)", 4), ("(a dog:1.3)", 6)]),
        ("[a:[b:c:8]:4]", [("a", 4), ("b", 4), ("c", 2)]),
        ("[a:b:4] [c:d:6]", [("a c", 4), ("b c", 2), ("b d", 4)]),
        ("[[a|b]:c:3]", [("a", 1), ("b", 1), ("a", 1), ("c", 7)]),
        ("[a|[b:c:4]]", [("a", 1), ("b", 1), ("a", 1), ("b", 1), *[("a", 1), ("c", 1)] * 3]),
        ("[a|] b", [("a b", 1), (" b", 1)] * 5),
        ("[a|a]", [("a", 1)]),
        # These are text, with the weights of their brackets.
        *((each, [(each, 1)]) for each in (
            "", "a cat", "[cat]", "[16:nine]", "[a:b:c:4]", "[a:b|c]", "[a|b:4]", "[a:b:4", "a:b:4]", r"\[a:b:4]",
            r"[a\:4]", r"[a:b:4\]", "[a (b:c:4]", "[a) b:c:4]", "(a:b:4)", "a | b", "[a:b:1e1]", "[a:b:1,5]", "[:]",
            "[a:b:[4]]", "[a:b:]", "]", ")(",
        )),
    ],
)  # fmt: skip
def test_a_prompt_changes_at_its_steps(prompt: str, expected: list[tuple[str, int]]) -> None:
    assert runs(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("[a:b:0.5]", [("a", 5), ("b", 9)]),
        ("[a:b:1.5]", [("a", 12), ("b", 2)]),
        ("[a:b:12]", [("a", 12), ("b", 2)]),
        ("[[a:b:0.5]:c:1.25]", [("a", 5), ("b", 6), ("c", 3)]),
        ("[a|b|c]", [*[("a", 1), ("b", 1), ("c", 1)] * 3, ("a", 2), ("b", 1), ("c", 1), ("a", 1)]),
    ],
)
def test_a_second_pass_counts_on_from_the_first(prompt: str, expected: list[tuple[str, int]]) -> None:
    assert runs(prompt, num_second=4) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a cat AND a dog", [("a cat ", 1), (" a dog", 1)]),
        ("a cat:0.5 AND a dog : -1.2 AND (b:2)", [("a cat", 0.5), (" a dog ", -1.2), (" (b:2)", 1)]),
        ("a AND 16:9", [("a ", 1), (" 16", 9)]),
        ("AND", [("", 1), ("", 1)]),
        ("a:0.5", [("a:0.5", 1)]),
        ("sAND and ANDy", [("sAND and ANDy", 1)]),
        ("[a AND b:c:5]", [("[a ", 1), (" b:c:5]", 1)]),
    ],
)
def test_and_joins_prompts_with_weights(prompt: str, expected: list[tuple[str, float]]) -> None:
    found = read_schedules(prompt, PromptSteps(10))
    assert [(each.by_step, each.weight) for each in found] == [((text,), weight) for text, weight in expected]
    (whole,) = read_schedules(prompt, PromptSteps(10), "negative_prompt", is_joined=False)
    assert whole.by_step[0].count("AND") == prompt.count("AND")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (" AND ".join("abcdefghi"), "AND joins 9 prompts; at most 8 are read"),
        ("a AND b:-101", "a prompt of weight -101; allowed are -100 to 100"),
        ("[a|b|c|d] [e|f|g|h|i]", "make 20 texts; at most 16 are read"),
        ("[a:b:1]" * 33, "has 33 edits and alternations; at most 32 are read"),
    ],
)
def test_a_refusal_names_the_limit(prompt: str, message: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(message)) as caught:
        read_schedules(prompt, PromptSteps(30))
    assert caught.value.field == "prompt"


@given(st.text(alphabet="[]():|\\ab1. \nAND"))
def test_any_text_is_read_and_what_changes_nothing_stays(prompt: str) -> None:
    for each in read_schedules(prompt[:30], PromptSteps(3, 2), is_joined=False):
        assert len(each.by_step) in (1, 5)
        assert all(set(text) <= set(prompt) for text in each.by_step)
        if not re.search(r"[:|].*\]", prompt, re.DOTALL):
            assert each.by_step == (prompt[:30],)


@pytest.mark.parametrize(
    "prompt",
    [
        "[" * 40_000,
        "[" * 20_000 + ":1]" * 20_000,
        "(" * 20_000 + ")" * 20_000,
        ("(" * 60 + ")" * 60) * 300,
        "[a:" * 40 + " :|" * 20_000,
        "[" + "a|" * 20_000,
        " AND:" * 8_000 + ": " * 8_000,
        "AND :" + " " * 40_000 + "x",
        "[a:" + "1" * 40_000 + "]",
    ],
)
def test_a_hostile_prompt_takes_little_time(prompt: str) -> None:
    started = time.process_time()
    with contextlib.suppress(InvalidField):
        read_schedules(prompt, PromptSteps(200, 200))
    # Some 0.1 s; with a time that grows as the square of the length it would be tens of seconds.
    assert time.process_time() - started < 5
