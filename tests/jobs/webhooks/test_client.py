"""Webhooks: signatures follow the specification, and deliveries go only to the address that was checked."""

import asyncio
import contextlib
import http.server
import json
import ssl
import subprocess
import threading
import time
from collections import Counter

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from noria.jobs.database.schema import deliveries
from noria.jobs.database.store import JobStore
from noria.jobs.thread_offloader import ThreadOffloader
from noria.jobs.webhooks.client import MAX_TRIES, WebhookClient, retry_delay_s
from noria.jobs.webhooks.dispatcher import WebhookDispatcher
from noria.jobs.webhooks.outbox import CLAIM_S, MAX_PER_HOST, Outbox, WebhookDelivery
from noria.jobs.webhooks.resolver import Resolver
from noria.jobs.webhooks.signing import format_secret, secret_of_key, sign
from noria.observe.logs.setup import LineHandler, logging_to
from waiting import POLL_INTERVAL_S, TIMEOUT_S, wait_until_async

SECRET = bytes(range(32))
DELIVERY = WebhookDelivery("msg_1", "http://hooks.example/in", '{"id": "job_1", "status": "succeeded"}', 1, "job_1")


class Receiver:
    """A real server on loopback that answers with the next of `statuses`, then 204, and records requests."""

    def __init__(self, statuses=(), certificate=None, body=b"", headers=()):
        self.received = []
        self.server_names = []  # asked for by TLS
        receiver, remaining = self, list(statuses)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                content = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.received.append(
                    (self.path, {name.lower(): text for name, text in self.headers.items()}, content)
                )
                with contextlib.suppress(OSError):
                    self.send_response(remaining.pop(0) if remaining else 204)
                    for name, text in headers:
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # a client that rejects the certificate
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            context.sni_callback = lambda _socket, name, _context: self.server_names.append(name)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


async def to_loopback(host, port):
    return ["127.0.0.1"]


def send(url, *, resolve=to_loopback, allow_private=True, now=1_795_230_000.9, made_by="", secrets=(SECRET,)):
    async def once():
        client = WebhookClient(secrets, allow_private=allow_private, resolve=resolve)
        try:
            delivery = WebhookDelivery("msg_1", url, DELIVERY.body, 1, "job_1", "", made_by)
            failed = await client.send(delivery, now)
            return failed and failed.reason
        finally:
            await client.close()

    return asyncio.run(once())


# ── Signing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_receiver_can_verify_the_signature_of_its_key_during_a_rotation():
    with Receiver() as receiver:
        url = f"http://hooks.example:{receiver.port}/in?a=b"
        assert send(url, made_by="alice", secrets=(bytes(32), SECRET), now=time.time()) is None
    ((path, headers, content),) = receiver.received
    assert (path, content.decode(), headers["content-type"]) == ("/in?a=b", DELIVERY.body, "application/json")
    assert headers["host"] == f"hooks.example:{receiver.port}"
    assert headers["webhook-id"] == "msg_1"
    for server_secret in (SECRET, bytes(32)):
        Webhook(format_secret(secret_of_key(server_secret, "alice"))).verify(content, headers)
        for other in (server_secret, secret_of_key(server_secret, "bob")):
            with pytest.raises(WebhookVerificationError):
                Webhook(format_secret(other)).verify(content, headers)


# ── Where it goes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_loopback_is_rejected_at_delivery():
    with Receiver() as receiver, contextlib.closing(Resolver(timeout_s=TIMEOUT_S)) as resolver:
        reason = send(f"http://127.0.0.1:{receiver.port}/", resolve=resolver, allow_private=False)
    assert "not public" in reason
    assert receiver.received == []


def test_a_host_that_resolves_to_a_private_address_after_its_check_is_rejected():
    answers = [["8.8.8.8"], ["127.0.0.1"]]

    async def rebinding(host, port):
        return answers.pop(0)

    async def accept_then_send(url):
        client = WebhookClient((SECRET,), allow_private=False, resolve=rebinding)
        await client.check_url(url)
        failed = await client.send(WebhookDelivery("msg_1", url, "{}", 1, "job_1"), 0.0)
        return failed.reason

    with Receiver() as receiver:
        reason = asyncio.run(accept_then_send(f"http://hooks.example:{receiver.port}/"))
    assert "not public" in reason
    assert receiver.received == []


def test_redirects_are_not_followed():
    with (
        Receiver() as elsewhere,
        Receiver([307], headers=[("Location", f"http://127.0.0.1:{elsewhere.port}/")]) as receiver,
    ):
        assert send(f"http://hooks.example:{receiver.port}/") == "it answered 307"
    assert elsewhere.received == []


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with Receiver() as receiver:
        assert send(f"http://hooks.example:{receiver.port}/") is None


def test_a_large_response_is_not_read_to_its_end():
    with Receiver(body=b"x" * 50_000_000) as receiver:
        assert send(f"http://hooks.example:{receiver.port}/") is None


def test_a_refused_connection_is_reported_in_words():
    assert "ConnectError" in send("http://hooks.example:1/")


@pytest.fixture
def certificate(tmp_path):
    file = tmp_path / "hooks.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hooks.example"]
    names = ["-addext", "subjectAltName=DNS:hooks.example", "-keyout", str(file), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, *names], check=True, capture_output=True)
    file.write_text(file.read_text() + (tmp_path / "cert.pem").read_text())
    return file


def test_tls_uses_the_host_name_although_the_connection_uses_the_address(certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    with Receiver(certificate=certificate) as receiver:
        assert send(f"https://hooks.example:{receiver.port}/") is None
        assert "CERTIFICATE_VERIFY_FAILED" in send(f"https://other.example:{receiver.port}/")
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
def test_retry_after_is_read_from_a_busy_receiver(status, text, wait_s):
    async def once(url):
        client = WebhookClient((SECRET,), allow_private=True, resolve=to_loopback)
        try:
            return await client.send(WebhookDelivery("msg_1", url, "{}", 1, "job_1"), 1_795_029_600.0)
        finally:
            await client.close()

    with Receiver([status], headers=[("Retry-After", text)]) as receiver:
        failed = asyncio.run(once(f"http://hooks.example:{receiver.port}/"))
    assert (failed.retry_after_s, failed.reason) == (wait_s, f"it answered {status}")


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


@pytest.fixture
def deliver_all(engine):
    """Delivers until nothing is pending. The clock jumps to when the next delivery is due."""
    now = 0.0

    async def deliver():
        nonlocal now
        offload = ThreadOffloader()
        client = WebhookClient((SECRET,), allow_private=True, resolve=to_loopback)
        dispatcher = WebhookDispatcher(Outbox(engine), client, offload, clock=lambda: now, uniform=lambda: 0.5)
        running = asyncio.create_task(dispatcher.run())
        async with asyncio.timeout(TIMEOUT_S):
            while (due := await offload(due_at, engine)) is not None:
                # rescheduled; while a try runs, the clock stands still, however long it takes
                if due != now + CLAIM_S:
                    now = due
                await asyncio.sleep(POLL_INTERVAL_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
        offload.close()

    return lambda: asyncio.run(deliver())


def test_a_failing_receiver_gets_the_same_message_until_it_accepts_it(store: JobStore, job, deliver_all):
    with Receiver([500, 503], headers=[("Retry-After", "900")]) as receiver:
        new = job(webhook=f"http://hooks.example:{receiver.port}/", webhook_events=("completed",), made_by="alice")
        record, _ = store.accept(new, 9, 0.0)
        store.cancel(record.id, 0.0)
        deliver_all()
    for _, headers, content in receiver.received:
        secrets = [secret_of_key(SECRET, "alice")]
        signature = sign(secrets, headers["webhook-id"], int(headers["webhook-timestamp"]), content)
        assert headers["webhook-signature"] == signature
    assert len({headers["webhook-id"] for _, headers, _ in receiver.received}) == 1
    assert [headers["webhook-timestamp"] for _, headers, _ in receiver.received] == ["0", "5", "995"]
    assert len({headers["webhook-signature"] for _, headers, _ in receiver.received}) == 3
    assert [json.loads(content)["status"] for _, _, content in receiver.received] == ["canceled"] * 3


def test_a_receiver_that_is_gone_ends_the_deliveries_of_the_key_to_its_url(store: JobStore, job, deliver_all, caplog):
    with Receiver([410] * 100) as gone, Receiver() as other:
        for number in range(20):
            url = f"http://hooks.example:{gone.port if number < 19 else other.port}/"
            new = job(webhook=url, webhook_events=("completed",), made_by="bob" if number == 18 else "alice")
            store.cancel(store.accept(new, 99, float(number))[0].id, float(number) - 99)
        deliver_all()
    by_id = Counter(headers["webhook-id"] for _, headers, _ in gone.received)
    assert (
        len(by_id) <= 1 + MAX_PER_HOST
    )  # those of alice that were in flight when the first one was answered, and bob's
    assert set(by_id.values()) == {1}
    assert len(other.received) == 1
    dropped = [record.noria_fields for record in caplog.records if "410" in record.message]
    assert sum(fields["num_dropped"] for fields in dropped) == 19
    assert {(fields["event"], fields["reason"]) for fields in dropped} == {("webhook_gone", "it answered 410")}


def webhook_lines(lines):
    return [line for line in lines if line["logger"] == "noria.webhooks"]


@pytest.mark.parametrize("allow_private", [True, False])
def test_the_log_line_of_a_webhook_names_its_job_and_omits_the_query_of_its_url(
    store: JobStore, engine, job, allow_private
):
    lines = []
    with Receiver([500]) as receiver, logging_to(LineHandler("frontend-0", lines.append), "info"):
        url = f"http://hooks.example:{receiver.port}/in?auth=hunter2"
        record, _ = store.accept(job(webhook=url, webhook_events=("completed",)), 9, 0.0)
        store.cancel(record.id, 0.0)

        async def try_once():
            offload = ThreadOffloader()
            client = WebhookClient((SECRET,), allow_private=allow_private, resolve=to_loopback)
            running = asyncio.create_task(WebhookDispatcher(Outbox(engine), client, offload).run())
            await wait_until_async(lambda: webhook_lines(lines))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await client.close()
            offload.close()

        asyncio.run(try_once())
    assert not [line for line in lines if line["logger"].startswith("http")]
    webhook_line = webhook_lines(lines)[0]
    assert (webhook_line["event"], webhook_line["request_id"]) == ("webhook_failed", record.id)
    assert webhook_line["url"] == f"http://hooks.example:{receiver.port}/in"
    assert ("500" if allow_private else "/in'") in webhook_line["reason"]
    assert "hunter2" not in str(webhook_line)
