"""The audit log under attack: whoever guesses keys, or ignores a limit, neither fills the log nor hides from it."""

import time

from starlette.requests import Request

from hostile.jobs_server import serving_jobs
from noria.errors import MissingScope, RateLimited, Unauthorized
from noria.frontend.access.api_keys import ApiKey, key_digest
from noria.frontend.access.auth import ClientDirectory
from noria.frontend.access.rejection_log import RejectionLog

NUM_GUESSES = 20


def rejections(caplog):
    lines = [record.noria_fields for record in caplog.records if record.name == "noria.keys"]
    return [line for line in lines if line["event"] == "client_rejected"]


def test_a_client_that_guesses_keys_gets_a_line_every_ten_seconds(new_engine, tmp_path, caplog):
    started = time.monotonic()
    with serving_jobs(new_engine, tmp_path) as (mallory, alice, _):
        for number in range(NUM_GUESSES):
            guess = {"X-Api-Key": f"noria_guess-{number}"}
            assert mallory.get("/v1/jobs", headers=guess).status_code == 401
            assert mallory.get("/metrics", headers=guess).status_code == 200
        assert alice.get("/v1/jobs").status_code == 200
    lines = rejections(caplog)
    assert {(line["reason"], line["client"], line.get("key")) for line in lines} == {("unknown_key", "127.0.0.1", None)}
    assert sum(line["num_requests"] for line in lines) == 2 * NUM_GUESSES
    assert len(lines) <= 2 + (time.monotonic() - started) / 10
    assert "noria_guess" not in caplog.text


def test_many_addresses_share_a_line_and_keys_keep_their_own(caplog):
    now = 0.0
    keys = [ApiKey(name, key_digest(name.encode())) for name in ("alice", "bob")]
    clients = ClientDirectory(keys, 1)
    log = RejectionLog(clients, clock=lambda: now)
    clients.update(keys[:1])

    def reject(error, address, key):
        scope = {"type": "http", "client": (address, 1), "headers": [(b"x-api-key", key)], "state": {}}
        http = Request(scope)
        if key == b"alice":
            scope["state"]["api_client"] = clients.find(http.headers)
        log.record(http, error("no"))

    for second in range(60):
        now = float(second)
        for number in range(100):
            reject(Unauthorized, f"10.0.{second}.{number}", b"guess")
            reject(RateLimited, "192.0.2.1", b"alice")
        reject(MissingScope, "192.0.2.1", b"alice")
        reject(Unauthorized, f"2001:db8::{second:x}", b"bob")
        log.log_due()
        assert len(log._rejections) <= 64 + 2 * 2
    lines = rejections(caplog)
    assert len(lines) <= (64 + 2 * 2) * 7
    totals = {}
    for line in lines:
        about = line["reason"], line.get("key")
        totals[about] = totals.get(about, 0) + line["num_requests"]
    now += 20.0
    log.log_due()
    assert totals.keys() == {
        ("unknown_key", None),
        ("revoked_key", "bob"),
        ("missing_scope", "alice"),
        ("rate_limited", "alice"),
    }
    lines_of_alice = [line for line in lines if (line["reason"], line.get("key")) == ("rate_limited", "alice")]
    assert len(lines_of_alice) <= 7
    assert sum(line["num_requests"] for line in rejections(caplog)) == 60 * (100 + 100 + 1 + 1)
    now += 20.0
    log.log_due()
    assert log._rejections == {}
