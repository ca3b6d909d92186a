"""The front end as a process: start, drain, and end with its parent."""

import asyncio
import functools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from noria.config import Config, FrontendConfig, JobsConfig
from noria.frontend.process import http_server
from noria.observe.logs.setup import child_log_environment, new_mark
from noria.protocol.process_signals import STOP_SIGNAL
from waiting import wait_until, wait_until_ready

DEFAULT_JOBS = JobsConfig()


@pytest.fixture
def start(new_engine, tmp_path):
    engine = new_engine()
    started = []

    def start_process(command=(sys.executable,), jobs=DEFAULT_JOBS, extra_environment=None):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = msgspec.json.encode(
                {
                    "config": Config(data_dir=str(tmp_path / "data"), jobs=jobs),
                    "fd": listener.fileno(),
                    "engines": [engine.address],
                }
            ).decode()
            process = subprocess.Popen(
                [*command, "-m", "noria.frontend.process", task],
                pass_fds=[listener.fileno()],
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} | (extra_environment or {}),
            )
            started.append(process)
            host, port = listener.getsockname()
        return process, httpx.Client(base_url=f"http://{host}:{port}", timeout=60, verify=False), engine

    yield start_process
    for process in started:
        process.kill()
        process.communicate()


def test_serves_drains_and_exits_with_0(start):
    process, client, engine = start()
    with client:
        assert client.get("/healthz").status_code == 200
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"noria frontend")
        engine.never_answers = True
        statuses = []

        def post():
            statuses.append(
                httpx.post(f"{client.base_url}/t2i", json={"prompt": "p"}, timeout=60, verify=False).status_code
            )

        thread = threading.Thread(target=post)
        thread.start()
        wait_until(lambda: engine.submitted)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # are for the supervisor
            process.send_signal(number)
            assert client.get("/healthz").status_code == 200
        process.send_signal(STOP_SIGNAL)

        def closed():
            try:
                return client.get("/healthz").status_code is None
            except httpx.TransportError:
                return True

        wait_until(closed)
        assert process.poll() is None
        engine.never_answers = False
        engine.set_state("dead")
        engine.set_state("ready")
        thread.join()
        assert statuses == [200]
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    lines = [msgspec.json.decode(line) for line in log.splitlines()]
    (of_request,) = [line for line in lines if line["logger"] == "noria.requests"]
    assert (of_request["path"], of_request["status"], of_request["outcome"]) == ("/t2i", 200, "ok")
    assert of_request["process"] == "frontend"
    assert [line["event"] for line in lines if "drain" in line.get("event", "")] == ["drain_began", "drain_ended"]
    assert "Traceback" not in log


def test_requests_in_flight_at_the_end_of_a_drain_get_503(serve, new_engine, monkeypatch):
    monkeypatch.setattr("noria.frontend.process._REJECT_GRACE_S", 60.0)
    engine = new_engine()
    engine.never_answers = True
    answers = []
    with serve(Config(frontend=FrontendConfig(drain_s=0.2)), engine) as (url, server):
        wait_until_ready(url)
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/t2i", json={"prompt": "p"}, timeout=60, verify=False))
        )
        thread.start()
        wait_until(lambda: engine.submitted)
        server.should_exit = True
        thread.join()
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("pieces", [1, 8])
def test_a_client_that_does_not_read_is_disconnected_at_the_end_of_a_drain_without_warnings(
    pieces, caplog, monkeypatch
):
    # after a shorter time uvicorn may cancel the work, with a warning
    monkeypatch.setattr("noria.frontend.process._CLOSE_GRACE_S", 60.0)

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(pieces):
            body = bytes(8_000_000 // pieces)  # in total, more than the kernel buffers
            await send({"type": "http.response.body", "body": body, "more_body": number + 1 < pieces})

    app = Starlette(routes=[Route("/", lambda _: answer)])
    app.state.load, app.state.drain = functools.partial(asyncio.sleep, 0), lambda: None
    app.state.stop = lambda: None
    server = http_server(app, FrontendConfig(drain_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as silent:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        silent.connect(listener.getsockname())
        silent.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connections = server.server_state.connections
        wait_until(lambda: any(each.flow is not None and each.flow.write_paused for each in list(connections)))
        server.should_exit = True
        thread.join(50)
        assert not thread.is_alive()
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_a_slow_reader_of_the_log_delays_no_request_and_loses_no_line(start):
    """Writes more lines than a pipe holds, which are read after all requests are answered."""
    num_requests = 100
    mark = new_mark()
    process, client, _ = start(extra_environment=child_log_environment(mark))
    with client:
        for number in range(num_requests):
            assert client.get(f"/{number}/{'x' * 8000}").status_code == 404
    paths = []
    while len(paths) < num_requests:  # before it is told to end: at its end it waits at most 2 s for a slow reader
        line = msgspec.json.decode(process.stderr.readline().removeprefix(mark.decode()))
        assert "lost" not in line
        assert not line["logger"].startswith("uvicorn"), line  # each request has one line, which is ours
        if line.get("event") == "access":
            paths.append(line["path"])
    assert [int(path.split("/")[1]) for path in paths] == list(range(num_requests))
    process.send_signal(STOP_SIGNAL)
    assert process.wait(timeout=60) == 0


def test_an_unusable_jobs_database_ends_the_process_with_the_reason(start):
    process, client, _ = start(jobs=JobsConfig(database="sqlite:////proc/no/jobs.sqlite"))
    client.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "the jobs database sqlite:////proc/no/jobs.sqlite cannot be used" in errors
    assert "Traceback" not in errors


def test_front_end_never_imports_torch():
    script = (
        "import sys, noria.frontend.process; "
        "print([name for name in ('torch', 'diffusers', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_ends_with_its_parent(start):
    script = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], close_fds=False)"
    parent, client, _ = start((sys.executable, "-c", script))
    with client:
        assert client.get("/healthz").status_code == 200
        (child,) = pathlib.Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
        wait_until(lambda: not _is_alive(child))


def _is_alive(pid: str) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
