"""The supervisor with small fake child processes; its decisions have tests of their own, in virtual time."""

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from certificates import make_certificate
from noria.cli.main import main
from noria.cli.server_address import local_url
from noria.cli.top.events import EnginesEvent
from noria.cli.top.stream import stream_events
from noria.config import FrontendConfig
from noria.errors import UnavailableNow
from noria.protocol.process_signals import SAME_ORDER_S
from noria.supervisor.announcements import ready_banner
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL
from noria.testing.server import NO_PROXY_OPENER, reserve_port
from supervisor.faked_server import DRIVER, FakedServer, pid
from waiting import TIMEOUT_S, wait_until

Start = Callable[..., FakedServer]


def get(url: str) -> http.client.HTTPResponse:
    """Return the response of the server, without the environment's proxy."""
    answer: http.client.HTTPResponse = NO_PROXY_OPENER.open(url, timeout=TIMEOUT_S)
    return answer


# ── The temporary folder ───────────────────────────────────────────────────────────────────────────────────────


def test_a_temporary_folder_too_long_for_sockets_is_rejected_in_one_line(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "noria", "serve", "--port", "0"],
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "Set the environment variable TMPDIR to a shorter path" in result.stderr


# ── The settings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_taken_port_is_named_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == UnavailableNow.exit_status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"port {port} on 127.0.0.1 is taken" in error
    assert "--port" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--results", "ftp://noria:hunter2@files.example/results"], "setting jobs.results holds a password"),
        (["--api-keys-file", "keys.toml"], "sha256 is missing"),
        (["--database", "postgresql://noria@db.example/noria"], "jobs.webhook_secret_file is 'auto'"),  # may be shared
        (["--trusted-proxies", "::1,*"], "setting frontend.trusted_proxies has '*'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_rejected_before_anything_starts(
    flags: list[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("keys.toml").write_text('[[key]]\nname = "a"\n')
    assert main(["serve", "--port", "0", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "hunter2" not in error  # nor in the arguments of a child


# ── The banner ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_banner_names_the_page_of_each_kind_of_model():
    page = "  http://h/text   try the text encoder in a browser\n"
    assert page in ready_banner(1.0, [FAKE_ENCODER], "http://h", has_api_keys=False)
    assert "http://h/ " not in ready_banner(1.0, [FAKE_ENCODER], "http://h", has_api_keys=False)
    assert page not in ready_banner(1.0, [FAKE_MODEL], "http://h", has_api_keys=False)


def test_the_banner_of_a_unix_socket_has_a_command_and_no_pages():
    banner = ready_banner(1.0, [FAKE_MODEL], "unix:/run/noria/a b.sock", has_api_keys=False)
    assert "  curl -s --unix-socket '/run/noria/a b.sock' http://localhost/t2i -H" in banner
    assert "/live" not in banner


def test_the_banner_of_a_server_with_api_keys_has_a_command_with_a_key():
    assert (
        "curl -s http://h/t2i -H 'content-type: application/json' -H \"authorization: Bearer $NORIA_API_KEY\" -d"
        in ready_banner(1.0, [FAKE_MODEL], "http://h", has_api_keys=True)
    )


# ── Listeners, with real front ends ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "processes"), [("Unix socket", 2), ("TLS", 1)])
def test_noria_top_reaches_a_server_at_each_kind_of_listener_and_each_front_end_that_shares_one(
    kind: str, processes: int, start: Start, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"frontend.processes": str(processes), "data_dir": str(tmp_path / "data"), "frontend.drain_s": "1"}
    if kind == "TLS":
        certificate = make_certificate(tmp_path)
        settings |= {
            "frontend.ssl_certfile": str(certificate.certfile),
            "frontend.ssl_keyfile": str(certificate.keyfile),
        }
    else:
        settings["frontend.uds"] = str(tmp_path / "s")
    server = start(FLAGS=json.dumps(settings))
    url = server.url.strip()
    assert url.startswith("https://127.0.0.1:" if kind == "TLS" else f"unix:{tmp_path}/s")
    config = FrontendConfig(
        port=urlsplit(url).port or 8000,
        uds=settings.get("frontend.uds", ""),
        ssl_certfile=settings.get("frontend.ssl_certfile", ""),
    )

    async def first_event(address: str = local_url(config), certfile: str = config.ssl_certfile) -> object:
        async with contextlib.aclosing(stream_events(address, None, certfile)) as events:
            return await anext(events)

    assert isinstance(asyncio.run(first_event()), EnginesEvent)
    monkeypatch.setenv("SSL_CERT_FILE", config.ssl_certfile)
    assert isinstance(asyncio.run(first_event(url, "")), EnginesEvent)

    wait_until(lambda: len(server.children("frontend")) == processes)  # the banner comes when the first one answers
    for child in server.children("frontend") if processes > 1 else ():  # each alone
        child.suspend()
        assert isinstance(asyncio.run(first_event()), EnginesEvent)
        child.resume()
    assert server.stop() == 0
    assert not (tmp_path / "s").exists()


def test_a_front_end_and_a_registrar_that_hang_are_replaced(start: Start, tmp_path: pathlib.Path) -> None:
    settings = {"data_dir": str(tmp_path / "data"), "registry.deployments": "true", "frontend.drain_s": "1"}
    # Short only where needed: on a busy machine a healthy process, too, takes seconds to answer.
    driver = f"import noria.supervisor.child_tasks\nnoria.supervisor.child_tasks.MIN_HANG_TIMEOUT_S = 8.0\n{DRIVER}"
    server = start(driver=driver, FLAGS=json.dumps(settings), HANG_S="8")
    assert server.url
    (frontend,), (registrar,) = server.children("frontend"), server.children("registrar")
    for child in (frontend, registrar):
        child.suspend()
    for name in ("frontend-0", "registrar"):
        server.wait_for(f"{name} hangs: it has not answered for", file=server.output)
        server.wait_for(f"{name} ended by SIGKILL; starting it again in 0.0 s", file=server.output)
    wait_until(lambda: server.children("registrar") not in ([], [registrar]))
    with get(f"{server.url}/healthz") as answer:
        assert answer.status == 200
    assert server.output.read_text().count(" hangs: ") == 2
    assert server.stop() == 0


# ── With child processes ──────────────────────────────────────────────────────────────────────────────────────────────


def test_it_prints_the_banner_restarts_killed_children_and_stops_in_order(start: Start, tmp_path: pathlib.Path) -> None:
    server = start(devices="cpu,cpu")
    with get(server.url) as answer:
        first_pid = int(answer.headers["X-Pid"])
    server.wait_for("curl -s", file=server.output)
    banner = server.output.read_text()
    assert f"  {server.url.rstrip('/')}/live " in banner and "curl -s" in banner and "NORIA_API_KEY" not in banner
    assert len(server.wait_for("environment 10000 True", 2)) == 2

    os.kill(first_pid, signal.SIGKILL)  # a front end: the port stays open, and another one responds
    server.wait_for("frontend started", 2)  # until then the killed one may still accept a connection
    with get(server.url) as answer:
        assert int(answer.headers["X-Pid"]) != first_pid
    first, second = (line.split()[2] for line in server.wait_for("frontend worker", 2))
    assert first == second  # so that the second requeues the jobs of the first
    assert first.endswith("/frontend-0")
    server.wait_for("engine-0 ready")  # sent to the supervisor before the event is recorded
    os.kill(pid(server.wait_for("engine-1 ready")[0]), signal.SIGKILL)
    server.wait_for("engine-1 ready", 2)
    assert len(server.wait_for("engine-0 started")) == 1

    assert server.stop() == 0
    words = [line.rpartition(" ")[0] for line in server.events.read_text().splitlines()]
    assert words[-4:-2] == ["frontend draining", "frontend stopped"]
    assert sorted(words[-2:]) == ["engine-0 stopped", "engine-1 stopped"]
    assert server.output.read_text().count("noria: ready") == 1
    assert "ended by SIGKILL; starting it again in 0.0 s" in server.output.read_text()
    assert not list(tmp_path.glob("noria-*"))  # its private directory
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", urlsplit(server.url).port), TIMEOUT_S)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("stuck", "one iteration has taken 77.0 s; the limit is 50.0 s"),
        ("silent", "it has not answered for"),
        ("loading", "it was not ready after"),
    ],
)
def test_an_engine_that_hangs_is_killed_and_its_exit_counts_as_a_crash(how: str, words: str, start: Start) -> None:
    # Short only where needed: on a busy machine a healthy engine, too, takes seconds to start or to answer.
    timeouts = {"loading": {"START_S": "4"}, "silent": {"HANG_S": "2"}, "stuck": {"PING_S": "0.4"}}
    server = start(ENGINE_HANGS=how, **timeouts[how])
    server.wait_for("engine-0 after crashed")
    line, *_ = server.wait_for("engine-0 hangs", file=server.output)
    assert words in line
    server.wait_for("engine-0 ended by SIGKILL; starting it again in 0.0 s", file=server.output)
    assert server.stop() == 0


def test_a_restarted_engine_is_told_how_the_previous_run_ended_and_a_log_of_text_in_a_file_has_no_colours(
    start: Start,
) -> None:
    server = start(driver=DRIVER.replace("flags |= {", 'flags |= {"log_format": "text", '))
    server.wait_for("engine-0 after none")
    exits = ((signal.SIGKILL, "killed"), (signal.SIGSEGV, "crashed"), (signal.SIGTERM, "killed"))
    for run, (number, cause) in enumerate(exits, 1):
        server.wait_for("engine-0 is ready on", run, file=server.output)  # in the supervisor's view
        os.kill(pid(server.wait_for("engine-0 ready", run)[-1]), number)
        server.wait_for(f"engine-0 after {cause}", 2 if number == signal.SIGTERM else 1)
    server.wait_for("starting it again in 0.0 s", len(exits), file=server.output)
    server.wait_for("noria.supervisor: engine-0 is ready on cpu  child=engine-0 device=cpu", file=server.output)
    assert "\x1b" not in server.output.read_text()


def test_metrics_of_dead_processes_are_merged_at_the_latest_when_the_next_process_ends(
    start: Start, tmp_path: pathlib.Path
) -> None:
    server = start()
    (first,) = server.wait_for("engine-0 ready")
    (folder,) = tmp_path.glob("noria-*/")
    (folder / f"counter_{pid(first)}.db").write_bytes(struct.pack("i4x", 8))
    (folder / "counter.draft").mkdir()  # makes writing the merged file fail
    os.kill(pid(first), signal.SIGKILL)
    server.wait_for("cannot merge the metrics of dead processes: ", file=server.output)
    (folder / "counter.draft").rmdir()
    second = server.wait_for("engine-0 ready", 2)[-1]  # the server goes on
    assert [path.name for path in folder.glob("*.db")] == [f"counter_{pid(first)}.db"]
    os.kill(pid(second), signal.SIGKILL)
    server.wait_for("engine-0 ready", 3)
    assert [path.name for path in folder.glob("*.db")] == ["counter_ended-1.db"]
    assert server.stop() == 0


def test_a_second_signal_stops_immediately(start: Start) -> None:
    server = start(FRONTEND_DRAINS_S="60")
    assert server.url
    server.process.send_signal(signal.SIGINT)
    server.wait_for("frontend draining")
    time.sleep(SAME_ORDER_S)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(TIMEOUT_S) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid(server.wait_for("frontend started")[0]), 0)


def test_a_front_end_that_exceeds_its_drain_time_is_killed(start: Start) -> None:
    driver = DRIVER.replace(
        "sys.exit(",
        "import noria.supervisor.supervisor; noria.supervisor.supervisor.FRONTEND_STOP_TIMEOUT_S = 0.5; sys.exit(",
    )
    server = start(driver=driver, drain_s=0.5, FRONTEND_DRAINS_S="60")
    assert server.url
    assert server.stop() == 0
    server.wait_for("frontend-0 is killed: it has not ended in time", file=server.output)
    server.wait_for("engine-0 stopped")


def test_a_model_that_the_engine_rejects_stops_the_server(start: Start) -> None:
    server = start(ENGINE_EXITS="3")
    assert server.process.wait(TIMEOUT_S) == 3
    output = server.output.read_text()
    assert "engine-0 ended with status 3: it rejected its model" in output
    assert output.splitlines()[-1].startswith("noria: error: engine-0 was given up: it rejected its model.")
    assert len(server.wait_for("engine-0 started")) == 1


def test_one_order_that_comes_as_several_signals_lets_requests_in_flight_complete_and_systemd_is_told(
    start: Start, tmp_path: pathlib.Path
) -> None:
    """timeout(1) sends SIGTERM twice, and systemd with SendSIGHUP sends another signal after it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "manager"))
        server = start(NOTIFY_SOCKET=str(tmp_path / "manager"), FRONTEND_DRAINS_S="2")
        assert server.url
        assert manager.recv(100) == b"READY=1"
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            server.process.send_signal(number)
            time.sleep(0.1)
        assert server.process.wait(TIMEOUT_S) == 0
        assert manager.recv(100) == b"STOPPING=1"
    for name in ("frontend", "engine-0"):
        server.wait_for(f"{name} stopped")
    server.wait_for("SIGHUP: finishing requests in flight", file=server.output)


@pytest.mark.parametrize("removed", ["", "supervisor.lock"])
def test_a_server_whose_temporary_folder_is_removed_ends_in_order_with_the_reason(
    removed: str, start: Start, tmp_path: pathlib.Path
) -> None:
    server = start(PING_S="0.4")
    assert server.url
    (folder,) = tmp_path.glob("noria-*/")
    if removed:
        (folder / removed).unlink()
    else:
        shutil.rmtree(folder)
    assert server.process.wait(TIMEOUT_S) == 1
    server.wait_for("was removed, maybe by a cleaner of temporary files", file=server.output)
    last_line = server.output.read_text().splitlines()[-1]
    assert last_line.startswith("noria: error: ") and "was removed" in last_line
    server.wait_for("frontend stopped")


def test_a_child_that_cannot_be_started_does_not_keep_others_from_being_stopped(start: Start) -> None:
    driver = DRIVER.replace("[sys.executable,", '["/no/such/program" if kind == "frontend" else sys.executable,')
    server = start(driver=driver)
    assert server.process.wait(TIMEOUT_S) == 1
    assert "FileNotFoundError" in server.output.read_text()
    for line in server.events.read_text().splitlines():
        if " started " in line:
            with pytest.raises(ProcessLookupError):
                os.kill(pid(line), 0)


# ── The log ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines_of(server: FakedServer) -> list[dict[str, object]]:
    """Return the log lines, which are JSON, without the banner."""
    return [json.loads(line) for line in server.output.read_text().splitlines() if line.startswith("{")]


def test_lines_of_all_processes_are_collected_with_names_and_events(start: Start) -> None:
    server = start(FAKES_SAY="ünï\nTraceback (most recent call last):\n  File x\nValueError: why")
    assert server.url
    os.kill(pid(server.wait_for("engine-0 ready")[0]), signal.SIGKILL)
    server.wait_for("engine-0 ready", 2)
    server.wait_for("engine_ready", 2, file=server.output)
    assert server.stop() == 0
    lines = lines_of(server)
    printed = [line for line in lines if line["logger"] == "stderr"]
    assert {line["process"] for line in printed} == {"engine-0", "frontend-0"}
    assert {line["message"] for line in printed} == {"ünï", "ValueError: why"}
    events = [line["event"] for line in lines if line["process"] == "supervisor"]
    assert events == ["engine_ready", "engine_restarted", "engine_ready", "stopping", "stopped"]
    (restarted,) = [line for line in lines if line.get("event") == "engine_restarted"]
    assert (restarted["child"], restarted["status"], restarted["level"]) == ("engine-0", -signal.SIGKILL, "error")


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The write end of a full pipe, to which writing blocks."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65_536)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


def test_outputs_that_are_not_read_do_not_keep_a_server_from_serving_restarting_children_and_stopping(
    start: Start, full_pipe: int
) -> None:
    with reserve_port() as port:
        server = start(stdout=full_pipe, stderr=full_pipe, PORT=str(port))
        for run in range(1, 4):  # after the first one the banner blocks on stdout
            os.kill(pid(server.wait_for("engine-0 ready", run)[-1]), signal.SIGKILL)
        with get(f"http://127.0.0.1:{port}") as answer:
            assert answer.status == 200
        assert server.stop() == 0


def test_the_supervisor_imports_no_database_and_no_server() -> None:
    code = "import sys, noria.supervisor.supervisor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"sqlalchemy", "uvicorn", "torch", "numpy"} & set(loaded)
