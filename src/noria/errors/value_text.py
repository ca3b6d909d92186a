"""The words of error messages about values: the start of a long one, and the name that was meant."""

import itertools
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

_MAX_REPR_CHARS = 80
_MAX_MISSPELT_CHARS = 100  # longer text is no typing error, and comparing it takes time
_NO_MEANINGS: Mapping[str, str] = MappingProxyType({})
_WORD = re.compile(r"[^\W_]+")
_MAX_INT_BITS = 4 * _MAX_REPR_CHARS  # bits of an integer that is written; one of `_MAX_REPR_CHARS` digits has fewer


class _StartRepr(reprlib.Repr):
    """The start of a value's repr: at least `_MAX_REPR_CHARS` characters if it has so many, in time for these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxtuple = self.maxlist = self.maxset = self.maxfrozenset = _MAX_REPR_CHARS // 2
        self.maxlong = self.maxother = 10**9  # those are short

    def repr_str(self, x: str, _: int) -> str:
        return repr(x[:_MAX_REPR_CHARS])

    def repr_int(self, x: int, _: int) -> str:
        # Python writes no integer of more than 4,300 digits (ValueError), which products of a request's have.
        num_bits = x.bit_length()
        return repr(x) if num_bits <= _MAX_INT_BITS else f"an integer of {num_bits} bits"

    def repr_bytes(self, x: bytes, _: int) -> str:
        return repr(x[:_MAX_REPR_CHARS])

    def repr_bool(self, x: bool, _: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, _: int) -> str:  # noqa: N802, ARG002 - likewise
        return "null"

    def repr_tuple(self, x: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(x), level)

    def repr_dict(self, x: Mapping[object, object], level: int) -> str:
        if level <= 0:
            return "{…}"
        items = itertools.islice(x.items(), _MAX_REPR_CHARS // 2)
        return "{" + ", ".join(f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in items) + "}"


_START_REPR = _StartRepr()


def short_repr(value: object) -> str:
    """The repr of `value`, cut to `_MAX_REPR_CHARS` characters, for messages. Files in base64 take no longer.

    null, true, false and lists are in JSON's and TOML's form, as users wrote them.
    """
    text = _START_REPR.repr(value)
    return text if len(text) <= _MAX_REPR_CHARS else text[: _MAX_REPR_CHARS - 1] + "…"


def short_list(texts: Iterable[str], max_named: int = 8) -> str:
    """The texts, divided by commas, for messages: the first `max_named`, and how many more there are."""
    each = list(texts)
    more = f" and {len(each) - max_named} more" if len(each) > max_named else ""
    return ", ".join(each[:max_named]) + more


def did_you_mean(got: str, known: Iterable[str], meanings: Mapping[str, str] = _NO_MEANINGS) -> str:
    """A sentence that names the one of `known` that was meant, or an empty string if none can be told.

    It is the one that `meanings`, by other programs' names, says; else one whose letters hardly differ; else the one
    that has all words of `got` and fewest others, or the path that ends with it, if there is one such.
    """
    if len(got) > _MAX_MISSPELT_CHARS:
        return ""
    names = list(known)
    found = meanings.get(got)
    if found not in names:
        found = _nearest(got, names) or _longer(got, names)
    return f" Did you mean {found!r}?" if found else ""


def _nearest(got: str, names: Sequence[str]) -> str | None:
    """Return the name with the fewest edits from `got`: at most one for each four of its letters."""
    text = got.lower()
    letters, best, limit = Counter(text), None, max(1, len(text) // 4) if len(text) > 1 else 0
    for name in names:
        other = name.lower()
        has_same_letters = (letters - Counter(other)).total() <= limit >= (Counter(other) - letters).total()
        if has_same_letters and _one_letter_words(other) == _one_letter_words(text):
            distance = _num_edits(text, other)
            if distance < limit or (distance == limit and best is None):
                best, limit = name, distance
    return best


def _longer(got: str, names: Sequence[str]) -> str | None:
    """Return the name that `got` is a part of, some of its words or the end of a path, if one has the fewest words."""
    by_name = {name: set(_WORD.findall(name.lower())) for name in names}
    words = set(_WORD.findall(got.lower()))
    found = [name for name in names if words and words < by_name[name] and (got[0] != "/" or name.endswith(got))]
    fewest = min((len(by_name[name]) for name in found), default=0)
    found = [name for name in found if len(by_name[name]) == fewest]
    return found[0] if len(found) == 1 else None


def _one_letter_words(text: str) -> list[str]:
    """Return the words whose letter makes their meaning: the `p` of `top_p`."""
    return [word for word in _WORD.findall(text) if len(word) == 1]


def _num_edits(a: str, b: str) -> int:
    """Return how many letters are added, left out, replaced or swapped with the next one (Damerau-Levenshtein)."""
    before, above = [0], list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        row = [i]
        for j, other in enumerate(b, 1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, above = above, row
    return above[-1]
