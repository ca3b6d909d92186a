"""The requests of A1111's clients that are being drawn: how far the first of them is, and an end to them on demand.

A1111 draws one request at a time and its clients ask for "the" progress, and interrupt "the" image. Here that is the request that has
been drawn for longest, of those that came to this front end by A1111's route and, where there are API keys, with the same key; nobody
else's requests are told of or ended.
"""

import asyncio
from dataclasses import dataclass

from noria.errors import RequestCancelled
from noria.frontend.engine_link import PreviewImage, Progress, Update
from noria.frontend.keys import Caller
from noria.frontend.studio import Drawing, Studio, Wish


@dataclass(eq=False)
class Task:
    """One request, from its admission to its end."""

    wish: Wish
    drawing: asyncio.Task[Drawing] | None = None
    progress: Progress | None = None  # the last that was heard
    preview: PreviewImage | None = None  # likewise
    interrupted: bool = False

    def hear(self, update: Update) -> None:
        """Keep what is last."""
        match update:
            case Progress():
                self.progress = update
            case PreviewImage():
                self.preview = update

    def interrupt(self) -> None:
        """End it at its next step."""
        self.interrupted = True
        if self.drawing is not None:
            self.drawing.cancel()


class Tasks:
    """Those of one front end, in the order of their arrival."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._tasks: list[Task] = []

    def of(self, caller: Caller) -> list[Task]:
        """The caller's, from the one that has been drawn for longest."""
        return [task for task in self._tasks if task.wish.caller is caller]

    async def draw(self, wish: Wish) -> Drawing:
        """The wish's files; raises as `Studio.draw` does, and RequestCancelled when it is interrupted."""
        task = Task(wish)
        task.drawing = asyncio.create_task(self._studio.draw(wish, task.hear))
        self._tasks.append(task)
        try:
            return await task.drawing
        except asyncio.CancelledError:
            if task.interrupted:
                raise RequestCancelled("interrupted by POST /sdapi/v1/interrupt or /skip.") from None
            raise
        finally:
            self._tasks.remove(task)
