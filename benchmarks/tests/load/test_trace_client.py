"""The client of traces against servers that answer late, wrongly or not at all."""

import asyncio
import base64
import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from http_servers import HttpServer
from noria_bench.load.reply_sampler import sampled_replies
from noria_bench.load.trace_client import TraceConfig, run_trace
from noria_bench.load.workload import Arrival, RequestTemplate
from noria_bench.measurement.run_metrics import RequestRecord, attainment

LATE_S = 0.5
PNG = {"content-type": "image/png"}
TIMEOUT_S = 60.0  # only a bound: a run ends when all is answered


@pytest.fixture
def server():
    """Behaves as the prompt says; an image is the prompt's own bytes."""

    def answer(request):
        server.bodies.append(request.json)
        server.encodings.add(request.headers["accept-encoding"])
        match request.json["prompt"]:
            case "fine":
                request.send(b"fine", headers={"Server-Timing": "queue;dur=1.0, predicted;dur=250.0"} | PNG)
            case "two":
                request.send(server.two, headers={"X-Batch-Size": "6", "content-type": "application/json"})
            case "late":
                server.release.wait(LATE_S)
                request.send(b"late", headers=PNG)
            case "together":
                server.together.wait(TIMEOUT_S)
                request.send(b"together", headers=PNG)
            case "never":
                server.release.wait(TIMEOUT_S)
            case "broken":
                request.close_connection = True
            case status:
                request.send(b"{}", int(status))

    with HttpServer(answer) as server:
        server.bodies, server.encodings, server.release = [], set(), threading.Event()
        server.together = threading.Barrier(40)
        files = [{"b64_json": base64.b64encode(text).decode()} for text in (b"one", b"two")]
        server.two = json.dumps({"images": files}).encode()
        yield server
        server.release.set()


def arrivals(*prompts, every_s=0.0, deadline_s=TIMEOUT_S):
    return tuple(
        Arrival(
            number,
            number * every_s,
            deadline_s,
            "normal",
            40.0,
            RequestTemplate(prompt, number, 64, 64, 2, 3.0, "ddim", 1),
        )
        for number, prompt in enumerate(prompts)
    )


def run(server, arrivals_sent, grace_s=TIMEOUT_S, **options):
    """The records of a trace, in the order of their ends."""
    received, url = [], f"http://127.0.0.1:{server.server_port}/t2i"
    asyncio.run(run_trace(TraceConfig(url, arrivals_sent, grace_s, **options), received.append))
    return received


def records(server, arrivals_sent, grace_s=TIMEOUT_S):
    received = sorted(run(server, arrivals_sent, grace_s), key=lambda record: record.number)
    assert [record.number for record in received] == [arrival.number for arrival in arrivals_sent]
    return received


def test_each_way_to_fail_is_a_miss_and_none_stops_the_run(server):
    fine, late, *others = arrivals("fine", "late", "broken", "429", "504", "500")
    received = records(server, (fine, msgspec.structs.replace(late, deadline_s=LATE_S / 2), *others))
    assert [record.status for record in received] == [200, 200, 0, 429, 504, 500]
    assert [record.met_deadline for record in received] == [True] + [False] * 5
    assert attainment(received) == pytest.approx(1 / 6)


def test_an_unanswered_request_is_a_miss_after_the_grace_period(server):
    received = records(server, arrivals("never", "never", deadline_s=LATE_S / 2), grace_s=LATE_S / 2)
    assert [(record.status, record.done_s, record.met_deadline) for record in received] == [(0, None, False)] * 2


def test_requests_are_sent_without_waiting_for_earlier_answers(server):
    received = records(server, arrivals(*["together"] * 40, every_s=0.005))
    assert {record.status for record in received} == {200}
    assert max(record.sent_s for record in received) < min(record.done_s for record in received)
    assert all(record.sent_s >= record.intended_s for record in received)


def test_in_a_closed_loop_each_user_sends_the_next_request_when_the_previous_one_is_answered(server):
    received = run(server, arrivals(*["late"] * 3, deadline_s=None), num_users=2, users_s=1.5 * LATE_S)
    assert sorted(record.number for record in received) == list(range(len(received)))
    assert {record.status for record in received} == {200}
    assert len(received) >= 4  # more than the trace has: it repeats
    assert all(record.sent_s < 2 * LATE_S and record.latency_s >= LATE_S for record in received)
    sent_or_done = sorted([(r.done_s, -1) for r in received] + [(r.sent_s, 1) for r in received])
    assert max(itertools.accumulate(change for _, change in sent_or_done)) == 2


def test_a_record_has_what_the_server_reports(server):
    fine, two = records(server, arrivals("fine", "two"))
    assert (fine.predicted_s, fine.batch_size, fine.queue_s) == (0.25, None, 0.001)
    assert fine.digest == hashlib.sha256(b"fine").hexdigest()[:16]
    assert (two.predicted_s, two.batch_size) == (None, 6)
    assert two.digest == hashlib.sha256(b"onetwo").hexdigest()[:16]


def test_a_request_has_its_deadline_and_every_setting(server):
    (arrival,) = arrivals("fine", deadline_s=1.0)
    records(server, (arrival,))
    settings = {"prompt", "seed", "width", "height", "inference_steps", "guidance_scale", "scheduler", "n"}
    assert set(server.bodies[0]) == settings | {"deadline_ms", "metadata"}
    assert server.bodies[0]["deadline_ms"] == 1000
    assert server.encodings == {"identity"}


def test_the_process_writes_each_record_as_its_request_ends(server):
    config = TraceConfig(f"http://127.0.0.1:{server.server_port}/t2i", arrivals("fine", "never"))
    with subprocess.Popen(
        [sys.executable, "-m", "noria_bench.load.trace_client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        client.stdin.write(msgspec.json.encode(config))
        client.stdin.close()
        first = msgspec.json.decode(next(itertools.chain(client.stdout)), type=RequestRecord)
        client.kill()  # an interrupted run keeps its records
    assert (first.number, first.status) == (0, 200)


def test_without_deadlines_it_ends_when_all_is_answered_and_stores_samples(server, tmp_path):
    started = time.monotonic()
    arrivals_sent = arrivals("fine", "late", "two", "500", deadline_s=None)
    received = run(server, arrivals_sent, 600.0, sample_folder=str(tmp_path))
    assert time.monotonic() - started < 60
    assert sorted((record.number, record.status) for record in received) == [(0, 200), (1, 200), (2, 200), (3, 500)]
    assert [file.name for file in sampled_replies(tmp_path).values()] == ["0.image", "1.image", "2.json"]
    assert all("deadline_ms" not in body for body in server.bodies)


def test_a_malformed_answer_is_recorded(server):
    server.two = b'{"images": null}'
    (record,) = records(server, arrivals("two"))
    assert (record.status, record.digest) == (200, None)
