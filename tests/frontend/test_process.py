"""The front end as its own process: how it starts, drains, and ends with its parent."""

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
from noria.frontend.engines.pool import EnginePool
from noria.frontend.process import http_server
from noria.observe.logs.setup import child_log_environment, new_mark

NO_JOBS_SET = JobsConfig()


@pytest.fixture
def start(new_engine, tmp_path):
    engine = new_engine()
    started = []

    def begin(command=(sys.executable,), jobs=NO_JOBS_SET, more_environment=None):
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
                env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} | (more_environment or {}),
            )
            started.append(process)
            host, port = listener.getsockname()
        return process, httpx.Client(base_url=f"http://{host}:{port}", timeout=60, verify=False), engine

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_serves_drains_and_exits_zero(start, until):
    process, client, engine = start()
    with client:
        assert client.get("/healthz").status_code == 200
        until(lambda: client.get("/readyz").status_code == 200)
        assert pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"noria frontend")
        engine.holds = True
        statuses = []

        def post():
            statuses.append(
                httpx.post(f"{client.base_url}/t2i", json={"prompt": "p"}, timeout=60, verify=False).status_code
            )

        thread = threading.Thread(target=post)
        thread.start()
        until(lambda: engine.submitted)
        process.send_signal(signal.SIGTERM)

        def closed():
            try:
                return client.get("/healthz").status_code is None
            except httpx.TransportError:
                return True

        until(closed)
        assert process.poll() is None
        engine.holds = False
        engine.become("dead")
        engine.become("ready")
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


def test_who_is_not_answered_at_the_end_of_a_drain_gets_503(serve, new_engine, ready, until, monkeypatch):
    monkeypatch.setattr("noria.frontend.process._LAST_WORDS_S", 60.0)
    engine = new_engine()
    engine.holds = True
    answers = []
    with serve(Config(frontend=FrontendConfig(drain_s=0.2)), engine) as (url, server):
        ready(url)
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/t2i", json={"prompt": "p"}, timeout=60, verify=False))
        )
        thread.start()
        until(lambda: engine.submitted)
        server.should_exit = True
        thread.join()
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("pieces", [1, 8])
def test_who_does_not_read_his_answer_is_left_at_the_end_of_a_drain_without_noise(pieces, until, caplog, monkeypatch):
    monkeypatch.setattr("noria.frontend.process._CLOSING_S", 60.0)  # before uvicorn itself breaks it off, and complains

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(pieces):
            body = bytes(8_000_000 // pieces)  # in all, more than the kernel takes
            await send({"type": "http.response.body", "body": body, "more_body": number + 1 < pieces})

    app = Starlette(routes=[Route("/", lambda _: answer)])
    app.state.drain = lambda: None
    server = http_server(app, EnginePool([]), FrontendConfig(drain_s=0.2))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as silent:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        silent.connect(listener.getsockname())
        silent.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        connections = server.server_state.connections
        until(lambda: any(each.flow is not None and each.flow.write_paused for each in list(connections)))
        server.should_exit = True
        thread.join(50)
        assert not thread.is_alive()
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_who_does_not_read_the_log_holds_up_no_request_and_loses_no_line(start):
    """More lines than any pipe holds; nobody reads until all requests are answered."""
    mark = new_mark()
    process, client, _ = start(more_environment=child_log_environment(mark))
    with client:
        for number in range(300):
            assert client.get(f"/{number}/{'x' * 8000}").status_code == 404
    paths = []
    while len(paths) < 300:  # before its end: it has 2 s for its last words then, however slow its reader is
        line = msgspec.json.decode(process.stderr.readline().removeprefix(mark.decode()))
        assert "lost" not in line
        if line.get("event") == "access":
            paths.append(line["path"])
    assert [int(path.split("/")[1]) for path in paths] == list(range(300))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def test_a_jobs_database_that_cannot_be_used_ends_it_with_the_reason(start):
    process, client, _ = start(jobs=JobsConfig(database="sqlite:////proc/no/jobs.sqlite"))
    client.close()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "the jobs' database sqlite:////proc/no/jobs.sqlite cannot be used" in errors
    assert "Traceback" not in errors


def test_ends_with_its_parent(start, until):
    script = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], close_fds=False)"
    parent, client, _ = start((sys.executable, "-c", script))
    with client:
        assert client.get("/healthz").status_code == 200
        (child,) = pathlib.Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
        until(lambda: not _lives(child))


def _lives(pid: str) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_metrics_of_all_processes_are_summed(start, until):
    _, one, _ = start()
    _, other, _ = start()
    with one, other:
        for client in (one, other):
            until(lambda client=client: client.get("/readyz").status_code == 200, seconds=60)
            assert client.post("/t2i", json={"prompt": "p"}).status_code == 200
        for client in (one, other):
            text = client.get("/metrics").text
            assert 'noria_requests_total{model="tiny",outcome="ok"} 2.0' in text
            assert "noria_engines_configured 1.0" in text  # as each was told: the same ones
            assert 'noria_engine_up{engine="engine-0"} 0.0' in text  # this one counts nothing; the front ends expect it


def test_front_end_never_loads_torch():
    script = "import sys, noria.frontend.process; print([name for name in ('torch', 'diffusers', 'transformers', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
