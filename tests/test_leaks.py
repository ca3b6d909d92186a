"""The fixture `no_leaks` fails a test for what the test leaves, and not for what fixtures of a wider scope keep."""

import os
import subprocess
import sys

TESTS = """
import concurrent.futures, socket, subprocess, sys, threading
import pytest
import leaks
from leaks import no_leaks

leaks.GRACE_S = 0.3
kept = []

@pytest.fixture(scope="module")
def server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopped = threading.Event()
        def serve():
            while not stopped.is_set():
                kept.append(listener.accept()[0])
                threading.Thread(target=stopped.wait).start()  # thread of the server, for the connection
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        stopped.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join()

@pytest.fixture(scope="module")
def pool():
    with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="pool") as pool:
        pool.submit(print).result()
        yield pool

def test_a_thread(server):
    event = threading.Event()
    kept.append(event)
    threading.Thread(target=event.wait, name="mine", daemon=True).start()

def test_a_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_a_server():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_a_connection():
    kept.extend(socket.socketpair())

def test_what_ends_soon():
    threading.Timer(0.1, print).start()

def test_a_connection_to_a_server_of_the_module(server):
    kept.append(socket.create_connection(server))

def test_a_thread_more_in_a_pool_of_the_module(pool):
    both = threading.Barrier(2)
    assert len([pool.submit(both.wait) for _ in range(2)]) == 2

def test_a_pool():
    pool = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="own")
    kept.append(pool)
    pool.submit(print)

def test_nothing():
    pass
"""


def test_a_thread_a_child_and_a_socket_that_are_left_behind_fail_their_test(tmp_path, request):
    (tmp_path / "test_leaking.py").write_text(TESTS)
    without = [f"-pno:{plugin}" for plugin in ("cacheprovider", "warnings", "schemathesis", "hypothesispytest")]
    command = [sys.executable, "-m", "pytest", *without, "-rEp", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(request.path.parent), "COLUMNS": "200"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    errors = [line.rpartition("::test_")[2] for line in ran.splitlines() if line.startswith("ERROR ")]
    found = dict(line.split(" - Failed: left behind: ") for line in errors)
    assert found.keys() == {"a_thread", "a_child", "a_server", "a_connection", "a_pool"}, ran
    assert found["a_thread"] == "thread 'mine'"
    assert found["a_child"].startswith("child process ")
    assert found["a_server"].startswith("socket ('127.0.0.1', ")
    assert "9 passed" in ran
