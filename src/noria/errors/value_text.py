"""What messages of errors say of values: the start of a long one, and the nearest of the names that exist."""

import difflib
import itertools
import reprlib
from collections.abc import Iterable, Mapping

_MAX_REPR_CHARS = 80
_MAX_MISSPELT_CHARS = 200  # longer text is no typing error, and comparing it takes time and memory


class _StartRepr(reprlib.Repr):
    """The start of a value's repr: at least `_MAX_REPR_CHARS` characters if it has so many, in time for these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = self.maxtuple = self.maxlist = self.maxset = self.maxfrozenset = _MAX_REPR_CHARS // 2
        self.maxlong = self.maxother = 10**9  # those are short

    def repr_str(self, x: str, _: int) -> str:
        return repr(x[:_MAX_REPR_CHARS])

    def repr_bytes(self, x: bytes, _: int) -> str:
        return repr(x[:_MAX_REPR_CHARS])

    def repr_dict(self, x: Mapping[object, object], level: int) -> str:
        if level <= 0:
            return "{…}"
        items = itertools.islice(x.items(), _MAX_REPR_CHARS // 2)
        return "{" + ", ".join(f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in items) + "}"


_START_REPR = _StartRepr()


def short_repr(value: object) -> str:
    """The repr of `value`, cut to `_MAX_REPR_CHARS` characters, for messages. Files in base64 take no longer."""
    text = _START_REPR.repr(value)
    return text if len(text) <= _MAX_REPR_CHARS else text[: _MAX_REPR_CHARS - 1] + "…"


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest of `known`, or an empty string if none is near."""
    if len(got) > _MAX_MISSPELT_CHARS:
        return ""
    matches = difflib.get_close_matches(got, list(known), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
