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
from noria.errors import InvalidField, RouteNotFound, did_you_mean, shown
from noria.frontend.audience import Audience, Watcher
from noria.frontend.engine_link import EngineLink
from noria.frontend.places import client_of
from noria.frontend.sheet import sheet
from noria.frontend.streaming import COMMENT, EventStream, event
from noria.messages import Follow, WheelView, engine_name
from noria.views import TurnView

log = logging.getLogger("noria.frontend")

PATH = "/v1/live"
_KEEP_ALIVE_S = 15.0  # as for the other streams
_MOST_TURNS = 256  # that a newcomer is shown: as many as an engine keeps

Setting = Literal["full", "no-previews", "off"]


def what_to_show(config: FrontendConfig) -> Setting:
    """The setting `frontend.live` without its "auto": where there are keys, nobody sees what others draw."""
    if config.live == "auto":
        return "no-previews" if config.keys_file else "full"
    return config.live


class _Wheel:
    """One engine's wheel, as this front end follows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.views: asyncio.Queue[tuple[WheelView, memoryview | None] | None] = asyncio.Queue()  # None: it is gone
        self.last: WheelView | None = None
        self.turns: deque[TurnView] = deque(maxlen=_MOST_TURNS)

    def remember(self, view: WheelView) -> WheelView:
        """Keep what a newcomer wants to see; returns `view` without the turns that were seen before."""
        if self.last is None or self.last.incarnation != view.incarnation:
            self.turns.clear()
        newest = self.turns[-1].number if self.turns else 0
        new = tuple(turn for turn in view.turns if turn.number > newest)
        self.turns += new
        self.last = msgspec.structs.replace(view, turns=new)
        return self.last


class Live:
    """The stream of one front end."""

    def __init__(self, link: EngineLink, config: FrontendConfig) -> None:
        self._link, self._shows = link, what_to_show(config)
        self._audience = Audience()
        self._wheels = [_Wheel(engine_name(number)) for number in range(link.num_engines)]
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = asyncio.Event()
        link.on_change, link.on_view = self._changed, self._viewed

    @property
    def routes(self) -> list[Route]:
        """The one."""
        return [Route(PATH, self.stream)]

    def drain(self) -> None:
        """End the streams: the process is about to stop, and clients come again elsewhere."""
        self._draining.set()

    async def stream(self, http: Request) -> EventStream:
        """Events `engines` and `wheel`, until the client leaves."""
        if self._shows == "off":
            raise RouteNotFound(
                f"{PATH} is switched off on this server: the setting frontend.live is 'off'; allowed are auto, full, no-previews."
            )
        pictures = _wants_pictures(http) and self._shows == "full"
        watcher = self._audience.join(client_of(http), pictures=pictures)
        watcher.tell(self._engines())
        for number, wheel in enumerate(self._wheels):
            if (last := self._last(number, wheel)) is not None:
                whole = msgspec.structs.replace(last, turns=tuple(wheel.turns), left=())
                watcher.show(wheel.name, _event(wheel.name, whole))
        if not self._tasks:
            self._tasks = [
                # In a context of its own: it is done for all who watch, and not for the request of the first.
                asyncio.create_task(self._follow(number, wheel), context=contextvars.Context())
                for number, wheel in enumerate(self._wheels)
            ]

        async def end() -> None:
            self._leave(watcher)

        return EventStream(self._frames(watcher), end, self._draining)

    def _leave(self, watcher: Watcher) -> None:
        self._audience.leave(watcher)
        if len(self._audience) == 0:
            for task in self._tasks:
                task.cancel()
            self._tasks = []
            self._wheels = [_Wheel(wheel.name) for wheel in self._wheels]  # what was seen is of no use any more

    async def _frames(self, watcher: Watcher) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    await watcher.wait()
            except TimeoutError:
                yield COMMENT
            for frame in watcher.take():
                yield frame

    async def _follow(self, number: int, wheel: _Wheel) -> None:
        """Ask, show, ask again; an engine that is not ready is asked when it is, and its next life from the beginning."""
        while True:
            last = self._last(number, wheel)
            seen = None if last is None else last.number
            await self._link.follow(number, Follow(seen, pictures=self._audience.wants_pictures))
            answer = await wheel.views.get()
            if answer is None:  # it is ready now, or is no more
                continue
            view, pixels = answer
            if seen is None and not _is_whole(view):  # to who watched before; the answer to this question is to come
                continue
            try:
                await self._show(number, wheel, wheel.remember(view), pixels)
            except Exception:  # an engine's nonsense: it costs this view
                log.exception("%s: its view makes no sense", wheel.name)

    def _last(self, number: int, wheel: _Wheel) -> WheelView | None:
        """The last view of the engine's present life."""
        return wheel.last if wheel.last is not None and self._lives(number, wheel.last) else None

    def _lives(self, number: int, view: WheelView) -> bool:
        """Whether `view` is of the engine's present life."""
        return view.incarnation == self._link.engines[number].incarnation

    async def _show(self, number: int, wheel: _Wheel, view: WheelView, pixels: memoryview | None) -> None:
        plain = _event(wheel.name, view)
        pictured = plain
        if view.cells and pixels is not None and self._audience.wants_pictures:
            places, (width, height), file = await asyncio.to_thread(sheet, view.cells, pixels)
            cells = [
                {
                    "slot": cell.slot,
                    "request_id": cell.request_id,
                    "index": cell.index,
                    "width_px": cell.width_px,
                    "height_px": cell.height_px,
                    "x": place.x,
                    "y": place.y,
                }
                for cell, place in zip(view.cells, places, strict=True)
            ]
            whole = {"format": "jpeg", "b64": file, "width": width, "height": height}
            pictured = _event(wheel.name, view, cells=cells, sheet=whole)
        if not self._lives(number, view):  # it has ended meanwhile, and all have been told
            return
        for watcher in self._audience:
            watcher.show(wheel.name, pictured if watcher.pictures else plain)

    # What the link tells.

    def _changed(self) -> None:
        """An engine has another state, or is gone."""
        news = self._engines()
        for watcher in self._audience:
            watcher.tell(news)
        for wheel in self._wheels if self._tasks else ():
            wheel.views.put_nowait(None)

    def _viewed(self, number: int, view: WheelView, pixels: memoryview | None) -> None:
        if self._tasks:
            self._wheels[number].views.put_nowait((view, pixels))

    def _engines(self) -> bytes:
        """The event."""
        engines = [
            {"name": wheel.name, "state": view.state, "device": view.device, "incarnation": view.incarnation}
            for wheel, view in zip(self._wheels, self._link.engines, strict=True)
        ]
        return event(
            "engines", {"engines": engines, "server": {"version": __version__, "models": list(self._link.models)}}
        )


def _is_whole(view: WheelView) -> bool:
    """Whether it has all turns that an engine keeps, as the first answer to who has seen none."""
    return len(view.turns) >= min(view.number, _MOST_TURNS)


def _event(engine: str, view: WheelView, **more: Any) -> bytes:
    """A view as JSON: its fields as declared, but for the cells, which come with the sheet that they are in."""
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return event("wheel", {"engine": engine} | fields | {"cells": []} | more)


def _wants_pictures(http: Request) -> bool:
    for name in http.query_params:
        if name != "pictures":
            raise InvalidField(
                f"there is no parameter {shown(name)} here.{did_you_mean(name, ['pictures'])} Allowed is pictures=true or false.",
                field=name,
            )
    text = http.query_params.get("pictures", "true")
    if text not in ("true", "false"):
        raise InvalidField(f"pictures is {shown(text)}; allowed are true, false.", field="pictures")
    return text == "true"
