"""The arithmetic of the quick bench, and its users against a faulty server."""

import itertools
import os
import signal
import threading

import pytest

from http_servers import HttpServer
from noria.config import Config, EngineConfig
from noria_bench.benches import quick
from noria_bench.benches.quick import summarise, table
from noria_bench.load.closed_loop import Reply, images_per_second, run_closed_loop
from noria_bench.load.workload import caption
from waiting import wait_until


def test_images_per_second_counts_the_intervals_after_the_warm_up():
    replies = [Reply(0.0, done, 200, 1) for done in (1.0, 2.0, 2.5, 3.0, 4.0)]
    assert images_per_second(replies, warm_up_s=2.0) == pytest.approx(3 / 2)


def test_failures_are_not_images():
    replies = [Reply(0.0, 1.0, 200, 1), Reply(0.0, 1.5, 500, 1), Reply(0.0, 2.0, 200, 1)]
    assert images_per_second(replies, warm_up_s=0.0) == pytest.approx(1.0)
    with pytest.raises(RuntimeError, match="too few"):
        images_per_second(replies, warm_up_s=1.5)


def test_the_server_does_not_write_its_request_log_into_the_bench_s_output(tiny_folder, monkeypatch):
    class StartedError(Exception):
        pass

    def running_server(arguments):
        level = arguments[arguments.index("--log-level") + 1]
        raise StartedError(level)

    monkeypatch.setattr(quick, "running_server", running_server)
    with pytest.raises(StartedError, match="warning"):
        quick.measure(Config(model=str(tiny_folder), engine=EngineConfig(devices=("cpu",), threads=1)))


def make_round(loop, server, bare, served):
    return {
        "loop_images_per_s": loop,
        "server_images_per_s": server,
        "pipeline_seconds": bare,
        "server_seconds": served,
        "frontend_cpu_ms": 3.0,
        "requests": 10,
        "failures": 1,
    }


def test_the_ratios_are_medians_of_each_rounds_own_ratio():
    summary = summarise([make_round(4, 4, 1.0, 1.1), make_round(2, 1, 1.0, 1.0), make_round(8, 7.6, 0.5, 1.0)])
    assert summary["throughput_ratio"] == pytest.approx(0.95)
    assert summary["latency_ratio"] == pytest.approx(1.1)
    assert summary["failures"] == 3


def test_errors_and_dropped_connections_are_counted_as_failures():
    numbers = itertools.count()

    def answer(request):
        if next(numbers) % 2:
            request.send(status=503)
        else:
            request.close_connection = True  # no answer at all

    with HttpServer(answer) as server:
        replies = run_closed_loop(server.server_port, 1, 600.0, lambda k: {"prompt": caption(k)}, max_requests=2)
    assert [reply.status for reply in replies] == [0, 503]


@pytest.mark.parametrize("at", [0, 20])  # while they start, and afterwards
def test_ctrl_c_ends_every_user(at):
    before = set(threading.enumerate())

    def body(number):
        if number == at:
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    with pytest.raises(KeyboardInterrupt):
        run_closed_loop(1, 4, 600.0, body)  # where nothing listens
    # A thread that was interrupted while it started cannot be joined yet.
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_the_table_names_commit_and_machine():
    result = {
        "summary": summarise([make_round(4, 4, 1.0, 1.1)]),
        "machine": {"cores": 2, "cpu": "Test CPU", "load_average_before": 0.5},
        "model": {"name": "m"},
        "workload": {"steps": 20},
        "noria": "0",
        "commit": "abc",
        "date": "2026-01-01T00:00:00",
        "seconds_to_ready": 5.0,
    }
    text = table(result)
    assert "| 8 users, images/s | 4.00 | 4.00 | 1.000 |" in text
    assert "2 cores of Test CPU" in text
    assert "at abc" in text
