"""The values that the code of an endpoint records during one request."""

from collections.abc import Mapping

from noria.statistics.values import Values
from noria.statistics.variables import Variable

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
