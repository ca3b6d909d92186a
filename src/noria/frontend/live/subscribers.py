"""Who watches the wheels, and what each of them has not read yet.

A frame is made once for all who watch. Who reads slowly loses older views, and holds nobody up.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

from noria.frontend.http.concurrency_limits import ConcurrencyLimiter
from noria.observe.metrics import declarations

MAX_SUBSCRIBERS = 64
"""Of one front end: a view with pictures is some 100 kB, five times a second to each."""
MAX_SUBSCRIBERS_PER_CLIENT = 16
"""Of these, so that it takes four to keep others out. An open page or terminal is one."""

_MAX_UNREAD_VIEWS = 4  # views of one engine: nearly a second
_RETRY_AFTER_S = 10.0


class Subscriber:
    """One client's mailbox."""

    def __init__(self, client: str, *, wants_thumbnails: bool) -> None:
        self.client, self.wants_thumbnails = client, wants_thumbnails
        self._engines_event: bytes | None = None
        self._views: dict[str, deque[bytes]] = {}
        self._updated = asyncio.Event()

    def put_engines(self, engines_event: bytes) -> None:
        """Leave the newest state of the engines; it replaces what was not read."""
        self._engines_event = engines_event
        self._updated.set()

    def put_view(self, engine: str, view: bytes) -> None:
        """Leave a view of an engine's wheel."""
        self._views.setdefault(engine, deque(maxlen=_MAX_UNREAD_VIEWS)).append(view)
        self._updated.set()

    async def wait(self) -> None:
        """Until there is something to take."""
        await self._updated.wait()

    def take(self) -> list[bytes]:
        """All that is unread: the engines' state first, then the views of each in their order."""
        frames = [] if self._engines_event is None else [self._engines_event]
        for views in self._views.values():
            frames += views
            views.clear()
        self._engines_event = None
        self._updated.clear()
        return frames


class LiveSubscribers:
    """All who watch by one front end."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        self._limiter = ConcurrencyLimiter(
            "streams of GET /v1/live", MAX_SUBSCRIBERS, MAX_SUBSCRIBERS_PER_CLIENT, _RETRY_AFTER_S
        )

    def __len__(self) -> int:
        return len(self._subscribers)

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(self._subscribers)

    @property
    def wants_thumbnails(self) -> bool:
        """Whether anybody does."""
        return any(subscriber.wants_thumbnails for subscriber in self._subscribers)

    def add(self, client: str, *, wants_thumbnails: bool) -> Subscriber:
        """One more, of `client`; `leave` has to follow. Raises RateLimited if there are as many as there may be."""
        self._limiter.acquire(client)
        subscriber = Subscriber(client, wants_thumbnails=wants_thumbnails)
        self._subscribers.append(subscriber)
        declarations.LIVE_SUBSCRIBERS.inc()
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        """It reads no more."""
        self._subscribers.remove(subscriber)
        self._limiter.release(subscriber.client)
        declarations.LIVE_SUBSCRIBERS.dec()
