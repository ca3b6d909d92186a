"""Metrics in a temporary folder that is too small: the processes serve, and the log says what is missing."""

import os
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from noria.engine.monitoring.crash_journal import CrashJournal, read_in_flight

COUNT = """
import pathlib, sys
from noria.observe.metrics import declarations
from noria.observe.metrics.exposition import exposition
folder = pathlib.Path(sys.argv[1])
for number in range(400):
    declarations.JOBS_ACCEPTED.inc(5)
    declarations.ITERATION_SECONDS.labels(f"{number}x{number}").observe(1.0)
(folder / "filler").unlink(missing_ok=True)
declarations.JOBS_ACCEPTED.inc()
print(exposition()[0].decode())
"""


@pytest.fixture
def small_folder(tmp_path):
    """A file system of 256 KiB, which needs the right to mount."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("only root can mount the small file system that this fills; the rest of the suite needs no root")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def counts(folder):
    """A process's counts of accepted jobs and of iterations, and its stderr; it makes 2,001 and 400."""
    run = subprocess.run(
        [sys.executable, "-c", COUNT, str(folder)],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    samples = [sample for family in text_string_to_metric_families(run.stdout) for sample in family.samples]
    jobs = sum(sample.value for sample in samples if sample.name == "noria_jobs_accepted_total")
    return jobs, sum(sample.value for sample in samples if sample.name == "noria_iteration_seconds_count"), run.stderr


def test_values_that_fit_are_served_and_the_log_names_the_reason_once(small_folder):
    jobs, iterations, log = counts(small_folder)
    assert jobs == 2001
    assert 0 < iterations < 400
    assert log.count("No space left on device") == log.count("/metrics lacks values") == 1


def test_a_full_folder_stops_nothing_and_values_are_complete_when_there_is_space(small_folder):
    (small_folder / "filler").write_bytes(bytes(256 * 1024))
    jobs, iterations, log = counts(small_folder)
    assert (jobs, iterations) == (2001, 0)
    assert log.count("No space left on device") == 1


def test_requests_in_flight_that_cannot_be_written_fail_nothing(small_folder, caplog):
    (small_folder / "filler").write_bytes(bytes(256 * 1024))
    journal = CrashJournal(small_folder / "in-flight")
    for _ in range(3):
        journal.record_iteration(["a"])
        with journal.preparing("b"):
            pass
    assert len(caplog.records) == 1
    (small_folder / "filler").unlink()
    journal.record_iteration(["c"])
    assert "c" in read_in_flight(small_folder / "in-flight")
    journal.close()
