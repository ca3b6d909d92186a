r"""Prompts of AUTOMATIC1111 that change between steps, and those that `AND` joins. Pure.

`[from:to:when]` is `from` up to step `when`, then `to`; `[to:when]` and `[from::when]` have nothing in place of the
other. With a point `when` is a part of all steps, else the number of a step, from 1 on. `[a|b]` is another one at each
step. All may be in one another and in weights. Brackets that are neither stay text, whose weights
`a1111_syntax.py` reads: those with more colons, with a colon and a bar, or around a bracket without its partner.

A second pass counts on from the first one: its steps follow those of the first, and its parts are 1 to 2. Alternation
begins anew. Prompts are untrusted: reading takes time linear in their length.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from noria.errors import InvalidField
from noria.models.diffusion.prompts.a1111_syntax import MAX_WEIGHT

MAX_TEXTS = 16  # texts of a prompt: each is encoded, and its embedding kept as long as its images run
MAX_JOINED = 8  # prompts that AND joins: each is a row of every call
_MAX_CHANGES = 32  # edits and alternations of a prompt
_MAX_OPEN = 64  # brackets in one another; `a1111_syntax.py` refuses more
_NUMBER = re.compile(r"\s*([+-]?(?:\d{1,9}(?:\.\d{0,20})?|\.\d{1,20}))\s*", re.ASCII)
_TOKEN = re.compile(r"\\.|[\[\]():|]|[^\\\[\]():|]+|\\", re.DOTALL)
_AND = re.compile(r"\bAND\b")
_WEIGHT = re.compile(rf":{_NUMBER.pattern}\Z", re.ASCII)


class PromptSteps(NamedTuple):
    """The steps of a request, by which its prompts change."""

    num_first: int  # all steps of the first pass, also those that a start image leaves out
    num_second: int = 0  # steps that a second pass makes


class ScheduledText(NamedTuple):
    """A prompt, or one of those that are joined: its text at each step of both passes, or the one of all steps."""

    by_step: tuple[str, ...]
    weight: float = 1.0


class _Change(NamedTuple):
    """An edit, which has a number, or an alternation."""

    options: "tuple[tuple[_Node, ...], ...]"
    when: float = 0.0
    is_part: bool = False  # whether `when` is a part of all steps
    alternates: bool = False


_Node = str | _Change


class _Bracket:
    """An open bracket, or the prompt itself: what stands between its colons and bars."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.parts: list[list[_Node]] = [[]]
        self.separators: list[str] = []
        self.is_text = kind != "["  # whether it is certainly no change

    def all_nodes(self) -> list[_Node]:
        """Return what it contains, with its separators and without the bracket itself."""
        found = [*self.parts[0]]
        for separator, nodes in zip(self.separators, self.parts[1:], strict=True):
            found += [separator, *nodes]
        return found

    def change(self) -> _Change | None:
        """Return the edit or alternation that it is when it closes; None: it is text."""
        kinds = {*self.separators}
        if self.is_text or len(kinds) != 1:
            return None
        options = tuple(tuple(_merged(nodes)) for nodes in self.parts)
        if kinds == {"|"}:
            return _Change(options, alternates=True)
        last = options[-1][0] if len(options[-1]) == 1 else None
        number = _NUMBER.fullmatch(last) if isinstance(last, str) else None
        if number is None or len(options) > 3:
            return None
        before, after = options[:-1] if len(options) == 3 else ((), options[0])
        return _Change((before, after), float(number[1]), is_part="." in number[1])


def read_schedules(
    prompt: str, steps: PromptSteps, field: str = "prompt", *, is_joined: bool = True
) -> list[ScheduledText]:
    """Return the prompts that `AND` joins, mostly one; without `is_joined` it is a word, as in negative prompts.

    Raises InvalidField, of `field`: there are too many of them, or of their changes.
    """
    joined = split_joined(prompt) if is_joined else [(prompt, 1.0)]
    if len(joined) > MAX_JOINED:
        raise InvalidField(f"{field}: AND joins {len(joined)} prompts; at most {MAX_JOINED} are read.", field=field)
    weight = max((weight for _, weight in joined), key=abs)
    if abs(weight) > MAX_WEIGHT:
        raise InvalidField(
            f"{field}: AND joins a prompt of weight {weight:.4g}; allowed are {-MAX_WEIGHT:g} to {MAX_WEIGHT:g}.",
            field=field,
        )
    found = [ScheduledText(_by_step(_parse(text, field), steps), weight) for text, weight in joined]
    if (num_texts := sum(len({*each.by_step}) for each in found)) > MAX_TEXTS:
        raise InvalidField(
            f"{field}: its edits and alternations make {num_texts} texts; at most {MAX_TEXTS} are read. Use fewer, or "
            "alternations of equal length.",
            field=field,
        )
    return found


def split_joined(prompt: str) -> list[tuple[str, float]]:
    """Return the prompts that `AND` joins, with the weights at their ends; a number after a single one is text."""
    texts = _AND.split(prompt)
    if len(texts) == 1:
        return [(prompt, 1.0)]
    found = []
    for text in texts:
        weight = _WEIGHT.search(text, max(text.rfind(":"), 0))
        found.append((text, 1.0) if weight is None else (text[: weight.start()], float(weight[1])))
    return found


def _by_step(nodes: Sequence[_Node], steps: PromptSteps) -> tuple[str, ...]:
    if all(isinstance(node, str) for node in nodes):
        return (_text_at(nodes, 1, 0, 0),)
    num_first, num_second = steps
    found = [_text_at(nodes, step, num_first, 0) for step in range(1, num_first + 1)]
    found += [_text_at(nodes, step, num_second, num_first) for step in range(1, num_second + 1)]
    return tuple(found) if len({*found}) > 1 else (found[0],)


def _text_at(nodes: Iterable[_Node], step: int, num_steps: int, num_before: int) -> str:
    """Return the text at a step of a pass, from 1 on, of `num_steps`; the pass before it has `num_before`."""
    texts = []
    for node in nodes:
        if isinstance(node, str):
            texts.append(node)
            continue
        if node.alternates:
            chosen = (step - 1) % len(node.options)
        elif node.is_part:
            chosen = int(step > math.trunc((node.when - bool(num_before)) * num_steps))
        else:
            chosen = int(step > node.when - num_before)
        texts.append(_text_at(node.options[chosen], step, num_steps, num_before))
    return "".join(texts)


def _parse(prompt: str, field: str) -> list[_Node]:
    open_brackets = [_Bracket("")]
    num_changes = 0
    for match in _TOKEN.finditer(prompt):
        piece, top = match[0], open_brackets[-1]
        if piece in ("[", "(") and len(open_brackets) <= _MAX_OPEN:
            open_brackets.append(_Bracket(piece))
        elif piece in (":", "|") and top.kind == "[":
            top.separators.append(piece)
            top.parts.append([])
        elif piece in ("]", ")"):
            num_changes += _close(open_brackets, piece)
        else:
            top.parts[-1].append(piece)
    if num_changes > _MAX_CHANGES:
        raise InvalidField(
            f"{field}: has {num_changes} edits and alternations; at most {_MAX_CHANGES} are read.", field=field
        )
    _flatten(open_brackets, 0)
    return _merged(open_brackets[0].all_nodes())


def _close(open_brackets: list[_Bracket], end: str) -> int:
    """Close the innermost bracket that `end` closes; return how many changes it is."""
    kind = "[" if end == "]" else "("
    k = next((k for k in reversed(range(len(open_brackets))) if open_brackets[k].kind == kind), None)
    if k is None:
        open_brackets[-1].is_text = True
        open_brackets[-1].parts[-1].append(end)
        return 0
    _flatten(open_brackets, k)
    closed = open_brackets.pop()
    around = open_brackets[-1].parts[-1]
    if (change := closed.change()) is not None:
        around.append(change)
        return 1
    around += [kind, *closed.all_nodes(), end]
    return 0


def _flatten(open_brackets: list[_Bracket], k: int) -> None:
    """Make text of the brackets inside of number k, which stay open."""
    for each in open_brackets[k + 1 :]:
        open_brackets[k].is_text = True
        open_brackets[k].parts[-1] += [each.kind, *each.all_nodes()]
    del open_brackets[k + 1 :]


def _merged(nodes: Iterable[_Node]) -> list[_Node]:
    """Return nodes with no two texts side by side."""
    groups = itertools.groupby(nodes, key=lambda node: isinstance(node, str))
    found: list[_Node] = []
    for is_text, group in groups:
        found.extend(["".join(map(str, group))] if is_text else group)
    return found
