"""An engine of a replica, over all its restarts; its process is small and needs no model and no Ray."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from noria.cluster.engine_runner import EngineRunner
from noria.config import Config, EngineConfig
from noria.testing.fake_engine import FAKE_LOAD, FAKE_MODEL
from waiting import TIMEOUT_S, wait_until

ENGINE = """
import os, pathlib, signal, socket, sys, uuid
import msgspec
from noria.protocol.messages import EngineState, Hello, Leave, LoadAck, Ping, Pong
from noria.protocol.process_signals import leave_signals_to_supervisor
from noria.protocol.tasks import EngineTask
from noria.testing.fake_engine import FAKE_LOAD, open_channel

task = msgspec.json.decode(sys.argv[1], type=EngineTask)
leave_signals_to_supervisor()
incarnation = uuid.uuid4().hex
channel, inbox = open_channel(
    task.address, pathlib.Path(task.secret_key_file).read_text(), socket.socket(fileno=task.fd)
)
signal.signal(signal.SIGRTMIN, lambda *_: os._exit(0))
while True:
    client, message, _ = inbox.get()
    match message:
        case Hello():
            channel.send(client, EngineState(incarnation, "ready", task.models, task.previous_exit))
            channel.send(client, FAKE_LOAD)
        case Leave():
            channel.send(client, msgspec.structs.replace(FAKE_LOAD, num_running=0, num_waiting=0))
        case Ping() if task.previous_exit == "none" and task.device == "cuda":
            channel.send(client, Pong(incarnation, 77.0, 50.0))
        case Ping():
            channel.send(client, Pong(incarnation, 0.0, 50.0))
"""

RunEngine = Callable[..., EngineRunner]


@pytest.fixture
def run_engine() -> Iterator[RunEngine]:
    runners: list[EngineRunner] = []

    def run(script: str = ENGINE, device: str = "cpu") -> EngineRunner:
        config = Config(engine=EngineConfig(devices=(device,)))
        command = lambda kind, task: [sys.executable, "-c", script, task]  # noqa: E731
        runners.append(EngineRunner(config, [FAKE_MODEL], list, "engine#1", "127.0.0.1", command))
        return runners[-1]

    yield run
    for runner in runners:
        runner.stop()


def restarted(runner: EngineRunner, pid: int) -> bool:
    return runner.engine.pid not in (None, pid) and runner.engine.is_ready


def test_an_engine_on_ray_has_the_environment_of_one_machine(
    run_engine: RunEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLIBC_TUNABLES", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    runner = run_engine()
    runner.ready.result(TIMEOUT_S)
    environment = psutil.Process(runner.engine.pid).environ()
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "GOMP_SPINCOUNT" not in environment
    assert environment["PROMETHEUS_MULTIPROC_DIR"] == runner.metrics_folder


@pytest.mark.parametrize(("device", "cause"), [("cpu", "killed"), ("cuda", "crashed")])
def test_an_engine_that_was_killed_or_hung_is_started_again_at_the_same_address(
    run_engine: RunEngine, device: str, cause: str
) -> None:
    runner = run_engine(device=device)
    runner.ready.result(TIMEOUT_S)
    address, pid = runner.endpoint.address, runner.engine.pid
    assert pid is not None
    if device == "cpu":
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: restarted(runner, pid), TIMEOUT_S)
    assert runner.endpoint.address == runner.engine.task.address == address
    assert (runner.engine.task.previous_exit, runner.failure) == (cause, "")


def test_an_engine_drains_until_it_has_nothing_to_do_and_ends_with_the_runner(run_engine: RunEngine) -> None:
    runner = run_engine()
    runner.ready.result(TIMEOUT_S)
    wait_until(lambda: runner.engine.load == FAKE_LOAD, TIMEOUT_S)
    asyncio.run(runner.drain(TIMEOUT_S))
    assert runner.engine.load is not None
    assert runner.engine.load.num_running == 0
    runner.stop()
    assert (runner.engine.pid, runner.engine.load) == (None, None)


def test_an_engine_that_rejects_its_model_is_given_up_with_the_reason(run_engine: RunEngine) -> None:
    runner = run_engine("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"^engine#1 ended with status 3: it rejected its model; its log has the"):
        runner.ready.result(TIMEOUT_S)
