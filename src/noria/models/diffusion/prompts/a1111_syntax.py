r"""AUTOMATIC1111's syntax of prompts: words with weights, in sections.

`(a)` weighs 1.1, `[a]` 1/1.1 and `(a:1.3)` 1.3; those of nested brackets are multiplied, and a bracket that is not
closed ends with the prompt. `\(`, `\)`, `\[`, `\]` and `\\` are the character itself. `BREAK`, outside of brackets,
begins a new section. `a1111_schedule.py` has read what changes between steps before. Prompts are untrusted: reading
takes time linear in their length.
"""

import contextlib
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

from noria.errors import InvalidField, short_repr

MAX_WEIGHT = 100.0  # published prompts stay below 2
_MAX_OPEN = 64  # brackets in one another: 1.1 to the power of 64 is beyond the largest weight
_FACTORS = {"(": 1.1, "[": 1 / 1.1}
_NUMBER = r"[+-]?[.\d]+"
_NO_NUMBER = r"[+-]?(?:nan|inf|infinity|[.\d]+e[+-]?\d+)"
_PIECE = re.compile(
    rf"""
    \\(?P<escaped>[()\[\]\\])
    | :\s*(?:(?P<number>{_NUMBER})|(?P<no_number>{_NO_NUMBER}))\s*(?P<end>[)\]])
    | (?P<special>[()\[\]])
    | (?:[^\\:()\[\]]|\\(?![()\[\]\\]))+
    | :
    """,
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
_BREAK = re.compile(r"\bBREAK\b")


class WeightedText(NamedTuple):
    """A part of a prompt whose words have the same weight."""

    text: str
    weight: float


class _Piece(NamedTuple):
    text: str
    num_open: int  # brackets around it


def parse(prompt: str, field: str = "prompt") -> list[list[WeightedText]]:
    """Return the sections of a prompt, at least one; neighbours of equal weight are one part.

    Raises InvalidField, of `field`: a weight has no value that can be used.
    """
    reader = _Reader(prompt, field)
    sections: list[list[WeightedText]] = [[]]
    for piece, weight in zip(reader.pieces, reader.weights, strict=True):
        if not abs(weight) <= MAX_WEIGHT:
            raise InvalidField(
                f"{field}: {short_repr(piece.text)} has the weight {weight:.4g}; allowed are {-MAX_WEIGHT:g} to "
                f"{MAX_WEIGHT:g}.",
                field=field,
            )
        first, *others = _BREAK.split(piece.text) if piece.num_open == 0 else [piece.text]
        sections[-1].append(WeightedText(first, weight))
        sections += [[WeightedText(text, weight)] for text in others]
    return [_merged(section) for section in sections]


def _merged(section: Iterable[WeightedText]) -> list[WeightedText]:
    """Return parts with neighbours of other weights; none is empty."""
    groups = itertools.groupby((part for part in section if part.text), key=lambda part: part.weight)
    return [WeightedText("".join(part.text for part in parts), weight) for weight, parts in groups]


class _Bracket(NamedTuple):
    kind: str
    at: int  # its place in the prompt
    first: int  # the first piece after it


class _Reader:
    """Divides a prompt into the pieces between its brackets, and weighs them."""

    def __init__(self, prompt: str, field: str) -> None:
        self._prompt, self._field = prompt, field
        self._open: list[_Bracket] = []
        self.pieces: list[_Piece] = []
        self.weights: list[float] = []
        for match in _PIECE.finditer(prompt):
            self._read(match)
        for bracket in self._open:
            self._weigh(bracket, _FACTORS[bracket.kind])

    def _read(self, match: re.Match[str]) -> None:
        special, end = match["special"], match["end"]
        if match["escaped"]:
            self._add(match["escaped"])
        elif special in ("(", "["):
            self._begin(special, match.start())
        elif special in (")", "]"):
            self._end(match, special)
        elif end is not None:
            self._end(match, end, match["number"], match["no_number"])
        else:
            self._add(match[0])

    def _add(self, text: str) -> None:
        self.pieces.append(_Piece(text, len(self._open)))
        self.weights.append(1.0)

    def _begin(self, kind: str, at: int) -> None:
        if len(self._open) == _MAX_OPEN:
            raise InvalidField(
                f"{self._field}: the bracket at character {at} is inside of {_MAX_OPEN} others, which is the most. "
                f"Close some, or write \\{kind} for the bracket itself.",
                field=self._field,
            )
        self._open.append(_Bracket(kind, at, len(self.pieces)))

    def _end(self, match: re.Match[str], end: str, number: str | None = None, no_number: str | None = None) -> None:
        kind = "(" if end == ")" else "["
        k = next((k for k in reversed(range(len(self._open))) if self._open[k].kind == kind), None)
        if k is None:
            self._add(match[0])
            return
        bracket = self._open.pop(k)
        text = self._prompt[bracket.at : match.end()]
        if kind == "(" and (number is not None or no_number is not None):
            self._weigh(bracket, _weight(number, text, self._field))
            return
        if number is not None or no_number is not None:
            self._add(match[0][:-1])
        self._weigh(bracket, _FACTORS[kind])

    def _weigh(self, bracket: _Bracket, factor: float) -> None:
        for index in range(bracket.first, len(self.weights)):
            self.weights[index] *= factor


def _weight(number: str | None, text: str, field: str) -> float:
    with contextlib.suppress(ValueError):
        if number is not None:
            return float(number)
    raise InvalidField(
        f"{field}: the weight of {short_repr(text)} is no decimal number, such as 1.3. Change it, or write "
        r"\( for the bracket itself.",
        field=field,
    )
