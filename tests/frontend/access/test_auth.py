"""Authentication over HTTP: which requests are accepted, the response to the others, and which jobs a client sees."""

import base64
import contextlib
import re
import threading

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from frontends import served_client
from noria.config import Config, FrontendConfig
from noria.errors import ConfigError, RateLimited
from noria.frontend.access import key_reload
from noria.frontend.access.api_keys import ALL_SCOPES, ApiKey, generate_key
from noria.frontend.access.auth import ClientDirectory, presented_key
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.middleware import ObservabilityMiddleware
from noria.frontend.http.operations import Operation
from noria.frontend.routing import routes_of
from waiting import wait_until


def basic(password, user="user"):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


OPEN_PATHS = {
    *("/healthz", "/health", "/readyz", "/v2/health/live", "/v2/health/ready", "/metrics", "/openapi.json"),
    *(
        "/",
        "/text",
        "/live",
        "/models",
        "/deployments",
        "/lineage",
        "/drift",
        "/docs",
        "/docs/{name}",
        "/pages/{name}",
    ),
}


def is_open(method, path):
    return path.replace(":path", "") in OPEN_PATHS and method != "POST"


def test_every_route_but_the_open_ones_needs_a_key(client_of):
    anonymous = client_of()
    for route in build_app(Config(), EnginePool([])).routes:
        path = re.sub(r"{.*?}", "x", route.path)
        for method in route.methods - {"HEAD"}:
            answer = anonymous.request(method, path)
            assert (answer.status_code == 401) is (not is_open(method, route.path)), (method, path, answer.status_code)


def test_a_key_is_accepted_in_each_header(client_of):
    key, client = client_of.keys["bob"], client_of()
    for headers in (
        {"Authorization": f"bearer {key}"},
        {"Authorization": f"Bearer   {key}"},
        {"X-Api-Key": key},
        {"Authorization": basic(key)},
        {"X-Api-Key": key, "Authorization": "Bearer of-a-proxy"},
    ):
        assert client.get("/v1/models", headers=headers).status_code == 200, headers


def test_an_unknown_key_is_answered_with_401(client_of):
    client = client_of()
    challenges = ['Bearer realm="noria"', 'Basic realm="noria", charset="UTF-8"']
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Digest x"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic \u00e9".encode()},
        {"Authorization": basic("wrong")},
        {"X-Api-Key": ""},
        {"X-Api-Key": "\u00e9".encode()},
    ):
        answer = client.post("/t2i", json={"prompt": "p"}, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (401, "unauthorized", "authentication_error")
        assert answer.headers.get_list("www-authenticate") == challenges
    assert client_of.engine.submitted == []


def test_a_request_of_a_pages_script_gets_no_basic_challenge(client_of):
    answer = client_of().get("/v1/models", headers={"X-Requested-With": "fetch"})
    assert (answer.status_code, answer.headers.get_list("www-authenticate")) == (401, ['Bearer realm="noria"'])


def test_a_digest_is_not_a_key(client_of, tmp_path):
    digest = re.search(r"[0-9a-f]{64}", (tmp_path / "keys.toml").read_text())[0]
    assert client_of().get("/v1/models", headers={"X-Api-Key": digest}).status_code == 401


def test_a_password_may_contain_colons():
    assert presented_key({"authorization": basic("a:b", user="")}) == b"a:b"
    assert presented_key({"authorization": basic("\u00e9")}) == "\u00e9".encode()
    assert presented_key({}) is None


def app_of(operation):
    """An application of one operation, for clients without keys."""

    def refuse(_, error):
        return JSONResponse({"message": error.message}, error.http_status)

    app = Starlette(routes=routes_of([operation], ClientDirectory((), 1)))
    app.middleware_stack = ObservabilityMiddleware(app.router, refuse, refuse, lambda *_: True)
    return app


def test_endpoints_get_the_first_value_of_a_header_and_all_of_them():
    async def endpoint(http):
        values = [http.headers["x-a"], http.headers.get("x-missing"), http.headers.getlist("x-a"), http.cookies]
        return JSONResponse([*values, "x-a" in http.headers, "x-missing" in http.headers])

    app = app_of(Operation(method="POST", path="/", handler=endpoint, group="Generate", scopes=()))
    response = TestClient(app).post("/", headers=[("x-a", "1"), ("X-A", "2"), ("Cookie", "a=b")])
    assert response.json() == ["1", None, ["1", "2"], {"a": "b"}, True, False]


def test_openais_client_raises_its_authentication_error(client_of):
    with httpx.Client(verify=False) as web:
        settings = {"base_url": f"{client_of.address}/v1", "http_client": web, "max_retries": 0}
        stranger = openai.OpenAI(api_key="wrong", **settings)
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.images.generate(prompt="p")
        assert caught.value.code == "unauthorized"
        alice = openai.OpenAI(api_key=client_of.keys["alice"], **settings)
        assert alice.images.generate(prompt="p").data[0].b64_json


def test_a1111s_clients_get_the_reason_as_detail(client_of):
    answer = client_of().get("/sdapi/v1/progress")
    assert answer.status_code == 401
    assert "password of Basic" in answer.json()["detail"]


def test_the_log_has_the_name_of_the_key_and_not_the_key(client_of, captured_log_fields, caplog):
    with captured_log_fields("noria.access") as lines, captured_log_fields("noria.requests") as requests:
        client_of("alice").get("/v1/models", headers={"x-request-id": "abc"})
        client_of().get("/v1/models", headers={"x-request-id": "def"})
        client_of("alice").post("/t2i", json={"prompt": "p"}, headers={"x-request-id": "ghi"})
        # A line is written after its answer is: the client may be quicker.
        wait_until(
            lambda: [x for x in lines() if (x["request_id"], x["status"], x.get("key")) == ("abc", 200, "alice")]
        )
        wait_until(lambda: [x for x in lines() if (x["request_id"], x["status"], x.get("key")) == ("def", 401, None)])
        wait_until(lambda: [x for x in requests() if (x["request_id"], x.get("key")) == ("ghi", "alice")])
    assert client_of.keys["alice"] not in caplog.text


def test_openapi_has_security_schemes_if_there_are_keys(client_of, client):
    locked, open_to_all = client_of().get("/openapi.json").json(), client.get("/openapi.json").json()
    schemes = locked["components"]["securitySchemes"]
    assert {scheme["type"] for scheme in schemes.values()} == {"http", "apiKey"}
    for path, item in locked["paths"].items():
        for method, operation in item.items():
            assert ("security" in operation) is not is_open(method.upper(), path)
            assert "security" not in operation or "401" in operation["responses"]
    needed = {path: locked["paths"][path]["get"] for path in ("/v1/jobs", "/v1/models")}
    assert {path: get["security"][0]["bearer"] for path, get in needed.items()} == {
        "/v1/jobs": ["jobs"],
        "/v1/models": [],
    }
    assert "missing_scope" in needed["/v1/jobs"]["responses"]["403"]["description"]
    assert "securitySchemes" not in open_to_all["components"]
    assert "security" not in open_to_all["paths"]["/t2i"]["post"]


def test_no_front_end_starts_without_the_configured_file_of_keys(tmp_path):
    config = Config(frontend=FrontendConfig(api_keys_file=str(tmp_path / "none.toml")))
    with pytest.raises(ConfigError, match="cannot be read"):
        build_app(config, EnginePool([]))


@pytest.fixture
def ended():
    def wait(client, job_id):
        wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["completed_at"])
        return client.get(f"/v1/jobs/{job_id}").json()

    return wait


def test_a_job_is_visible_to_its_own_key_only(client_of, ended):
    alice, bob = client_of("alice"), client_of("bob")
    job_id = alice.post("/v1/jobs", json={"input": {"prompt": "p"}}).json()["id"]
    assert ended(alice, job_id)["status"] == "succeeded"
    never_was = bob.get("/v1/jobs/job_00000000000000000000000000").json()["error"]["message"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/images/0")):
        answer = bob.request(method, f"/v1/jobs/{job_id}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found"), path
        assert answer.json()["error"]["message"] == never_was.replace("job_00000000000000000000000000", job_id)
    assert alice.get(f"/v1/jobs/{job_id}/images/0").headers["content-type"] == "image/png"
    assert "succeeded" in alice.get(f"/v1/jobs/{job_id}/events").text


def test_jobs_submitted_without_keys_are_visible_without_keys_only(serve_keys, new_engine, tmp_path, client_with_key):
    def post(client):
        return client.post("/v1/jobs", json={"input": {"prompt": "p"}}).json()["id"]

    @contextlib.contextmanager
    def open_to_all():
        with served_client(Config(data_dir=str(tmp_path)), new_engine()) as client:
            yield client

    with open_to_all() as client:
        before = post(client)
    with serve_keys(alice="") as (address, _, keys), client_with_key(address, keys, "alice") as alice:
        assert alice.get(f"/v1/jobs/{before}").status_code == 404
        own = post(alice)
        assert [job["id"] for job in alice.get("/v1/jobs").json()["results"]] == [own]
    with open_to_all() as client:
        assert [job["id"] for job in client.get("/v1/jobs").json()["results"]] == [own, before]
        assert client.get(f"/v1/jobs/{own}").status_code == 200


@pytest.fixture
def client_with_scopes(serve_keys):
    """Makes clients of one front end by the name of their key: each scope is a key's only one."""
    with contextlib.ExitStack() as stack:
        limits = {scope: f'scopes = ["{scope}"]' for scope in sorted(ALL_SCOPES)}
        address, engine, keys = stack.enter_context(serve_keys(**limits, of_before=""))

        def make(name):
            headers = {"X-Api-Key": keys[name]}
            return stack.enter_context(httpx.Client(base_url=address, headers=headers, verify=False, timeout=60))

        make.engine = engine
        yield make


def test_a_route_needs_its_scope(client_with_scopes):
    routes = {
        ("GET", "/v1/models"): ALL_SCOPES,
        ("GET", "/v1/models/tiny"): ALL_SCOPES,
        ("POST", "/t2i"): {"generate", "admin"},
        ("POST", "/v1/images/generations"): {"generate", "admin"},
        ("POST", "/v1/embeddings"): {"generate", "admin"},
        ("POST", "/v1/images/metadata"): {"generate", "admin"},
        ("GET", "/sdapi/v1/progress"): {"generate", "admin"},
        ("POST", "/sdapi/v1/interrupt"): {"generate", "admin"},
        ("GET", "/v1/jobs"): {"jobs", "admin"},
        ("POST", "/v1/jobs"): {"jobs", "admin"},
        ("DELETE", "/v1/jobs/job_00000000000000000000000000"): {"jobs", "admin"},
        ("POST", "/api/v1/lineage"): {"lineage", "admin"},
        ("POST", "/api/v1/lineage/batch"): {"lineage", "admin"},
        ("GET", "/v1/registry/versions"): {"lineage", "deploy", "admin"},
        ("GET", "/v1/registry/served"): {"lineage", "deploy", "admin"},
        ("GET", "/v1/registry/trace"): {"lineage", "deploy", "admin"},
        ("POST", "/v1/registry/trace"): {"lineage", "deploy", "admin"},
        ("GET", "/v1/deployments"): {"lineage", "deploy", "admin"},
        ("GET", "/v1/deployments/history"): {"lineage", "deploy", "admin"},
        ("GET", "/v1/statistics"): {"lineage", "deploy", "admin"},
        ("POST", "/v1/registry/versions"): {"deploy", "admin"},
        ("POST", "/v1/deployments"): {"deploy", "admin"},
        ("POST", "/v1/deployments/promote"): {"deploy", "admin"},
        ("POST", "/v1/deployments/rollback"): {"deploy", "admin"},
    }
    for name in (*sorted(ALL_SCOPES), "of_before"):
        client = client_with_scopes(name)
        for (method, path), scopes in routes.items():
            is_allowed = name in scopes or (name == "of_before" and bool(scopes & {"generate", "jobs"}))
            assert (client.request(method, path).status_code != 403) is is_allowed, (name, method, path)
    answer = client_with_scopes("metrics").post("/t2i", json={"prompt": "p"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["retryable"]) == (403, "missing_scope", False)
    assert "needs the scope generate; the key 'metrics' has metrics." in error["message"]


def test_exemplars_need_the_scope_metrics(client_with_scopes):
    client_with_scopes("generate").post("/t2i", json={"prompt": "p"})
    headers = {"Accept": "application/openmetrics-text"}
    has_exemplars = {
        name: "request_id=" in client_with_scopes(name).get("/metrics", headers=headers).text
        for name in (*ALL_SCOPES, "of_before")
    }
    others = {"generate": False, "jobs": False, "lineage": False, "deploy": False}
    assert has_exemplars == others | {"metrics": True, "admin": True, "of_before": True}


def test_an_admin_sees_cancels_and_erases_the_jobs_of_every_key(client_with_scopes, captured_log_fields):
    client_with_scopes.engine.never_answers = True
    admin, client, other = (client_with_scopes(name) for name in ("admin", "jobs", "of_before"))
    job_ids = [each.post("/v1/jobs", json={"input": {"prompt": "p"}}).json()["id"] for each in (client, other)]
    assert [job["id"] for job in admin.get("/v1/jobs").json()["results"]] == job_ids[::-1]
    assert [job["id"] for job in client.get("/v1/jobs").json()["results"]] == job_ids[:1]
    with captured_log_fields("noria.jobs") as lines:
        for _ in range(2):
            assert admin.delete(f"/v1/jobs/{job_ids[0]}").json()["completed_at"]
        assert admin.delete(f"/v1/jobs/{job_ids[1]}?erase=true").status_code == 204
        by_admin = [line for line in lines() if line.get("key") == "admin"]
    assert [(line["event"], line["owner"]) for line in by_admin] == [
        ("job_cancelled", "jobs"),
        ("job_cancelled", "of_before"),
        ("job_erased", "of_before"),
    ]
    assert other.get(f"/v1/jobs/{job_ids[1]}").status_code == 404


def test_a1111s_progress_and_interrupt_cover_only_the_clients_own_requests(client_of):
    client_of.engine.never_answers = True
    alice, bob, answers = client_of("alice"), client_of("bob"), []
    thread = threading.Thread(
        target=lambda: answers.append(alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}).status_code)
    )
    thread.start()
    try:
        wait_until(lambda: alice.get("/sdapi/v1/progress").json()["state"]["job_count"] == 1)
        assert bob.get("/sdapi/v1/progress").json()["state"]["job_count"] == 0
        for path in ("interrupt", "skip"):
            assert bob.post(f"/sdapi/v1/{path}").json() == {}
        state = alice.get("/sdapi/v1/progress").json()["state"]
        assert (state["job_count"], state["interrupted"]) == (1, False)
    finally:
        alice.post("/sdapi/v1/interrupt")
        thread.join()
    assert answers == [499]


def test_a_key_does_not_change_the_a1111_settings_of_another(client_of):
    alice, bob = client_of("alice"), client_of("bob")
    assert alice.post("/sdapi/v1/options", json={"samples_format": "webp"}).status_code == 200
    formats = [client.get("/sdapi/v1/options").json()["samples_format"] for client in (alice, bob)]
    files = [client.post("/sdapi/v1/txt2img", json={"prompt": "p"}).json()["images"][0] for client in (alice, bob)]
    assert formats == ["webp", "png"]
    assert [base64.b64decode(file)[:4] for file in files] == [b"RIFF", b"\x89PNG"]


def test_a_changed_file_of_keys_adds_and_revokes_without_a_restart(client_of, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(key_reload, "_POLL_INTERVAL_S", 0.05)
    caplog.set_level("INFO")
    alice, bob, file = client_of("alice"), client_of("bob"), tmp_path / "keys.toml"
    carols_key, carols_table = generate_key("carol")

    def rewrite(content):
        new = file.with_suffix(".new")
        new.write_text(content)
        new.replace(file)  # at once, so that no half of it is read

    assert alice.get("/v1/models").status_code == bob.get("/v1/models").status_code == 200
    rewrite(file.read_text().partition('[[key]]\nname = "bob"')[0] + carols_table)
    wait_until(lambda: bob.get("/v1/models").status_code == 401)
    assert alice.get("/v1/models").status_code == 200
    assert client_of().get("/v1/models", headers={"X-Api-Key": carols_key}).status_code == 200
    assert alice.get("/v1/jobs").status_code == 200
    rewrite(file.read_text().replace("[[key]]", '[[key]]\nscopes = ["generate"]', 1))  # alice's
    wait_until(lambda: alice.get("/v1/jobs").status_code == 403)
    rewrite("[[key]]")
    wait_until(lambda: "name is missing" in caplog.text)
    assert alice.get("/v1/models").status_code == 200
    events = [record.noria_fields for record in caplog.records if record.name == "noria.keys"]
    changes = [event for event in events if event["event"] != "client_rejected"]
    assert [(event["event"], event.get("key")) for event in changes] == [
        ("api_key_added", "carol"),
        ("api_key_revoked", "bob"),
        ("api_key_changed", "alice"),
        ("api_keys_rejected", None),
    ]
    rejected = {(event["reason"], event["key"]) for event in events if event["event"] == "client_rejected"}
    assert rejected == {("revoked_key", "bob"), ("missing_scope", "alice")}


def test_a_changed_key_keeps_what_is_in_flight_and_charged():
    before = ApiKey("alice", "a" * 64, max_images_in_flight=4, images_per_minute=60)
    clients = ClientDirectory([before], 1)
    (client,) = clients._clients.values()
    client.images.acquire(3, 1000.0, lambda: 0.0)
    changed = ApiKey("al", "a" * 64, max_images_in_flight=2, images_per_minute=20, scopes=frozenset({"jobs"}))
    clients.update([changed, ApiKey("alice", "b" * 64)])
    assert clients._clients[changed] is client
    assert (client.name, client.has_scope("generate"), client.has_scope("jobs")) == ("al", False, True)
    with pytest.raises(RateLimited, match=r"'al' has 3 images in flight.*limit of 2"):
        client.images.acquire(1, 1000.0, lambda: 0.0)
    client.images.release(3)
    with pytest.raises(RateLimited, match="20 images a minute"):  # 3 of 60 are charged: 1 of 20
        client.images.charge(20, 1000.0)
    client.images.charge(19, 1000.0)


def test_front_ends_share_the_limits_by_their_present_number():
    clients = ClientDirectory([ApiKey("alice", "a" * 64, max_images_in_flight=4, texts_per_minute=60)], 1)
    (client,) = clients._clients.values()
    client.images.acquire(3, 1000.0, lambda: 0.0)
    clients.share_among(2)
    with pytest.raises(RateLimited, match=r"3 images in flight.*limit of 2"):
        client.images.acquire(1, 1000.0, lambda: 0.0)
    with pytest.raises(RateLimited, match="30 texts a minute"):
        client.texts.charge(31, 1000.0)
    clients.update([ApiKey("alice", "a" * 64, max_images_in_flight=8)])
    clients.share_among(1)
    client.images.acquire(5, 1000.0, lambda: 0.0)


def test_limits_that_a_changed_key_loses_and_gets_are_applied():
    limited, unlimited = ApiKey("alice", "a" * 64, texts_per_minute=1, priority="low"), ApiKey("alice", "a" * 64)
    clients = ClientDirectory([limited], 1)
    (client,) = clients._clients.values()
    clients.update([unlimited])
    client.texts.acquire(100, 1000.0, lambda: 0.0)
    assert client.allowed_priority("high") == "high"
    clients.update([limited])
    client.texts.charge(1, 1000.0)
    with pytest.raises(RateLimited):
        client.texts.charge(1, 1000.0)
    assert client.allowed_priority(None) == "low"


@pytest.mark.parametrize(
    ("address", "status"),
    [("127.0.0.1", 200), ("::1", 200), ("::ffff:127.0.0.1", 200), ("unix", 200), ("192.0.2.7", 401), ("other", 401)],
)
def test_without_keys_only_clients_of_the_same_machine_change_the_registry(address, status):
    async def answer(_):
        return JSONResponse({})

    operation = Operation(method="GET", path="/", handler=answer, group="Deployments", scopes=("deploy",))

    client = TestClient(app_of(operation), client=(address, 1))
    assert client.get("/").status_code == status
    assert client.get("/", headers={"X-Forwarded-For": address}).status_code == 401
