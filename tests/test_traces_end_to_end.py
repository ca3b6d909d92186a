"""Traces of the whole server, received by a collector that decodes the OTLP of real processes."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from noria.testing.server import running_server
from waiting import wait_until

BODY = {"prompt": "a red circle above a blue square", "seed": 3, "inference_steps": 6}
CLOCK_TOLERANCE_S = 0.01  # the clocks of two processes

pytestmark = pytest.mark.slow  # servers of its own: 20 s of CPU time each; tests/observe/traces holds the exporter
STAGES = ["queue", "text_encode", "denoise", "decode"]


@pytest.fixture(scope="module")
def server(collector):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        # One thread, because other tests use the other cores.
        arguments = ["bundled", "--slots", "4", "--threads", "1", "--traces-endpoint", collector.endpoint]
        arguments += ["--restart-wait-s", "280"]  # a busy machine takes more than the default minute to start an engine
        with running_server(arguments) as running:
            yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as opened:
        yield opened


def spans_by_name(collector, trace_id, *names):
    """The spans of a trace by name, once all `names` have arrived."""
    spans = collector.wait(lambda spans: of_trace(spans, trace_id, names))
    return {span.name: span for span in spans}


def of_trace(spans, trace_id, names):
    found = [span for span in spans if span.trace_id == trace_id]
    return found if {span.name for span in found} >= set(names) else None


def test_a_request_is_one_tree_from_its_caller_through_both_processes(client, collector, caller):
    trace_id, span_id, header = caller
    answer = client.post(
        "/t2i", json=BODY, headers={"traceparent": header, "tracestate": "vendor=x", "x-request-id": "an-id"}
    )
    assert answer.status_code == 200
    spans = spans_by_name(collector, trace_id, "POST /t2i", *STAGES, "postprocess")
    assert len(spans) == 6
    request = spans["POST /t2i"]
    assert (request.kind, request.parent_id, request.failed, request.tracestate) == (
        "server",
        span_id,
        False,
        "vendor=x",
    )
    assert {spans[name].parent_id for name in [*STAGES, "postprocess"]} == {request.span_id}
    assert {spans[name].tracestate for name in STAGES} == {"vendor=x"}

    assert (
        request.resource["service.instance.id"] == spans["postprocess"].resource["service.instance.id"] == "frontend-0"
    )
    assert {spans[name].resource["service.instance.id"] for name in STAGES} == {"engine-0"}
    assert len({span.resource["process.pid"] for span in spans.values()}) == 2
    for span in spans.values():
        assert span.resource["service.name"] == "noria"
        assert span.resource["deployment.environment.name"] == "test"

    in_order = [spans[name] for name in [*STAGES, "postprocess"]]
    assert request.began - CLOCK_TOLERANCE_S <= in_order[0].began
    assert in_order[-1].ended <= request.ended + CLOCK_TOLERANCE_S
    for one, next_one in itertools.pairwise(in_order):
        assert one.began <= one.ended <= next_one.began + CLOCK_TOLERANCE_S
    spent = {part.split(";")[0].strip(): part for part in answer.headers["server-timing"].split(",")}
    for name in STAGES:
        assert spans[name].ended - spans[name].began == pytest.approx(
            float(spent[name].partition("dur=")[2]) / 1e3, abs=2e-4
        )
    assert spent["traceparent"] == f' traceparent;desc="00-{trace_id}-{request.span_id}-01"'

    attributes = request.attributes
    assert (
        attributes
        | {
            "http.request.method": "POST",
            "http.route": "/t2i",
            "url.path": "/t2i",
            "url.scheme": "http",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "generate_content",
            "gen_ai.output.type": "image",
            "gen_ai.request.model": "noria-shapes",
            "gen_ai.request.seed": 3,
            "noria.inference_steps": 6,
            "noria.images": 1,
            "noria.outcome": "ok",
            "noria.mean_batch": 1.0,
            "noria.request_id": "an-id",
        }
        == attributes
    )
    assert spans["denoise"].attributes["noria.slots"] == 4

    page = client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"}).text
    found = [line for line in page.splitlines() if f'# {{request_id="an-id",trace_id="{trace_id}"}}' in line]
    assert {line.partition("{")[0] for line in found} >= {"noria_request_seconds_bucket", "noria_stage_seconds_bucket"}
    assert spans["denoise"].attributes["noria.request_id"] == "an-id"
    assert not any("red circle" in str(value) for span in spans.values() for value in span.attributes.values())


def test_a_request_without_a_trace_starts_one_and_the_response_names_it(client, collector):
    timing = client.post("/t2i", json=BODY | {"stream": True}).headers["server-timing"]
    trace_id, span_id, flags = timing.removeprefix('traceparent;desc="00-').removesuffix('"').split("-")
    assert int(flags, 16) & 1  # sampled; bit 2 says that the trace id is random
    spans = spans_by_name(collector, trace_id, "POST /t2i", *STAGES, "postprocess")
    assert (spans["POST /t2i"].span_id, spans["POST /t2i"].parent_id) == (span_id, "")
    # the request span lasts as long as the stream
    assert spans["decode"].ended <= spans["POST /t2i"].ended + CLOCK_TOLERANCE_S


def test_probes_pages_and_metrics_are_not_traced(client, collector, caller):
    trace_id, _, header = caller
    for path in ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/"):
        assert client.get(path, headers={"traceparent": header}).status_code == 200
    client.get("/v1/models", headers={"traceparent": header})
    spans_by_name(collector, trace_id, "GET /v1/models")
    assert len(collector.of_trace(trace_id)) == 1


def test_a_cancelled_request_has_spans_of_its_stages_so_far(client, collector, caller):
    trace_id, _, header = caller

    def num_joined():
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("noria_joins_total{"))

    joined_before, body = num_joined(), json.dumps(BODY | {"inference_steps": 200, "n": 16}).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        head = (
            "POST /t2i HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        connection.sendall(f"{head}traceparent: {header}\r\n\r\n".encode() + body)
        wait_until(lambda: num_joined() > joined_before)  # so that it has spent time on denoising
    spans = spans_by_name(collector, trace_id, "POST /t2i", "queue", "denoise")
    assert (spans["POST /t2i"].failed, spans["POST /t2i"].attributes["error.type"]) == (True, "cancelled")
    assert spans["POST /t2i"].attributes["http.response.status_code"] == 499
    assert (spans["denoise"].failed, spans["denoise"].attributes["error.type"]) == (True, "cancelled")
    assert "decode" not in spans


def test_after_an_engine_was_killed_the_trace_has_the_attempt_that_succeeded(client, server, collector, caller):
    trace_id, _, header = caller
    with httpx.stream(
        "POST",
        f"{client.base_url}/t2i",
        json=BODY | {"inference_steps": 150, "stream": True},
        headers={"traceparent": header},
        timeout=280,
    ) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: ") and json.loads(line[6:])["step"] > 0)
        (engine,) = server.children("engine")
        os.kill(engine.pid, signal.SIGKILL)
        assert any(line == "event: finished" for line in lines)
    spans = spans_by_name(collector, trace_id, "POST /t2i", *STAGES, "postprocess")
    assert spans["denoise"].resource["process.pid"] != engine.pid
    assert not spans["POST /t2i"].failed


@contextlib.contextmanager
def serve(*arguments, **environment):
    """A server process, terminated at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "noria", "serve", "bundled", "--slots", "4", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_an_unreachable_collector_costs_one_log_line(tmp_path):
    arguments = ["--data-dir", str(tmp_path), "--traces-endpoint", "http://127.0.0.1:9/v1/traces"]
    timeouts = {"OTEL_EXPORTER_OTLP_TIMEOUT": "280", "OTEL_BSP_EXPORT_TIMEOUT": "280000"}
    with serve(*arguments, OTEL_BSP_SCHEDULE_DELAY="50", **timeouts) as process:
        url = next(line for line in process.stdout if "ready" in line).partition(" on ")[2].strip()
        # the front end may learn of it a moment later
        wait_until(lambda: httpx.get(f"{url}/readyz", timeout=280).is_success)
        for _ in range(3):
            assert httpx.post(f"{url}/t2i", json=BODY, timeout=280).status_code == 200
        stderr, line = "", "\n"
        while line and "export" not in stderr.lower():
            line = process.stderr.readline()
            stderr += line
        stopped_at = time.monotonic()
        process.terminate()
        stderr += process.stderr.read()
        assert process.wait(timeout=120) == 0
    assert time.monotonic() - stopped_at < 120  # not the minutes that the SDK would wait in each process
    export_lines = [line for line in stderr.splitlines() if "export" in line.lower()]
    assert 1 <= len(export_lines) <= 2, stderr  # one for each process
    assert "Traceback" not in stderr
    assert "killed" not in stderr


WITHOUT_THE_EXTRA = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in ("opentelemetry.sdk", "opentelemetry.exporter"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from noria.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_the_extra_the_server_exits_and_says_how_to_install_it():
    arguments = ["serve", "bundled", "--traces-endpoint", "http://127.0.0.1:4318/v1/traces"]
    command = [sys.executable, "-c", WITHOUT_THE_EXTRA, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "pip install 'noria-serve[traces]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_sdk_of_opentelemetry_is_imported_only_if_traces_are_enabled():
    modules = "noria.frontend.process, noria.engine.process, noria.supervisor.supervisor"
    script = f"import sys, {modules}; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0
