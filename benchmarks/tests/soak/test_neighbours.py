"""The waits of a quiet client, of a small HTTP server that an attack slows down."""

import contextlib
import json
import threading
import time

import pytest

from http_servers import HttpServer
from noria_bench.soak import neighbours


@pytest.fixture
def slow():
    return threading.Event()


@pytest.fixture
def status():
    """The status that the server answers with, which an attack changes."""
    return [200]


@pytest.fixture
def port(slow, status):
    def answer(request):
        time.sleep(0.5 if slow.is_set() else 0.001)
        request.send(status=status[0])

    with HttpServer(answer) as server:
        yield server.server_port


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(neighbours, "ALL_WINDOWS", neighbours.Windows(1, 0.1))
    monkeypatch.setattr(neighbours, "QUIET_REQUESTS", {"/healthz": (5, None)})
    monkeypatch.setattr(neighbours, "GRPC_ATTACKS", {})


def test_an_attack_that_slows_others_down_is_a_failure(port, slow, monkeypatch, tmp_path, capsys):
    def slow_down(attacked_port, stopped):
        assert attacked_port == port
        slow.set()
        stopped.wait()
        slow.clear()

    attacks = {"slow": slow_down, "none": lambda _port, stopped: stopped.wait()}
    monkeypatch.setattr(neighbours, "NEIGHBOUR_ATTACKS", attacks)
    monkeypatch.setattr(neighbours, "serving", lambda: contextlib.nullcontext((port, 0)))
    assert neighbours.measure_attacks(tmp_path) == 1
    result = json.loads((tmp_path / "neighbours.json").read_bytes())
    slowed, served = (result["attacks"][name]["/healthz"] for name in ("slow", "none"))
    assert len(slowed["growths"]) == 3 and min(slowed["growths"]) > neighbours.ALLOWED_GROWTH
    assert slowed["attacked_p99_s"] > 0.5 > slowed["p99_s"] >= slowed["median_s"] > 0.001
    assert served["growths"][-1] <= neighbours.ALLOWED_GROWTH
    assert f"| none | {served['growths'][-1]:.2f} |" in capsys.readouterr().out
    assert result["commit"]


def test_a_quiet_client_that_is_rejected_ends_the_run_and_what_was_measured_is_kept(
    port, monkeypatch, tmp_path, status
):
    def reject(_port, stopped):
        status[0] = 429
        stopped.wait()

    attacks = {"none": lambda _port, stopped: stopped.wait(), "reject": reject}
    monkeypatch.setattr(neighbours, "NEIGHBOUR_ATTACKS", attacks)
    monkeypatch.setattr(neighbours, "serving", lambda: contextlib.nullcontext((port, 0)))
    with pytest.raises(RuntimeError, match="during the attack 'reject', the quiet client's GET /healthz got 429"):
        neighbours.measure_attacks(tmp_path)
    assert json.loads((tmp_path / "neighbours.json").read_bytes())["attacks"].keys() == {"none"}
