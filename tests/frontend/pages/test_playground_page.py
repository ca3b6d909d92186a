"""The page `/`, without a browser: its links and fields, and that it needs no engine."""

import re

from starlette.testclient import TestClient

from noria.config import Config
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.protocol.request import ImageRequestBody


def test_page_loads_files_of_this_server_only(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="(pages/[^"]+)"', page.text)
    assert "pages/playground/playground.js" in loaded
    for path in loaded:
        assert client.get(f"/{path}").status_code == 200


def test_page_links_to_the_other_pages(client):
    links = set(re.findall(r'<a [^>]*href="([^#"][^"]*)"', client.get("/").text))
    pages = {"./", "live", "models", "deployments", "lineage", "drift", "docs", "docs#metrics"}
    assert links == pages | {"openapi.json", "readyz", "metrics", "docs/troubleshooting.md"}
    for path in links:
        assert client.get(f"/{path.removeprefix('./')}").status_code == 200


NOT_ON_THE_PAGE = {
    *("stream", "partial_images", "metadata", "loras", "image", "mask", "controls", "ip_adapter", "reference_images"),
}


def test_every_field_has_a_label_and_an_error_element(client):
    page = client.get("/").text
    for field in set(ImageRequestBody.__struct_fields__) - NOT_ON_THE_PAGE:
        assert f'<label for="{field}">' in page
        assert f'id="{field}-error"' in page
        assert re.search(rf'name="{field}"[^>]*aria-describedby="[^"]*\b{field}-error"', page), field


def test_page_is_served_without_an_engine(folder):
    with TestClient(build_app(Config(), EnginePool([f"ipc://{folder}/nobody"])), "http://localhost") as early:
        assert early.get("/").status_code == 200


def test_a_server_of_text_encoders_has_their_page_before_an_engine_has_reported(folder):
    pool = EnginePool([f"ipc://{folder}/nobody"], default_models={"encoder": "minilm"})
    with TestClient(build_app(Config(), pool), "http://localhost") as early:
        assert early.get("/").text == early.get("/text").text != ""
        assert 'id="inference_steps"' not in early.get("/").text
        assert 'data-kind="diffusion"' not in early.get("/live").text
