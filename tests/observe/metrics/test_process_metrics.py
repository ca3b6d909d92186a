"""The processes of a server are found by their titles; with real processes."""

import contextlib
import pathlib
import subprocess
import sys
import threading

import psutil
import pytest

from noria.observe.metrics.process_metrics import child_processes, process_metrics, process_name

SUPERVISOR = """
import setproctitle, subprocess, sys
setproctitle.setproctitle("noria supervisor")
engine = (
    "import setproctitle, time; setproctitle.setproctitle('noria engine engine-0'); "
    "print('up', flush=True); time.sleep(60)"
)
child = subprocess.Popen([sys.executable, "-c", engine], stdout=subprocess.PIPE)
child.stdout.readline()
stranger = subprocess.Popen(["sleep", "60"])
frontend = (
    "import setproctitle; setproctitle.setproctitle('noria frontend frontend-1'); "
    "from noria.observe.metrics.exposition import exposition; print(exposition()[0].decode())"
)
print(subprocess.run([sys.executable, "-c", frontend], capture_output=True, text=True, check=True).stdout)
child.kill()
stranger.kill()
"""


def test_a_front_end_reports_all_processes_of_its_server_and_no_others():
    run = subprocess.run([sys.executable, "-c", SUPERVISOR], capture_output=True, text=True, check=True, timeout=120)
    lines = [line for line in run.stdout.splitlines() if line.startswith("noria_process_resident_memory_bytes{")]
    assert {line.partition('"')[2].partition('"')[0] for line in lines} == {"supervisor", "engine-0", "frontend-1"}
    assert all(float(line.split()[-1]) > 1e6 for line in lines)


def test_a_process_that_has_ended_has_no_name():
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        child.kill()
    assert process_name(process) is None


@pytest.mark.parametrize("kernel_lists", [True, False])
def test_the_running_children_of_all_threads_are_found(kernel_lists, monkeypatch):
    if not kernel_lists:
        monkeypatch.setattr(pathlib.Path, "glob", lambda self, pattern: iter(()))
    with contextlib.ExitStack() as stack:
        started, finish = [], threading.Event()

        def start():
            started.append(stack.enter_context(subprocess.Popen(["sleep", "60"])))
            stack.callback(started[-1].kill)

        def start_and_stay():
            start()
            ready.set()
            finish.wait()

        before, ready = child_processes(psutil.Process()), threading.Event()
        start()
        threading.Thread(target=start_and_stay).start()
        stack.callback(finish.set)
        ready.wait()
        with subprocess.Popen(["true"]):
            pass
        found = set(child_processes(psutil.Process())) - set(before)
        assert {child.pid for child in found} == {child.pid for child in started}


@pytest.mark.parametrize("kernel_lists", [True, False])
def test_a_process_that_has_ended_has_no_children(kernel_lists, monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as child:
        process = psutil.Process(child.pid)
        child.kill()
    if not kernel_lists:
        monkeypatch.setattr(pathlib.Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(psutil.NoSuchProcess):
        child_processes(process)


def test_an_unsupervised_process_reports_itself():
    families = {family.name: family for family in process_metrics()}
    (sample,) = families["noria_process_start_time_seconds"].samples
    assert sample.value == psutil.Process().create_time()
    assert families["noria_machine_cores"].samples[0].value >= 1
    assert families["noria_machine_memory_bytes"].samples[0].value > 1e8
