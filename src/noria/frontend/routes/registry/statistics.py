"""`GET /v1/statistics`: what the server counts, how far it drifts, and the distributions of one variable over time."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.errors import InvalidField
from noria.frontend.http.json_response import json_response
from noria.frontend.http.paths import STATISTICS_PATH
from noria.frontend.services.registry.statistics import StatisticsService
from noria.statistics.windows import SeriesKey

SERIES_PATH = f"{STATISTICS_PATH}/series"


class StatisticsRoutes:
    """The routes of statistics."""

    def __init__(self, service: StatisticsService) -> None:
        self._service = service

    @property
    def routes(self) -> list[Route]:
        """The routes to serve."""
        return [Route(STATISTICS_PATH, self.statistics), Route(SERIES_PATH, self.series)]

    async def statistics(self, _: Request) -> Response:
        """Return all series, as of the last seconds."""
        return json_response(await self._service.list_series())

    async def series(self, http: Request) -> Response:
        """Return the distributions of the series that the query names."""
        for field in SeriesKey._fields:
            if field not in http.query_params:
                raise InvalidField(f"{field} is missing; the query has {', '.join(SeriesKey._fields)}.", field=field)
        key = SeriesKey(*(http.query_params[field] for field in SeriesKey._fields))
        return json_response(await self._service.detail(key))
