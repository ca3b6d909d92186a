"""/openapi.json and /docs describe what the server does."""

import re
from html.parser import HTMLParser

import httpx
import pytest
from starlette.testclient import TestClient

from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.frontend.app import build_app
from noria.frontend.bodies.image_fields import IMAGE_FIELDS
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.operations import Served
from noria.frontend.openapi.docs_page import docs_page
from noria.frontend.openapi.document import openapi, served_errors
from noria.frontend.protocols.openai.images import OPENAI_FIELDS
from noria.frontend.server import routes as server
from noria.observe.metrics.declarations import DECLARATIONS
from waiting import wait_until


@pytest.fixture
def document(client):
    return client.get("/openapi.json").json()


def references(node):
    if isinstance(node, dict):
        for key, value in node.items():
            yield from [value] if key == "$ref" else references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_document_has_what_openapi_requires(document):
    assert document["openapi"].startswith("3.1.")
    assert {"title", "version"} <= set(document["info"])
    for item in document["paths"].values():
        for operation in item.values():
            assert all("description" in response for response in operation["responses"].values())
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def schemas_in(node):
    """Yield every object of a document, values of examples and enumerations left out."""
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key not in ("const", "default", "enum", "example", "examples"):
                yield from schemas_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from schemas_in(value)


def test_document_has_only_what_generators_of_clients_read(document):
    """tests/clients/test_generators.py runs them."""
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for node in schemas_in({part: document[part] for part in ("paths", "components")}):
        if isinstance(content := node.get("content"), dict):
            assert all("schema" in each for each in content.values() if isinstance(each, dict))
        assert "prefixItems" not in node
        assert not ("properties" in node and {"anyOf", "allOf"} & node.keys())
        assert node.get("type") != "array" or isinstance(node["items"], dict)
        if isinstance(values := node.get("enum"), list):
            assert values
            assert len({str(value).lower() for value in values}) == len(values)
        if isinstance(pattern := node.get("pattern"), str):
            assert "\\Z" not in pattern
    for name, schema in document["components"]["schemas"].items():
        assert schema["title"] == name


def test_document_has_every_route(document):
    routes = [route for route in build_app(Config(), EnginePool([])).routes if route.path != "/pages/{name:path}"]
    assert {re.sub(":path", "", route.path) for route in routes} == set(document["paths"])
    for route in routes:
        operations = document["paths"][re.sub(":path", "", route.path)]
        assert {method.upper() for method in operations} == route.methods - {"HEAD"}


def test_defaults_and_bounds_are_those_of_the_model(document, spec):
    for body in ("ImageRequestBody", "GenerationsRequestBody"):
        fields = document["components"]["schemas"][body]["properties"]
        assert fields["inference_steps"] == {
            "type": ["integer", "null"], "minimum": 1, "maximum": 100, "default": spec.default_steps,
            "description": IMAGE_FIELDS["inference_steps"],
        }  # fmt: skip
        assert fields["guidance_scale"]["default"] == spec.default_guidance
        assert fields["scheduler"]["default"] == spec.default_scheduler
        assert fields["scheduler"]["examples"] == list(spec.schedulers)
        assert fields["prompt"]["maxLength"] == 200
    width = document["components"]["schemas"]["ImageRequestBody"]["properties"]["width"]
    assert (width["minimum"], width["maximum"], width["multipleOf"], width["default"]) == (16, 128, 8, 64)
    assert document["components"]["schemas"]["ImageRequestBody"]["required"] == ["prompt"]


def test_every_description_is_of_a_field(document):
    """Every field has one: the page needs it."""
    fields = {name for schema in document["components"]["schemas"].values() for name in schema.get("properties", ())}
    for operation in build_app(Config(), EnginePool([])).state.operations:
        assert set(operation.fields or ()) <= fields


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.loaded, self.anchors, self.ids, self.text = [], [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.loaded += [attributes[name] for name in ("src",) if name in attributes]
        if tag == "link":
            self.loaded.append(attributes["href"])
        if tag == "a":
            self.anchors.append(attributes["href"])
        if "id" in attributes:
            self.ids.add(attributes["id"])

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("path", ["/docs"])
def test_pages_load_nothing_from_elsewhere(client, path):
    response = client.get(path)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = _Page(response.text)
    assert all(address.startswith("pages/") for address in page.loaded)
    assert {client.get(f"/{address}").status_code for address in page.loaded} == {200}
    assert "script-src 'self'" in response.headers["content-security-policy"]
    assert all(anchor[1:] in page.ids for anchor in page.anchors if anchor.startswith("#"))
    for anchor in page.anchors:
        if not anchor.startswith("#"):
            assert client.get(f"/{anchor.removeprefix('./')}").status_code == 200


def test_docs_page_has_every_route_field_and_error(client, document):
    text = _Page(client.get("/docs").text).text
    for path in document["paths"]:
        assert path in text
    for name in OPENAI_FIELDS:
        assert name in text
    for error_type in served_errors():
        assert error_type.code in text
    for name in DECLARATIONS:
        assert name in text
    assert "16 to 128, multiple of 8" in text
    assert "ddim or euler or pndm" in text
    assert "PNDM order 4, no Runge-Kutta warm-up" in text


def test_docs_page_has_commands_for_this_server(client):
    text = _Page(client.get("/docs", headers={"host": "192.0.2.7:8123"}).text).text
    for command in (
        "curl -s http://192.0.2.7:8123/t2i -H 'content-type: application/json' \\\n  -d '{",
        "curl -s http://192.0.2.7:8123/v1/models/MODEL",
        "curl -s -X DELETE http://192.0.2.7:8123/v1/jobs/ID",
        "curl -s -N http://192.0.2.7:8123/v1/live",
        "curl -s -X POST http://192.0.2.7:8123/sdapi/v1/interrupt",
        "curl -s http://192.0.2.7:8123/v1/images/metadata --data-binary @image.png",
        "curl -s http://192.0.2.7:8123/v1/jobs/ID/images/INDEX -o image.png",
    ):
        assert command in text
    assert "NORIA_API_KEY" not in text


def test_docs_page_has_commands_with_a_key_where_one_is_required(tmp_path, folder):
    (tmp_path / "keys.toml").write_text(generate_key("alice")[1])
    config = Config(frontend=FrontendConfig(api_keys_file=str(tmp_path / "keys.toml")))
    with TestClient(build_app(config, EnginePool([f"ipc://{folder}/nobody"])), "http://localhost") as closed:
        text = _Page(closed.get("/docs").text).text
    assert 'curl -s http://localhost/v1/models -H "authorization: Bearer $NORIA_API_KEY"' in text
    assert "curl -s http://localhost/readyz" in text and "/readyz -H" not in text


def test_document_and_page_are_built_once_per_model(serve, new_engine, monkeypatch):
    built_for = []
    monkeypatch.setattr(
        server, "openapi", lambda all_of, served: built_for.append(served.spec) or openapi(all_of, served)
    )
    engine = new_engine("loading")
    with serve(Config(), engine) as (url, _), httpx.Client(base_url=url, timeout=60, verify=False) as client:

        def check_all(description):
            for number in range(3):
                assert description in client.get("/openapi.json").json()["info"]["description"]
                page = client.get("/docs", headers={"host": f"a{number}.localhost"}).text
                assert description in page and f"http://a{number}.localhost/t2i" in page

        check_all("No image model is ready.")
        engine.set_state("ready")
        wait_until(lambda: client.get("/readyz").status_code == 200)
        check_all("Serving tiny.")
    assert [spec and spec.name for spec in built_for] == [None, "tiny"]


def test_address_is_escaped_in_the_page():
    operations = build_app(Config(), EnginePool([])).state.operations
    page = docs_page(operations, openapi(operations, Served(None, None, FrontendConfig())))
    page = page.with_origin("http://a<b>&c")
    assert "a<b>" not in page
    assert "http://a&lt;b&gt;&amp;c/t2i" in page


def test_all_pages_have_the_same_navigation(client):
    navigations = {}
    for path in ("/", "/live", "/docs"):
        (found,) = re.findall(r'<nav aria-label="Pages">.*?</nav>', client.get(path).text, re.DOTALL)
        assert f'<a href="{path[1:] or "./"}" aria-current="page"' in found
        navigations[path] = " ".join(found.replace(' aria-current="page"', "").split())
    assert len(set(navigations.values())) == 1, navigations
