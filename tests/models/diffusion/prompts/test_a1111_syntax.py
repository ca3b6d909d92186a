"""Prompts in A1111's syntax: which words weigh how much, and what is refused."""

import re
import time

import pytest

from noria.errors import InvalidField
from noria.models.diffusion.prompts.a1111_syntax import parse


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("", []),
        ("a cat", [("a cat", 1)]),
        ("a (cat)", [("a ", 1), ("cat", 1.1)]),
        ("((cat))", [("cat", 1.21)]),
        ("[cat] a", [("cat", 1 / 1.1), (" a", 1)]),
        ("[[cat]]", [("cat", 1 / 1.21)]),
        ("(cat:1.3)", [("cat", 1.3)]),
        ("( cat : 1.3 )", [(" cat ", 1.3)]),
        ("(cat:.5)", [("cat", 0.5)]),
        ("(cat:0)", [("cat", 0)]),
        ("(cat:-1)", [("cat", -1)]),
        ("((cat:1.3))", [("cat", 1.43)]),
        ("(a (cat:1.5) b:2)", [("a ", 2), ("cat", 3), (" b", 2)]),
        ("(a [cat])", [("a ", 1.1), ("cat", 1)]),
        ("(16:9:1.2)", [("16:9", 1.2)]),
        ("[16:nine]", [("16:nine", 1 / 1.1)]),
        ("(cat", [("cat", 1.1)]),
        ("a [(cat", [("a cat", 1)]),
        ("a (cat:1.3", [("a ", 1), ("cat:1.3", 1.1)]),
        ("a) cat] b:1.3) :nan)", [("a) cat] b:1.3) :nan)", 1)]),
        ("()(:2)[]", []),
        (r"a \(cat\) \[b\] \\ \c", [(r"a (cat) [b] \ \c", 1)]),
        (r"(a \) cat\:1.2)", [(r"a ) cat" + "\\", 1.2)]),
        ("a | b, andy and BREAKS", [("a | b, andy and BREAKS", 1)]),
        ("(a|b)", [("a|b", 1.1)]),
        ("[a:b:c:5] AND", [("a:b:c:5", 1 / 1.1), (" AND", 1)]),
        ("(a BREAK b)", [("a BREAK b", 1.1)]),
        (r"\[a:b:5\]", [("[a:b:5]", 1)]),
    ],
)
def test_brackets_weigh_words(prompt: str, parts: list[tuple[str, float]]) -> None:
    (section,) = parse(prompt)
    assert [text for text, _ in section] == [text for text, _ in parts]
    assert [weight for _, weight in section] == pytest.approx([weight for _, weight in parts])


@pytest.mark.parametrize(
    ("prompt", "sections"),
    [
        ("a BREAK b", [["a "], [" b"]]),
        ("BREAK a BREAK\nBREAK (b) c", [[], [" a "], ["\n"], [" ", "b", " c"]]),
        ("a BREAK", [["a "], []]),
    ],
)
def test_break_begins_a_section(prompt: str, sections: list[list[str]]) -> None:
    assert [[part.text for part in section] for section in parse(prompt)] == sections


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("(cat:nan)", "the weight of '(cat:nan)' is no decimal number"),
        ("(cat:1e999)", "no decimal number"),
        ("(cat:-inf)", "no decimal number"),
        ("(cat:1.2.3)", "no decimal number"),
        ("(cat:101)", "'cat' has the weight 101; allowed are -100 to 100"),
        (f"((cat:{'9' * 4000}):0)", "'cat' has the weight nan"),
        ("(" * 50 + "cat", "'cat' has the weight 117.4"),
        ("(" * 100_000, "is inside of 64 others"),
        ("[(" * 50_000, "is inside of 64 others"),
    ],
)
def test_a_refusal_names_the_construct(prompt: str, message: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(message)) as caught:
        parse(prompt, "negative_prompt")
    assert caught.value.field == "negative_prompt"


@pytest.mark.parametrize(
    "prompt",
    [
        ")" * 40_000,
        r"\(" * 20_000,
        "[" * 60 + "(" * 3 + "(b)" * 13_000,
        ": " * 20_000,
        ":" + " " * 40_000,
        "(:" + "1" * 40_000,
        " BREAK" * 7_000,
        "a:1)" * 10_000,
    ],
)
def test_a_hostile_prompt_takes_little_time(prompt: str) -> None:
    started = time.process_time()
    parse(prompt)
    # Some 0.1 s; with a time that grows as the square of the length it would be tens of seconds.
    assert time.process_time() - started < 5
