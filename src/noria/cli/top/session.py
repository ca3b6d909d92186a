"""Shows the live view of a server in the terminal, redrawn on every change, until `q` or Ctrl-C.

One thread with one event loop handles the stream, the keyboard and the screen. If the server goes away, this retries;
if it is unreachable at the start, or rejects the request, this is an error.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from noria.cli.top.frame import render_frame
from noria.cli.top.server_state import ServerState
from noria.cli.top.stream import ServerUnreachable, stream_events
from noria.cli.top.text import StyledText
from noria.errors import ConfigError, LiveError, short_repr
from noria.settings import API_KEY_VARIABLE

_MIN_FRAME_INTERVAL_S = 0.1
_MAX_FRAME_INTERVAL_S = 1.0  # deadlines count down even without events
_FIRST_FRAME_TIMEOUT_S = 10.0  # for the first view of every engine
_RETRY_DELAYS_S = (0.5, 1.0, 2.0, 5.0)  # the last one repeats
_QUIT_HINT: StyledText = ("q quits", "dim")


def run(url: str, key: str | None, *, once: bool, certfile: str = "") -> int:
    """Show the server at `url`: one frame, or frames until the user quits. Returns the exit status.

    `certfile` is as of `stream_events`.

    Raises:
        ConfigError: `certfile` cannot be read, or standard output is no terminal (without `once`).
        LiveError: the server is unreachable at the start, or rejects the request.
    """
    if once:
        console = Console(highlight=False)
        state, now = asyncio.run(_fetch_first_state(url, key, certfile)), time.monotonic()
        with console.capture() as captured:
            for row in render_frame(state, url, ("", ""), console.width, None, now)[:-1]:
                row.rstrip()
                console.print(row, no_wrap=True, crop=False, end="\n")
        print(captured.get(), end="")
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "noria top needs a terminal; standard input or output is none. `noria top --once` prints one frame "
            "anywhere."
        )
    asyncio.run(_TopSession(url, key, certfile).run())
    return 0


def read_key(file: pathlib.Path | None, environment: Mapping[str, str]) -> str | None:
    """The API key that `file` contains alone, else that of NORIA_API_KEY, else None.

    Raises ConfigError if the file has none, or the key cannot be one.
    """
    if file is None:
        key, source = environment.get(API_KEY_VARIABLE, "").strip(), f"environment variable {API_KEY_VARIABLE}"
        if not key:
            return None
    else:
        source = f"--key-file {short_repr(str(file))}"
        try:
            key = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}.") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source} must hold one line: an API key as `noria key create` printed it.")
    return key


async def _fetch_first_state(url: str, key: str | None, certfile: str) -> ServerState:
    """The state once every engine has sent its view, or whatever has arrived at the timeout."""
    state = ServerState()
    try:
        async with (
            asyncio.timeout(_FIRST_FRAME_TIMEOUT_S),
            contextlib.aclosing(stream_events(url, key, certfile)) as stream,
        ):
            async for event in stream:
                state.apply(event, time.monotonic())
                if state.is_complete:
                    return state
    except TimeoutError:
        if state.server is not None:
            return state
        raise LiveError(f"{url} sent nothing within {_FIRST_FRAME_TIMEOUT_S:.0f} s.") from None
    except ServerUnreachable as error:
        raise _unreachable_error(url, error) from error
    return state


def _unreachable_error(url: str, error: ServerUnreachable) -> LiveError:
    return LiveError(f"there is no server at {url}: {error}. `noria serve` starts one.")


@dataclass
class _TopSession:
    url: str
    key: str | None
    certfile: str
    _state: ServerState = field(default_factory=ServerState)
    _footer: StyledText = _QUIT_HINT
    _needs_redraw: asyncio.Event = field(default_factory=asyncio.Event)
    _quit_requested: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Render frames until the user quits; raises LiveError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._quit)
        loop.add_signal_handler(signal.SIGWINCH, self._needs_redraw.set)
        read_task = asyncio.create_task(self._read_events())
        quit_task = asyncio.create_task(self._quit_requested.wait())
        render_task: asyncio.Task[None] | None = None
        try:
            # Take over the terminal only when there is something to show.
            await _wait_for_first(read_task, quit_task, asyncio.create_task(self._needs_redraw.wait()))
            if not read_task.done() and not self._quit_requested.is_set():
                with (
                    _raw_key_input(loop, self._on_keys),
                    Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live,
                ):
                    render_task = asyncio.create_task(self._render_frames(live))
                    await _wait_for_first(read_task, quit_task, render_task)
        finally:
            for task in (read_task, quit_task, render_task):
                if task is not None and not task.done():
                    task.cancel()
        for ended in (read_task, render_task):
            if ended is not None and ended.done() and not ended.cancelled():
                ended.result()  # raises the error that ended it

    def _quit(self) -> None:
        self._quit_requested.set()

    def _on_keys(self, keys: bytes) -> None:
        if not keys or b"q" in keys or b"Q" in keys or b"\x03" in keys or b"\x04" in keys:
            self._quit()
        else:
            self._needs_redraw.set()

    async def _read_events(self) -> None:
        """Apply the server's events to the state, reconnecting after errors; raises LiveError."""
        attempt = 0
        while True:
            try:
                async with contextlib.aclosing(stream_events(self.url, self.key, self.certfile)) as stream:
                    async for event in stream:
                        attempt = 0
                        self._state.apply(event, time.monotonic())
                        self._footer = _QUIT_HINT
                        self._needs_redraw.set()
            except ServerUnreachable as error:
                if self._state.server is None:
                    raise _unreachable_error(self.url, error) from error
                self._footer = (f"the server is unreachable ({error}); retrying · q quits", "bold red")
                self._needs_redraw.set()
            await asyncio.sleep(_RETRY_DELAYS_S[min(attempt, len(_RETRY_DELAYS_S) - 1)])
            attempt += 1

    async def _render_frames(self, live: Live) -> None:
        while True:
            self._needs_redraw.clear()
            width, height = live.console.size
            rows = render_frame(self._state, self.url, self._footer, width, height, time.monotonic())
            live.update(Group(*rows), refresh=True)
            await asyncio.sleep(_MIN_FRAME_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._needs_redraw.wait(), _MAX_FRAME_INTERVAL_S)


async def _wait_for_first(*tasks: "asyncio.Task[Any] | None") -> None:
    await asyncio.wait([task for task in tasks if task is not None], return_when=asyncio.FIRST_COMPLETED)


@contextlib.contextmanager
def _raw_key_input(loop: asyncio.AbstractEventLoop, on_keys: Callable[[bytes], None]) -> Iterator[None]:
    """Call `on_keys` with each key press, without Enter, and with b"" at end of file.

    Restores the terminal at the end.
    """
    terminal = sys.stdin.fileno()
    saved_attributes = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, lambda: on_keys(os.read(terminal, 64)))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, saved_attributes)
