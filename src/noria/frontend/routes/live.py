"""`GET /v1/live`: the engines' wheels as they turn, as one stream of events, to whoever watches.

While anybody does, each engine is asked for one view after another (`messages.Follow`), the next when the last is written; when nobody
does, nothing is asked. A view is made an event once for all watchers: once with pictures, once without.
"""

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from noria import __version__
from noria.config import FrontendConfig
from noria.errors import InvalidField, RouteNotFound, did_you_mean, short_repr
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.concurrency_limits import client_id_of
from noria.frontend.http.sse import KEEP_ALIVE_COMMENT, EventStream, serialize_event
from noria.frontend.live.sprite_sheet import make_sprite_sheet
from noria.frontend.live.subscribers import LiveSubscribers, Subscriber
from noria.protocol.live_views import IterationView
from noria.protocol.messages import EngineView, ViewRequest, engine_name

log = logging.getLogger("noria.frontend")

PATH = "/v1/live"
_KEEP_ALIVE_S = 15.0  # as for the other streams
_MAX_ITERATIONS = 256  # that a newcomer is shown: as many as an engine keeps

LiveSetting = Literal["full", "no-previews", "off"]


def resolve_live_setting(config: FrontendConfig) -> LiveSetting:
    """The setting `frontend.live` without its "auto": where there are keys, nobody sees what others draw."""
    if config.live == "auto":
        return "no-previews" if config.keys_file else "full"
    return config.live


class _EngineFeed:
    """One engine's wheel, as this front end follows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.views: asyncio.Queue[tuple[EngineView, memoryview | None] | None] = asyncio.Queue()  # None: it is gone
        self.last_view: EngineView | None = None
        self.iterations: deque[IterationView] = deque(maxlen=_MAX_ITERATIONS)

    def record_view(self, view: EngineView) -> EngineView:
        """Keep what a newcomer wants to see; returns `view` without the turns that were seen before."""
        if self.last_view is None or self.last_view.incarnation != view.incarnation:
            self.iterations.clear()
        last_iteration = self.iterations[-1].number if self.iterations else 0
        new = tuple(iteration for iteration in view.iterations if iteration.number > last_iteration)
        self.iterations += new
        self.last_view = msgspec.structs.replace(view, turns=new)
        return self.last_view


class Live:
    """The stream of one front end."""

    def __init__(self, engine_pool: EnginePool, config: FrontendConfig) -> None:
        self._engine_pool, self._setting = engine_pool, resolve_live_setting(config)
        self._subscribers = LiveSubscribers()
        self._feeds = [_EngineFeed(engine_name(number)) for number in range(engine_pool.num_engines)]
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = asyncio.Event()
        engine_pool.on_change, engine_pool.on_view = self._on_engines_changed, self._on_view

    @property
    def routes(self) -> list[Route]:
        """The one."""
        return [Route(PATH, self.stream)]

    def drain(self) -> None:
        """End the streams: the process is about to stop, and clients come again elsewhere."""
        self._draining.set()

    async def stream(self, http: Request) -> EventStream:
        """Events `engines` and `wheel`, until the client leaves."""
        if self._setting == "off":
            raise RouteNotFound(
                f"{PATH} is switched off on this server: the setting frontend.live is 'off'; allowed are auto, full, no-previews."
            )
        wants_thumbnails = _wants_thumbnails(http) and self._setting == "full"
        subscriber = self._subscribers.add(client_id_of(http), wants_thumbnails=wants_thumbnails)
        subscriber.put_engines(self._engines_event())
        for number, feed in enumerate(self._feeds):
            if (last := self._current_view(number, feed)) is not None:
                full_view = msgspec.structs.replace(last, turns=tuple(feed.iterations), left=())
                subscriber.put_view(feed.name, _serialize_view(feed.name, full_view))
        if not self._tasks:
            self._tasks = [
                # In a context of its own: it is done for all who watch, and not for the request of the first.
                asyncio.create_task(self._request_views(number, feed), context=contextvars.Context())
                for number, feed in enumerate(self._feeds)
            ]

        async def unsubscribe() -> None:
            self._unsubscribe(subscriber)

        return EventStream(self._frames(subscriber), unsubscribe, self._draining)

    def _unsubscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.remove(subscriber)
        if len(self._subscribers) == 0:
            for task in self._tasks:
                task.cancel()
            self._tasks = []
            self._feeds = [_EngineFeed(feed.name) for feed in self._feeds]  # what was seen is of no use any more

    async def _frames(self, subscriber: Subscriber) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    await subscriber.wait()
            except TimeoutError:
                yield KEEP_ALIVE_COMMENT
            for frame in subscriber.take():
                yield frame

    async def _request_views(self, number: int, feed: _EngineFeed) -> None:
        """Ask, show, ask again; an engine that is not ready is asked when it is, and its next life from the beginning."""
        while True:
            last = self._current_view(number, feed)
            last_iteration = None if last is None else last.last_iteration
            await self._engine_pool.request_view(
                number, ViewRequest(last_iteration, with_thumbnails=self._subscribers.wants_thumbnails)
            )
            answer = await feed.views.get()
            if answer is None:  # it is ready now, or is no more
                continue
            view, pixels = answer
            if last_iteration is None and not _is_complete(
                view
            ):  # to who watched before; the answer to this question is to come
                continue
            try:
                await self._publish(number, feed, feed.record_view(view), pixels)
            except Exception:  # an engine's nonsense: it costs this view
                log.exception("%s: its view makes no sense", feed.name)

    def _current_view(self, number: int, feed: _EngineFeed) -> EngineView | None:
        """The last view of the engine's present life."""
        return feed.last_view if feed.last_view is not None and self._is_current(number, feed.last_view) else None

    def _is_current(self, number: int, view: EngineView) -> bool:
        """Whether `view` is of the engine's present life."""
        return view.incarnation == self._engine_pool.engines[number].incarnation

    async def _publish(self, number: int, feed: _EngineFeed, view: EngineView, pixels: memoryview | None) -> None:
        plain_event = _serialize_view(feed.name, view)
        event_with_thumbnails = plain_event
        if view.thumbnails and pixels is not None and self._subscribers.wants_thumbnails:
            positions, (width, height), jpeg_b64 = await asyncio.to_thread(make_sprite_sheet, view.thumbnails, pixels)
            thumbnails = [
                {
                    "slot": thumbnail.slot,
                    "request_id": thumbnail.request_id,
                    "index": thumbnail.index,
                    "width_px": thumbnail.width_px,
                    "height_px": thumbnail.height_px,
                    "x": position.x,
                    "y": position.y,
                }
                for thumbnail, position in zip(view.thumbnails, positions, strict=True)
            ]
            sprite_sheet = {"format": "jpeg", "b64": jpeg_b64, "width": width, "height": height}
            event_with_thumbnails = _serialize_view(feed.name, view, cells=thumbnails, sheet=sprite_sheet)
        if not self._is_current(number, view):  # it has ended meanwhile, and all have been told
            return
        for subscriber in self._subscribers:
            subscriber.put_view(feed.name, event_with_thumbnails if subscriber.wants_thumbnails else plain_event)

    # What the link tells.

    def _on_engines_changed(self) -> None:
        """An engine has another state, or is gone."""
        engines_event = self._engines_event()
        for subscriber in self._subscribers:
            subscriber.put_engines(engines_event)
        for feed in self._feeds if self._tasks else ():
            feed.views.put_nowait(None)

    def _on_view(self, number: int, view: EngineView, pixels: memoryview | None) -> None:
        if self._tasks:
            self._feeds[number].views.put_nowait((view, pixels))

    def _engines_event(self) -> bytes:
        """The event."""
        engines = [
            {"name": feed.name, "state": status.state, "device": status.device, "incarnation": status.incarnation}
            for feed, status in zip(self._feeds, self._engine_pool.engines, strict=True)
        ]
        return serialize_event(
            "engines",
            {"engines": engines, "server": {"version": __version__, "models": list(self._engine_pool.models)}},
        )


def _is_complete(view: EngineView) -> bool:
    """Whether it has all turns that an engine keeps, as the first answer to who has seen none."""
    return len(view.iterations) >= min(view.last_iteration, _MAX_ITERATIONS)


def _serialize_view(engine: str, view: EngineView, **extra_fields: Any) -> bytes:
    """A view as JSON: its fields as declared, but for the cells, which come with the sheet that they are in."""
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return serialize_event("wheel", {"engine": engine} | fields | {"cells": []} | extra_fields)


def _wants_thumbnails(http: Request) -> bool:
    for name in http.query_params:
        if name != "pictures":
            raise InvalidField(
                f"there is no parameter {short_repr(name)} here.{did_you_mean(name, ['pictures'])} Allowed is pictures=true or false.",
                field=name,
            )
    text = http.query_params.get("pictures", "true")
    if text not in ("true", "false"):
        raise InvalidField(f"pictures is {short_repr(text)}; allowed are true, false.", field="pictures")
    return text == "true"
