"""Whose share of an engine a request takes, as the engine gets it."""

import httpx
import pytest

from noria.config import Config, FrontendConfig
from waiting import wait_until, wait_until_ready


@pytest.fixture
def submit(serve, new_engine):
    """Submits an image request and returns the engine's; the header that names clients is X-Client."""
    engine = new_engine()
    with serve(Config(frontend=FrontendConfig(client_header="X-Client")), engine) as (address, _):
        wait_until_ready(address)
        with httpx.Client(base_url=address, verify=False, timeout=60) as client:

            def post(path="/t2i", headers=None, **body):
                assert client.post(path, json={"prompt": "p"} | body, headers=headers).status_code == 200
                return engine.submitted[-1]

            yield post


def test_without_keys_it_is_that_of_the_address_and_no_engine_gets_that(submit):
    one, other = ({"X-Forwarded-For": address} for address in ("192.0.2.1", "192.0.2.2"))
    first = submit(headers=one)
    assert submit(headers=one).share_client == first.share_client != submit(headers=other).share_client
    assert "192.0.2" not in repr(first)
    assert (first.client, first.share_weight) == ("", 1.0)


def test_the_addresses_of_an_ipv6_network_share_one(submit):
    one, neighbour, other = (
        submit(headers={"X-Forwarded-For": address}).share_client
        for address in ("2001:db8::1", "2001:db8::2", "2001::1")
    )
    assert one == neighbour != other


def test_without_keys_the_user_of_openai_requests_is_before_the_address_and_the_operators_header_before_that(submit):
    openai, anonymous = "/v1/images/generations", submit().share_client
    ann, ben = (submit(openai, user=user).share_client for user in ("ann", "ben"))
    named = submit(openai, headers={"X-Client": "shop"}, user="ann").share_client
    assert len({anonymous, ann, ben, named}) == 4
    assert submit(openai, headers={"X-Forwarded-For": "192.0.2.1"}, user="ann").share_client == ann
    assert submit(headers={"X-Client": "shop"}).share_client == named
    assert submit(openai).share_client == anonymous


def test_a_header_that_the_operator_does_not_name_is_ignored(client, engine):
    for value in ("one", "other"):
        assert client.post("/t2i", json={"prompt": "p"}, headers={"X-Client": value}).status_code == 200
    assert len({request.share_client for request in engine.submitted}) == 1


def test_with_keys_it_is_that_of_the_key_by_its_weight_and_its_jobs_have_a_smaller_one(serve_keys, client_with_key):
    with serve_keys(alice="", bob="weight = 2.5\n") as (address, engine, keys):
        for name, weight in (("alice", 1.0), ("bob", 2.5)):
            with client_with_key(address, keys, name) as client:
                body = {"prompt": "p", "user": "somebody else"}
                assert client.post("/v1/images/generations", json=body).status_code == 200
            assert (engine.submitted[-1].share_client, engine.submitted[-1].share_weight) == (name, weight)
        with client_with_key(address, keys, "bob") as client:
            assert client.post("/v1/jobs", json={"input": {"prompt": "p"}}).status_code == 202
        wait_until(lambda: len(engine.submitted) == 3)
        assert (engine.submitted[-1].share_client, engine.submitted[-1].share_weight) == ("bob jobs", 0.25)
