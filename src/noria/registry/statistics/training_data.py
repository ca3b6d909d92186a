"""Values of training data, from a file of JSON or CSV, as a reference distribution."""

import csv
import pathlib
from collections.abc import Mapping

import msgspec

from noria.errors import RegistryError, short_repr
from noria.statistics.distributions import CategoryCounts, Counts
from noria.statistics.values import TEXT_COLUMNS, Value
from noria.statistics.variables import Variable

Columns = Mapping[str, list[Value]]
"""Values by column."""

_Cell = float | str | bool | None


def read_columns(file: pathlib.Path) -> Columns:
    """Return the columns of a file: CSV with a header, or JSON, an object of lists or a list of objects.

    Raises:
        RegistryError: it cannot be read, or has another form.

    """
    try:
        if file.suffix.lower() == ".csv":
            with file.open(encoding="utf-8", newline="") as opened:
                return _by_column(list(csv.DictReader(opened)))
        decoded = msgspec.json.decode(file.read_bytes(), type=dict[str, list[_Cell]] | list[dict[str, _Cell]])
    except (OSError, UnicodeDecodeError, csv.Error, msgspec.MsgspecError) as error:
        raise RegistryError(
            f"{file} cannot be read: {error}. It is a .csv file with a header, or JSON: an object of lists, or a list "
            "of objects, with a column or key for each variable."
        ) from error
    if isinstance(decoded, list):
        return _by_column(decoded)
    return {name: [value for value in values if value is not None] for name, values in decoded.items()}


def _by_column(rows: "list[dict[str, _Cell]]") -> Columns:
    columns: dict[str, list[Value]] = {}
    for row in rows:
        for name, value in row.items():
            if name is not None and value not in (None, ""):  # a row of CSV may be longer than the header
                columns.setdefault(name, []).append(value)
    return columns


def count_columns(columns: Columns, variables: Mapping[str, Variable]) -> dict[str, Counts]:
    """Return the counts of the columns that are variables; of `prompt` and `text` those of the built-in ones.

    Raises:
        RegistryError: a value of a scalar is no number.

    """
    counts: dict[str, Counts] = {}
    for column, values in columns.items():
        if column in variables:
            counts[column] = _count(variables[column], values)
        for name, compute in TEXT_COLUMNS.get(column, {}).items():
            if name in variables and name not in columns:
                counts[name] = _count(variables[name], [compute(str(value)) for value in values])
    return counts


def _count(variable: Variable, values: list[Value]) -> Counts:
    counts = variable.new_counts()
    for value in values:
        if isinstance(counts, CategoryCounts):
            counts.record(str(value))
            continue
        try:
            counts.record(float(value))
        except ValueError as error:
            raise RegistryError(
                f"{variable.name} has the value {short_repr(value)}; the values of a {variable.kind} are numbers."
            ) from error
    return counts
