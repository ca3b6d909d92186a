"""API keys over HTTP: who gets in, and what is told to who does not."""

import base64
import contextlib
import itertools
import re
import threading

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import Config, FrontendConfig
from noria.errors import ConfigError, InvalidField, RateLimited
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.http.api_keys import ApiKey, generate_key
from noria.frontend.http.quotas import OPEN_PATHS, ApiClient, TokenBucket, presented_key
from noria.frontend.routes.static_pages import ASSETS_PATH
from noria.protocol.request import ImageRequestBody


@pytest.fixture
def serve_keys(serve, new_engine, tmp_path, ready):
    """Starts a front end; gives its address, the engine, and the key of each name in `limits`: its further lines in the file."""

    @contextlib.contextmanager
    def start(processes=1, **limits):
        drawn = {name: generate_key(name) for name in limits}
        file = tmp_path / "keys.toml"
        file.write_text("\n".join(drawn[name][1] + lines for name, lines in limits.items()))
        engine = new_engine()
        frontend = FrontendConfig(keys_file=str(file), processes=processes)
        with serve(Config(data_dir=str(tmp_path), frontend=frontend), engine) as (address, _):
            ready(address)
            yield address, engine, {name: key for name, (key, _) in drawn.items()}

    return start


@pytest.fixture
def client_of(serve_keys):
    """Makes clients of one server, by the name of their key."""
    with contextlib.ExitStack() as stack:
        address, engine, keys = stack.enter_context(serve_keys(alice="", bob=""))

        def make(name=None):
            headers = {"Authorization": f"Bearer {keys[name]}"} if name else {}
            return stack.enter_context(httpx.Client(base_url=address, headers=headers, verify=False, timeout=60))

        make.address, make.engine, make.keys = address, engine, keys
        yield make


def basic(password, user="user"):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# ── Who gets in ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_open(path):
    return path in OPEN_PATHS or path.startswith(f"{ASSETS_PATH}/")


def test_every_route_but_the_open_ones_needs_a_key(client_of):
    nobody = client_of()
    for route in build_app(Config(), EnginePool([])).routes:
        path = re.sub(r"{.*?}", "x", route.path)
        for method in route.methods - {"HEAD"}:
            answer = nobody.request(method, path)
            assert (answer.status_code == 401) is (not is_open(route.path)), (method, path, answer.status_code)
    assert {"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/live", "/"} == OPEN_PATHS


def test_a_key_opens_every_route(client_of):
    alice = client_of("alice")
    assert alice.post("/t2i", json={"prompt": "p"}).status_code == 200
    assert alice.get("/v1/models").status_code == 200
    assert alice.get("/v1/jobs").status_code == 200
    assert alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}).status_code == 200


@pytest.mark.parametrize(
    "way", ["bearer", "Bearer with spaces", "x-api-key", "basic", "x-api-key before authorization"]
)
def test_a_key_comes_in_several_ways(client_of, way):
    key = client_of.keys["bob"]
    headers = {
        "bearer": {"Authorization": f"bearer {key}"},
        "Bearer with spaces": {"Authorization": f"Bearer   {key}"},
        "x-api-key": {"X-Api-Key": key},
        "basic": {"Authorization": basic(key)},
        "x-api-key before authorization": {"X-Api-Key": key, "Authorization": "Bearer of-a-proxy"},
    }[way]
    assert client_of().get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Digest x"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic \u00e9".encode()},
        {"Authorization": basic("wrong")},
        {"X-Api-Key": ""},
        {"X-Api-Key": "\u00e9".encode()},
    ],
)
def test_what_is_no_key_of_ours_is_401(client_of, headers):
    answer = client_of().post("/t2i", json={"prompt": "p"}, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (401, "unauthorized", "authentication_error")
    assert answer.headers.get_list("www-authenticate") == [
        'Bearer realm="noria"',
        'Basic realm="noria", charset="UTF-8"',
    ]
    assert client_of.engine.submitted == []


def test_a_page_that_asks_by_script_has_no_browser_ask_for_a_password(client_of):
    answer = client_of().get("/v1/models", headers={"X-Requested-With": "fetch"})
    assert (answer.status_code, answer.headers.get_list("www-authenticate")) == (401, ['Bearer realm="noria"'])


def test_a_digest_is_not_a_key(client_of, tmp_path):
    digest = re.search(r"[0-9a-f]{64}", (tmp_path / "keys.toml").read_text())[0]
    assert client_of().get("/v1/models", headers={"X-Api-Key": digest}).status_code == 401


def test_a_password_may_hold_colons_and_no_key_is_none():
    assert presented_key({"authorization": basic("a:b", user="")}) == b"a:b"
    assert presented_key({"authorization": basic("\u00e9")}) == "\u00e9".encode()
    assert presented_key({}) is None


def test_openais_client_raises_its_authentication_error(client_of):
    with httpx.Client(verify=False) as web:
        settings = {"base_url": f"{client_of.address}/v1", "http_client": web, "max_retries": 0}
        stranger = openai.OpenAI(api_key="wrong", **settings)
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.images.generate(prompt="p")
        assert caught.value.code == "unauthorized"
        alice = openai.OpenAI(api_key=client_of.keys["alice"], **settings)
        assert alice.images.generate(prompt="p").data[0].b64_json


def test_a1111s_clients_read_why(client_of):
    answer = client_of().get("/sdapi/v1/progress")
    assert answer.status_code == 401
    assert "password of Basic" in answer.json()["detail"]


def test_the_log_tells_whose_request_it_was_and_no_key(client_of, said_in, caplog, until):
    with said_in("noria.access") as lines, said_in("noria.requests") as requests:
        client_of("alice").get("/v1/models", headers={"x-request-id": "abc"})
        client_of().get("/v1/models", headers={"x-request-id": "def"})
        client_of("alice").post("/t2i", json={"prompt": "p"}, headers={"x-request-id": "ghi"})
        # A line is written after its answer is: the client may be quicker.
        until(lambda: [x for x in lines() if (x["request_id"], x["status"], x.get("key")) == ("abc", 200, "alice")])
        until(lambda: [x for x in lines() if (x["request_id"], x["status"], x.get("key")) == ("def", 401, None)])
        until(lambda: [x for x in requests() if (x["request_id"], x.get("key")) == ("ghi", "alice")])
    assert client_of.keys["alice"] not in caplog.text


def test_the_document_tells_of_keys_where_there_are_some(client_of, client):
    locked, open_to_all = client_of().get("/openapi.json").json(), client.get("/openapi.json").json()
    schemes = locked["components"]["securitySchemes"]
    assert {scheme["type"] for scheme in schemes.values()} == {"http", "apiKey"}
    for path, item in locked["paths"].items():
        for operation in item.values():
            assert ("security" in operation) is (path not in OPEN_PATHS)
            assert "security" not in operation or "401" in operation["responses"]
    assert "securitySchemes" not in open_to_all["components"]
    assert "security" not in open_to_all["paths"]["/t2i"]["post"]


def test_no_front_end_starts_with_a_file_that_is_none(tmp_path):
    config = Config(frontend=FrontendConfig(keys_file=str(tmp_path / "none.toml")))
    with pytest.raises(ConfigError, match="cannot be read"):
        build_app(config, EnginePool([]))


# ── How much of it: in virtual time ─────────────────────────────────────────────────────────────────────────────────────────

rates = st.integers(1, 600)
askings = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 600)), max_size=60)  # seconds since the last, images


@given(rates, askings)
def test_no_window_ever_has_more_than_its_share_and_a_burst(rate, askings):
    pace, now, passed = TokenBucket(rate), 1000.0, []
    for gap_s, num_images in askings:
        now += gap_s
        if num_images <= rate and pace.take(num_images, now) == 0:
            passed.append((now, num_images))
    for first, last in itertools.combinations_with_replacement(range(len(passed)), 2):
        window_s = passed[last][0] - passed[first][0]
        assert sum(num for _, num in passed[first : last + 1]) <= rate + window_s * rate / 60 + 0.001


@given(rates, st.lists(st.tuples(st.floats(0, 90), st.integers(1, 600)), max_size=60))
def test_nobody_who_keeps_to_the_rate_is_refused(rate, askings):
    pace, now = TokenBucket(rate), 1000.0
    for pause_s, num_images in askings:
        fitting = min(num_images, rate)
        assert pace.take(fitting, now) == 0
        now += fitting * 60 / rate + pause_s


@given(rates, askings)
def test_who_waits_as_told_passes_and_who_comes_much_sooner_does_not(rate, askings):
    pace, now = TokenBucket(rate), 1000.0
    for gap_s, num_images in askings:
        now += gap_s
        fitting = min(num_images, rate)
        if wait_s := pace.take(fitting, now):
            assert pace.take(fitting, now + 0.99 * wait_s - 1e-5) > 0 or wait_s < 1e-4
            now += wait_s
            assert pace.take(fitting, now) == 0


@given(rates, askings, st.integers(1, 600))
def test_what_is_given_back_was_never_taken(rate, askings, undone):
    pace, twin, now = TokenBucket(rate), TokenBucket(rate), 1000.0
    for gap_s, num_images in askings:
        now += gap_s
        undone_now = min(undone, rate)
        if pace.take(undone_now, now) == 0:
            pace.refund(undone_now)
        fitting = min(num_images, rate)
        assert pace.take(fitting, now) == pytest.approx(twin.take(fitting, now), abs=1e-5)


def test_a_minutes_worth_passes_at_once_and_then_one_after_the_other():
    pace = TokenBucket(30)
    assert [pace.take(1, 100.0) for _ in range(31)] == [0.0] * 30 + [pytest.approx(2.0)]
    assert pace.take(1, 102.0) == 0
    assert pace.take(30, 102.0) == pytest.approx(60.0)


def test_images_in_flight_are_counted_until_they_leave():
    caller = ApiClient(ApiKey("a", "0" * 64, max_images_in_flight=4), 1)
    caller.acquire(3, 0.0, 7.5)
    with pytest.raises(RateLimited, match="has 3 images in flight; with 2 more they would be over 4") as caught:
        caller.acquire(2, 0.0, 7.5)
    assert caught.value.retry_after_s == 7.5
    caller.acquire(1, 0.0, 7.5)
    caller.release(3)
    caller.acquire(3, 0.0, 7.5)


def test_who_is_refused_for_one_limit_is_not_charged_for_the_other():
    caller = ApiClient(ApiKey("a", "0" * 64, max_images_in_flight=2, images_per_minute=3), 1)
    caller.acquire(2, 0.0, 1.0)
    with pytest.raises(RateLimited, match="in flight"):
        caller.acquire(1, 0.0, 1.0)
    caller.release(2)
    caller.acquire(1, 0.0, 1.0)
    with pytest.raises(RateLimited, match="3 images a minute; 1 more pass in 20"):
        caller.acquire(1, 0.0, 1.0)
    caller.release(1)
    caller.acquire(1, 20.0, 1.0)


def test_several_front_ends_share_a_keys_limits_and_each_grants_one_at_least():
    key = ApiKey("a", "0" * 64, max_images_in_flight=4, images_per_minute=10)
    caller = ApiClient(key, 3)
    with pytest.raises(InvalidField, match="n is 2; the key 'a' has 1 images in flight"):
        caller.acquire(2, 0.0, 0.0)
    with pytest.raises(InvalidField, match="n is 4; the key 'a' has 3 images a minute"):
        caller.apply_priority(ImageRequestBody("p", n=4))
    lone = ApiClient(key, 64)
    lone.acquire(1, 0.0, 0.0)
    lone.release(1)
    with pytest.raises(RateLimited, match="1 images a minute; 1 more pass in 60"):
        lone.acquire(1, 0.0, 0.0)


@pytest.mark.parametrize(
    ("highest", "asked", "given"),
    [("high", None, None), ("high", "high", "high"), ("normal", None, None), ("normal", "low", "low"), ("low", None, "low")],
)  # fmt: skip
def test_a_key_has_priorities_up_to_its_own(highest, asked, given):
    assert (
        ApiClient(ApiKey("a", "0" * 64, priority=highest), 1)
        .apply_priority(ImageRequestBody("p", priority=asked))
        .priority
        == given
    )


def test_a_priority_above_the_keys_is_refused():
    with pytest.raises(InvalidField, match="priority is 'high'; allowed for the key 'a' are low, normal") as caught:
        ApiClient(ApiKey("a", "0" * 64, priority="normal"), 1).apply_priority(ImageRequestBody("p", priority="high"))
    assert caught.value.field == "priority"


# ── How much of it: over HTTP ───────────────────────────────────────────────────────────────────────────────────────────────


def of(address, keys, name):
    headers = {"Authorization": f"Bearer {keys[name]}"}
    return httpx.Client(base_url=address, headers=headers, verify=False, timeout=60)


def test_images_a_minute_are_counted_as_images_and_for_each_key(serve_keys):
    with (
        serve_keys(alice="images_per_minute = 4", bob="") as (address, engine, keys),
        of(address, keys, "alice") as alice,
    ):
        assert alice.post("/t2i", json={"prompt": "p", "n": 3}).status_code == 200
        refused = alice.post("/t2i", json={"prompt": "p", "n": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert refused.json()["error"]["retryable"] is True
        assert 1 <= int(refused.headers["retry-after"]) <= 15
        assert alice.post("/v1/images/generations", json={"prompt": "p"}).status_code == 200
        assert (
            alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}).json()["detail"].startswith("the key 'alice' may ask")
        )
        too_many = alice.post("/t2i", json={"prompt": "p", "n": 5})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        assert sum(request.num_images for request in engine.submitted) == 4
        with of(address, keys, "bob") as bob:
            assert bob.post("/t2i", json={"prompt": "p", "n": 5}).status_code == 200


def test_an_image_is_in_flight_until_its_request_ends_and_when_its_client_leaves(serve_keys, until):
    with serve_keys(alice="max_images_in_flight = 2") as (address, engine, keys), of(address, keys, "alice") as alice:
        engine.holds = True
        with alice.stream("POST", "/t2i", json={"prompt": "p", "n": 2, "stream": True}):
            pass  # accepted, and left
        until(lambda: engine.cancelled)
        engine.holds = False
        until(lambda: alice.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200)
        engine.submitted.clear()
        engine.holds = True
        threads = [
            threading.Thread(target=alice.post, args=("/t2i",), kwargs={"json": {"prompt": "p"}}) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(engine.submitted) == 2)
        for body in ({"prompt": "p"}, {"prompt": "p", "stream": True}):
            refused = alice.post("/t2i", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
            assert "has 2 images in flight" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "2"  # as the fake engine predicts its drain
        too_many = alice.post("/t2i", json={"prompt": "p", "n": 3})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        engine.holds = False
        engine.become("dead")
        engine.become("ready")
        for thread in threads:
            thread.join()
        assert alice.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200
        with alice.stream("POST", "/t2i", json={"prompt": "p", "n": 2, "stream": True}) as answer:
            assert "event: finished" in "".join(answer.iter_text())
        assert alice.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200


def test_openais_client_raises_its_rate_limit_error_and_passes_when_it_has_waited_as_told(serve_keys):
    limits = {"alice": "images_per_minute = 16", "bob": "images_per_minute = 1"}
    with serve_keys(**limits) as (address, _, keys), httpx.Client(verify=False) as web:
        settings = {"base_url": f"{address}/v1", "http_client": web}
        bob = openai.OpenAI(api_key=keys["bob"], max_retries=0, **settings)
        assert bob.images.generate(prompt="p").data
        with pytest.raises(openai.RateLimitError) as caught:
            bob.images.generate(prompt="p")
        assert caught.value.code == "rate_limited"
        alice = openai.OpenAI(api_key=keys["alice"], max_retries=1, **settings)
        assert alice.images.generate(prompt="p", n=16).data
        assert alice.images.generate(prompt="p").data


def test_a_priority_above_the_keys_is_400_on_every_route(serve_keys):
    with serve_keys(alice='priority = "low"') as (address, engine, keys), of(address, keys, "alice") as alice:
        body = {"prompt": "p", "priority": "normal"}
        for path, sent, param in (
            ("/t2i", body, "priority"),
            ("/v1/images/generations", body, "priority"),
            ("/v1/jobs", {"input": body}, "input.priority"),
        ):
            refused = alice.post(path, json=sent)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        header = {"X-Noria-Priority": "high"}
        assert alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}, headers=header).status_code == 400
        assert alice.post("/t2i", json={"prompt": "p"}).status_code == 200
        assert [request.priority for request in engine.submitted] == ["low"]


# ── Jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_count_when_they_are_accepted_and_are_never_in_flight(serve_keys):
    limits = "images_per_minute = 3\nmax_images_in_flight = 1"
    with serve_keys(alice=limits) as (address, engine, keys), of(address, keys, "alice") as alice:
        engine.holds = True
        job = {"input": {"prompt": "p", "n": 2}}
        assert (
            alice.post("/v1/jobs", json=job | {"webhook": "ftp://x"}).status_code == 400
        )  # what is refused is not counted
        assert alice.post("/v1/jobs", json=job, headers={"Idempotency-Key": "k"}).status_code == 202
        refused = alice.post("/v1/jobs", json=job)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        small = {"input": {"prompt": "p"}}
        assert alice.post("/v1/jobs", json=small, headers={"Idempotency-Key": "s"}).status_code == 202
        too_many = alice.post("/v1/jobs", json={"input": {"prompt": "p", "n": 4}})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "input.n")


def test_a_job_that_is_posted_again_is_not_counted_again(serve_keys):
    with serve_keys(alice="images_per_minute = 2") as (address, _, keys), of(address, keys, "alice") as alice:
        job = {"input": {"prompt": "p"}}
        statuses = [alice.post("/v1/jobs", json=job, headers={"Idempotency-Key": "k"}).status_code for _ in range(4)]
        assert statuses == [202, 200, 200, 200]
        assert alice.post("/v1/jobs", json=job).status_code == 202


@pytest.fixture
def ended(until):
    def wait(client, job_id):
        until(lambda: client.get(f"/v1/jobs/{job_id}").json()["completed_at"])
        return client.get(f"/v1/jobs/{job_id}").json()

    return wait


def test_a_job_is_its_keys_alone(client_of, ended):
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


def test_a_list_has_ones_own_jobs_on_every_page(client_of):
    names = {"alice": [], "bob": []}
    for number in range(10):
        name = ("alice", "bob")[number % 2]
        names[name].append(client_of(name).post("/v1/jobs", json={"input": {"prompt": "p"}}).json()["id"])
    for name, own in names.items():
        url, found = "/v1/jobs?limit=2", []
        while url:
            page = client_of(name).get(url).json()
            found += [job["id"] for job in page["results"]]
            url = page["next"]
        assert found == own[::-1]


def test_nobody_cancels_anothers_job(client_of):
    client_of.engine.holds = True
    alice, bob = client_of("alice"), client_of("bob")
    job_id = alice.post("/v1/jobs", json={"input": {"prompt": "p"}}).json()["id"]
    assert bob.delete(f"/v1/jobs/{job_id}").status_code == 404
    assert alice.get(f"/v1/jobs/{job_id}").json()["status"] in ("starting", "processing")
    assert alice.delete(f"/v1/jobs/{job_id}").json()["status"] == "canceled"


def test_idempotency_keys_of_two_api_keys_are_two(client_of):
    def post(name, prompt):
        body = {"input": {"prompt": prompt}}
        return client_of(name).post("/v1/jobs", json=body, headers={"Idempotency-Key": "order-1"})

    first, other, again = post("alice", "p"), post("bob", "q"), post("alice", "p")
    assert [answer.status_code for answer in (first, other, again)] == [202, 202, 200]
    assert first.json()["id"] == again.json()["id"] != other.json()["id"]


def test_jobs_from_before_there_were_keys_are_nobodys_and_without_keys_all_are_everybodys(
    serve_keys, serve, new_engine, tmp_path, until
):
    def post(client):
        return client.post("/v1/jobs", json={"input": {"prompt": "p"}}).json()["id"]

    @contextlib.contextmanager
    def open_to_all():
        with (
            serve(Config(data_dir=str(tmp_path)), new_engine()) as (address, _),
            httpx.Client(base_url=address, verify=False, timeout=60) as client,
        ):
            until(lambda: client.get("/readyz").status_code == 200)
            yield client

    with open_to_all() as client:
        before = post(client)
    with serve_keys(alice="") as (address, _, keys), of(address, keys, "alice") as alice:
        assert alice.get(f"/v1/jobs/{before}").status_code == 404
        own = post(alice)
        assert [job["id"] for job in alice.get("/v1/jobs").json()["results"]] == [own]
    with open_to_all() as client:
        assert [job["id"] for job in client.get("/v1/jobs").json()["results"]] == [own, before]
        assert client.get(f"/v1/jobs/{own}").status_code == 200


# ── A1111's clients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_progress_and_interrupt_are_about_ones_own_requests(client_of, until):
    client_of.engine.holds = True
    alice, bob, answers = client_of("alice"), client_of("bob"), []
    thread = threading.Thread(
        target=lambda: answers.append(alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}).status_code)
    )
    thread.start()
    try:
        until(lambda: alice.get("/sdapi/v1/progress").json()["state"]["job_count"] == 1)
        assert bob.get("/sdapi/v1/progress").json()["state"]["job_count"] == 0
        for path in ("interrupt", "skip"):
            assert bob.post(f"/sdapi/v1/{path}").json() == {}
        state = alice.get("/sdapi/v1/progress").json()["state"]
        assert (state["job_count"], state["interrupted"]) == (1, False)
    finally:
        alice.post("/sdapi/v1/interrupt")
        thread.join()
    assert answers == [499]
