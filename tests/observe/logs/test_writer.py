"""The writer of log lines never blocks, keeps their order, and leaves room in the pipe for other output."""

import asyncio
import contextlib
import fcntl
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from noria.observe.logs.log_record import as_json, line_of
from noria.observe.logs.setup import child_log_environment, new_mark
from noria.observe.logs.writer import NonBlockingWriter, SharedPipe

PIPE_BYTES = 65_536


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reading, writing
    for fd in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(fd)


@pytest.fixture
def writer(pipe: tuple[int, int]) -> Iterator[NonBlockingWriter]:
    made = NonBlockingWriter(as_json, SharedPipe(pipe[1]), "child", max_buffered_bytes=200_000)
    made.start()
    yield made
    with contextlib.suppress(OSError):
        os.close(pipe[0])  # the reader is gone, so the writer ends
    made.close(60)
    assert not made.is_alive()


def put(writer: NonBlockingWriter, numbers: range, num_chars: int = 1000, logger: str = "noria.requests") -> None:
    for number in numbers:
        writer.put(line_of(0.0, "info", logger, "p", "x" * num_chars) | {"number": number})


def reader(fd: int) -> Callable[[], list[dict]]:
    """Read JSON lines from `fd` in a thread; the returned function waits for the end and returns them."""
    lines: list[dict] = []

    def read() -> None:
        with open(fd, "rb", closefd=False) as file:
            lines.extend(map(json.loads, file))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def end() -> list[dict]:
        thread.join(60)
        assert not thread.is_alive()
        return lines

    return end


def test_a_line_is_in_the_pipe_when_it_is_put(pipe: tuple[int, int]) -> None:
    writer = NonBlockingWriter(as_json, SharedPipe(pipe[1]), "child")  # its thread has not been started
    put(writer, range(10))
    assert [json.loads(line)["number"] for line in os.read(pipe[0], PIPE_BYTES).splitlines()] == list(range(10))


def test_request_lines_of_an_event_loop_are_written_together_others_at_once(pipe: tuple[int, int]) -> None:
    writer = NonBlockingWriter(as_json, SharedPipe(pipe[1]), "child")  # its thread has not been started
    os.set_blocking(pipe[0], False)

    def numbers() -> list[int]:
        try:
            return [json.loads(line)["number"] for line in os.read(pipe[0], PIPE_BYTES).splitlines()]
        except BlockingIOError:
            return []

    async def later() -> list[int]:
        await asyncio.to_thread(select.select, [pipe[0]], [], [])
        return numbers()

    async def scenario() -> None:
        with writer.gathering():
            put(writer, range(3))
            assert numbers() == []
            assert await later() == [0, 1, 2]
            put(writer, range(3, 5))
            writer.put(line_of(0.0, "warning", "noria.requests", "p", "x") | {"number": 5})
            assert numbers() == [3, 4, 5]
            put(writer, range(1), logger="noria.frontend")
            assert numbers() == [0]
            put(writer, range(6, 8))
            other = threading.Thread(target=put, args=(writer, range(8, 9)))
            other.start()
            other.join()  # and the loop has no turn
            assert numbers() == [8]
            assert await later() == [6, 7]
            put(writer, range(9, 10))
        assert numbers() == [9]

    asyncio.run(scenario())


@pytest.mark.parametrize("num_chars", [10, 1950, 2100, 8000])  # 2100: none fits into the rest of a page
def test_a_pipe_that_is_not_read_has_room_left_for_other_output(
    pipe: tuple[int, int], writer: NonBlockingWriter, num_chars: int
) -> None:
    put(writer, range(100), num_chars)
    time.sleep(0.1)  # the thread does what it can
    os.set_blocking(pipe[1], False)
    assert os.write(pipe[1], b"\n" * (PIPE_BYTES // 2)) == PIPE_BYTES // 2


def test_queued_lines_are_written_in_order_and_lost_ones_are_reported(
    pipe: tuple[int, int], writer: NonBlockingWriter
) -> None:
    put(writer, range(300))  # 16 kB in the pipe, 200 kB queued
    lines = reader(pipe[0])
    writer.flush(60)
    put(writer, range(300, 310))
    writer.close(60)
    os.close(pipe[1])
    found = lines()
    numbers = [line["number"] for line in found if "number" in line]
    (loss_line,) = [line for line in found if "num_lost" in line]
    assert numbers == sorted(numbers)
    assert numbers[-10:] == list(range(300, 310))
    assert (loss_line["process"], loss_line["logger"]) == ("child", "noria.log_collector")
    assert 0 < loss_line["num_lost"] == 310 - len(numbers)


def test_a_line_that_is_longer_than_the_share_is_written_completely(
    pipe: tuple[int, int], writer: NonBlockingWriter
) -> None:
    lines = reader(pipe[0])
    writer.put(line_of(0.0, "info", "l", "p", "m") | {f"field_{number}": "x" * 8000 for number in range(7)})
    writer.close(60)
    os.close(pipe[1])
    (line,) = lines()
    assert line["field_6"] == "x" * 8000


def test_flush_and_close_do_not_wait_for_a_reader_that_is_gone(
    pipe: tuple[int, int], writer: NonBlockingWriter
) -> None:
    put(writer, range(30))
    os.close(pipe[0])
    put(writer, range(30))
    began = time.monotonic()
    writer.flush(60)
    writer.close(60)
    assert time.monotonic() - began < 30
    assert not writer.is_alive()


# ── Processes that end ────────────────────────────────────────────────────────────────────────────────────────────────

# The normal timeout of 2 s may be too short on a busy machine.
SCRIPT_HEAD = """
import logging, os, signal, sys, threading
from noria.observe.logs.setup import fields, logging_here
from noria.observe.logs.writer import NonBlockingWriter
NonBlockingWriter.flush.__defaults__ = NonBlockingWriter.close.__defaults__ = (120.0,)
log = logging.getLogger("noria.test")
with logging_here("child", "info"):
    for number in range(100):
        log.info("x" * 2000, extra=fields(number=number))
    print("logged")
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("    sys.exit(3)", 3),
        ("    raise ValueError", 1),
        ("    logging.shutdown(); os._exit(4)", 4),
        ("os._exit(5)", 5),
    ],
)
def test_queued_lines_are_written_before_the_process_ends(pipe: tuple[int, int], end: str, status: int) -> None:
    mark = new_mark()
    environment = os.environ | child_log_environment(mark)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT_HEAD + end], stdout=subprocess.PIPE, stderr=pipe[1], env=environment
    ) as process:
        os.close(pipe[1])
        assert process.stdout is not None
        process.stdout.readline()  # all lines are logged, and most are queued: the pipe's share is 16 kB
        with open(pipe[0], "rb", closefd=False) as file:
            written = file.read()
    assert process.returncode == status
    lines = [line.removeprefix(mark) for line in written.split(b"\n") if line.startswith(mark)]
    assert [json.loads(line)["number"] for line in lines] == list(range(100))


def test_a_crash_dump_does_not_block_on_a_pipe_that_is_not_read(pipe: tuple[int, int]) -> None:
    script = SCRIPT_HEAD + "    import faulthandler; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)"
    environment = os.environ | child_log_environment(new_mark())
    with subprocess.Popen([sys.executable, "-c", script], stderr=pipe[1], env=environment) as process:
        assert process.wait(60) == -signal.SIGSEGV
    os.close(pipe[1])
    assert b"Fatal Python error: Segmentation fault" in pathlib.Path(f"/dev/fd/{pipe[0]}").read_bytes()
