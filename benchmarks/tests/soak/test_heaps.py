"""Small requests beside a heap, of a small HTTP server that serves slower while a heap is in flight."""

import contextlib
import json
import time

import msgspec
import pytest

from http_servers import HttpServer
from noria.errors import ConfigError
from noria.frontend.jobs.inputs import JobRequestBody
from noria.frontend.protocols.openai.embeddings import EmbeddingsRequestBody
from noria.protocol.request import ImageRequestBody
from noria_bench.soak import heaps
from noria_bench.soak.options import HEAP_NAMES, NeighbourOptions


@pytest.fixture
def server():
    """A request takes 10 ms, one of the heap 500 ms; beside the heap, 400 ms."""

    def answer(request):
        if request.command == "DELETE":
            server.num_cancelled += 1
            return request.send({"id": "a", "status": "canceled"})
        if request.command == "GET":
            is_done = time.monotonic() >= server.jobs["a"]
            return request.send({"id": "a", "status": "succeeded" if is_done else "processing"})
        body = request.json
        server.bodies.append(body)
        if request.path == "/v1/jobs":
            server.jobs["a"] = time.monotonic() + 0.1
            return request.send({"id": "a", "status": "starting"}, 202)
        if body["inference_steps"] == 200:
            server.num_heap += 1
            time.sleep(0.5)
            server.num_heap -= 1
        else:
            time.sleep(0.4 if server.num_heap else 0.01)
        return request.send({}, 429 if body.get("prompt") == "fails" else 200)

    with HttpServer(answer) as server:
        server.num_heap, server.num_cancelled, server.jobs, server.bodies = 0, 0, {}, []
        yield server


def clients(server, *, splits=False):
    return heaps.Clients(server.server_port, "t2i", "/t2i", [{}] * (heaps.NUM_SMALL + 1), splits=splits)


def test_small_requests_are_compared_with_their_time_alone(server):
    found = heaps.measure_heap("noria", "long", clients(server), 0.9)
    assert 0.01 <= found.alone_s < found.lone_beside_s >= 0.2
    assert found.growth > 1.0 and found.num_failed == 0
    assert found.slowdowns.keys() == {*(f"small {number}" for number in range(7)), "heap"}
    assert min(value for name, value in found.slowdowns.items() if name != "heap") > found.slowdowns["heap"]
    assert found.steps_per_s > 16 * 200  # a request of the heap takes less than a second


def test_requests_are_of_one_image_where_a_server_takes_no_more(server):
    heap = heaps.HEAPS["long"].heap
    assert (heap.split().connections, heap.split().steps) == (16, 200)
    clients(server, splits=True).run({0: heap}, 0.2)
    assert server.bodies and all("n" not in body for body in server.bodies)


BODIES = {"/t2i": ImageRequestBody, "/v1/jobs": JobRequestBody, "/v1/embeddings": EmbeddingsRequestBody}


@pytest.mark.parametrize("load", [load for heap in heaps.HEAPS.values() for load in (heap.heap, heap.small)])
def test_routes_take_the_bodies_of_all_loads(load):
    body = msgspec.convert(dict(load.body), BODIES[load.path])
    if load.is_of_jobs:
        msgspec.convert(body.input, ImageRequestBody)


def test_the_small_clients_go_on_until_the_heap_is_done(server):
    loads = {0: heaps.HEAPS["long"].small, 7: heaps.HEAPS["long"].heap}
    replies = clients(server).run(loads, 0.1)
    assert replies[0][-1].done_s >= replies[7][-1].done_s


def test_a_job_takes_until_it_has_succeeded_and_one_is_measured_at_least(server, monkeypatch):
    monkeypatch.setattr(heaps, "_JOB_POLL_S", 0.1)
    assert clients(server).run({7: heaps.HEAPS["jobs"].heap}, 0.0)[7]
    server.num_cancelled = 0
    (replies,) = clients(server).run({7: heaps.HEAPS["jobs"].heap}, 0.5).values()
    assert {reply.status for reply in replies} == {200} and min(reply.latency_s for reply in replies) >= 0.1
    assert 0 < server.num_cancelled <= heaps.HEAPS["jobs"].heap.connections  # a last one may just have succeeded


def test_what_was_measured_is_written_and_rejected_requests_count(server, monkeypatch, tmp_path, capsys):
    load = heaps.Load("/t2i", {"prompt": "fails", "inference_steps": 200}, steps=200)
    monkeypatch.setattr(heaps, "HEAPS", {"long": heaps.Heap(load, heaps.HEAPS["long"].small)})
    monkeypatch.setattr(heaps, "open_both_models", lambda config: (config, None, None))
    monkeypatch.setattr(heaps, "_serving", lambda *_: contextlib.nullcontext(clients(server)))
    options = NeighbourOptions("heaps", ("long",), ("noria-fcfs",), 0.3)
    assert heaps.main(heaps.Config(), options, tmp_path) == 0
    (result,) = json.loads((tmp_path / heaps.FILE_NAME).read_bytes())["results"]
    assert result["num_failed"] > 0 and result["slowdowns"]["heap"] is None
    assert "| long, noria-fcfs |" in capsys.readouterr().out


def test_a_target_that_is_not_installed_ends_the_bench_before_it_measures(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(heaps, "open_both_models", lambda _: pytest.fail("it began"))
    with pytest.raises(ConfigError, match=r"litserve is not installed.*noria bench install litserve"):
        heaps.main(heaps.Config(), NeighbourOptions(targets=("noria", "litserve")), tmp_path)


def test_every_heap_has_an_option():
    assert tuple(heaps.HEAPS) == HEAP_NAMES
