"""Large integers in each numeric field of each route, alone and together: never an error of the server.

Python writes no integer of more than 4,300 digits, and turns none of more than 308 into a float; sums and products of
a request's integers have more digits than they have.
"""

import json

import httpx
import pytest

from frontends import serving
from noria.config import Config
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from waiting import wait_until_ready

LARGE = ("-" + "9" * 4299, "9" * 310, str(2**63), str(2**64), "1" + "0" * 5000, "1e999", "-1e308")
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(folder):
    models = (FAKE_MODEL, FAKE_ENCODER)
    with FakeEngine(f"ipc://{folder}/numbers", models=models) as engine, serving(Config(), engine) as (url, _):
        wait_until_ready(url)
        with httpx.Client(base_url=url, verify=False, timeout=60) as opened:
            yield opened


def resolve(document, schema):
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def numeric_paths(document, schema, path=(), depth=0):
    """The paths of numbers in a body of a schema; 0 is the first element of a list."""
    schema = resolve(document, schema)
    types = schema.get("type", ())
    if {"integer", "number"} & set([types] if isinstance(types, str) else types):
        yield path
    if depth < 5:
        for name, field in schema.get("properties", {}).items():
            yield from numeric_paths(document, field, (*path, name), depth + 1)
        if isinstance(schema.get("items"), dict):
            yield from numeric_paths(document, schema["items"], (*path, 0), depth + 1)
        for each in schema.get("anyOf", []) + schema.get("oneOf", []) + schema.get("allOf", []):
            yield from numeric_paths(document, each, path, depth + 1)


def put(body, path, value):
    """Return the body with a value at a path, whatever is on the way."""
    if not path:
        return value
    head, *rest = path
    if head == 0:
        return [put(body[0] if isinstance(body, list) and body else None, rest, value)]
    given = body if isinstance(body, dict) else {}
    return {**given, head: put(given.get(head), rest, value)}


def test_large_numbers_in_any_fields_are_no_error_of_the_server(client):
    document = client.get("/openapi.json").json()
    num_sent, failed = 0, []
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        schema = resolve(document, content["schema"])
        example = schema.get("example", schema.get("examples", [{}])[0])
        paths = list(dict.fromkeys(numeric_paths(document, schema)))
        if not paths:
            continue
        url = path.replace("{model}", FAKE_ENCODER.name).replace("{name}", FAKE_ENCODER.name)
        for number in LARGE:
            bodies = [put(example, each, "NUMBER") for each in paths]
            together = example
            for each in paths:
                together = put(together, each, "NUMBER")
            for body in [*bodies, together]:
                text = json.dumps(body).replace('"NUMBER"', number)
                response = client.post(url, content=text, headers=JSON)
                num_sent += 1
                # 501 and 503 are answers to what is not there, 504 to a deadline.
                if response.status_code == 500:
                    failed.append((url, text[:300], response.text[:200]))
    assert not failed
    assert num_sent > 500


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sdapi/v1/txt2img", '{"prompt": "a", "batch_size": 1%(zeros)s, "n_iter": 1%(zeros)s}'),
        ("/sdapi/v1/txt2img", '{"prompt": "a", "batch_size": -1%(zeros)s, "n_iter": 1%(zeros)s}'),
        ("/v2/models/%(model)s/infer", '{"inputs": [%(tensor)s]}'),
        ("/v2/models/%(model)s/infer", '{"inputs": [%(negative)s]}'),
    ],
)
def test_products_of_large_numbers_are_400(client, path, body):
    tensor = '{"name": "%s", "datatype": "%s", "shape": [2048, %s], "data": [%s]}'

    def tensors(datatype, size, data):
        names = ["text"] if datatype == "BYTES" else ["input_ids", "attention_mask"]
        return ", ".join(tensor % (name, datatype, size, data) for name in names)

    for datatype, data in (("INT64", "1"), ("BYTES", '"a"'), ("FP32", "1.0")):
        values = {
            "zeros": "0" * 4000,
            "model": FAKE_ENCODER.name,
            "tensor": tensors(datatype, "9" * 4299, data),
            "negative": tensors(datatype, "-" + "9" * 4299, data),
        }
        response = client.post(path % values, content=body % values, headers=JSON)
        assert response.status_code == 400, response.text


@pytest.mark.parametrize("size", ["1" + "0" * 4290, "9" * 400])
def test_sizes_of_binary_data_are_bounded(client, size):
    for name in ("input_ids", "text"):
        head = (
            f'{{"inputs": [{{"name": "{name}", "datatype": "INT64", "shape": [{size}, {size}], '
            f'"parameters": {{"binary_data_size": {size}}}}}]}}'
        )
        response = client.post(
            f"/v2/models/{FAKE_ENCODER.name}/infer",
            content=head.encode() + b"\0" * 8,
            headers={"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"},
        )
        assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs?limit=%s",
        "/v1/registry/versions?limit=%s",
        "/v1/registry/versions?before=%s",
        "/v1/registry/events?before=%s",
        "/v1/registry/trace?of=x&limit=%s",
        "/v1/registry/trace?of=deployment:%s",
        "/v1/registry/trace?of=dataset:%s",
        "/v1/registry/trace?of=x@%s",
        "/v1/deployments/history?endpoint=a&limit=%s",
        "/v1/live?interval_ms=%s",
    ],
)
def test_large_numbers_in_queries_are_no_error_of_the_server(client, path):
    for number in LARGE:
        with client.stream("GET", path % number) as response:
            assert response.status_code != 500, path
