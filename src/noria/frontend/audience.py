"""Who watches the wheels, and what each of them has not read yet.

A frame is made once for all who watch. Who reads slowly loses older views, and holds nobody up.
"""

import asyncio
from collections import deque
from collections.abc import Iterator

from noria.frontend.places import Places
from noria.observe import metrics

MOST_WATCHERS = 64
"""Of one front end: a view with pictures is some 100 kB, five times a second to each."""
MOST_OF_A_CLIENT = 16
"""Of these, so that it takes four to keep others out. An open page or terminal is one."""

_MOST_UNREAD = 4  # views of one engine: nearly a second
_COME_AGAIN_S = 10.0


class Watcher:
    """One client's mailbox."""

    def __init__(self, client: str, *, pictures: bool) -> None:
        self.client, self.pictures = client, pictures
        self._news: bytes | None = None
        self._views: dict[str, deque[bytes]] = {}
        self._filled = asyncio.Event()

    def tell(self, news: bytes) -> None:
        """Leave the newest state of the engines; it replaces what was not read."""
        self._news = news
        self._filled.set()

    def show(self, engine: str, view: bytes) -> None:
        """Leave a view of an engine's wheel."""
        self._views.setdefault(engine, deque(maxlen=_MOST_UNREAD)).append(view)
        self._filled.set()

    async def wait(self) -> None:
        """Until there is something to take."""
        await self._filled.wait()

    def take(self) -> list[bytes]:
        """All that is unread: the engines' state first, then the views of each in their order."""
        frames = [] if self._news is None else [self._news]
        for views in self._views.values():
            frames += views
            views.clear()
        self._news = None
        self._filled.clear()
        return frames


class Audience:
    """All who watch by one front end."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []
        self._places = Places("streams of GET /v1/live", MOST_WATCHERS, MOST_OF_A_CLIENT, _COME_AGAIN_S)

    def __len__(self) -> int:
        return len(self._watchers)

    def __iter__(self) -> Iterator[Watcher]:
        return iter(self._watchers)

    @property
    def wants_pictures(self) -> bool:
        """Whether anybody does."""
        return any(watcher.pictures for watcher in self._watchers)

    def join(self, client: str, *, pictures: bool) -> Watcher:
        """One more, of `client`; `leave` has to follow. Raises RateLimited if there are as many as there may be."""
        self._places.take(client)
        watcher = Watcher(client, pictures=pictures)
        self._watchers.append(watcher)
        metrics.LIVE_WATCHERS.inc()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """It reads no more."""
        self._watchers.remove(watcher)
        self._places.leave(watcher.client)
        metrics.LIVE_WATCHERS.dec()
