"""Requests views of their running batches from the engines, and publishes them as events to the subscribers.

While there are subscribers, each engine is asked for one view at a time (`messages.ViewRequest`): the next request is
sent when the last view is published. Without subscribers nothing is requested. A view is serialized once for all
subscribers that see the same of it: all requests or those of one API key, with thumbnails or without.
"""

import asyncio
import contextvars
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from noria import __version__
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.sse import serialize_event
from noria.frontend.live.redaction import Redaction
from noria.frontend.live.sprite_sheet import make_sprite_sheet
from noria.frontend.live.subscribers import LiveSubscribers, Subscriber
from noria.protocol.live_views import IterationView
from noria.protocol.messages import EngineView, ViewRequest

log = logging.getLogger("noria.frontend")

_MAX_ITERATIONS = 256  # sent to a new subscriber: as many as an engine keeps


class _EngineHistory:
    def __init__(self, name: str) -> None:
        self.name = name
        # Views with their pixels as they come; None: the engine's state changed.
        self.inbox: asyncio.Queue[tuple[EngineView, memoryview | None] | None] = asyncio.Queue()
        self.last_view: EngineView | None = None
        self.iterations: deque[IterationView] = deque(maxlen=_MAX_ITERATIONS)

    def record_view(self, view: EngineView) -> EngineView:
        """Keep `view` for new subscribers; returns it without the iterations that earlier views had."""
        if self.last_view is None or self.last_view.incarnation != view.incarnation:
            self.iterations.clear()
        last_iteration = self.iterations[-1].number if self.iterations else 0
        new = tuple(iteration for iteration in view.iterations if iteration.number > last_iteration)
        self.iterations += new
        self.last_view = msgspec.structs.replace(view, iterations=new)
        return self.last_view


class LiveFeed:
    """The feed of one front end."""

    def __init__(self, engine_pool: EnginePool) -> None:
        self._engine_pool = engine_pool
        self._subscribers = LiveSubscribers()
        self._redaction = Redaction(secrets.token_bytes(32))
        self._histories: dict[str, _EngineHistory] = {}  # histories of the pool's engines, by name
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by the engine's name; empty while there are no subscribers
        engine_pool.on_change.append(self._on_engines_changed)
        engine_pool.on_view.append(self._on_view)

    def subscribe(self, client: str, only: str | None, *, wants_thumbnails: bool) -> Subscriber:
        """Add a subscriber, whose first events are the engines' states and last views; `unsubscribe` has to follow.

        It sees the requests of the API key `only`, and of others that they are there; None: all requests.

        Raises RateLimited: there are as many subscribers, or as many of `client`, as allowed.
        """
        subscriber = self._subscribers.add(client, only, wants_thumbnails=wants_thumbnails)
        self._follow_engines()
        subscriber.put_engines(self._engines_event())
        for history in self._histories.values():
            if (last := self._current_view(history)) is not None:
                full_view = msgspec.structs.replace(last, iterations=tuple(history.iterations), departures=())
                subscriber.put_view(
                    history.name, _serialize_view(history.name, self._redaction.view_for(full_view, only))
                )
        return subscriber

    def _follow_engines(self) -> None:
        """Ask each engine of the pool for views, and no longer those that have left it."""
        names = self._engine_pool.engine_names
        for name in self._histories.keys() - set(names):
            del self._histories[name]
            self._tasks.pop(name).cancel()
        for name in names:
            if name not in self._histories:
                history = self._histories[name] = _EngineHistory(name)
                # In a context of its own: the task serves all subscribers, so it must not log or trace as the first
                # one's request.
                self._tasks[name] = asyncio.create_task(self._request_views(history), context=contextvars.Context())

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove `subscriber`; with the last one, stop asking the engines and forget their views."""
        self._subscribers.remove(subscriber)
        if len(self._subscribers) == 0:
            for task in self._tasks.values():
                task.cancel()
            self._tasks, self._histories = {}, {}

    async def _request_views(self, history: _EngineHistory) -> None:
        """Request a view, publish it, repeat. The request to an engine that is not ready is sent when it is ready."""
        while True:
            last = self._current_view(history)
            last_iteration = None if last is None else last.last_iteration
            self._engine_pool.request_view(
                history.name, ViewRequest(last_iteration, with_thumbnails=self._subscribers.wants_thumbnails)
            )
            reply = await history.inbox.get()
            if reply is None:
                continue
            view, pixels = reply
            is_complete = len(view.iterations) >= min(view.last_iteration, _MAX_ITERATIONS)
            if last_iteration is None and not is_complete:
                continue  # it answers a request of earlier subscribers; the reply to this one is to come
            try:
                await self._publish(history, history.record_view(view), pixels)
            except Exception:  # an invalid view is dropped; the next one may be valid
                log.exception("%s: dropped an invalid view", history.name)

    def _current_view(self, history: _EngineHistory) -> EngineView | None:
        """The last view, if it is of the engine's current incarnation."""
        last = history.last_view
        return last if last is not None and self._is_current(history.name, last) else None

    def _is_current(self, name: str, view: EngineView) -> bool:
        named = zip(self._engine_pool.engine_names, self._engine_pool.engines, strict=False)
        return any(each == name and status.incarnation == view.incarnation for each, status in named)

    async def _publish(self, history: _EngineHistory, view: EngineView, pixels: memoryview | None) -> None:
        sheet = None
        if view.thumbnails and pixels is not None and self._subscribers.wants_thumbnails:
            positions, (width, height), jpeg_b64 = await asyncio.to_thread(make_sprite_sheet, view.thumbnails, pixels)
            sheet = positions, {"format": "jpeg", "b64": jpeg_b64, "width": width, "height": height}
        if not self._is_current(history.name, view):  # the engine ended meanwhile, and the subscribers have that event
            return
        events: dict[tuple[str | None, bool], bytes] = {}  # by what is seen
        for subscriber in self._subscribers:
            seen = subscriber.only, sheet is not None and subscriber.wants_thumbnails
            if seen not in events:
                shown = self._redaction.view_for(view, subscriber.only)
                extra = _thumbnail_fields(shown, *sheet) if sheet is not None and seen[1] else {}
                events[seen] = _serialize_view(history.name, shown, **extra)
            subscriber.put_view(history.name, events[seen])

    def _on_engines_changed(self) -> None:
        """The engine pool calls this when an engine's state changes, and when it has others."""
        if len(self._subscribers):
            self._follow_engines()
        engines_event = self._engines_event()
        for subscriber in self._subscribers:
            subscriber.put_engines(engines_event)
        for history in self._histories.values():
            history.inbox.put_nowait(None)

    def _on_view(self, name: str, view: EngineView, pixels: memoryview | None) -> None:
        """The engine pool calls this with each view."""
        if name in self._histories:
            self._histories[name].inbox.put_nowait((view, pixels))

    def _engines_event(self) -> bytes:
        engines = [
            {
                "name": name,
                "state": status.state,
                "device": status.device,
                "incarnation": status.incarnation,
                "kind": models[0].kind if models else None,
            }
            for name, (status, models) in zip(
                self._engine_pool.engine_names, self._engine_pool.held_models(), strict=False
            )
        ]
        return serialize_event(
            "engines",
            {"engines": engines, "server": {"version": __version__, "models": list(self._engine_pool.models)}},
        )


def _thumbnail_fields(view: EngineView, positions: Sequence[Any], sprite_sheet: dict[str, Any]) -> dict[str, Any]:
    thumbnails = [
        {**msgspec.structs.asdict(thumbnail), "x": position.x, "y": position.y}
        for thumbnail, position in zip(view.thumbnails, positions, strict=True)
    ]
    for thumbnail in thumbnails:
        del thumbnail["offset"]  # place of its pixels in the engine's frame, which clients do not get
    return {"thumbnails": thumbnails, "sprite_sheet": sprite_sheet}


def _serialize_view(engine: str, view: EngineView, **extra_fields: Any) -> bytes:
    """Serialize a view as an event; `extra_fields` has its `thumbnails` and their `sprite_sheet`, if any."""
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return serialize_event("engine_view", {"engine": engine} | fields | {"thumbnails": []} | extra_fields)
