"""Statistics in the OpenAPI document."""

from typing import Any

from noria.errors import InvalidField, RegistryConflict, RegistryUnavailable
from noria.frontend.http.paths import STATISTICS_PATH
from noria.frontend.openapi.operations import json_content, operation, parameter
from noria.frontend.routes.registry.statistics import SERIES_PATH
from noria.frontend.services.registry.statistics import SeriesDetail, StatisticsList

STRUCTS = (StatisticsList, SeriesDetail)

_PARAMETERS = {
    "endpoint": "the name that requests give as `model`, or an endpoint with code",
    "version": "MODEL@NUMBER, or the fingerprint of a model of the configuration",
    "variable": "the name of the variable",
}


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    listing = operation(
        "List what is counted",
        "For each variable, version and endpoint the number of values in the current windows, their mean or most "
        "frequent category, and their drift from the reference.",
        content=json_content(StatisticsList),
        errors=[RegistryUnavailable],
    )
    series = operation(
        "The distributions of a variable",
        "Now, in the reference, and over time, by cell.",
        content=json_content(SeriesDetail),
        errors=[InvalidField, RegistryConflict, RegistryUnavailable],
    )
    series["parameters"] = [
        parameter(name, "query") | {"required": True, "description": text} for name, text in _PARAMETERS.items()
    ]
    return {STATISTICS_PATH: {"get": listing}, SERIES_PATH: {"get": series}}
