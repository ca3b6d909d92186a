"""`noria top`: follows a server and draws a frame whenever something changes, until `q` or Ctrl-C.

One thread, one loop: the stream, the keys and the screen take turns. A server that goes away is waited for; one that is not there at the
start, or refuses, is an error.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from noria.errors import ConfigError, LiveError, shown
from noria.top.board import Board
from noria.top.frame import frame
from noria.top.stream import Away, events
from noria.top.words import Piece

_FRAME_S = 0.1  # at least between two frames
_TICK_S = 1.0  # at most: deadlines come nearer though nothing is said
_ONCE_S = 10.0  # for every engine to show its wheel
_RETRY_S = (0.5, 1.0, 2.0, 5.0)  # the last one again and again
_LEAVE: Piece = ("q leaves", "dim")


def run(url: str, key_file: pathlib.Path | None, *, once: bool) -> int:
    """Show the server at `url`: one frame, or until it is told to leave; returns the exit status.

    Raises:
        ConfigError: no file of a key, or no terminal for more than one frame.
        LiveError: nobody answers at the start, or it does not show its wheel.

    """
    key = None if key_file is None else read_key(key_file)
    if once:
        console = Console(highlight=False)
        board, now = asyncio.run(_first(url, key)), time.monotonic()
        for row in frame(board, url, ("", ""), console.width, None, now)[:-1]:
            row.rstrip()
            console.print(row, no_wrap=True, crop=False, end="\n")
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "noria top draws on a terminal, and this is none. `noria top --once` prints one frame anywhere."
        )
    asyncio.run(_Watching(url, key).run())
    return 0


def read_key(file: pathlib.Path) -> str:
    """The API key that is all of `file`. Raises ConfigError where there is none."""
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {shown(str(file))} cannot be read: {error}.") from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigError(
            f"--key-file {shown(str(file))} does not hold an API key, alone on its line, as `noria key` drew it."
        )
    return key


async def _first(url: str, key: str | None) -> Board:
    """What every engine shows at once; of a slow one, what there is."""
    board = Board()
    try:
        async with asyncio.timeout(_ONCE_S), contextlib.aclosing(events(url, key)) as stream:
            async for event in stream:
                board.take(event, time.monotonic())
                if board.is_whole:
                    return board
    except TimeoutError:
        if board.server is not None:
            return board
        raise LiveError(f"{url} says nothing within {_ONCE_S:.0f} s.") from None
    except Away as error:
        raise _unreachable(url, error) from error
    return board


def _unreachable(url: str, error: Away) -> LiveError:
    return LiveError(f"nobody shows a wheel at {url}: {error}. Is the server running there? `noria serve` starts one.")


@dataclass
class _Watching:
    """One server, one terminal."""

    url: str
    key: str | None
    _board: Board = field(default_factory=Board)
    _note: Piece = _LEAVE
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Draw until it is told to leave; raises LiveError as `run` does."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        following = asyncio.create_task(self._follow())
        leaving = asyncio.create_task(self._leaving.wait())
        drawing: asyncio.Task[None] | None = None
        try:
            # The terminal is taken over only when there is something to show.
            await _first_of(following, leaving, asyncio.create_task(self._changed.wait()))
            if not following.done() and not self._leaving.is_set():
                with (
                    _keys(loop, self._pressed),
                    Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live,
                ):
                    drawing = asyncio.create_task(self._draw(live))
                    await _first_of(following, leaving, drawing)
        finally:
            for task in (following, leaving, drawing):
                if task is not None and not task.done():
                    task.cancel()
        for ended in (following, drawing):
            if ended is not None and ended.done() and not ended.cancelled():
                ended.result()  # raises what ended it

    def _leave(self) -> None:
        self._leaving.set()

    def _pressed(self, keys: bytes) -> None:
        if not keys or b"q" in keys or b"Q" in keys or b"\x03" in keys or b"\x04" in keys:
            self._leave()
        else:
            self._changed.set()

    async def _follow(self) -> None:
        """Note what the server says, again after it was away; raises LiveError."""
        attempt = 0
        while True:
            try:
                async with contextlib.aclosing(events(self.url, self.key)) as stream:
                    async for event in stream:
                        attempt = 0
                        self._board.take(event, time.monotonic())
                        self._note = _LEAVE
                        self._changed.set()
            except Away as error:
                if self._board.server is None:
                    raise _unreachable(self.url, error) from error
                self._note = (f"the server is away ({error}); asking again · q leaves", "bold red")
                self._changed.set()
            await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            attempt += 1

    async def _draw(self, live: Live) -> None:
        while True:
            self._changed.clear()
            width, height = live.console.size
            rows = frame(self._board, self.url, self._note, width, height, time.monotonic())
            live.update(Group(*rows), refresh=True)
            await asyncio.sleep(_FRAME_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK_S)


async def _first_of(*tasks: "asyncio.Task[Any] | None") -> None:
    await asyncio.wait([task for task in tasks if task is not None], return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def _keys(loop: asyncio.AbstractEventLoop, pressed: Callable[[bytes], None]) -> Iterator[None]:
    """Call `pressed` with each key at once, without an Enter; nothing when the terminal is gone. The terminal is as before at the end."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, lambda: pressed(os.read(terminal, 64)))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
