"""Single requests that made the server fail, or block others."""

import concurrent.futures
import itertools
import threading

import httpx
import pytest

from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.frontend.services.images import image_writer
from waiting import wait_until_ready

TXT2IMG = "/sdapi/v1/txt2img"
OPENMETRICS = {"accept": "application/openmetrics-text"}


@pytest.fixture
def client(serve, new_engine):
    with serve(Config(), new_engine()) as (url, _), httpx.Client(base_url=url, verify=False, timeout=60) as opened:
        wait_until_ready(url)
        yield opened


def nested(levels):
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("field", ["unknown", "eta", "override_settings"])
def test_hostile_values_of_ignored_fields_are_no_error_of_the_server(client, field):
    values = ("1" + "0" * 4000, "1" + "0" * 5000, *map(nested, (40, 900, 971, 990, 5000)))
    for value, path in itertools.product(values, (TXT2IMG, "/sdapi/v1/options")):
        text = f'{{"unknown": {value}}}' if field == "override_settings" else value
        response = client.post(path, content=f'{{"{field}": {text}}}', headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text
        if value.startswith("["):
            assert response.status_code == 400


def test_previews_are_encoded_while_others_are_served(client, monkeypatch):
    """The encoder waits for another client's response: on the event loop that would never come."""
    is_encoding, was_served = threading.Event(), threading.Event()
    write_preview = image_writer.write_preview

    def wait_and_write(*args):
        is_encoding.set()
        assert was_served.wait(60)
        return write_preview(*args)

    monkeypatch.setattr(image_writer, "write_preview", wait_and_write)
    body = {"prompt": "p", "stream": True, "partial_images": 1}
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        for path in ("/v1/images/generations", "/t2i"):
            is_encoding.clear()
            was_served.clear()
            response = other.submit(client.post, path, json=body)
            assert is_encoding.wait(60)
            try:
                assert client.get("/healthz").status_code == 200
            finally:
                was_served.set()
            assert response.result().status_code == 200


def test_metrics_name_requests_only_to_clients_with_a_key(serve, new_engine, tmp_path):
    key, table = generate_key("alice")
    (tmp_path / "keys.toml").write_text(table)
    config = Config(frontend=FrontendConfig(api_keys_file=str(tmp_path / "keys.toml")))
    with serve(config, new_engine()) as (url, _), httpx.Client(base_url=url, verify=False, timeout=60) as client:
        wait_until_ready(url)
        auth = {"authorization": f"Bearer {key}"}
        image = client.post("/t2i", json={"prompt": "p"}, headers=auth | {"x-request-id": "secret-request"})
        assert image.status_code == 200
        assert "secret-request" in client.get("/metrics", headers=OPENMETRICS | auth).text
        for headers in (OPENMETRICS, OPENMETRICS | {"authorization": "Bearer wrong"}):
            response = client.get("/metrics", headers=headers)
            assert response.status_code == 200 and "noria_request_seconds" in response.text
            assert "secret-request" not in response.text
