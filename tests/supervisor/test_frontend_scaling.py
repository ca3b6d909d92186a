"""Front ends start under load and stop without it, with real front ends in front of a fake engine."""

import contextlib
import functools
import http.client
import json
import pathlib
import subprocess
import sys
import threading

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from certificates import make_certificate
from noria.frontend.protocols.open_inference.grpc_messages import SERVICE, message
from noria.testing.server import reserve_port
from waiting import TIMEOUT_S, wait_until

ENGINE = """
import signal, sys
import msgspec
from noria.protocol.process_signals import die_with_parent
from noria.testing.fake_engine import FakeEngine

task = msgspec.json.decode(sys.argv[1])
die_with_parent(signal.SIGKILL, task["parent_pid"])
FakeEngine(task["address"])
signal.pause()
"""

# The limits are low, as another test may use the machine.
DRIVER = """
import sys
from noria.settings import load
from noria.supervisor import frontend_scaler, supervisor

frontend_scaler.SETTLE_S, frontend_scaler.WINDOW_S, frontend_scaler.STOP_AFTER_S = 1.0, 2.0, 2.0
frontend_scaler.START_ABOVE_CORES, frontend_scaler.STOP_BELOW_CORES = 0.2, 0.05
flags = {"registry.deployments": "false"} | dict(argument.split("=", 1) for argument in sys.argv[1:])

def command(kind, task):
    return [sys.executable, "engine.py", task] if kind == "engine" else supervisor.child_command(kind, task)

sys.exit(supervisor.serve(load(None, {}, flags), command))
"""


class Clients:
    """Clients in threads that make requests until `stop`, and collect failures."""

    def __init__(self):
        self.failures, self.num_requests = [], 0
        self.are_busy, self._stopping, self._threads = threading.Event(), threading.Event(), []
        self.are_busy.set()

    def start(self, make_request, pause_s):
        """Call `make_request` again and again, `pause_s` seconds after it has returned while clients are busy."""

        def work():
            while not self._stopping.is_set():
                try:
                    make_request()
                except Exception as error:
                    self.failures.append(repr(error))
                self.num_requests += 1
                self._stopping.wait(pause_s if self.are_busy.is_set() else 2.0)

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def running(folder, port, settings):
    """A supervisor that logs to `folder`/log, until the end of the context."""
    arguments = [f"{key}={value}" for key, value in settings.items()]
    (folder / "engine.py").write_text(ENGINE)
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-c", DRIVER, *arguments, f"frontend.port={port}"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=log)
    with process:
        try:
            url = f"{'https' if 'frontend.ssl_certfile' in settings else 'http'}://127.0.0.1:{port}/readyz"
            is_ready = functools.partial(httpx.get, url, timeout=TIMEOUT_S, verify=False)
            wait_until(lambda: process.poll() is None and is_ready().is_success, ignoring=(httpx.ConnectError,))
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def front_ends(supervisor):
    """Return the running front ends by name."""
    titles = {" ".join(child.cmdline()).strip(): child for child in supervisor.children()}
    return {title.rpartition(" ")[2]: child for title, child in titles.items() if title.startswith("noria frontend")}


def get(connection):
    """Return status and `Connection` of a response."""
    connection.request("GET", "/healthz")
    response = connection.getresponse()
    response.read()
    return response.status, response.headers["connection"]


def call_grpc(channel):
    request = message("ServerLiveRequest")().SerializeToString()
    channel.unary_unary(f"/{SERVICE}/ServerLive")(request, timeout=TIMEOUT_S)


def call_grpc_over_a_new_channel(address):
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call_grpc(channel)


@pytest.mark.slow  # two starts of front ends, and windows of some seconds: 20 s
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_front_end_starts_under_load_and_stops_without_it_and_no_request_fails(
    scheme: str, tmp_path: pathlib.Path
) -> None:
    settings = {"frontend.processes": "1-2", "data_dir": str(tmp_path / "data"), "engine.hang_timeout_s": "3600"}
    with reserve_port() as port, reserve_port() as grpc_port, contextlib.ExitStack() as stack:
        if scheme == "https":
            made = make_certificate(tmp_path)
            settings |= {"frontend.ssl_certfile": str(made.certfile), "frontend.ssl_keyfile": str(made.keyfile)}
            idle = http.client.HTTPSConnection("localhost", port, timeout=TIMEOUT_S, context=made.client_context())
        else:
            settings["frontend.grpc_port"] = str(grpc_port)
            idle = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        url = f"{scheme}://127.0.0.1:{port}"
        supervisor = stack.enter_context(running(tmp_path, port, settings))
        clients = Clients()
        stack.callback(clients.stop)

        def generate(client):
            client.post("/t2i", json={"prompt": "p", "model": "tiny"}).raise_for_status()

        def fetch(path):
            return httpx.get(f"{url}{path}", timeout=TIMEOUT_S, verify=False).raise_for_status().text

        def metric(name, **labels):
            samples = [each for family in text_string_to_metric_families(fetch("/metrics")) for each in family.samples]
            return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

        for _ in range(4):  # over connections that are kept
            client = stack.enter_context(httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False))
            clients.start(functools.partial(generate, client), 0.0)
        clients.start(lambda: fetch("/v1/models"), 0.05)  # over new ones
        if scheme == "http":
            address = f"127.0.0.1:{grpc_port}"
            channel = stack.enter_context(grpc.insecure_channel(address))
            clients.start(lambda: call_grpc(channel), 0.05)
            clients.start(lambda: call_grpc_over_a_new_channel(address), 0.05)

        wait_until(lambda: metric("noria_frontends") == 2)
        first, second = (front_ends(supervisor)[name] for name in ("frontend-0", "frontend-1"))
        wait_until(lambda: sum(each.status == "ESTABLISHED" for each in second.net_connections("tcp")) > 0)
        first.suspend()  # so that the other one accepts this connection
        assert get(idle) == (200, None)
        first.resume()
        clients.are_busy.clear()
        wait_until(lambda: "frontend_retired" in (tmp_path / "log").read_text())
        wait_until(lambda: metric("noria_frontends") == 1)
        assert second.is_running()  # for the client whose connection is idle
        assert get(idle) == (200, "close")
        wait_until(lambda: not second.is_running())
        clients.stop()
        assert clients.failures == []
        assert clients.num_requests > 100
        assert metric("noria_frontend_starts_total", process="frontend-1", cause="load") == 1
        assert metric("noria_frontend_stops_total", process="frontend-1") == 1
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    events = [line.get("event") for line in lines if line.get("child") == "frontend-1"]
    assert events == ["frontend_added", "frontend_retired", "frontend_ended"]
    assert [line for line in lines if line["level"] in ("error", "warning")] == []
