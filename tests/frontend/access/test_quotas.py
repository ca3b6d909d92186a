"""Quotas of API keys, in virtual time and over HTTP."""

import base64
import collections
import io
import itertools
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from noria.errors import InvalidField, RateLimited
from noria.frontend.access.api_keys import ApiKey
from noria.frontend.access.quotas import ApiClient, InFlight, Quota, TokenBucket
from waiting import wait_until

rates = st.integers(1, 600)
arrivals = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 600)), max_size=60)  # seconds since the last, images


@given(rates, arrivals)
def test_no_window_has_more_than_the_rate_and_one_burst(rate, arrivals):
    bucket, now, passed = TokenBucket(rate), 1000.0, []
    for gap_s, num_images in arrivals:
        now += gap_s
        if num_images <= rate and bucket.take(num_images, now) == 0:
            passed.append((now, num_images))
    for first, last in itertools.combinations_with_replacement(range(len(passed)), 2):
        window_s = passed[last][0] - passed[first][0]
        assert sum(num for _, num in passed[first : last + 1]) <= rate + window_s * rate / 60 + 0.001


@given(rates, st.lists(st.tuples(st.floats(0, 90), st.integers(1, 600)), max_size=60))
def test_a_client_within_the_rate_is_never_rejected(rate, arrivals):
    bucket, now = TokenBucket(rate), 1000.0
    for pause_s, num_images in arrivals:
        fitting = min(num_images, rate)
        assert bucket.take(fitting, now) == 0
        now += fitting * 60 / rate + pause_s


@given(rates, arrivals)
def test_a_client_passes_after_the_returned_wait_and_not_before(rate, arrivals):
    bucket, now = TokenBucket(rate), 1000.0
    for gap_s, num_images in arrivals:
        now += gap_s
        fitting = min(num_images, rate)
        if wait_s := bucket.take(fitting, now):
            assert bucket.take(fitting, now + 0.99 * wait_s - 1e-5) > 0 or wait_s < 1e-4
            now += wait_s
            assert bucket.take(fitting, now) == 0


@given(rates, arrivals, st.integers(1, 600))
def test_a_refund_undoes_a_take(rate, arrivals, undone):
    bucket, twin, now = TokenBucket(rate), TokenBucket(rate), 1000.0
    for gap_s, num_images in arrivals:
        now += gap_s
        undone_now = min(undone, rate)
        if bucket.take(undone_now, now) == 0:
            bucket.refund(undone_now)
        fitting = min(num_images, rate)
        assert bucket.take(fitting, now) == pytest.approx(twin.take(fitting, now), abs=1e-5)


def test_a_rejection_for_one_limit_does_not_charge_the_other():
    client = ApiClient(ApiKey("a", "0" * 64, max_images_in_flight=2, images_per_minute=3), 1)
    client.images.acquire(2, 0.0, lambda: 1.0)
    with pytest.raises(RateLimited, match="in flight"):
        client.images.acquire(1, 0.0, lambda: 1.0)
    client.images.release(2)
    client.images.acquire(1, 0.0, lambda: 1.0)
    with pytest.raises(RateLimited, match=r"3 images a minute.* 20"):
        client.images.acquire(1, 0.0, lambda: 1.0)
    client.images.release(1)
    client.images.acquire(1, 20.0, lambda: 1.0)


def test_front_ends_share_a_keys_limits_and_each_allows_at_least_one():
    key = ApiKey("a", "0" * 64, max_images_in_flight=4, images_per_minute=10)
    client = ApiClient(key, 3)
    with pytest.raises(InvalidField, match=r"n is 2.* 1 images in flight"):
        client.images.acquire(2, 0.0, lambda: 0.0)
    with pytest.raises(InvalidField, match=r"n is 4.* 3 images a minute"):
        client.images.check_rate(4)
    lone = ApiClient(key, 64)
    lone.images.acquire(1, 0.0, lambda: 0.0)
    lone.images.release(1)
    with pytest.raises(RateLimited, match=r"1 images a minute.* 60"):
        lone.images.acquire(1, 0.0, lambda: 0.0)


@pytest.mark.parametrize(
    ("highest", "asked", "given"),
    [
        ("high", None, None), ("high", "high", "high"), ("normal", None, None), ("normal", "low", "low"),
        ("low", None, "low"),
    ],
)  # fmt: skip
def test_a_key_may_use_priorities_up_to_its_own(highest, asked, given):
    assert ApiClient(ApiKey("a", "0" * 64, priority=highest), 1).allowed_priority(asked) == given


@pytest.mark.parametrize(
    ("highest", "asked", "allowed"),
    [("normal", "high", "low, normal"), ("low", "normal", "low"), ("low", "high", "low")],
)
def test_a_priority_above_the_keys_is_rejected_with_the_allowed_ones(highest, asked, allowed):
    with pytest.raises(InvalidField) as raised:
        ApiClient(ApiKey("a", "0" * 64, priority=highest), 1).allowed_priority(asked)
    message = f"priority is '{asked}'; allowed for the key 'a' are {allowed}."
    assert (raised.value.message, raised.value.field) == (message, "priority")


@pytest.mark.parametrize(
    ("unit", "field", "got"), [("images", "n", "n is 3"), ("texts", "input", "the request has 3 texts")]
)
def test_a_request_may_use_all_of_a_limit_and_no_more(unit, field, got):
    quota = Quota("a", unit, 2, 2)
    for limit_name, call in (
        ("a minute", quota.check_rate),
        ("in flight", lambda count: quota.acquire(count, 1000.0, lambda: 7.0)),
    ):
        with pytest.raises(InvalidField) as raised:
            call(3)
        message = f"{got}; the key 'a' has 2 {unit} {limit_name}: allowed are 1 to 2."
        assert (raised.value.message, raised.value.field) == (message, field)
        call(2)
    with pytest.raises(RateLimited) as rejected:
        quota.acquire(1, 1000.0, lambda: 7.0)
    assert (rejected.value.retry_after_s, quota.num_in_flight) == (7.0, 2)
    quota.release(2)
    with pytest.raises(RateLimited) as rejected:
        quota.acquire(1, 1000.0, lambda: 7.0)
    assert (rejected.value.retry_after_s, quota.num_in_flight) == (pytest.approx(30.0), 0)


def test_limits_that_change_keep_what_is_in_flight_and_charged():
    quota = Quota("a", "images", None, None)
    assert not quota.has_limits
    for now, limits in ((0.0, (None, None)), (0.0, (4, None)), (1000.0, (None, 4)), (1000.0, (None, 2))):
        quota.update("a", *limits)
        assert quota.has_limits is (limits != (None, None))
        with InFlight(quota, 1, now, lambda: 0.0):
            assert quota.num_in_flight == 1
        assert quota.num_in_flight == 0
    with pytest.raises(RateLimited), InFlight(quota, 2, 1000.0, lambda: 0.0):
        pass
    with pytest.raises(InvalidField), InFlight(quota, 3, 5000.0, lambda: 0.0):
        pass
    assert quota.num_in_flight == 0


def test_the_rate_counts_images_and_is_per_key(serve_keys, client_with_key):
    with (
        serve_keys(alice="images_per_minute = 4", bob="") as (address, engine, keys),
        client_with_key(address, keys, "alice") as alice,
    ):
        assert alice.post("/t2i", json={"prompt": "p", "n": 3}).status_code == 200
        rejected = alice.post("/t2i", json={"prompt": "p", "n": 2})
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "rate_limited")
        assert rejected.json()["error"]["retryable"] is True
        assert 1 <= int(rejected.headers["retry-after"]) <= 15
        assert alice.post("/v1/images/generations", json={"prompt": "p"}).status_code == 200
        assert (
            alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}).json()["detail"].startswith("the key 'alice' allows")
        )
        too_many = alice.post("/t2i", json={"prompt": "p", "n": 5})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        assert sum(request.payload.n for request in engine.submitted) == 4
        with client_with_key(address, keys, "bob") as bob:
            assert bob.post("/t2i", json={"prompt": "p", "n": 5}).status_code == 200


def test_images_that_a_filter_enlarges_count_and_are_recorded(serve_keys, client_with_key):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    image = base64.b64encode(file.getvalue()).decode()
    body = {"imageList": [{"data": image}] * 2, "upscaler_1": "Lanczos"}
    with (
        serve_keys(alice="images_per_minute = 3") as (address, engine, keys),
        client_with_key(address, keys, "alice") as alice,
    ):

        def num_requests():  # since the process began
            found = re.findall(r'noria_requests_total\{model="other",outcome="(.*)"\} (.*)', alice.get("/metrics").text)
            return collections.Counter({outcome: float(value) for outcome, value in found})

        before = num_requests()
        assert alice.post("/sdapi/v1/extra-batch-images", json=body).status_code == 200
        rejected = alice.post("/sdapi/v1/extra-batch-images", json=body)  # its second image
        assert (rejected.status_code, engine.submitted) == (429, [])
        assert num_requests() - before == {"ok": 3, "rate_limited": 1}


def test_an_image_is_in_flight_until_its_request_ends_or_its_client_disconnects(serve_keys, client_with_key):
    with (
        serve_keys(alice="max_images_in_flight = 2") as (address, engine, keys),
        client_with_key(address, keys, "alice") as alice,
    ):
        engine.never_answers = True
        with alice.stream("POST", "/t2i", json={"prompt": "p", "n": 2, "stream": True}):
            pass  # accepted, then disconnected
        wait_until(lambda: engine.cancelled)
        engine.never_answers = False
        wait_until(lambda: alice.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200)
        engine.submitted.clear()
        engine.never_answers = True
        threads = [
            threading.Thread(target=alice.post, args=("/t2i",), kwargs={"json": {"prompt": "p"}}) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.submitted) == 2)
        for body in ({"prompt": "p"}, {"prompt": "p", "stream": True}):
            rejected = alice.post("/t2i", json=body)
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "rate_limited")
            assert "has 2 images in flight" in rejected.json()["error"]["message"]
            assert rejected.headers["retry-after"] == "2"  # the backlog that the fake engine reports, rounded up
        too_many = alice.post("/t2i", json={"prompt": "p", "n": 3})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")
        engine.never_answers = False
        engine.set_state("dead")
        engine.set_state("ready")
        for thread in threads:
            thread.join()
        assert alice.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200
        with alice.stream("POST", "/t2i", json={"prompt": "p", "n": 2, "stream": True}) as answer:
            assert "event: finished" in "".join(answer.iter_text())
        assert alice.post("/t2i", json={"prompt": "p", "n": 2}).status_code == 200


def test_a_priority_above_the_keys_is_400_on_every_route(serve_keys, client_with_key):
    with (
        serve_keys(alice='priority = "low"') as (address, engine, keys),
        client_with_key(address, keys, "alice") as alice,
    ):
        body = {"prompt": "p", "priority": "normal"}
        for path, sent, param in (
            ("/t2i", body, "priority"),
            ("/v1/images/generations", body, "priority"),
            ("/v1/jobs", {"input": body}, "input.priority"),
        ):
            rejected = alice.post(path, json=sent)
            assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, param)
        header = {"X-Noria-Priority": "high"}
        assert alice.post("/sdapi/v1/txt2img", json={"prompt": "p"}, headers=header).status_code == 400
        assert alice.post("/t2i", json={"prompt": "p"}).status_code == 200
        assert [request.priority for request in engine.submitted] == ["low"]


def test_jobs_are_charged_when_accepted_and_never_in_flight(serve_keys, client_with_key):
    limits = "images_per_minute = 3\nmax_images_in_flight = 1"
    with serve_keys(alice=limits) as (address, engine, keys), client_with_key(address, keys, "alice") as alice:
        engine.never_answers = True
        job, small = {"input": {"prompt": "p", "n": 2}}, {"input": {"prompt": "p"}}
        # A rejected job is not charged, and one that is repeated once.
        assert alice.post("/v1/jobs", json=job | {"webhook": "ftp://x"}).status_code == 400
        statuses = [alice.post("/v1/jobs", json=small, headers={"Idempotency-Key": "s"}).status_code for _ in range(3)]
        assert statuses == [202, 200, 200]
        assert alice.post("/v1/jobs", json=job).status_code == 202
        rejected = alice.post("/v1/jobs", json=small)
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "rate_limited")
        too_many = alice.post("/v1/jobs", json={"input": {"prompt": "p", "n": 4}})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "input.n")


def test_what_is_held_counts_until_the_end_of_the_context_and_leaves_nothing():
    quota = Quota("alice", "images", 2, 4)
    for _ in range(9):
        with quota.hold(2, 1000.0, lambda: 0.0, in_flight=True):
            with (
                pytest.raises(RateLimited, match="has 2 images in flight"),
                quota.hold(1, 1000.0, lambda: 3.0, in_flight=True),
            ):
                pass
            with (
                pytest.raises(RateLimited, match="4 images a minute"),
                quota.hold(3, 1000.0, lambda: 0.0, in_flight=False),
            ):
                pass
        with quota.hold(4, 1000.0, lambda: 0.0, in_flight=False), pytest.raises(RateLimited, match="4 images a minute"):
            quota.charge(1, 1000.0)
    quota.acquire(2, 1000.0, lambda: 0.0)
