"""`GET /v1/live`: the state of the engines and views of their running batches, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal

from starlette.requests import Request

from noria.config import FrontendConfig
from noria.errors import InvalidField, RateLimited, RouteNotFound, did_you_mean, short_repr
from noria.frontend.access.auth import client_id_of
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.operations import EVENT_STREAM, Operation, parameter
from noria.frontend.http.request_head import read_flag
from noria.frontend.http.sse import KEEP_ALIVE_COMMENT, KEEP_ALIVE_INTERVAL_S, EventStream
from noria.frontend.live.feed import LiveFeed
from noria.frontend.live.subscribers import Subscriber

LiveSetting = Literal["full", "no-previews", "off"]


def resolve_live_setting(config: FrontendConfig) -> LiveSetting:
    """The setting `frontend.live` with "auto" resolved: with API keys, no client sees the images of others."""
    if config.live == "auto":
        return "no-previews" if config.api_keys_file else "full"
    return config.live


class LiveRoutes:
    """The route `GET /v1/live` of one front end."""

    def __init__(self, engine_pool: EnginePool, config: FrontendConfig) -> None:
        self._feed, self._setting = LiveFeed(engine_pool), resolve_live_setting(config)
        self._draining = asyncio.Event()

    @property
    def operations(self) -> list[Operation]:
        """The operation to serve."""
        return [
            Operation(
                method="GET",
                path="/v1/live",
                handler=self._stream,
                group="The running batch",
                scopes=(),
                summary="Stream the running batches",
                description="Server-sent events without an end: `engines`, at every change of a state; `engine_view`, "
                "up to five times a second for each engine.",
                parameters=[parameter("thumbnails", "query", type="boolean", default=True)],
                response=EVENT_STREAM,
                errors=[InvalidField, RouteNotFound, RateLimited],
                is_traced=False,
            )
        ]

    def drain(self) -> None:
        """End the streams, because the process is about to stop; clients reconnect to another front end."""
        self._draining.set()

    async def _stream(self, http: Request) -> EventStream:
        if self._setting == "off":
            raise RouteNotFound(
                "/v1/live is switched off on this server: the setting frontend.live is 'off'; "
                "allowed are auto, full, no-previews."
            )
        wants_thumbnails = _wants_thumbnails(http) and self._setting == "full"
        api_client = http.state.api_client
        only = None if api_client.has_scope("admin") else api_client.name
        subscriber = self._feed.subscribe(client_id_of(http), only, wants_thumbnails=wants_thumbnails)

        async def unsubscribe() -> None:
            self._feed.unsubscribe(subscriber)

        return EventStream(_frames(subscriber), unsubscribe, self._draining)


async def _frames(subscriber: Subscriber) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_INTERVAL_S):
                await subscriber.wait()
        except TimeoutError:
            yield KEEP_ALIVE_COMMENT
        for frame in subscriber.take():
            yield frame


def _wants_thumbnails(http: Request) -> bool:
    for name in http.query_params:
        if name != "thumbnails":
            raise InvalidField(
                f"unknown query parameter {short_repr(name)}.{did_you_mean(name, ['thumbnails'])} "
                "Allowed is thumbnails=true or false.",
                field=name,
            )
    return read_flag(http, "thumbnails", True)
