"""Dashboards against Grafana's own schema, as its foundation SDK has it: names, types and choices of every field, and units."""

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

register_default_plugins()  # what panels and queries of each kind have


def faults(document):
    """What Grafana does not know in it: fields that it passes over, and values that their fields cannot have."""
    read = Dashboard.from_json(document)
    written = json.loads(JSONEncoder().encode(read))
    return [*unknown(document, written, "$"), *mistyped(read, Dashboard, "$")]


def unknown(document, written, place):
    """Fields of `document` that its reading has lost."""
    if isinstance(document, dict):
        for name, value in document.items():
            if isinstance(written, dict) and name in written:
                yield from unknown(value, written[name], f"{place}.{name}")
            else:
                yield f"{place}.{name} is no field"
    elif isinstance(document, list):
        for number, (one, other) in enumerate(zip(document, written, strict=True)):
            yield from unknown(one, other, f"{place}[{number}]")
    elif document != written:
        yield f"{place} is {document!r}, read as {written!r}"


def mistyped(value, kind, place):
    """Values that are not of the types that the schema declares, among them words that are none of a choice's."""
    choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    found = [list(_mistyped(value, choice, place)) for choice in choices]
    if all(found):
        yield from found[0]


def _mistyped(value, kind, place):
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from mistyped(item, arguments[0], f"{place}[{number}]")
    elif allowed := _allowed(kind):
        if value not in allowed:
            yield f"{place} is {value!r}; it can be one of {allowed}"
    elif kind not in (object, typing.Any) and not isinstance(value, (float, int) if kind is float else origin or kind):
        yield f"{place} is {value!r}, not of {kind}"
    elif hasattr(type(value), "to_json"):
        for name, part in typing.get_type_hints(type(value)).items():
            yield from mistyped(getattr(value, name), part, f"{place}.{name}")


def _allowed(kind):
    """The words of a choice; none of what is no choice."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [each.value for each in kind]
    return list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_dashboard_is_what_grafana_reads(file):
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
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    (fault,) = faults(document)
    assert repr(value) in fault or last in fault


def test_units_are_grafanas():
    known = {value for name, value in vars(units).items() if name[0] != "_"}
    assert set(typing.get_args(Unit)) <= known
