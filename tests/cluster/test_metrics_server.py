"""The metrics of one replica over HTTP, and where Prometheus finds those of all."""

import httpx
import pytest

from noria.cluster.metrics_server import MetricsServer, targets


@pytest.fixture
def server():
    asked = []

    def render(accept):
        asked.append(accept)
        if accept == "gone":
            raise FileNotFoundError("the folder")
        return b"noria_engine_up 1\n", "text/plain"

    opened = MetricsServer("127.0.0.1", render)
    yield opened, asked
    opened.close()


@pytest.mark.parametrize(
    ("path", "accept", "status"), [("/metrics", "text/plain", 200), ("/metrics", "gone", 503), ("/other", "", 404)]
)
def test_a_scraper_gets_the_format_that_it_asks_for(server, path, accept, status):
    opened, asked = server
    answer = httpx.get(f"http://{opened.address}{path}", headers={"accept": accept})
    assert answer.status_code == status
    if status == 200:
        assert (answer.text, answer.headers["content-type"]) == ("noria_engine_up 1\n", "text/plain")
        assert asked == [accept]


def test_prometheus_finds_each_replica_with_its_labels_as_one_instance():
    replicas = {
        "frontend": [{"name": "a", "metrics": "192.0.2.1:1"}],
        "engine-tiny": [
            {"name": "b", "metrics": "192.0.2.2:2", "zmq": "tcp://192.0.2.2:3"},
            {},
        ],  # one says nothing yet
    }
    assert targets("noria", replicas) == [
        {
            "targets": [address],
            "labels": {
                "instance": "noria",
                "application": "noria",
                "deployment": deployment,
                "replica": name,
                "node": node,
            },
        }
        for address, node, deployment, name in [
            ("192.0.2.1:1", "192.0.2.1", "frontend", "a"),
            ("192.0.2.2:2", "192.0.2.2", "engine-tiny", "b"),
        ]
    ]
