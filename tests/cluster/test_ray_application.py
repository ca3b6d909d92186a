"""Requests that Ray's proxy passes to a front end."""

import asyncio

import pytest
from starlette.testclient import TestClient

from noria.cluster.ray_application import RayApplication
from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool


@pytest.mark.parametrize(
    ("client", "passed_on"),
    [(("127.0.0.1", 1), None), (("::1", 1), None), (("192.0.2.7", 1), ("192.0.2.7", 1)), (None, None)],
)
def test_the_proxys_address_gives_nobody_the_rights_of_this_machine(client, passed_on):
    """And each request has the state that uvicorn makes on one machine."""
    scopes = []

    async def app(scope, receive, send):
        scopes.append(scope)

    scope = {"type": "http", "client": client}
    asyncio.run(RayApplication(app, EnginePool([]), [])(scope, None, None))
    (seen,) = scopes
    assert seen["client"] == passed_on
    assert callable(seen["state"]["abort"])


@pytest.mark.parametrize(("asked", "left"), [(b"mine", []), (b"not {valid}", [b"made-here"])])
def test_a_response_has_one_request_id_which_is_that_of_the_log(asked, left):
    """Ray's proxy gives a request an id if it has none, and adds it to the response."""
    answered = b"made-here" if left else asked  # the id that the log has
    sent = []

    async def app(scope, receive, send):
        headers = [(b"x-request-id", answered), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "client": None, "headers": [(b"host", b"localhost"), (b"x-request-id", asked)]}
    asyncio.run(RayApplication(app, EnginePool([]), [])(scope, None, send))
    start, body = sent
    assert [value for name, value in start["headers"] if name == b"x-request-id"] == left
    assert (b"content-type", b"text/plain") in start["headers"]
    assert body["body"] == b"x"


@pytest.mark.parametrize(
    ("scope", "host", "status"),
    [(None, "localhost", 401), ("generate", "localhost", 403), ("metrics", "localhost", 200), ("metrics", "evil", 421)],
)
def test_addresses_of_replicas_are_only_for_keys_of_metrics(tmp_path, scope, host, status):
    key, table = generate_key("prometheus", [scope or "metrics"])
    (tmp_path / "keys.toml").write_text(table)
    config = Config(data_dir=str(tmp_path), frontend=FrontendConfig(api_keys_file=str(tmp_path / "keys.toml")))
    app = build_app(config, EnginePool([]), metrics_targets=lambda: [{"targets": ["192.0.2.1:1"]}])
    headers = {"authorization": f"Bearer {key}"} if scope else {}
    answer = TestClient(app, f"http://{host}").get("/metrics/targets", headers=headers)
    assert answer.status_code == status
    assert ("192.0.2.1:1" in answer.text) is (status == 200)
