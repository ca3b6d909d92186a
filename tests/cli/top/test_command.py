"""`noria top` without a terminal, and as a process on a real pseudo-terminal."""

import codecs
import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import NamedTuple

import pytest
from fake_live_server import engine_view, engines_event, slot_view, unreachable_url, view_event

from noria.cli.main import main
from noria.cli.top.session import read_key
from noria.errors import ConfigError

VIEW = engine_view(slots=[slot_view(2)], num_waiting=3)
EVENTS = [engines_event("engine-0"), view_event("engine-0", VIEW)]
_TIMEOUT_S = 120.0  # on a busy machine
_END_MARKER = b"[the end]"


class Ended(NamedTuple):
    """The end of a command."""

    returncode: int
    stdout: str
    stderr: str


def top(*arguments, **options):
    """Run `noria top` in this process, with `options` in its environment."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        for name in ("COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        for name, value in options.items():
            patch.setenv(name, value)
        status = main(["top", *arguments])
    return Ended(status, out.getvalue(), errors.getvalue())


class Terminal:
    """`noria top` on a pseudo-terminal."""

    def __init__(self, *arguments, columns=100, lines=30):
        self.master, self.slave = pty.openpty()
        self.saved_attributes = termios.tcgetattr(self.slave)
        self.resize(columns, lines)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "noria", "top", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
            # Its own terminal, so that Ctrl-C and a new size are signals.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one system call
        )
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character

    def resize(self, columns, lines):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, words):
        """Read until `words` are on the screen; returns the text so far, and clears it."""
        deadline = time.monotonic() + _TIMEOUT_S
        while words not in plain(self.text):
            remaining_s = deadline - time.monotonic()
            assert remaining_s > 0, f"{words!r} is not in {plain(self.text)[-3000:]!r}"
            self._read(remaining_s)
        found, self.text = self.text, ""
        return found

    def _read(self, timeout_s):
        """Read what is written within `timeout_s`; returns whether there was anything."""
        if not select.select([self.master], [], [], timeout_s)[0]:
            return False
        self.text += self._decoder.decode(os.read(self.master, 65536))
        return True

    def press(self, keys):
        os.write(self.master, keys)

    def wait_for_exit(self):
        """The exit status; reads the remaining output meanwhile."""
        deadline = time.monotonic() + _TIMEOUT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.05)
        while self._read(0):  # make room in the buffer for the marker
            pass
        os.write(self.slave, _END_MARKER)  # after all output of the process
        while _END_MARKER.decode() not in self.text:
            assert self._read(deadline + _TIMEOUT_S - time.monotonic()), "the end of the output did not arrive"
        self.text = self.text.removesuffix(_END_MARKER.decode())
        return self.process.poll()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[78=>]", "", text)


@pytest.fixture
def terminal():
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            return stack.enter_context(contextlib.closing(Terminal(*arguments, **options)))

        yield start


def test_once_prints_one_plain_frame_of_the_width_in_columns(live_server):
    server = live_server(EVENTS)
    result = top(server.url, "--once", COLUMNS="120")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"noria 9.9 · {server.url} · noria-shapes"
    assert "\n2 ████" in result.stdout
    assert "waits 64×64 starts in " in result.stdout  # the time passes while the command starts
    assert "\x1b" not in result.stdout
    assert not any(line.endswith(" ") for line in lines)


def test_once_reports_an_engine_that_is_loading(live_server):
    result = top(live_server([engines_event("engine-0", state="loading", incarnation=None)]).url, "--once")
    assert (result.returncode, result.stdout.splitlines()[1]) == (0, "engine-0 loading · cpu")


def test_the_key_is_read_from_the_key_file(live_server, tmp_path):
    (tmp_path / "key").write_text("noria-secret\n")
    server = live_server(EVENTS)
    assert top(server.url, "--once", "--key-file", str(tmp_path / "key")).returncode == 0
    assert server.requests == [("/v1/live?thumbnails=false", "Bearer noria-secret")]


def test_without_a_key_file_the_key_is_read_from_the_variable_that_pages_name(live_server, tmp_path):
    (tmp_path / "key").write_text("of-the-file\n")
    server = live_server(EVENTS)
    assert top(server.url, "--once", NORIA_API_KEY=" noria-secret\n").returncode == 0
    assert top(server.url, "--once", "--key-file", str(tmp_path / "key"), NORIA_API_KEY="noria-secret").returncode == 0
    assert top(server.url, "--once", NORIA_API_KEY="").returncode == 0
    assert [key for _, key in server.requests] == ["Bearer noria-secret", "Bearer of-the-file", None]
    rejected = top(server.url, "--once", NORIA_API_KEY="a secret")
    assert (rejected.returncode, "a secret" in rejected.stderr) == (2, False)
    assert "environment variable NORIA_API_KEY must hold" in rejected.stderr


def test_without_a_url_the_settings_name_the_server(live_server):
    server = live_server(EVENTS)
    assert server.url in top("--once", NORIA_FRONTEND_PORT=str(server.server_port)).stdout
    assert server.url in top("--once", "--port", str(server.server_port)).stdout


def test_an_unreachable_server_is_an_error():
    with unreachable_url() as url:
        result = top(url, "--once")
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(rf"noria: error: there is no server at {url}: .* `noria serve` starts one\.\n", result.stderr)


def test_a_rejection_is_an_error(live_server):
    result = top(live_server((404, b"no")).url, "--once")
    assert result.returncode == 1
    assert result.stderr.startswith("noria: error: http://127.0.0.1:")
    assert "is not Noria" in result.stderr


def test_without_once_a_pipe_is_rejected(live_server):
    result = top(live_server(EVENTS).url)
    assert result.returncode == 2
    assert "noria top --once" in result.stderr


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff"])
def test_an_invalid_key_file_is_rejected(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="--key-file"):
        read_key(tmp_path / "key", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path / "missing", {})


@pytest.mark.parametrize("action", [b"q", b"\x03", signal.SIGTERM])
def test_it_renders_on_the_alternate_screen_until_it_is_quit(live_server, terminal, action):
    screen = terminal(live_server(EVENTS).url)
    output = screen.wait_for("2 ██")  # the first frame may show the engine only, before its view arrives
    assert "\x1b[?1049h" in output  # the alternate screen
    screen.wait_for("q quits")
    if isinstance(action, bytes):
        screen.press(action)
    else:
        screen.process.send_signal(action)
    assert screen.wait_for_exit() == 0
    assert "\x1b[?1049l" in screen.text and "\x1b[?25h" in screen.text
    assert termios.tcgetattr(screen.slave) == screen.saved_attributes


def test_it_follows_the_terminals_size(live_server, terminal):
    screen = terminal(live_server(EVENTS).url, columns=60, lines=15)
    output = screen.wait_for("2 ██") + screen.wait_for("q quits")
    assert "guidance" not in plain(output)
    screen.resize(140, 40)
    screen.wait_for("guidance")
    screen.press(b"q")
    assert screen.wait_for_exit() == 0


def test_it_reconnects_to_a_server_that_went_away(live_server, terminal):
    server = live_server([*EVENTS, None], (503, b""), [engines_event("engine-0", state="loading")])
    screen = terminal(server.url)
    assert "the server is unreachable (it closed the connection); retrying" in plain(screen.wait_for("retrying"))
    screen.wait_for("engine-0 loading")
    screen.wait_for("q quits")
    screen.press(b"q")
    assert screen.wait_for_exit() == 0
    assert len(server.requests) == 3


def test_a_rejection_after_a_reconnect_ends_it(live_server, terminal):
    screen = terminal(live_server([*EVENTS, None], (404, b"no")).url)
    assert screen.wait_for_exit() == 1
    assert "\x1b[?1049l" in screen.text
    assert screen.text.rpartition("\x1b[?1049l")[2].strip().rpartition("noria: error: ")[2].startswith("http://127")


def test_at_the_start_the_screen_stays_until_there_is_something_to_show(terminal):
    with unreachable_url() as url:
        screen = terminal(url)
        assert screen.wait_for_exit() == 1
    assert "\x1b[?1049h" not in screen.text
    assert "there is no server at" in screen.text
