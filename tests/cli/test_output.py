"""Commands whose standard output or standard error cannot be written do what Unix tools do."""

import os
import subprocess
import sys

import pytest


def noria(arguments: list[str], stdout: int, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "noria", *arguments]
    return subprocess.run(command, check=False, stdout=stdout, stderr=stderr, text=True)


def test_a_reader_that_has_left_ends_a_command_as_sigpipe_does() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = noria(["serve", "--help"], writer)  # argparse prints
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_full_disk_is_one_line_and_a_failure() -> None:
    with open("/dev/full", "w") as full:
        result = noria(["doctor", "--security"], full.fileno())  # a command prints
    assert (result.returncode, result.stderr) == (
        1,
        "noria: error: the output cannot be written: No space left on device.\n",
    )


@pytest.mark.parametrize(("arguments", "status"), [(["serv"], 2), (["serve", "./no-such-folder"], 3)])
def test_an_error_keeps_its_status_where_nobody_can_be_told(arguments: list[str], status: int) -> None:
    with open("/dev/full", "w") as full:
        assert noria(arguments, subprocess.DEVNULL, full.fileno()).returncode == status


def test_a_closed_output_is_no_failure() -> None:
    command = f"exec {sys.executable} -m noria --version >&-"
    assert subprocess.run(["sh", "-c", command], check=False, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--devices", "cuda:77"], "device 'cuda:77' does not exist"),
        (["--data-dir", "/proc/none"], "setting jobs.results is 'auto', which cannot be used"),
    ],
)
def test_a_start_that_fails_in_a_process_of_the_server_ends_with_its_reason(flags: list[str], reason: str) -> None:
    result = noria(["serve", "minilm", "--port", "0", *flags], subprocess.PIPE)  # imports less than an image model
    assert result.returncode == 2
    *log, last = result.stderr.splitlines()
    assert last.startswith(f"noria: error: {reason}")
    assert '"message":"loading minilm: the libraries are imported first' in log[0]
    assert not any('"HEAD' in line for line in log)
