"""The subscribers of the live feed, and the events that each of them has not read yet.

An event is serialized once for all subscribers. A slow subscriber loses older views and delays no other.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.observe.metrics import declarations

MAX_SUBSCRIBERS = 64
"""Of one front end. A view with thumbnails has about 100 kB and is sent five times a second to each subscriber."""
MAX_SUBSCRIBERS_PER_CLIENT = 16
"""A quarter of `MAX_SUBSCRIBERS`: one client cannot keep others out. An open page or terminal is one subscriber."""

# Per engine: nearly a second.
_MAX_UNREAD_VIEWS = 4
_RETRY_AFTER_S = 10.0


class Subscriber:
    """A client's unread events."""

    def __init__(self, client: str, only: str | None, *, wants_thumbnails: bool) -> None:
        """`only` is the name of the API key whose requests it sees; None: all."""
        self.client, self.only, self.wants_thumbnails = client, only, wants_thumbnails
        self._engines_event: bytes | None = None
        self._views: dict[str, deque[bytes]] = {}
        self._updated = asyncio.Event()

    def put_engines(self, engines_event: bytes) -> None:
        """Add the engines' states; replaces an unread event of that kind."""
        self._engines_event = engines_event
        self._updated.set()

    def put_view(self, engine: str, view: bytes) -> None:
        """Add a view of `engine`; the oldest unread one is dropped if there are too many."""
        self._views.setdefault(engine, deque(maxlen=_MAX_UNREAD_VIEWS)).append(view)
        self._updated.set()

    async def wait(self) -> None:
        """Wait until there is an unread event."""
        await self._updated.wait()

    def take(self) -> list[bytes]:
        """Return and remove all unread events: the engines' states first, then each engine's views in order."""
        frames = [] if self._engines_event is None else [self._engines_event]
        for views in self._views.values():
            frames += views
            views.clear()
        self._engines_event = None
        self._updated.clear()
        return frames


class LiveSubscribers:
    """All subscribers of one front end."""

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
        """Whether any subscriber does."""
        return any(subscriber.wants_thumbnails for subscriber in self._subscribers)

    def add(self, client: str, only: str | None, *, wants_thumbnails: bool) -> Subscriber:
        """Add a subscriber of `client`; `remove` has to follow. Raises RateLimited if there are too many."""
        self._limiter.acquire(client)
        subscriber = Subscriber(client, only, wants_thumbnails=wants_thumbnails)
        self._subscribers.append(subscriber)
        declarations.LIVE_SUBSCRIBERS.inc()
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        """Remove `subscriber`, which has disconnected."""
        self._subscribers.remove(subscriber)
        self._limiter.release(subscriber.client)
        declarations.LIVE_SUBSCRIBERS.dec()
