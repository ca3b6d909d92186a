"""The log collector with real processes and pipes: no written line is lost, and a slow reader blocks nothing."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from noria.observe.logs.log_record import as_json, line_of
from noria.observe.logs.setup import child_log_environment
from noria.observe.logs.writer import NonBlockingWriter, Stream
from noria.supervisor.log_collector import LogCollector
from waiting import TIMEOUT_S, wait_until

# The normal timeout of 2 s may be too short on a busy machine.
LOGS = """
import logging, sys
from noria.observe.logs.setup import fields, logging_here
from noria.observe.logs.writer import NonBlockingWriter
NonBlockingWriter.flush.__defaults__ = NonBlockingWriter.close.__defaults__ = (120.0,)
log = logging.getLogger("noria.test")
"""


class Reader:
    """Reads lines of JSON from a pipe in a thread, after `start`."""

    def __init__(self) -> None:
        self._fd, self.writing = os.pipe()
        self.lines: list[dict] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "Reader":
        self._thread.start()
        return self

    def _run(self) -> None:
        with open(self._fd, "rb") as pipe:
            for line in pipe:
                self.lines.append(json.loads(line))

    def end(self) -> list[dict]:
        """Return all lines, once the pipe is closed."""
        with contextlib.suppress(OSError):
            os.close(self.writing)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.lines


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    with contextlib.suppress(OSError):
        os.close(made.writing)


def collect_log(
    reader: Reader, *scripts: str, while_running: Callable[[asyncio.subprocess.Process], None] | None = None
) -> list[dict]:
    """Return the log lines of children that run `scripts`, named child-0, child-1, …"""
    writer = NonBlockingWriter(as_json, Stream(reader.writing), "supervisor")
    writer.start()

    async def run() -> None:
        # A busy machine may suspend a child within its traceback for longer than the collector waits by default.
        log_collector = LogCollector(writer, flush_after_s=TIMEOUT_S)
        children = []
        for number, script in enumerate(scripts):
            with log_collector.open_pipe(f"child-{number}") as output:
                children.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-c",
                        script,
                        stdout=output,
                        stderr=output,
                        env=os.environ | child_log_environment(log_collector.mark),
                    )
                )
        if while_running is not None:
            await asyncio.to_thread(while_running, children[0])
        for child in children:
            await child.wait()
        log_collector.close()

    asyncio.run(run())
    writer.close(TIMEOUT_S)
    return reader.end()


def test_printed_text_and_a_final_traceback_are_lines_of_their_process(reader: Reader) -> None:
    script = (
        LOGS
        + """
with logging_here("x", "info"):
    print("hello", end="")
    log.info("between")
    print("{}")
raise ValueError("two\\nlines")
"""
    )
    hello, between, braces, fault = collect_log(reader.start(), script)
    assert (hello["message"], hello["level"], hello["logger"]) == ("hello", "warning", "stderr")
    assert between["message"] == "between"
    assert braces["message"] == "{}"
    assert (fault["level"], fault["logger"], fault["process"]) == ("error", "stderr", "child-0")
    assert fault["exception"].startswith("Traceback (most recent call last)")
    assert fault["exception"].endswith("ValueError: two\nlines")


def test_a_segmentation_fault_is_logged_with_its_location(reader: Reader) -> None:
    script = "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)"
    (fault,) = collect_log(reader.start(), script)
    assert fault["exception"].startswith("Fatal Python error: Segmentation fault")
    assert "string_at" in fault["exception"]


def test_a_killed_child_loses_no_line_that_it_wrote(reader: Reader) -> None:
    script = (
        LOGS
        + """
import os, signal
with logging_here("x", "info"):
    for number in range(1000):
        log.info("line", extra=fields(number=number))
    sys.stderr.write("no end")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    *lines, last = collect_log(reader.start(), script)
    assert [line["number"] for line in lines] == list(range(1000))
    assert last["message"] == "no end"


def test_a_log_that_is_not_read_does_not_block_a_child_and_lost_lines_are_counted(reader: Reader) -> None:
    """The reader begins when the child has ended, having written more than pipe and queue hold."""
    script = (
        LOGS
        + """
with logging_here("x", "info"):
    for number in range(3000):
        log.info("z" * 8000, extra=fields(number=number))
"""
    )
    child_ended = threading.Event()

    def wait(child: asyncio.subprocess.Process) -> None:
        wait_until(lambda: child.returncode is not None, 120)
        child_ended.set()
        reader.start()

    lines = collect_log(reader, script, while_running=wait)
    assert child_ended.is_set()
    numbers = [line["number"] for line in lines if "number" in line]
    assert numbers == sorted(numbers)
    lost = sum(line.get("num_lost", 0) for line in lines)
    assert lost > 0
    assert len(numbers) + lost == 3000


def test_a_child_that_prints_very_short_lines_does_not_block_the_event_loop(reader: Reader) -> None:
    """The most CPU time between two passes of the event loop; reading 64 KiB of such lines at once took 0.3 s."""
    reader.start()
    writer = NonBlockingWriter(as_json, Stream(reader.writing), "supervisor")
    writer.start()

    async def longest_s() -> float:
        log_collector = LogCollector(writer)
        with log_collector.open_pipe("child") as output:
            assert os.write(output, b"x\n" * 32_768) == 65_536
        longest, before, until = 0.0, time.thread_time(), time.monotonic() + 60
        while len(reader.lines) < 32_768:
            assert time.monotonic() < until
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        return longest

    gc.disable()  # garbage of earlier tests might be collected in this thread
    try:
        longest = asyncio.run(longest_s())
    finally:
        gc.enable()
    writer.close(TIMEOUT_S)
    assert len(reader.end()) == 32_768, longest
    assert longest < 0.1


def test_a_closed_terminal_loses_the_lines_and_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = NonBlockingWriter(as_json, Stream(writing), "supervisor")
    writer.start()
    for number in range(10):
        writer.put(line_of(0.0, "info", "l", "p", str(number)))
    writer.close(TIMEOUT_S)
    assert not writer.is_alive()
    writer.put(line_of(0.0, "info", "l", "p", "after"))
    os.close(writing)


class CountingStream(Stream):
    """Counts the writes."""

    num_tries = 0

    def write(self, data: bytes) -> None:
        self.num_tries += 1
        super().write(data)


def test_a_disk_that_was_full_gets_later_lines_and_the_number_of_lost_ones(reader: Reader) -> None:
    disk = os.open("/dev/full", os.O_WRONLY)
    sink = CountingStream(disk)
    writer = NonBlockingWriter(as_json, sink, "supervisor")
    writer.start()
    for number in range(3):
        writer.put(line_of(0.0, "info", "l", "p", str(number)))
    wait_until(lambda: writer._num_lost == 3 and sink.num_tries >= 3)
    os.dup2(reader.writing, disk)  # the disk has space again
    writer.put(line_of(0.0, "info", "l", "p", "after"))
    reader.start()
    writer.close(TIMEOUT_S)
    os.close(disk)
    lines = reader.end()
    assert sum(line.get("num_lost", 0) for line in lines) == 3
    assert "after" in [line["message"] for line in lines]


def test_a_disk_that_stays_full_does_not_block_close() -> None:
    with open("/dev/full", "wb") as disk:
        writer = NonBlockingWriter(as_json, Stream(disk.fileno()), "supervisor")
        writer.start()
        writer.put(line_of(0.0, "info", "l", "p", "lost"))
        writer.close(TIMEOUT_S)
        assert not writer.is_alive()


def test_a_terminal_that_another_program_made_non_blocking_gets_every_line(reader: Reader) -> None:
    os.set_blocking(reader.writing, False)
    writer = NonBlockingWriter(as_json, Stream(reader.writing), "supervisor")
    writer.start()
    for number in range(500):
        writer.put(line_of(0.0, "info", "l", "p", "x" * 5000) | {"number": number})
    time.sleep(0.1)  # the pipe may or may not be full; all lines arrive in both cases
    reader.start()
    writer.close(TIMEOUT_S)
    assert [line["number"] for line in reader.end()] == list(range(500))


def test_a_grandchild_that_holds_the_pipe_does_not_block_close(reader: Reader) -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid)"
    (line,) = collect_log(reader.start(), script)
    os.kill(int(line["message"]), signal.SIGKILL)


def test_a_child_cannot_forge_lines_of_another_process(reader: Reader) -> None:
    forged = json.dumps(
        {"time": "x", "level": "error", "logger": "noria", "process": "supervisor", "message": "forged"}
    )
    (line,) = collect_log(reader.start(), f"print({forged!r})")
    assert (line["process"], line["logger"], line["message"]) == ("child-0", "stderr", forged)


def test_the_supervisor_logs_through_the_same_writer() -> None:
    script = """
import logging, sys
from noria.config import Config
from noria.supervisor.log_collector import collecting_logs
with collecting_logs(Config(log_format=sys.argv[1])):
    logging.getLogger("noria.supervisor").info("here")
"""
    for log_format, begins in (("json", b'{"time":'), ("text", b"20")):
        done = subprocess.run([sys.executable, "-c", script, log_format], capture_output=True, check=True)
        assert done.stderr.startswith(begins)
        assert done.stderr.count(b"\n") == 1
