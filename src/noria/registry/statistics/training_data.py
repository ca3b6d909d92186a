"""Values of training data, from a file of JSON or CSV, as a reference distribution."""

import codecs
import csv
import io
import pathlib
import re
from collections.abc import Iterator, Mapping

import msgspec

from noria.errors import RegistryError, short_list, short_repr
from noria.statistics.distributions import CategoryCounts, Counts
from noria.statistics.values import TEXT_COLUMNS, Value
from noria.statistics.variables import Variable

Columns = Mapping[str, list[Value]]
"""Values by column."""

_Cell = float | str | bool | None


_CSV_SUFFIXES = (".csv", ".tsv")
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_DELIMITERS = ",;\t"
_LINE_END = r"(?:\r\n|\r|\n)"
_BEFORE_HEADER = re.compile(rf"(?:[ \t]*{_LINE_END})*(?:sep=([,;\t|]){_LINE_END})?")
"""Empty lines, and the delimiter as Excel writes it."""
_FORM = (
    "It is a .csv or .tsv file with a header, or JSON: an object of lists, or a list of objects, with a column or key "
    "for each variable; in UTF-8, or in UTF-16 with a byte order mark."
)


def read_columns(file: pathlib.Path) -> Columns:
    """Return the columns of a file: CSV with a header, or JSON, an object of lists or a list of objects.

    CSV has commas, semicolons or tabs between cells, whichever divides its header into most, or what `sep=` names.
    Columns without a value are there, too.

    Raises RegistryError: it cannot be read, has another form, columns of one name, or rows that do not fit the header.
    """
    try:
        text = _decode(file.read_bytes())
        if file.suffix.lower() in _CSV_SUFFIXES:
            return _read_csv(text, file)
        decoded = msgspec.json.decode(text, type=dict[str, list[_Cell]] | list[dict[str, _Cell]])
    except (OSError, UnicodeError, csv.Error, msgspec.MsgspecError) as error:
        raise RegistryError(f"{file} cannot be read: {error}. {_FORM}") from error
    columns: dict[str, list[Value]] = {}
    pairs = decoded.items() if isinstance(decoded, dict) else _pairs(decoded)
    for name, values in pairs:
        columns.setdefault(name, []).extend(value for value in values if value not in (None, ""))
    return columns


def _decode(content: bytes) -> str:
    """Return the text of a file. Raises UnicodeError."""
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), "utf-8")
    text = content.decode(encoding)
    if "\0" in text:
        raise UnicodeError("it has NUL characters, as UTF-16 without a byte order mark has")
    return text


def _pairs(rows: "list[dict[str, _Cell]]") -> Iterator[tuple[str, list[_Cell]]]:
    for row in rows:
        for name, value in row.items():
            yield name, [value]


def _read_csv(text: str, file: pathlib.Path) -> Columns:
    """Return the columns of the text of a file. Raises RegistryError and csv.Error."""
    before = _BEFORE_HEADER.match(text)
    assert before is not None, "it may be empty"
    table, num_lines_before = text[before.end() :], len(before[0].splitlines())
    header = {each: next(csv.reader(io.StringIO(table, newline=""), delimiter=each), ()) for each in _DELIMITERS}
    delimiter = before[1] or max(_DELIMITERS, key=lambda each: len(header[each]))
    rows = csv.reader(io.StringIO(table, newline=""), delimiter=delimiter, strict=True)
    names = [name.strip() for name in next(rows, [])]
    repeated = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if repeated:
        raise RegistryError(
            f"{file} has several columns of one name: {short_list(map(short_repr, repeated))}. Leave one of them, or "
            "rename the others."
        )
    columns: dict[str, list[Value]] = {name: [] for name in names if name}
    for row in rows:
        if not any(row):  # empty lines, and empty rows of spreadsheets
            continue
        surplus = row[len(names) :] + [cell for name, cell in zip(names, row, strict=False) if not name]
        if len(row) < len(names) or any(surplus):
            raise RegistryError(
                f"{file}, line {num_lines_before + rows.line_num}: the row has {len(row)} cells, the header names "
                f"{len(columns)}: {short_list(columns)}, divided by {delimiter!r}. Put texts with such a character or "
                "with line breaks into quotes, and give each column a name."
            )
        for name, cell in zip(names, row, strict=False):
            if name and cell:
                columns[name].append(cell)
    return columns


def count_columns(columns: Columns, variables: Mapping[str, Variable]) -> dict[str, Counts]:
    """Return the counts of the columns that are variables; of `prompt` and `text` those of the built-in ones.

    Raises RegistryError: a value of a scalar is no number.
    """
    counts: dict[str, Counts] = {}
    for column, values in columns.items():
        if not values:
            continue
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
                f"{variable.name} has the value {short_repr(value)}; the values of a {variable.kind} are numbers, "
                "such as 0.5."
            ) from error
    return counts
