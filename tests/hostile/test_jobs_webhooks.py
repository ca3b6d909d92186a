"""Webhooks of one caller: 16 names whose name servers do not answer once made every other's webhook a 400."""

import asyncio
import contextlib
import socket
import threading

import pytest

from noria.errors import InvalidField, JobsUnavailable, QueueFull, RateLimited
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore
from noria.jobs.records import NewJob, new_job_id
from noria.jobs.webhooks.outbox import MAX_AGE_S, MAX_IN_FLIGHT, MAX_PER_CLIENT, MAX_PER_HOST, Outbox
from noria.jobs.webhooks.resolver import Resolver
from noria.jobs.webhooks.url_check import check_webhook_url
from waiting import TIMEOUT_S


def test_slow_names_of_one_key_are_temporary_errors_and_keep_no_other_from_a_lookup():
    released, entered = threading.Event(), []

    def look_up(host, *_):
        if host.startswith("slow"):
            entered.append(host)
            released.wait(TIMEOUT_S)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 443))]

    async def attack(resolver):
        async def post(number):
            with pytest.raises(JobsUnavailable) as caught:
                await check_webhook_url(
                    f"https://slow{number}.example/", lambda host, port: resolver(host, port, client="mallory")
                )
            assert caught.value.retry_after_s

        attacks = [asyncio.create_task(post(number)) for number in range(64)]
        try:
            await asyncio.sleep(0)
            alices = await check_webhook_url(
                "https://fast.example/", lambda host, port: resolver(host, port, client="alice")
            )
            assert alices.address == "93.184.216.34"
            assert len(entered) <= 4
        finally:
            released.set()
        await asyncio.gather(*attacks)

    with contextlib.closing(Resolver(look_up, timeout_s=TIMEOUT_S)) as resolver:
        asyncio.run(attack(resolver))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://168.63.129.16:32526/vmSettings", "not public"),
        ("https://example.com:25/", "its port is 25"),
        ("https://example.com:6/", "its port is 6"),
    ],
)
def test_services_of_hosts_that_are_no_receivers_are_no_targets(url, words):
    async def resolve(host, _port):
        return [host if host[0] == "1" else "93.184.216.34"]

    with pytest.raises(InvalidField, match=words):
        asyncio.run(check_webhook_url(url, resolve))


@pytest.mark.parametrize("mallory", ["the key 'mallory'", "the address 192.0.2.1"])
def test_a_client_whose_receivers_do_not_answer_delays_only_its_own_deliveries(database, tmp_path, mallory):
    """Without keys, one with 60 host names once kept all deliveries of a front end."""
    engine = open_jobs_database(database, tmp_path)
    store, outbox = JobStore(engine), Outbox(engine)

    def accept(client, host, now):
        new = NewJob(
            new_job_id(), "m", "v", b"{}", b"{}", "http://noria.test/", webhook=f"https://{host}/", client=client
        )
        store.cancel(store.accept(new, 1000, now)[0].id, now)

    for number in range(20):
        accept(mallory, "tarpit.example", number)
    in_flight = outbox.claim_due(MAX_IN_FLIGHT, 50.0)
    assert len(in_flight) == MAX_PER_HOST
    assert outbox.claim_due(MAX_IN_FLIGHT - len(in_flight), 50.0, in_flight) == []
    for number in range(20):
        accept(mallory, f"tarpit{number}.example", 20 + number)
    accept("the key 'alice'", "hooks.example", 49.0)
    accept("the address 192.0.2.2", "hooks.example", 49.5)
    more = outbox.claim_due(MAX_IN_FLIGHT - len(in_flight), 51.0, in_flight)
    others = ["the key 'alice'", "the address 192.0.2.2"]
    assert [delivery.client for delivery in more] == [mallory] * (MAX_PER_CLIENT - MAX_PER_HOST) + others
    store.close()


def test_pending_webhooks_are_bounded_in_number_and_age(database, tmp_path):
    """A receiver that accepts none once made the table grow by each job, for days."""
    engine = open_jobs_database(database, tmp_path)
    store, outbox = JobStore(engine), Outbox(engine)

    def end_job(client, now, webhook="https://hooks.example/"):
        new = NewJob(new_job_id(), "m", "v", b"{}", b"{}", "http://noria.test/", webhook=webhook, client=client)
        store.cancel(store.accept(new, 1000, now, max_pending_webhooks=8)[0].id, now)

    for number in range(2):
        end_job("mallory", number)
    with pytest.raises(RateLimited, match=r"mallory has 2 pending webhooks; at most 2"):
        end_job("mallory", 2)
    end_job("mallory", 2, webhook=None)
    for number in range(6):
        end_job(f"client {number // 2}", 3 + number)
    with pytest.raises(QueueFull, match=r"8 webhooks are pending; at most 8"):
        end_job("alice", 10)
    assert outbox.expire(MAX_AGE_S) == 0
    assert outbox.expire(1.5 + MAX_AGE_S) == 2
    end_job("alice", 11, "https://alice.example/")
    assert {delivery.client for delivery in outbox.claim_due(MAX_IN_FLIGHT, 12.0)} == {"client 0", "client 1", "alice"}
    store.close()
