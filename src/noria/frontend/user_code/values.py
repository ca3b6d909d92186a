"""The values of user code: texts that an endpoint's model encodes, the JSON of its response, and what it records."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from noria.errors import UserCodeFailed, short_repr
from noria.frontend.http.body import decode
from noria.statistics.values import Values
from noria.statistics.variables import Variable

Pair = Annotated[list[str], Meta(min_length=2, max_length=2)]


class EncodeBody(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an endpoint without `preprocess`, and what one with it may return."""

    inputs: str | list[str | Pair]  # a text, or texts and pairs of texts
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    prompt_name: str | None = None

    @property
    def texts(self) -> list[str | tuple[str, str]]:
        """The inputs, as tokenizers take them."""
        inputs = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return [each if isinstance(each, str) else (each[0], each[1]) for each in inputs]


def body_as(struct_type: type[Any], body: Any) -> Any:
    """Return `body` as a `struct_type`. Raises what `http.body.decode` raises, and ValueError as `to_json`."""
    return decode(to_json(body), struct_type)


def inputs_of(returned: Any, endpoint: str) -> EncodeBody | None:
    """Return what `preprocess` wants encoded; None if that is nothing. Raises UserCodeFailed."""
    if returned is None:
        return None
    try:
        return msgspec.convert(returned if isinstance(returned, dict) else {"inputs": returned}, EncodeBody)
    except msgspec.ValidationError as error:
        raise UserCodeFailed(
            f"preprocess of endpoint {endpoint!r} returned {short_repr(type(returned).__name__)}, which is neither "
            f"None, a text, a list of texts or pairs, nor a dict with inputs: {error}."
        ) from error


def to_json(returned: Any) -> bytes:
    """Return what user code made as JSON; arrays and numbers of numpy are lists and numbers.

    Raises:
        ValueError: a number is not finite, which JSON cannot say.
        Exception: whatever else msgspec raises.
    """
    encoded = msgspec.json.encode(returned, enc_hook=_to_builtin)
    if b"null" in encoded:  # as msgspec writes such numbers
        _check_finite(msgspec.to_builtins(returned, enc_hook=_to_builtin, str_keys=False))
    return encoded


def _check_finite(tree: Any) -> None:
    pending = [("", tree)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path.removeprefix('.') or 'the response'} is {value}, which is no number in JSON")
        if isinstance(value, dict):
            pending += ((f"{path}.{key}", each) for key, each in value.items())
            pending += ((f"{path}.{key}", key) for key in value)
        elif isinstance(value, list | tuple):
            pending += ((f"{path}[{index}]", each) for index, each in enumerate(value))


def _to_builtin(value: Any) -> Any:
    import numpy as np  # front ends without such code never import it

    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


_MAX_VALUES = 256  # values of one request, to bound memory


class RecordedValues:
    """The values of one request, which are counted when it has ended: only then its version is known."""

    def __init__(self, variables: Mapping[str, Variable], wanted: Mapping[str, Variable]) -> None:
        """`wanted` are those of `variables` that are counted of this request."""
        self._variables, self.wanted = variables, wanted
        self.values: Values = []

    def add(self, name: str, value: float | str) -> None:
        """Keep a value, from any thread. Raises ValueError: there is no such variable, or it has no such values."""
        if (variable := self._variables.get(name)) is None:
            raise ValueError(f"there is no statistic {name!r} here; there are {', '.join(self._variables) or 'none'}")
        if variable.kind != "category" and (value := float(value)) < 0 and variable.kind == "counter":
            raise ValueError(f"statistic {name!r} is a counter and got {value}; it counts up only")
        if len(self.values) >= _MAX_VALUES:
            raise ValueError(f"one request records at most {_MAX_VALUES} values")
        if name in self.wanted:
            self.values.append((name, value))
