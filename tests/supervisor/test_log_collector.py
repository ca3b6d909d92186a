"""The relay with real processes and pipes: nothing is lost that was written, and nobody who reads slowly holds anybody up."""

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

import noria.supervisor.log_collector
from noria.observe.logs.log_record import as_json, make_line
from noria.observe.logs.setup import child_log_environment
from noria.observe.logs.writer import NonBlockingWriter, Stream
from noria.supervisor.log_collector import LogCollector
from waiting import TIMEOUT_S, wait_until

# Its last words may take as long as they take on a busy machine: 2 s are for a supervisor that reads nothing.
LOGS = """
import logging, sys
from noria.observe.logs.setup import fields, logging_here
from noria.observe.logs.writer import Outlet
Outlet.flush.__defaults__ = Outlet.close.__defaults__ = (120.0,)
log = logging.getLogger("noria.test")
"""


@pytest.fixture(autouse=True)
def _long_quiet_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stop a child in the middle of its traceback for longer than the relay waits for the rest."""
    monkeypatch.setattr(noria.supervisor.log_collector, "_QUIET_S", TIMEOUT_S)


class Reader:
    """Reads lines of JSON from a pipe, in a thread, once it is told to."""

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
        """All lines, once nobody can write any more."""
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
    """What the log has of children with these `scripts`, named child-0, child-1, …"""
    outlet = NonBlockingWriter(as_json, Stream(reader.writing), "supervisor")
    outlet.start()

    async def run() -> None:
        log_collector = LogCollector(outlet)
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
    outlet.close(TIMEOUT_S)
    return reader.end()


def test_lines_keep_their_process_fields_and_order(reader: Reader) -> None:
    script = (
        LOGS
        + """
with logging_here("liar", "info"):
    for number in range(200):
        log.info("line", extra=fields(number=number))
"""
    )
    lines = collect_log(reader.start(), script, script)
    for name in ("child-0", "child-1"):
        assert [line["number"] for line in lines if line["process"] == name] == list(range(200))
    assert len(lines) == 400


def test_what_is_printed_and_a_traceback_at_the_start_are_lines_of_their_process(reader: Reader) -> None:
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


def test_a_segmentation_fault_tells_where_it_was(reader: Reader) -> None:
    script = "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)"
    (fault,) = collect_log(reader.start(), script)
    assert fault["exception"].startswith("Fatal Python error: Segmentation fault")
    assert "string_at" in fault["exception"]


def test_a_child_that_is_killed_loses_nothing_that_it_wrote(reader: Reader) -> None:
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


def test_a_long_line_is_cut_and_costs_nothing_else(reader: Reader) -> None:
    script = (
        LOGS
        + """
with logging_here("x", "info"):
    print("x" * 1_000_000)
    log.info("y" * 1_000_000)
    log.info("after")
"""
    )
    printed, logged, after = collect_log(reader.start(), script)
    assert printed["message"].endswith("… [cut]")
    assert logged["message"].endswith("… [cut]")
    assert after["message"] == "after"


def test_nobody_who_reads_nothing_stalls_a_child_and_lost_lines_are_counted(reader: Reader) -> None:
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
    lost = sum(line.get("lost", 0) for line in lines)
    assert lost > 0
    assert len(numbers) + lost == 3000


def test_a_child_that_prints_very_short_lines_leaves_the_loop_its_turns(reader: Reader) -> None:
    """The most CPU that the relay takes between two turns of the loop; 64 KiB of such lines took 0.3 s."""
    reader.start()
    outlet = NonBlockingWriter(as_json, Stream(reader.writing), "supervisor")
    outlet.start()

    async def longest_s() -> float:
        log_collector = LogCollector(outlet)
        with log_collector.open_pipe("child") as output:
            assert os.write(output, b"x\n" * 32_768) == 65_536
        longest, before, until = 0.0, time.thread_time(), time.monotonic() + 60
        while len(reader.lines) < 32_768:
            assert time.monotonic() < until
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        return longest

    gc.disable()  # this thread may be the one whose turn it is to clean up what the tests before have left
    try:
        longest = asyncio.run(longest_s())
    finally:
        gc.enable()
    outlet.close(TIMEOUT_S)
    assert len(reader.end()) == 32_768, longest
    assert longest < 0.1


def test_a_terminal_that_is_gone_costs_the_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    outlet = NonBlockingWriter(as_json, Stream(writing), "supervisor")
    outlet.start()
    for number in range(10):
        outlet.put(make_line(0.0, "info", "l", "p", str(number)))
    outlet.close(TIMEOUT_S)
    assert not outlet.is_alive()
    outlet.put(make_line(0.0, "info", "l", "p", "after"))
    os.close(writing)


class CountingStream(Stream):
    """Counts how often it was tried."""

    num_tries = 0

    def write(self, data: bytes) -> None:
        self.num_tries += 1
        super().write(data)


def test_a_disk_that_was_full_gets_the_lines_that_come_later_and_how_many_were_lost(reader: Reader) -> None:
    disk = os.open("/dev/full", os.O_WRONLY)
    sink = CountingStream(disk)
    outlet = NonBlockingWriter(as_json, sink, "supervisor")
    outlet.start()
    for number in range(3):
        outlet.put(make_line(0.0, "info", "l", "p", str(number)))
    wait_until(lambda: outlet._num_lost == 3 and sink.num_tries >= 3)
    os.dup2(reader.writing, disk)  # somebody has emptied it
    outlet.put(make_line(0.0, "info", "l", "p", "after"))
    reader.start()
    outlet.close(TIMEOUT_S)
    os.close(disk)
    lines = reader.end()
    assert sum(line.get("lost", 0) for line in lines) == 3
    assert "after" in [line["message"] for line in lines]


def test_a_disk_that_stays_full_does_not_hold_the_end() -> None:
    with open("/dev/full", "wb") as disk:
        outlet = NonBlockingWriter(as_json, Stream(disk.fileno()), "supervisor")
        outlet.start()
        outlet.put(make_line(0.0, "info", "l", "p", "lost"))
        outlet.close(TIMEOUT_S)
        assert not outlet.is_alive()


def test_a_terminal_that_another_program_made_non_blocking_gets_every_line(reader: Reader) -> None:
    os.set_blocking(reader.writing, False)
    outlet = NonBlockingWriter(as_json, Stream(reader.writing), "supervisor")
    outlet.start()
    for number in range(500):
        outlet.put(make_line(0.0, "info", "l", "p", "x" * 5000) | {"number": number})
    time.sleep(0.1)  # the pipe is full meanwhile, or it is not: the lines are there in both cases
    reader.start()
    outlet.close(TIMEOUT_S)
    assert [line["number"] for line in reader.end()] == list(range(500))


def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_end(reader: Reader) -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid)"
    (line,) = collect_log(reader.start(), script)
    os.kill(int(line["message"]), signal.SIGKILL)


def test_a_child_cannot_forge_lines_of_another(reader: Reader) -> None:
    forged = json.dumps(
        {"time": "x", "level": "error", "logger": "noria", "process": "supervisor", "message": "forged"}
    )
    (line,) = collect_log(reader.start(), f"print({forged!r})")
    assert (line["process"], line["logger"], line["message"]) == ("child-0", "stderr", forged)


def test_the_supervisor_itself_writes_through_the_outlet() -> None:
    script = """
import logging, sys
from noria.config import Config
from noria.supervisor.log_collector import relaying
with relaying(Config(log_format=sys.argv[1])):
    logging.getLogger("noria.supervisor").info("here")
"""
    for log_format, begins in (("json", b'{"time":'), ("text", b"20")):
        done = subprocess.run([sys.executable, "-c", script, log_format], capture_output=True, check=True)
        assert done.stderr.startswith(begins)
        assert done.stderr.count(b"\n") == 1
