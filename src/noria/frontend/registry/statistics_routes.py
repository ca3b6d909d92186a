"""`GET /v1/statistics`: what the server counts, how far it drifts, and the distributions of one variable over time."""

import functools

from starlette.requests import Request
from starlette.responses import Response

from noria.errors import InvalidField, RegistryConflict, RegistryUnavailable
from noria.frontend.http.json_response import json_response
from noria.frontend.http.operations import Operation, parameter
from noria.frontend.registry.statistics_service import SeriesDetail, StatisticsList, StatisticsService
from noria.statistics.windows import SeriesKey

_PARAMETERS = {
    "endpoint": "the name that requests give as `model`, or an endpoint with code",
    "version": "MODEL@NUMBER, or the fingerprint of a model of the configuration",
    "variable": "the name of the variable",
}


class StatisticsRoutes:
    """The routes of statistics."""

    def __init__(self, service: StatisticsService) -> None:
        self._service = service

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve."""
        get = functools.partial(Operation, method="GET", group="Statistics", scopes=("lineage", "deploy"))
        return [
            get(
                path="/v1/statistics",
                handler=self._statistics,
                summary="List what is counted",
                description="For each variable, version and endpoint the number of values in the current windows, "
                "their mean or most frequent category, and their drift from the reference.",
                response=StatisticsList,
                errors=[RegistryUnavailable],
            ),
            get(
                path="/v1/statistics/series",
                handler=self._series,
                summary="The distributions of a variable",
                description="Now, in the reference, and over time, by cell.",
                parameters=[
                    parameter(name, "query") | {"required": True, "description": text}
                    for name, text in _PARAMETERS.items()
                ],
                response=SeriesDetail,
                errors=[InvalidField, RegistryConflict, RegistryUnavailable],
            ),
        ]

    async def _statistics(self, _: Request) -> Response:
        return json_response(await self._service.list_series())

    async def _series(self, http: Request) -> Response:
        for field in SeriesKey._fields:
            if field not in http.query_params:
                raise InvalidField(f"{field} is missing; the query has {', '.join(SeriesKey._fields)}.", field=field)
        key = SeriesKey(*(http.query_params[field] for field in SeriesKey._fields))
        return json_response(await self._service.detail(key))
