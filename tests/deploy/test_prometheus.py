"""Every panel and rule has data in a real Prometheus (Debian: prometheus) that scrapes two real servers.

One has images, the other texts, user code and deployments. GPU panels use a page in dcgm-exporter's format, since test
machines have no GPU.
"""

import concurrent.futures
import contextlib
import functools
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import threading
import time
import uuid

import httpx
import psutil
import pytest
import yaml

from encoders import make_encoder, sentence_transformer
from noria.cli.main import main
from noria.dashboards.build import DASHBOARDS
from noria.dashboards.gpu import GPU
from noria.testing.server import running_server
from safety_classifiers import save_classifier
from waiting import wait_until

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(400)]

RULES = pathlib.Path(__file__).parents[2] / "deploy" / "prometheus"
DCGM_PAGE = pathlib.Path(__file__).parent / "dcgm_exporter_page.txt"
SCRAPE_S = 2
NUM_TARGETS = 4
IMAGES = '{model="noria-shapes"}'
ENDPOINT = """
class Similarity:
    def preprocess(self, body, state):
        return body["texts"]

    def postprocess(self, result, state):
        return {"similarity": result.rows[0] @ result.rows[1]}
"""


@pytest.fixture(scope="module")
def dcgm():
    """The addresses of two exporters with the same page: dcgm-exporter, and Noria if it sees the GPU too."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = DCGM_PAGE.read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield [f"{host}:{server.server_port}" for host in ("127.0.0.1", "localhost")]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def noria(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noria")
    (folder / "prompts.json").write_text(json.dumps({"prompt": ["a red circle"] * 300}))
    registry = ["--data-dir", str(folder / "data")]
    assert main(["models", "add", "shapes", "bundled", *registry]) == 0
    reference = ["--version", "shapes@1", "--from", str(folder / "prompts.json")]
    assert main(["stats", "baseline", "noria-shapes", *reference, *registry]) == 0
    options = ["--processes", "2", "--devices", "cpu,cpu", "--slots", "4"]
    options += ["--safety-classifiers", str(save_classifier(folder / "nsfw")), "--safety-threshold", "1"]
    statistics = ["--statistics-builtin", "prompts,parameters,images", *registry]
    with running_server(["bundled", *options, *statistics]) as server:
        yield server


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A server of an embedding model `small` and a classifier; and its registry, with another version of `small`."""
    folder = tmp_path_factory.mktemp("texts")
    small = make_encoder(folder / "small", **sentence_transformer())
    labels = {"id2label": {0: "bad", 1: "good"}}
    classifier = make_encoder(folder / "classifier", "BertForSequenceClassification", labels)
    shutil.copytree(small, folder / "second")
    weights = bytearray((folder / "second" / "model.safetensors").read_bytes())
    (folder / "second" / "model.safetensors").write_bytes(weights[:-4096] + bytes(4096))
    (folder / "similarity.py").write_text(ENDPOINT)
    (folder / "noria.toml").write_text(
        f'[[endpoints]]\nname = "similarity"\ncode = "{folder}/similarity.py:Similarity"\nmodel = "small"\n'
    )
    registry = ["--data-dir", str(folder / "data")]
    assert main(["models", "add", "small", str(folder / "second"), *registry]) == 0
    options = ["--additional-models", str(classifier), "--config", str(folder / "noria.toml")]
    statistics = ["--statistics-builtin", "texts", *registry]
    with running_server([str(small), *options, *statistics, "--mount-niceness", "5"]) as server:
        yield server, registry


class Prometheus:
    def __init__(self, client):
        self._client = client

    def ready(self):
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, expr):
        """Return labels and value of each result of an instant query."""
        answer = self._client.get("/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def value(self, expr):
        return next((value for _, value in self.ask(expr)), None)

    def scraped(self, times):
        """Wait until each target was scraped, and the rules were evaluated, `times` more."""
        counts = "count_over_time(up[1h])"
        wanted = {tuple(sorted(labels.items())): count + times for labels, count in self.ask(counts)}

        def more():
            have = {tuple(sorted(labels.items())): count for labels, count in self.ask(counts)}
            return len(have) == NUM_TARGETS and all(
                count >= wanted.get(target, times) for target, count in have.items()
            )

        wait_until(more)

    def exemplars(self, expr):
        params = {"query": expr, "start": time.time() - 600, "end": time.time()}
        return self._client.get("/api/v1/query_exemplars", params=params).json()["data"]

    def alerts(self, name):
        """Return the pending and firing alerts of a name by engine."""
        alerts = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {alert["labels"]["engine"]: alert for alert in alerts if alert["labels"]["alertname"] == name}


@contextlib.contextmanager
def running_prometheus(folder, scrape_configs):
    """Prometheus with the rules of `deploy/`, in a hurry."""
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    del config["alerting"]
    config["scrape_configs"] = scrape_configs
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        "--web.listen-address=127.0.0.1:0",
    ]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [*command, "--enable-feature=exemplar-storage"], cwd=folder, stdout=log, stderr=log
        ) as process,
    ):
        try:
            listening = wait_until(lambda: re.search(r'"Listening on" address=(\S+)\s', (folder / "log").read_text()))
            with httpx.Client(base_url=f"http://{listening[1]}", timeout=60) as client:
                found = Prometheus(client)
                wait_until(found.ready)
                yield found
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def prometheus(noria, texts, dcgm, tmp_path_factory):
    targets = [f"127.0.0.1:{each.port}" for each in (noria, texts[0])]
    scrape_configs = [
        {"job_name": "noria", "static_configs": [{"targets": targets}]},
        {"job_name": "dcgm", "static_configs": [{"targets": dcgm}]},
    ]
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), scrape_configs) as found:
        yield found


@contextlib.contextmanager
def asking_texts(server):
    """A user of each route and model, who asks five times a second."""
    requests = [
        ("/v1/embeddings", {"input": ["a red circle", "blue"], "normalize": False}),  # a norm of 1 is not counted
        ("/predict", {"inputs": "what a lovely day"}),
        ("/v1/endpoints/similarity", {"texts": ["a cat", "a kitten"]}),
    ]
    stopping = threading.Event()

    def ask(path, body):
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client:
            while not stopping.wait(0.2):
                assert client.post(path, json=body).status_code == 200, path

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as users:
        asking = [users.submit(ask, path, body) for path, body in requests]
        try:
            yield
        finally:
            stopping.set()
        for each in asking:
            each.result()


def deploy_with_shadow_and_canary(registry, prometheus):
    """Have copies of requests answered by the other version of `small`, then half of the requests themselves."""

    def is_positive(metric):
        return (prometheus.value(f'sum({metric}{{version="small@1"}})') or 0) > 0

    plan = ["--shadow", "100%", "--canary", "50%", "--wait", "120"]
    assert main(["deploy", "small", "small@1", *plan, *registry]) == 0
    wait_until(lambda: is_positive("noria_shadow_distance_count"))
    assert main(["promote", "small", *registry]) == 0
    wait_until(lambda: is_positive("noria_deployment_requests_total"))
    prometheus.scraped(2)  # two values of each metric, for their rates


@pytest.fixture(scope="module")
def loaded(noria, texts, prometheus):
    """Prometheus after half a minute of load, and the seconds of the image requests as their clients measured them."""
    url = f"http://127.0.0.1:{noria.port}"
    seconds = []
    with httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        def generate(k):
            started = time.monotonic()
            answer = client.post("/t2i", json={"prompt": f"a red circle {k}", "inference_steps": 4 + k % 5})
            assert answer.status_code == 200
            seconds.append(time.monotonic() - started)

        wait_until(lambda: prometheus.value("sum(noria_engine_up)") == 3)
        with asking_texts(texts[0]):
            deploy_with_shadow_and_canary(texts[1], prometheus)
            for round_ in range(3):  # rates need several scrapes
                with concurrent.futures.ThreadPoolExecutor(6) as users:
                    list(users.map(generate, range(30 * round_, 30 * round_ + 30)))
                prometheus.scraped(1)
        assert client.post("/t2i", json={"prompt": "p", "n": 0}).status_code == 400
        job = client.post("/v1/jobs", json={"input": {"prompt": "a job", "inference_steps": 2}}).json()
        wait_until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "succeeded")
    done = 'sum(noria_requests_total{model="noria-shapes",outcome="ok"})'  # and the job
    wait_until(lambda: (prometheus.value(done) or 0) > len(seconds))
    prometheus.scraped(3)  # some values are exported later, and the rate of a new series needs two scrapes
    return prometheus, seconds


def panels():
    for dashboard in DASHBOARDS:
        for row in dashboard.rows:
            for panel in row.panels:
                for position, query in enumerate(panel.queries):
                    yield pytest.param(query.expr, id=f"{dashboard.uid} {panel.title} {position}")


@pytest.mark.parametrize("expr", list(panels()))
def test_every_panel_has_data(loaded, expr):
    prometheus, _ = loaded
    wait_until(functools.partial(prometheus.ask, re.sub(r'"\$\w+"', '".*"', expr)))


def test_a_gpu_with_two_exporters_is_shown_once(loaded):
    prometheus, _ = loaded
    (row,) = (row for row in GPU.rows if row.title == "GPU")
    for panel in row.panels:
        for query in panel.queries:
            assert len(wait_until(lambda query=query: prometheus.ask(query.expr))) == 1, panel.title


def test_every_recording_rule_has_data(loaded):
    prometheus, _ = loaded
    groups = yaml.safe_load((RULES / "recording.yml").read_text())["groups"]
    records = {rule["record"] for group in groups for rule in group["rules"]}
    wait_until(lambda: all(prometheus.ask(record) for record in records))  # they are evaluated every 15 s


def test_prometheus_and_the_clients_count_the_same(loaded):
    prometheus, seconds = loaded
    counted = prometheus.value(f"sum(noria_request_seconds_count{IMAGES})") - 1  # the job
    assert counted == pytest.approx(len(seconds), rel=0.01)
    assert prometheus.value("sum(noria_images_total)") - 1 == pytest.approx(len(seconds), rel=0.01)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_prometheus_and_the_clients_agree_on_percentiles_within_a_bucket(loaded, share):
    prometheus, seconds = loaded
    bounds = sorted(
        float(labels["le"]) for labels, _ in prometheus.ask(f"sum by (le) (noria_request_seconds_bucket{IMAGES})")
    )
    reported = prometheus.value(f"histogram_quantile({share}, sum by (le) (noria_request_seconds_bucket{IMAGES}))")
    measured = sorted(seconds)[int(share * len(seconds))]

    def bucket(value):
        return next(position for position, bound in enumerate(bounds) if value <= bound)

    assert abs(bucket(reported) - bucket(measured)) <= 1


def test_a_slow_bucket_has_a_request_id(loaded):
    prometheus, _ = loaded
    found = wait_until(lambda: prometheus.exemplars("noria_request_seconds_bucket"))
    names = {exemplar["labels"]["request_id"] for series in found for exemplar in series["exemplars"]}
    assert names
    assert all(re.fullmatch(r"[0-9a-f]{32}|job_\w+|[\w.-]+", name) for name in names)


def test_each_engine_has_series_of_its_own(loaded, noria):
    prometheus, _ = loaded
    of_images = f'instance="127.0.0.1:{noria.port}"'
    for name in ("engine_up", "slots", "iterations_total", "denoise_steps_total", "joins_total", "device_memory_bytes"):
        found = {
            labels["engine"]: value
            for labels, value in prometheus.ask(f"sum by (engine) (noria_{name}{{{of_images}}})")
        }
        assert set(found) == {"engine-0", "engine-1"}, name
        assert all(value > 0 for value in found.values()), (name, found)
    assert prometheus.value(f"sum(noria_slots{{{of_images}}})") == 8


def test_a_slow_bucket_has_a_trace_id_even_if_both_ids_fill_the_exemplar(loaded, noria):
    prometheus, _ = loaded
    ids = {"trace_id": uuid.uuid4().hex, "request_id": uuid.uuid4().hex.ljust(78, "x")}
    headers = {"traceparent": f"00-{ids['trace_id']}-00f067aa0ba902b7-01", "x-request-id": ids["request_id"]}
    url = f"http://127.0.0.1:{noria.port}/t2i"

    def is_kept():
        # Each scrape is answered by one of the front ends, with its own exemplars.
        assert httpx.post(url, json={"prompt": "p", "inference_steps": 2}, headers=headers, timeout=120).is_success
        found = prometheus.exemplars("noria_request_seconds_bucket")
        return ids in [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    wait_until(is_kept)


def started_since(noria, known):
    """Return a child of the supervisor that is not in `known`, once it runs its own program; else None."""
    own = noria.process.cmdline()
    return next(
        (child for child in noria.process.children() if child.pid not in known and child.cmdline() != own), None
    )


def test_a_killed_engine_is_seen_and_named_by_its_alerts(loaded, noria):
    prometheus, _ = loaded
    assert prometheus.value("sum(noria_engines_configured)") == 3
    before = prometheus.value("sum(noria_requests_total)")
    (engine,) = (child for child in noria.children("engine") if "engine-1" in " ".join(child.cmdline()))
    killed, known = time.monotonic(), {child.pid for child in noria.process.children()}
    engine.kill()
    successor = wait_until(lambda: started_since(noria, known), ignoring=(psutil.NoSuchProcess,))
    successor.suspend()  # so that it does not become ready before the check
    try:
        missing = wait_until(lambda: prometheus.alerts("NoriaEngineMissing"))
        prometheus.scraped(1)
    finally:
        successor.resume()
    assert set(missing) == {"engine-1"}
    firing = wait_until(lambda: prometheus.alerts("NoriaEngineRestarted"))
    assert set(firing) == {"engine-1"}
    assert re.match(r"engine-1 of \S+ was restarted .* was killed\.", firing["engine-1"]["annotations"]["summary"])
    wait_until(lambda: prometheus.value("sum(noria_engine_up)") == 3)
    since = f"{time.monotonic() - killed:.0f}s"
    # Meanwhile it was not ready, while the other was; for less than the five minutes after which that alert fires.
    for engine, least in (("engine-0", 1), ("engine-1", 0)):
        assert prometheus.value(f'min_over_time(noria_engine_up{{engine="{engine}"}}[{since}])') == least, engine
    pending = prometheus.ask(f'count_over_time(ALERTS{{alertname="NoriaEngineMissing",alertstate="pending"}}[{since}])')
    assert {labels["engine"] for labels, _ in pending} == {"engine-1"}
    assert prometheus.value('sum(noria_engine_starts_total{previous_exit="killed"})') == 1
    assert prometheus.value("sum(noria_requests_total)") >= before  # the counts of the killed engine are kept


@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_the_replicas_of_a_cluster_are_one_server_to_rules_and_alerts(ray_world, tmp_path):
    wait_until(ray_world.is_whole, 240)
    discovery = {"url": f"http://127.0.0.1:{ray_world.port}/metrics/targets", "refresh_interval": "2s"}
    with running_prometheus(tmp_path, [{"job_name": "noria", "http_sd_configs": [discovery]}]) as prometheus:
        wait_until(lambda: prometheus.value("sum(up)") == 6)
        found = prometheus.ask("up")
        assert (
            {labels["instance"] for labels, _ in found} == {labels["application"] for labels, _ in found} == {"noria"}
        )
        assert len({(labels["deployment"], labels["replica"]) for labels, _ in found}) == 6
        wait_until(lambda: prometheus.value("sum(noria_engine_up)") == 4)
        assert prometheus.value("sum(noria_engines_configured)") == 4

        def busy():
            body = {"prompt": "a red circle", "inference_steps": 4}
            assert ray_world.http.post("/t2i", json=body).status_code == 200
            records = ("instance_model:noria_images:rate1m", "instance:noria_engine_busy:ratio_rate1m")
            return all((prometheus.value(record) or 0) > 0 for record in records)

        wait_until(busy)
        for record in ("instance:noria_engine_busy:ratio_rate1m", "instance:noria_batch_size:mean1m"):
            assert [labels["instance"] for labels, _ in prometheus.ask(record)] == ["noria"]
        assert not prometheus.ask('ALERTS{alertname=~"NoriaDown|NoriaNoEngine|NoriaEngineMissing"}')
