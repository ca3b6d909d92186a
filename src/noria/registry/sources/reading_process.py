"""Reads a source in a process of its own, beside a server: `python -m noria.registry.sources.reading_process`.

Hashing and copying take minutes and the interpreter's lock, and a library for a store may hang or crash; so a front end
has it done elsewhere, and can end it. What is complete of a copy is kept, and the next process goes on from there.
"""

import asyncio
import os
import pathlib
import signal
import sys

import msgspec

from noria.errors import NoriaError, RegistryUnavailable, all_codes
from noria.observe.idle_cores import yielding_cores
from noria.observe.terminal_text import escape_for_terminal
from noria.protocol.process_signals import blocking_signals, die_with_parent, leave_signals_to_supervisor
from noria.registry.model_folder import ModelFolder
from noria.registry.sources.limits import SourceLimits

_RETRY_AFTER_S = 60.0
_MAX_PAUSES_S = 10.0  # on a busy machine; a client waits for the answer


class ReadingTask(msgspec.Struct, frozen=True):
    """The source that is to be read."""

    source: str
    model: str
    data_folder: str
    limits: SourceLimits
    parent_pid: int


class ReadingFailed(msgspec.Struct, frozen=True, tag=True):
    """A `NoriaError`."""

    code: str
    message: str


class ReadingDone(msgspec.Struct, frozen=True, tag=True):
    """The folder, or the copy."""

    folder: ModelFolder


async def read_in_process(task: ReadingTask, max_s: float) -> ModelFolder:
    """Return what `read_source` does. The process is killed after `max_s`, and if this is cancelled.

    Raises:
        RegistryUnavailable: the process took too long, or crashed.
        NoriaError: what `read_source` raises.
    """
    command = (sys.executable, "-m", "noria.registry.sources.reading_process")
    pipe = asyncio.subprocess.PIPE
    with blocking_signals():
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        async with asyncio.timeout(max_s):
            output, _ = await child.communicate(msgspec.json.encode(task))
    except TimeoutError:
        raise RegistryUnavailable(
            f"{task.source} was not read within {max_s:g} s. What is complete is kept; send the same request again.",
            retry_after_s=_RETRY_AFTER_S,
        ) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        result = msgspec.json.decode(output, type=ReadingDone | ReadingFailed)
    except msgspec.DecodeError:
        raise RegistryUnavailable(
            f"the process that read {task.source} ended with status {child.returncode}; -9 is mostly too little "
            "memory. Send the same request again.",
            retry_after_s=_RETRY_AFTER_S,
        ) from None
    if isinstance(result, ReadingFailed):
        raise all_codes()[result.code](result.message)
    return result.folder


def main() -> int:
    """Read what standard input names; what comes of it goes to standard output, and progress to standard error."""
    leave_signals_to_supervisor()
    from noria.registry.sources.read import read_source  # which imports what a front end does not need

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=ReadingTask)
    die_with_parent(signal.SIGKILL, task.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all processes; the front end ends this one
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is for the log

    def report(sentence: str) -> None:
        sys.stderr.write(f"{escape_for_terminal(sentence)}\n")

    result: ReadingDone | ReadingFailed
    try:
        with yielding_cores(_MAX_PAUSES_S):
            folder = read_source(
                task.source, task.model, pathlib.Path(task.data_folder), os.environ, report, task.limits
            )
        result = ReadingDone(folder)
    except NoriaError as error:
        result = ReadingFailed(error.code, error.message)
    with os.fdopen(output, "wb") as opened:
        opened.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
