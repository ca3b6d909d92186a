"""The dashboards conform to Grafana's schema in its foundation SDK: field names, types, enum values and units."""

import copy
import enum
import json
import pathlib
import types
import typing

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from noria.dashboards.panels import Unit

FILES = sorted((pathlib.Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards").glob("*.json"))

register_default_plugins()  # the schemas of all kinds of panels and queries


def faults(document):
    """Return what Grafana would not accept: unknown fields, and invalid values."""
    read = Dashboard.from_json(document)
    written = json.loads(JSONEncoder().encode(read))
    return [*unknown(document, written, "$"), *mistyped(read, Dashboard, "$")]


def unknown(document, written, location):
    """Yield fields of `document` that are lost by parsing it."""
    if isinstance(document, dict):
        for name, value in document.items():
            if isinstance(written, dict) and name in written:
                yield from unknown(value, written[name], f"{location}.{name}")
            else:
                yield f"{location}.{name} is no known field"
    elif isinstance(document, list):
        for number, (one, other) in enumerate(zip(document, written, strict=True)):
            yield from unknown(one, other, f"{location}[{number}]")
    elif document != written:
        yield f"{location} is {document!r}, read as {written!r}"


def mistyped(value, kind, location):
    """Yield values that do not have the types or enum values of the schema."""
    choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    found = [list(_mistyped(value, choice, location)) for choice in choices]
    if all(found):
        yield from found[0]


def _mistyped(value, kind, location):
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from mistyped(item, arguments[0], f"{location}[{number}]")
    elif allowed := _allowed(kind):
        if value not in allowed:
            yield f"{location} is {value!r}; it can be one of {allowed}"
    elif kind not in (object, typing.Any) and not isinstance(value, (float, int) if kind is float else origin or kind):
        yield f"{location} is {value!r}, not of {kind}"
    elif hasattr(type(value), "to_json"):
        for name, part in typing.get_type_hints(type(value)).items():
            yield from mistyped(getattr(value, name), part, f"{location}.{name}")


def _allowed(kind):
    """Return the values of an enum or Literal; empty for other types."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [each.value for each in kind]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_dashboard_conforms_to_grafanas_schema(file):
    assert faults(json.loads(file.read_text())) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("graphTooltips",), 1),
        (("graphTooltip",), 7),
        (("refresh",), 15),
        (("templating", "list", 0, "type"), "source"),
        (("panels", 1, "gridPos", "width"), 3),
        (("panels", 1, "fieldConfig", "defaults", "unitt"), "s"),
        (("panels", 1, "fieldConfig", "defaults", "thresholds", "mode"), "relative"),
        (("panels", 1, "options", "graphMode"), "areas"),
        (("panels", 1, "options", "reduce"), {}),
        (("panels", 1, "targets", 0, "expression"), "up"),
        (("panels", 1, "targets", 0, "format"), "timeseries"),
    ],
)
def test_a_planted_fault_is_found(path, value):
    document = copy.deepcopy(json.loads(FILES[-1].read_text()))
    *parents, last = path
    node = document
    for parent in parents:
        node = node[parent]
    node[last] = value
    (fault,) = faults(document)
    assert repr(value) in fault or last in fault


def test_units_are_known_to_grafana():
    known = {value for name, value in vars(units).items() if name[0] != "_"}
    assert set(typing.get_args(Unit)) <= known
