"""Runs parts one after the other, each within its limit, and keeps on disk what was measured after each.

A part is done if it ended with status 0 on this content of the code; then it is skipped the next time. So a session
that was killed goes on where it was, and a later one on another machine can follow it.
"""

import datetime
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from noria.protocol.process_signals import die_with_parent
from noria_bench.gpu.parts import Part
from noria_bench.running import write_json

ROOT = pathlib.Path(__file__).resolve().parents[3]
FILE_NAME = "session.json"
_KILL_GRACE_S = 15.0  # a bench that is interrupted writes what it has
_CODE = ("src/noria", "benchmarks/noria_bench")


class PartResult(Struct, frozen=True):
    """How a part ended: `exit_status` is negative if a signal ended it, None if it did not start.

    `reason` says why it did not, or has the last lines of a part that failed.
    """

    name: str
    command: str
    content: str  # digest of the code: see `digest_of_code`
    small: bool
    gpu: str
    date: str
    seconds: float = 0.0
    exit_status: int | None = None
    reason: str = ""


class Session(Struct):
    """The document of a folder of results."""

    details: dict[str, str]  # details of the GPU
    provenance: dict[str, Any]
    parts: list[PartResult] = []

    def record(self, result: PartResult, folder: pathlib.Path) -> None:
        """Replace what is known of the part, and write the document atomically."""
        self.parts = [*(each for each in self.parts if each.name != result.name), result]
        write_json(self, folder / FILE_NAME)


def read_session(folder: pathlib.Path) -> Session | None:
    """The document of a folder; None if there is none. Raises ValueError if it cannot be read."""
    file = folder / FILE_NAME
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=Session)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{file} is no session of make gpu: {error}") from error


def done_parts(sessions: Iterable[Session], content: str, gpu: str, *, small: bool) -> dict[str, PartResult]:
    """The parts that were measured with this content, on this kind of device, at this size, by name."""
    return {
        part.name: part
        for session in sessions
        for part in session.parts
        if (part.exit_status, part.content, part.gpu, part.small) == (0, content, gpu, small)
    }


def digest_of_code(root: pathlib.Path = ROOT) -> str:
    """A digest of the files of Noria and its benches, whatever the commit that they are in."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for file in sorted((root / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_parts(
    parts: Sequence[Part],
    session: Session,
    folder: pathlib.Path,
    make_result: Callable[[Part], PartResult],
    problems: dict[str, str],
    end_s: float,
    log_status: Callable[[str], None],
    on_record: Callable[[], None],
) -> None:
    """Run the parts until `end_s` of the monotonic clock, and call `on_record` after each.

    One that lacks a need, or for which no time is left, is skipped; one that fails does not stop the next.
    """
    for part in parts:
        result, left_s = make_result(part), end_s - time.monotonic()
        missing = [problems[need] for need in part.needs if need in problems]
        if missing or left_s < part.estimate_s:
            reason = (
                missing[0] if missing else f"takes about {part.estimate_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
            )
            result = msgspec.structs.replace(result, reason=reason)
        else:
            log_status(f"{part.name}: {part.title} (about {part.estimate_s:.0f} s): {result.command}")
            log = folder / f"{part.name}.log"
            status, seconds = run_part(part, log, min(part.limit_s, left_s))
            reason = "" if status == 0 else " / ".join(log.read_text("utf-8", errors="replace").splitlines()[-5:])
            result = msgspec.structs.replace(result, exit_status=status, seconds=round(seconds, 1), reason=reason[:600])
        session.record(result, folder)
        on_record()
        log_status(f"{part.name}: {describe(result)}")


def describe(result: PartResult) -> str:
    """How the part ended, in words."""
    if result.exit_status is None:
        return f"skipped: {result.reason}"
    words = f"ended with status {result.exit_status} after {result.seconds:.0f} s"
    return f"{words}: {result.reason}" if result.reason else words


def set_up_environment() -> None:
    """Let all processes that this one starts find this checkout first, and keep what Python compiles."""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def run_part(part: Part, log: pathlib.Path, limit_s: float) -> tuple[int, float]:
    """Run one part within its limit; its output goes to `log`. Returns the exit status and the seconds."""
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = _stop(process)
        except BaseException:
            _stop(process)
            raise
    return status, time.monotonic() - start_s


def _stop(process: "subprocess.Popen[bytes]") -> int:
    """Interrupt the part, then kill it with all its processes; returns the exit status."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(_KILL_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
