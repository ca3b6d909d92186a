"""Webhooks: signatures follow the specification, and deliveries go only to the address that was checked."""

import asyncio
import contextlib
import json
import subprocess
from collections import Counter

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from databases import on_both
from jobs import webhook_receiver
from jobs.webhook_receiver import SECRET, Receiver, webhook_client
from noria.jobs.database.schema import deliveries
from noria.jobs.thread_offloader import ThreadOffloader
from noria.jobs.webhooks.client import MAX_TRIES, _attributes, retry_delay_s
from noria.jobs.webhooks.dispatcher import WebhookDispatcher
from noria.jobs.webhooks.outbox import CLAIM_S, MAX_AGE_S, MAX_PER_HOST, Outbox, WebhookDelivery
from noria.jobs.webhooks.resolver import Resolver
from noria.jobs.webhooks.signing import format_secret, secret_of_key, sign
from noria.observe.logs.setup import LineHandler, logging_to
from waiting import POLL_INTERVAL_S, TIMEOUT_S, wait_until_async

BODY = '{"id": "job_1", "status": "succeeded"}'


def delivery_to(url, made_by=""):
    return WebhookDelivery("msg_1", url, BODY, 1, "job_1", "", made_by)


async def send(url, made_by="", **options):
    return await webhook_receiver.send(delivery_to(url, made_by), **options)


# ── Signing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_receiver_can_verify_the_signature_of_its_key_during_a_rotation():
    with Receiver() as receiver:
        url = f"{receiver.address()}in?a=b"
        assert await send(url, made_by="alice", secrets=(bytes(32), SECRET)) is None
    ((path, headers, content),) = receiver.received
    assert (path, content.decode(), headers["content-type"]) == ("/in?a=b", BODY, "application/json")
    assert headers["host"] == f"hooks.example:{receiver.server_port}"
    assert headers["webhook-id"] == "msg_1"
    for server_secret in (SECRET, bytes(32)):
        Webhook(format_secret(secret_of_key(server_secret, "alice"))).verify(content, headers)
        for other in (server_secret, secret_of_key(server_secret, "bob")):
            with pytest.raises(WebhookVerificationError):
                Webhook(format_secret(other)).verify(content, headers)


# ── Where it goes ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_loopback_is_rejected_at_delivery():
    with Receiver() as receiver, contextlib.closing(Resolver(timeout_s=TIMEOUT_S)) as resolver:
        reason = await send(receiver.url, resolve=resolver, allow_private=False)
    assert "not public" in reason
    assert receiver.received == []


async def test_a_host_that_resolves_to_a_private_address_after_its_check_is_rejected():
    answers = [["8.8.8.8"], ["127.0.0.1"]]

    async def rebinding(host, port):
        return answers.pop(0)

    with Receiver() as receiver:
        async with webhook_client(rebinding, allow_private=False) as client:
            await client.check_url(receiver.address())
            failed = await client.send(delivery_to(receiver.address()), 0.0)
    assert "not public" in failed.reason
    assert receiver.received == []


async def test_redirects_are_not_followed():
    with (
        Receiver() as elsewhere,
        Receiver([307], headers={"Location": elsewhere.url}) as receiver,
    ):
        assert await send(receiver.address()) == "it answered 307"
    assert elsewhere.received == []


async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with Receiver() as receiver:
        assert await send(receiver.address()) is None


async def test_a_large_response_is_not_read_to_its_end():
    with Receiver(body=b"x" * 50_000_000) as receiver:
        assert await send(receiver.address()) is None


async def test_a_refused_connection_is_reported_in_words():
    assert "ConnectError" in await send("http://hooks.example:1/")


@pytest.fixture
def certificate(tmp_path):
    file = tmp_path / "hooks.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hooks.example"]
    names = ["-addext", "subjectAltName=DNS:hooks.example", "-keyout", str(file), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, *names], check=True, capture_output=True)
    file.write_text(file.read_text() + (tmp_path / "cert.pem").read_text())
    return file


async def test_tls_uses_the_host_name_although_the_connection_uses_the_address(certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with Receiver(certificate=certificate) as receiver:
        assert await send(receiver.address("https")) is None
        assert "CERTIFICATE_VERIFY_FAILED" in await send(f"https://other.example:{receiver.server_port}/")
    assert receiver.server_names == ["hooks.example", "other.example"]
    assert len(receiver.received) == 1


# ── Retries ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_retries_spread_over_days_and_then_end():
    waits = [retry_delay_s(number, 0.5) for number in range(1, MAX_TRIES)]
    assert waits[0] == 5.0
    assert waits == sorted(waits)
    assert max(waits) == 86_400.0
    assert 3 * 86_400 < sum(waits) < 4 * 86_400
    assert retry_delay_s(MAX_TRIES, 0.5, 1.0) is None
    assert retry_delay_s(1, 0.0) == 4.0
    assert retry_delay_s(1, 0.999) < 6.0


def test_retry_after_delays_the_next_try_by_a_day_at_most():
    assert retry_delay_s(1, 0.0, 60.0) == 60.0
    assert 60.0 < retry_delay_s(1, 0.5, 60.0) < 72.0  # not all at once
    assert retry_delay_s(1, 0.0, 1e9) == 86_400.0
    assert retry_delay_s(4, 0.5, 60.0) == 7200.0


@pytest.mark.parametrize(
    ("status", "text", "wait_s"),
    [
        (429, "120", 120.0),
        (503, "Wed, 18 Nov 2026 19:21:00 GMT", 60.0),
        (503, "Wed, 18 Nov 2026 19:19:00 GMT", 0.0),
        (500, "120", 0.0),
        (429, "soon", 0.0),
        (429, "-5", 0.0),
        (429, "9" * 400, 0.0),
    ],
)
async def test_retry_after_is_read_from_a_busy_receiver(status, text, wait_s):
    with Receiver([status], headers={"Retry-After": text}) as receiver:
        async with webhook_client() as client:
            failed = await client.send(delivery_to(receiver.address()), 1_795_029_600.0)
    assert (failed.retry_after_s, failed.reason) == (wait_s, f"it answered {status}")


@pytest.mark.parametrize(
    ("url", "port"), [("https://a.example/x", 443), ("http://a.example/x", 80), ("https://a.example:8443/x", 8443)]
)
def test_the_span_of_a_delivery_names_the_port_of_its_scheme(url, port):
    assert _attributes(delivery_to(url))["server.port"] == port


def test_webhooks_that_no_receiver_has_taken_for_five_days_are_deleted(store, engine, job, caplog):
    for created_at in (0.0, 10.0):
        store.accept(job(webhook="https://example.com/"), 9, created_at)
    store.claim("s/f/1", {("shapes", "v1")}, 2, 10.0)
    with engine.begin() as connection:
        oldest, newest = connection.scalars(sa.select(deliveries.c.id)).all()
        for each, created_at in ((oldest, 0.0), (newest, 10.0)):
            connection.execute(deliveries.update().where(deliveries.c.id == each).values(created_at=created_at))
    outbox = Outbox(engine)
    assert (outbox.expire(MAX_AGE_S), caplog.records) == (0, [])
    assert outbox.expire(MAX_AGE_S + 10.0) == 1
    assert [each.noria_fields for each in caplog.records] == [{"event": "webhooks_expired", "num_dropped": 1}]
    with engine.connect() as connection:
        assert connection.scalars(sa.select(deliveries.c.id)).all() == [newest]


def due_at(engine):
    """When the only delivery is due; None if there is none."""
    with engine.connect() as connection:
        return connection.scalar(sa.select(deliveries.c.due_at))


def test_a_claimed_delivery_is_due_again_if_its_dispatcher_dies(store, engine, job):
    store.accept(job(webhook="https://example.com/"), 9, 0.0)
    store.claim("s/f/1", {("shapes", "v1")}, 1, 0.0)
    outbox, other = Outbox(engine), Outbox(engine)
    (first,) = outbox.claim_due(9, 1.0)
    assert other.claim_due(9, 1.0) == []
    (second,) = other.claim_due(9, 1.0 + CLAIM_S)
    assert (second.id, second.body, second.num_tries) == (first.id, first.body, 2)
    outbox.reschedule(first, 9999.0)  # its claim is void
    assert len(outbox.claim_due(9, 1.0 + 2 * CLAIM_S)) == 1


@contextlib.asynccontextmanager
async def dispatching(engine, allow_private=True, **options):
    """Deliver what is due as long as the context lasts."""
    offload = ThreadOffloader()
    async with webhook_client(allow_private=allow_private) as client:
        running = asyncio.create_task(WebhookDispatcher(Outbox(engine), client, offload, **options).run())
        yield
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    offload.close()


@pytest.fixture
def deliver_all(engine):
    """Delivers until nothing is pending. The clock jumps to when the next delivery is due."""
    now = 0.0

    async def deliver():
        nonlocal now
        async with dispatching(engine, clock=lambda: now, uniform=lambda: 0.5), asyncio.timeout(TIMEOUT_S):
            while (due := await asyncio.to_thread(due_at, engine)) is not None:
                # rescheduled; while a try runs, the clock stands still, however long it takes
                if due != now + CLAIM_S:
                    now = due
                await asyncio.sleep(POLL_INTERVAL_S)

    return deliver


@on_both
async def test_a_failing_receiver_gets_the_same_message_until_it_accepts_it(store, job, deliver_all):
    with Receiver([500, 503], headers={"Retry-After": "900"}) as receiver:
        new = job(webhook=receiver.address(), webhook_events=("completed",), made_by="alice")
        record, _ = store.accept(new, 9, 0.0)
        store.cancel(record.id, 0.0)
        await deliver_all()
    for _, headers, content in receiver.received:
        secrets = [secret_of_key(SECRET, "alice")]
        signature = sign(secrets, headers["webhook-id"], int(headers["webhook-timestamp"]), content)
        assert headers["webhook-signature"] == signature
    assert len({headers["webhook-id"] for _, headers, _ in receiver.received}) == 1
    assert [headers["webhook-timestamp"] for _, headers, _ in receiver.received] == ["0", "5", "995"]
    assert len({headers["webhook-signature"] for _, headers, _ in receiver.received}) == 3
    assert [json.loads(content)["status"] for _, _, content in receiver.received] == ["canceled"] * 3


@on_both
async def test_a_receiver_that_is_gone_ends_the_deliveries_of_the_key_to_its_url(store, job, deliver_all, caplog):
    with Receiver([410] * 100) as gone, Receiver() as other:
        for number in range(20):
            url = (gone if number < 19 else other).address()
            new = job(webhook=url, webhook_events=("completed",), made_by="bob" if number == 18 else "alice")
            store.cancel(store.accept(new, 99, float(number))[0].id, float(number) - 99)
        await deliver_all()
    by_id = Counter(headers["webhook-id"] for _, headers, _ in gone.received)
    assert (
        len(by_id) <= 1 + MAX_PER_HOST
    )  # those of alice that were in flight when the first one was answered, and bob's
    assert set(by_id.values()) == {1}
    assert len(other.received) == 1
    dropped = [record.noria_fields for record in caplog.records if "410" in record.message]
    assert sum(fields["num_dropped"] for fields in dropped) == 19
    assert {(fields["event"], fields["reason"]) for fields in dropped} == {("webhook_gone", "it answered 410")}


async def test_a_webhook_that_no_try_delivers_is_abandoned_with_an_error_in_the_log(
    store, engine, job, deliver_all, caplog
):
    with Receiver([500] * MAX_TRIES) as receiver:
        new = job(webhook=receiver.address(), webhook_events=("completed",))
        store.cancel(store.accept(new, 9, 0.0)[0].id, 0.0)
        with engine.begin() as connection:
            connection.execute(deliveries.update().values(num_tries=MAX_TRIES - 2))
        await deliver_all()
    assert len(receiver.received) == 2
    (error,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert (error.noria_fields["event"], error.noria_fields["reason"]) == ("webhook_abandoned", "it answered 500")
    assert f"after {MAX_TRIES} tries" in error.getMessage()


def webhook_lines(lines):
    return [line for line in lines if line["logger"] == "noria.webhooks"]


@pytest.mark.parametrize("allow_private", [True, False])
async def test_the_log_line_of_a_webhook_names_its_job_and_omits_its_urls_query(store, engine, job, allow_private):
    lines = []
    with Receiver([500]) as receiver, logging_to(LineHandler("frontend-0", lines.append), "info"):
        url = f"{receiver.address()}in?auth=hunter2"
        record, _ = store.accept(job(webhook=url, webhook_events=("completed",)), 9, 0.0)
        store.cancel(record.id, 0.0)
        async with dispatching(engine, allow_private):
            await wait_until_async(lambda: webhook_lines(lines))
    assert not [line for line in lines if line["logger"].startswith("http")]
    webhook_line = webhook_lines(lines)[0]
    assert (webhook_line["event"], webhook_line["request_id"]) == ("webhook_failed", record.id)
    assert webhook_line["url"] == f"{receiver.address()}in"
    assert ("500" if allow_private else "/in'") in webhook_line["reason"]
    assert "hunter2" not in str(webhook_line)
