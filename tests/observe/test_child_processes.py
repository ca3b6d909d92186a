"""The children of a process are found with and without the kernel's list."""

import contextlib
import pathlib
import subprocess
import threading

import psutil
import pytest

from noria.observe.child_processes import child_processes


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
