"""Types of options, for argparse: each parses a text, or raises an error that says what is allowed."""

import math
from collections.abc import Callable, Collection

from noria.cli.parser import argument_type

ABOVE_0 = math.nextafter(0.0, 1.0)


def number(low: float, high: float, allowed: str) -> Callable[[str], float]:
    """Numbers from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(f"{text!r}; {allowed}")
        return value

    return argument_type(parse)


def whole(low: int, high: int, allowed: str) -> Callable[[str], int]:
    """Whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if not _is_whole(text, low, high):
            raise ValueError(f"{text!r}; {allowed}")
        return int(text)

    return argument_type(parse)


def wholes(low: int, high: int, allowed: str) -> Callable[[str], tuple[int, ...]]:
    """Several whole numbers from `low` to `high`, such as `4,1,2`, in this order without duplicates."""

    def parse(text: str) -> tuple[int, ...]:
        words = text.split(",")
        if not all(_is_whole(word, low, high) for word in words):
            raise ValueError(f"{text!r}; {allowed}")
        return tuple(dict.fromkeys(map(int, words)))

    return argument_type(parse)


def _is_whole(text: str, low: int, high: int) -> bool:
    return text.isascii() and text.isdecimal() and low <= int(text) <= high


def ordered(values: Callable[[str], tuple[int, ...]]) -> Callable[[str], tuple[int, ...]]:
    """The same `values`, in rising order."""
    return lambda text: tuple(sorted(values(text)))


def names(known: Collection[str], noun: str) -> Callable[[str], tuple[str, ...]]:
    """Some of the `known` names, such as `b,a`, or `all`; in the order of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        given = known if text == "all" else text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"{unknown[0]!r}; {noun} are all, {', '.join(known)}")
        return tuple(name for name in known if name in given)

    return argument_type(parse)


def one_of(known: Collection[str], noun: str) -> Callable[[str], str]:
    """Any one of the `known` names."""

    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r}; {noun} are {', '.join(known)}")
        return text

    return argument_type(parse)


CONNECTIONS = ordered(wholes(1, 128, "connections are whole numbers from 1 to 128, such as 1,16,128"))
LOADS = ordered(wholes(1, 1000, "loads are whole per cents of capacity from 1 to 1000, such as 50,90,130"))
SECONDS = number(1, 600, "a load takes 1 to 600 seconds")
ROUNDS = whole(1, 20, "it is a whole number of rounds from 1 to 20")
USERS = whole(1, 256, "it is a whole number of users from 1 to 256")
