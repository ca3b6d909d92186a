"""The children of a process. Knows no metrics: the supervisor, which counts nothing, asks for its own."""

import contextlib
import pathlib

import psutil


def child_processes(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of `process` from the kernel's list; psutil would look at every process of the machine.

    While a child ends, another may be missing from the kernel's list (proc(5)). Raises psutil.Error if `process` has
    ended.
    """
    try:
        lists = [path.read_text() for path in pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")]
    except OSError:  # a thread has just ended
        lists = []
    if not lists:  # a kernel without CONFIG_PROC_CHILDREN
        all_children: list[psutil.Process] = process.children()
        return all_children
    children = []
    for pid in " ".join(lists).split():
        with contextlib.suppress(psutil.Error):  # it has ended
            children.append(psutil.Process(int(pid)))
    return children
