"""`noria bench serve TARGET`: a real target in the foreground, and the commands that it prints."""

import contextlib
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request

import psutil
import pytest

from noria.config import Config
from noria.errors import ConfigError
from noria_bench.targets import serve
from noria_bench.targets.catalog import TARGETS, Target

TIMEOUT_S = 120
SERVE_SCRIPT = (
    "import sys; from noria_bench.targets import serve; from noria.config import Config; "
    "sys.exit(serve.main(Config(model=sys.argv[1]), sys.argv[2], 0))"
)


@contextlib.contextmanager
def serving(model, target):
    """The process, and the commands that it printed once its server was ready."""
    command = [sys.executable, "-c", SERVE_SCRIPT, str(model), target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output = ""
            while "Non-2xx" not in output:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                output += line
            yield process, {line.split()[0]: shlex.split(line) for line in output.splitlines() if line.startswith("  ")}
        finally:
            process.kill()


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    "end",
    [
        "Ctrl-C",
        # Each starts a server; the fast tests have one end of three.
        pytest.param("SIGTERM", marks=pytest.mark.slow),
        pytest.param("its server is killed", marks=pytest.mark.slow),
    ],
)
def test_it_serves_until_it_is_stopped_and_leaves_nothing(tiny_folder, end):
    with serving(tiny_folder, "reference-response-sync") as (process, lines):
        assert set(lines) == {"curl", "ab"}
        url, body_file = lines["ab"][-1], lines["ab"][lines["ab"].index("-p") + 1]
        assert url == lines["curl"][-1]
        body = pathlib.Path(body_file).read_bytes()
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            assert answer.read().startswith(b"\x89PNG")
        (server,) = psutil.Process(process.pid).children()
        if end == "its server is killed":
            server.kill()
        else:
            process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGTERM)
        stderr = process.communicate(timeout=TIMEOUT_S)[1]
        assert process.returncode == (1 if end == "its server is killed" else 0), stderr
        assert "Traceback" not in stderr
        assert not server.is_running()
        assert not pathlib.Path(body_file).exists()


def test_the_commands_are_complete_for_every_target(tmp_path):
    for target in TARGETS.values():
        text = serve.usage_text(target, 8001, tmp_path / "a body.json")
        assert f"'{tmp_path}/a body.json' -T application/json http://127.0.0.1:8001{target.path}\n" in text


def test_a_port_that_cannot_be_used_is_rejected_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            with pytest.raises(ConfigError, match=f"port {port} is not available .*--port 0"):
                serve.main(Config(model="/nowhere"), "noria", port)


def test_a_missing_framework_is_rejected_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match="noria bench install litserve"):
        serve.main(Config(), "litserve", 0)


def test_a_server_that_never_gets_ready_is_a_failure(monkeypatch, capfd):
    monkeypatch.setitem(serve.TARGETS, "ends", Target("ends", "/t2i", "noria_bench.targets.nowhere"))
    assert serve.main(Config(), "ends", 0) == 1
    assert "the server ended with status 1" in capfd.readouterr().err
