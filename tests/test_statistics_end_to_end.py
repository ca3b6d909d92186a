"""Statistics in a running server: two front ends and a registrar, real processes, in front of a fake engine."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import httpx
import msgspec
import numpy as np
import pytest

from noria.cli.main import main
from noria.config import Config, StatisticsConfig
from noria.models.catalog import open_model
from noria.models.location import BUNDLED
from noria.protocol.tasks import EngineAddress, FrontendTask, RegistrarTask
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until, wait_until_ready

pytestmark = pytest.mark.slow  # three processes start, one of them twice, and hundreds of requests are answered

SPEC = msgspec.structs.replace(open_model(str(BUNDLED)), name="tiny")
WORDS = ("red", "green", "blue", "circle", "square", "above", "below", "a", "the", "large")


class Server:
    """Two front ends on ports of their own, their registrar, and the folder of their metrics."""

    def __init__(self, folder: str, tmp_path: pathlib.Path, engine: FakeEngine) -> None:
        self.data, self._metrics = tmp_path / "data", tmp_path / "metrics"
        self._metrics.mkdir()
        settings = StatisticsConfig(builtin=("prompts", "parameters", "images"), window_s=600)
        self._config = Config(data_dir=str(self.data), statistics=settings, log_level="warning")
        self._reports, self._engine = f"ipc://{folder}/reports", engine
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in self._listeners]
        self.frontends = [self.start_frontend(number) for number in range(2)]
        self.registrar = self.start_registrar()

    def start_frontend(self, number: int) -> "subprocess.Popen[bytes]":
        fd = self._listeners[number].fileno()
        task = FrontendTask(
            self._config, fd, [self._engine.address], registrar=self._reports, worker_id=f"server/frontend-{number}"
        )
        return self._start("noria.frontend.process", task, fd)

    def start_registrar(self) -> "subprocess.Popen[bytes]":
        engine = EngineAddress("engine-0", self._engine.address, "diffusion")
        task = RegistrarTask(self._config, (engine,), (SPEC,), self._reports, "server")
        return self._start("noria.registrar.process", task)

    def _start(self, module: str, task: msgspec.Struct, *fds: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", module, msgspec.json.encode(task).decode()]
        return subprocess.Popen(
            command, pass_fds=fds, env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(self._metrics)}
        )

    def restart_registrar(self) -> None:
        """Kill it and start it, as the supervisor does; which also removes the gauges of one that has ended."""
        self.registrar.kill()
        self.registrar.wait()
        for file in self._metrics.glob(f"gauge_*_{self.registrar.pid}.db"):
            file.unlink()
        self.registrar = self.start_registrar()

    def stop(self) -> None:
        for process in (*self.frontends, self.registrar):
            process.kill()
            process.wait()
        for listener in self._listeners:
            listener.close()

    def metric(self, line: str) -> float | None:
        found = [each for each in httpx.get(f"{self.urls[0]}/metrics").text.splitlines() if each.startswith(line)]
        return float(found[0].rpartition(" ")[2]) if found else None

    def psi(self, variable: str) -> float | None:
        labels = f'endpoint="tiny",variable="{variable}",version="{SPEC.fingerprint}"'
        return self.metric(f"noria_drift_psi{{{labels}}}")

    def counted(self) -> float:
        return self.metric(f'noria_stat_prompt_words_count{{endpoint="tiny",version="{SPEC.fingerprint}"}}') or 0

    def ask(self, num_words: np.ndarray) -> None:
        """Ask for an image of a prompt of so many words each, of both front ends in turn."""
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(httpx.Client(base_url=url, timeout=60)) for url in self.urls]
            for index, num in enumerate(num_words):
                body = {"prompt": " ".join(WORDS[(index + i) % len(WORDS)] for i in range(num)), "seed": index}
                assert clients[index % 2].post("/t2i", json=body).status_code == 200


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="noria") as folder,  # pytest's own are too long for the path of a socket
        FakeEngine(f"ipc://{folder}/engine", models=(SPEC,)) as engine,
    ):
        server = Server(folder, tmp_path, engine)
        try:
            for url in server.urls:
                wait_until_ready(url)
            yield server
        finally:
            server.stop()


def test_a_shift_of_prompts_raises_the_psi_and_the_same_prompts_do_not(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def noria(*arguments: str) -> str:
        assert main([*arguments, "--data-dir", str(server.data)]) == 0
        return capsys.readouterr().out

    draw = np.random.default_rng(1)
    noria("models", "add", "shapes", "bundled")
    server.ask(draw.poisson(6, 300) + 1)
    wait_until(lambda: server.counted() == 300)
    wait_until(lambda: "300" in noria("stats", "show"), timeout_s=60)
    assert "shapes@1 at tiny has a reference of" in noria("stats", "baseline", "tiny")
    server.ask(draw.poisson(6, 300) + 1)
    wait_until(lambda: server.psi("prompt_words") is not None, timeout_s=60)
    wait_until(lambda: '"num_current":600' in noria("stats", "show", "--json"), timeout_s=60)

    server.restart_registrar()  # what it has kept, the next one goes on with
    wait_until(lambda: server.psi("prompt_words") is not None, timeout_s=60)
    for variable in ("prompt_words", "prompt_chars", "scheduler", "image_brightness"):
        assert abs(server.psi(variable)) < 0.1, variable

    server.frontends[0].kill()
    server.frontends[0].wait()
    server.frontends[0] = server.start_frontend(0)
    wait_until_ready(server.urls[0])
    server.ask(draw.poisson(20, 300) + 1)
    wait_until(lambda: server.counted() == 900)
    wait_until(lambda: '"num_current":900' in noria("stats", "show", "--json"), timeout_s=60)
    wait_until(lambda: server.psi("prompt_words") > 0.1 and server.psi("prompt_chars") > 0.1, timeout_s=60)
    assert abs(server.psi("scheduler")) < 0.1
    found = [json.loads(line)["series"] for line in noria("stats", "show", "tiny", "--json").splitlines()]
    words = next(each for each in found if each["key"][2] == "prompt_words")
    assert words["drift"]["psi"] == pytest.approx(server.psi("prompt_words"))
