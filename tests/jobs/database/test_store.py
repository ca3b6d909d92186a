"""The store of jobs on SQLite and PostgreSQL: each job ends exactly once, with any races and clocks."""

import concurrent.futures
import itertools
import json
import pathlib

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from databases import on_both
from noria.errors import GenerationFailed, IdempotencyConflict, JobNotFound, QueueFull, RateLimited
from noria.jobs.database.claims import LEASE_S, MAX_LOSSES
from noria.jobs.database.schema import events, jobs, open_jobs_database
from noria.jobs.database.store import JobStore, is_version_needed
from noria.jobs.records import TERMINAL_STATUSES, Claim
from noria.jobs.webhooks.outbox import Outbox
from noria.protocol.model_spec import ModelKey
from noria.storage.database import write_transaction
from searching import examples

SHAPES = {("shapes", "v1")}


def claim_of(record):
    return Claim(record.id, record.owner, record.attempt)


def accept(store, new, now=0.0):
    return store.accept(new, 1000, now)[0]


# ── Accepting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_key_and_body_give_the_same_job(store, job):
    first, created = store.accept(job(idempotency_key="k", body_digest="d"), 1, 0.0)
    again, created_again = store.accept(job(idempotency_key="k", body_digest="d"), 1, 5.0)  # although the queue is full
    assert (again, created, created_again) == (first, True, False)


def test_the_same_key_with_another_body_is_rejected(store, job):
    accept(store, job(idempotency_key="k", body_digest="d"))
    with pytest.raises(IdempotencyConflict, match=r"'k' .* job_"):
        accept(store, job(idempotency_key="k", body_digest="e"))


@on_both
def test_one_key_sent_concurrently_creates_one_job(store, job):
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        answers = list(
            threads.map(lambda _: store.accept(job(idempotency_key="k", body_digest="d"), 99, 0.0), range(12))
        )
    assert len({record.id for record, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1


def test_idempotency_keys_of_different_api_keys_do_not_clash(store, job):
    made = [
        accept(store, job(made_by=api_key, idempotency_key="k", body_digest=api_key))
        for api_key in ("", "alice", "bob")
    ]
    again = [
        accept(store, job(made_by=api_key, idempotency_key="k", body_digest=api_key))
        for api_key in ("", "alice", "bob")
    ]
    assert made == again
    assert len({record.id for record in made}) == 3


@on_both
def test_an_api_key_sees_only_its_own_jobs_and_without_keys_all_are_visible(store, job):
    alices, bobs, nobodys = (accept(store, job(made_by=api_key)) for api_key in ("alice", "bob", ""))
    assert store.get(alices.id, "alice") == store.get(alices.id) == alices
    assert store.page(9, made_by="alice").records == [alices]
    assert store.page(9, bobs.seq, made_by="bob").records == []
    assert store.page(9).records == [nobodys, bobs, alices]
    for stranger in ("bob", "", "alic"):
        with pytest.raises(JobNotFound, match="it never existed"):
            store.get(alices.id, stranger)
        with pytest.raises(JobNotFound, match="it never existed"):
            store.cancel(alices.id, 1.0, stranger)
    assert store.get(alices.id).status == "starting"
    assert store.cancel(alices.id, 1.0, "alice").status == "canceled"


def test_a_full_queue_is_rejected_with_retry_after(store, job):
    accept(store, job())
    with pytest.raises(QueueFull, match="at most 1 ") as caught:
        store.accept(job(), 1, 0.0)
    assert caught.value.retry_after_s


def test_the_queued_jobs_of_each_api_key_are_limited(store, job):
    accept(store, job(made_by="alice"))
    for made_by in ("bob", ""):
        assert store.accept(job(made_by=made_by), 9, 0.0, max_queued_per_key=1)[1]
    with pytest.raises(RateLimited, match="'alice' has 1 queued jobs; at most 1"):
        store.accept(job(made_by="alice"), 9, 0.0, max_queued_per_key=1)


def test_an_unknown_job_is_not_found(store):
    with pytest.raises(JobNotFound, match="job_x"):
        store.get("job_x")
    with pytest.raises(JobNotFound):
        store.cancel("job_x", 0.0)


@on_both
def test_pages_do_not_shift_when_jobs_are_added(store, job):
    old = [accept(store, job()).id for _ in range(5)]
    first = store.page(2).records
    for _ in range(3):
        accept(store, job())
    second = store.page(2, first[-1].seq).records
    third = store.page(2, second[-1].seq).records
    assert [record.id for record in (*first, *second, *third)] == old[::-1]


@on_both
def test_the_sequence_number_of_a_deleted_job_is_not_reused(store, job):
    last = accept(store, job())
    store.cancel(last.id, 0.0)
    store.delete(last.id)
    assert accept(store, job()).seq > last.seq


# ── Claiming, and ending once ─────────────────────────────────────────────────────────────────────────────────────────


@on_both
def test_jobs_are_claimed_in_order_and_by_priority(store, job):
    low, normal, high = (accept(store, job(priority=name), now) for now, name in enumerate(("low", "normal", "high")))
    assert [record.id for record in store.claim("s/f/1", SHAPES, 9, 10.0)] == [high.id, normal.id, low.id]


def test_a_job_accepted_after_the_worker_read_the_clock_does_not_start_before_it_was_created(store, job):
    record = accept(store, job(), now=5.0)
    (claimed,) = store.claim("a", SHAPES, 1, 4.9)
    assert claimed.started_at == record.created_at == 5.0


@on_both
def test_a_worker_claims_only_jobs_of_its_models(store, job):
    accept(store, job(version="v2"))
    accept(store, job(model="other"))
    assert store.claim("s/f/1", SHAPES, 9, 0.0) == []
    assert store.claim("s/f/1", set(), 9, 0.0) == []
    assert len(store.claim("s/f/1", {("shapes", "v2"), ("other", "v1")}, 9, 0.0)) == 2


@on_both
def test_a_version_is_needed_until_its_last_job_has_ended(store, engine, job):
    record, key = accept(store, job(version="v2")), ModelKey("shapes", "v2")
    assert is_version_needed(engine, key)
    assert not is_version_needed(engine, ModelKey("shapes", "v3"))
    store.claim("s/f/1", {key}, 1, 0.0)
    assert is_version_needed(engine, key)
    store.cancel(record.id, 1.0)
    assert not is_version_needed(engine, key)


@on_both
def test_two_workers_never_claim_the_same_job(store, job):
    job_ids = {accept(store, job()).id for _ in range(20)}
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        owners = [f"s/f{k}/1" for k in range(4)]
        claimed = list(threads.map(lambda owner: [store.claim(owner, SHAPES, 4, 0.0) for _ in range(8)], owners))
    names = [record.id for worker in claimed for batch in worker for record in batch]
    assert sorted(names) == sorted(job_ids)


def test_after_its_lease_expired_a_job_is_claimed_by_another_and_the_first_claim_is_void(store, job):
    accept(store, job())
    (old,) = store.claim("s/f/1", SHAPES, 1, 0.0)
    assert store.claim("t/f/1", SHAPES, 1, LEASE_S) == []
    assert store.renew({claim_of(old): None}, 10.0) == set()
    assert store.claim("t/f/1", SHAPES, 1, LEASE_S + 1) == []
    (new,) = store.claim("t/f/1", SHAPES, 1, 10.0 + LEASE_S + 1)
    assert (new.attempt, new.num_losses) == (2, 1)
    assert not store.finish(claim_of(old), ["1-0.png"], {}, 30.0)
    assert not store.fail(claim_of(old), GenerationFailed("x"), 30.0)
    assert not store.requeue(claim_of(old), 30.0)
    assert store.renew({claim_of(old): b"{}", claim_of(new): b"{}"}, 30.0) == {claim_of(old)}
    assert store.still_held([claim_of(old)]) == set()
    assert store.still_held([claim_of(new)]) == {claim_of(new)}
    assert store.finish(claim_of(new), ["2-0.png"], {}, 31.0)
    assert store.get(new.id).output == "2-0.png"


def test_a_restarted_front_end_reclaims_the_jobs_of_its_predecessor_at_once(store, job):
    for _ in range(3):
        accept(store, job())
    (its,) = store.claim("s/f1/old", SHAPES, 1, 0.0)
    store.claim("s/f10/old", SHAPES, 1, 0.0)
    store.claim("s/f1/new", SHAPES, 1, 0.0)
    assert [record.id for record in store.reclaim("s/f1/new", 1.0)] == [its.id]
    (claimed,) = store.claim("s/f1/new", SHAPES, 9, 1.0)
    assert (claimed.attempt, claimed.num_losses) == (2, 1)


@on_both
def test_a_job_that_loses_every_process_fails_with_a_reason(store, job):
    record = accept(store, job())
    for index in range(MAX_LOSSES):
        assert store.claim(f"s/f/{index}", SHAPES, 1, 0.0)
        store.reclaim(f"s/f/{index + 1}", 0.0)
    assert store.claim("s/f/last", SHAPES, 1, 0.0) == []
    failed = store.get(record.id)
    assert (failed.status, failed.error_code) == ("failed", "engine_lost")
    assert str(MAX_LOSSES) in failed.error


def test_a_requeued_job_is_not_claimable_before_its_delay_has_passed(store, job):
    accept(store, job())
    (claimed,) = store.claim("s/f/1", SHAPES, 1, 0.0)
    assert store.requeue(claim_of(claimed), 1.0, delay_s=5.0)
    assert store.claim("s/f/1", SHAPES, 1, 5.9) == []
    (again,) = store.claim("s/f/1", SHAPES, 1, 6.0)
    assert (again.owner, again.num_losses, again.num_engine_losses) == ("s/f/1", 0, 0)


# ── Events and webhooks ───────────────────────────────────────────────────────────────────────────────────────────────


def test_events_are_numbered_without_gaps_and_can_be_resumed(store, job):
    record = accept(store, job())
    (claimed,) = store.claim("s/f/1", SHAPES, 1, 1.0)
    store.renew({claim_of(claimed): b'{"step": 1}'}, 2.0)
    store.renew({claim_of(claimed): None}, 3.0)  # renews, and adds no event
    store.finish(claim_of(claimed), ["1-0.png"], {}, 4.0)
    job_events = store.events(record.id, 0)
    assert [(event.seq, event.type) for event in job_events] == [
        (1, "status"),
        (2, "status"),
        (3, "progress"),
        (4, "status"),
    ]
    assert [json.loads(event.data).get("status") for event in job_events] == [
        "starting",
        "processing",
        None,
        "succeeded",
    ]
    assert store.events(record.id, 2) == job_events[2:]
    assert store.events(record.id, 99) == []


def test_a_webhook_gets_the_first_start_and_the_end(store, engine, job):
    record = accept(store, job(webhook="https://example.com/"))
    (claimed,) = store.claim("s/f/1", SHAPES, 1, 1.0)
    store.requeue(claim_of(claimed), 2.0)
    (claimed,) = store.claim("s/f/1", SHAPES, 1, 3.0)
    store.fail(claim_of(claimed), GenerationFailed("broken"), 4.0)
    bodies = [json.loads(delivery.body) for delivery in Outbox(engine).claim_due(9, 5.0)]
    assert [(body["id"], body["status"], body["error"]) for body in bodies] == [
        (record.id, "processing", None),
        (record.id, "failed", "broken"),
    ]


def test_a_webhook_gets_only_the_events_it_filters_for(store, engine, job):
    for webhook, wanted in ((None, ("start", "completed")), ("https://example.com/", ("completed",))):
        accept(store, job(webhook=webhook, webhook_events=wanted))
    for claimed in store.claim("s/f/1", SHAPES, 9, 1.0):
        store.finish(claim_of(claimed), ["1-0.png"], {}, 2.0)
    assert [json.loads(delivery.body)["status"] for delivery in Outbox(engine).claim_due(9, 5.0)] == ["succeeded"]


# ── Time to live ──────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both
def test_an_expired_job_is_deleted_with_its_events(store, engine, job):
    ended, fresh, waiting = (accept(store, job()) for _ in range(3))
    store.cancel(ended.id, 10.0)
    store.cancel(fresh.id, 90.0)
    assert store.expired(90.0, 100.0, 10) == []
    assert store.expired(60.0, 100.0, 10) == [ended.id]
    store.delete(ended.id)
    store.delete(waiting.id)  # has not ended: stays
    with engine.connect() as connection:
        assert set(connection.scalars(sa.select(events.c.job_id).distinct())) == {fresh.id, waiting.id}
        assert set(connection.scalars(sa.select(jobs.c.id))) == {fresh.id, waiting.id}


def test_a_job_not_started_within_its_time_to_live_fails(store, job):
    record = accept(store, job(model="gone"), 0.0)
    assert store.expire(60.0, 60.0) == 0
    assert store.expire(60.0, 61.0) == 1
    assert store.get(record.id).error_code == "job_expired"
    assert store.expire(60.0, 61.0) == 0


# ── Texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_both
def test_the_texts_of_a_job_are_stored_with_it_and_deleted_at_its_end(store, job):
    chunks = [b'{"first_line":1,"texts":["\xc3\xbc","\\u0000"]}', b'{"first_line":3,"texts":["b"]}']
    ended = [accept(store, job(text_bytes=9, chunks=iter(chunks))) for _ in range(4)]
    other = accept(store, job(text_bytes=9, chunks=chunks))
    assert [store.chunk(ended[0].id, number) for number in range(3)] == [*(chunk.decode() for chunk in chunks), None]
    store.cancel(ended[0].id, 1.0)
    finished, failed, requeued = map(claim_of, store.claim("s/f/1", SHAPES, 3, 1.0))
    store.finish(finished, ["part-000000-1-1-0.f32"], {}, 2.0)
    store.fail(failed, GenerationFailed("broken"), 2.0)
    store.requeue(requeued, 2.0)
    assert [store.chunk(record.id, 1) is None for record in (*ended, other)] == [True, True, True, False, False]
    assert store.get(ended[1].id).text_bytes == 9


@on_both
def test_the_texts_and_start_images_of_all_jobs_and_of_a_key_are_bounded_until_they_end(store, job):
    def accept_texts(made_by, text_bytes, image_bytes=0):
        new = job(made_by=made_by, text_bytes=text_bytes, image_bytes=image_bytes)
        return store.accept(new, 99, 0.0, max_queued_bytes=40)[0]

    first = accept_texts("alice", 10)
    with pytest.raises(RateLimited, match=r"10 bytes .* 10, a quarter"):
        accept_texts("alice", 1)
    (claimed,) = store.claim("s/f/1", SHAPES, 1, 1.0)
    with pytest.raises(RateLimited):
        accept_texts("alice", 1)
    accept_texts("", 0, image_bytes=30)
    with pytest.raises(QueueFull, match="40 bytes"):
        accept_texts("bob", 0, image_bytes=1)
    accept(store, job(made_by="alice"))  # a job of images
    store.fail(claim_of(claimed), GenerationFailed("broken"), 2.0)
    assert accept_texts("alice", 10).id != first.id


# ── Everything at once ────────────────────────────────────────────────────────────────────────────────────────────────


class TwoWorkers(RuleBasedStateMachine):
    """Two workers that crash and restart, clients, and a clock that jumps; with a model of which worker holds which
    job.
    """

    database = ""
    job = None  # creates jobs
    made = Bundle("made")
    claims = Bundle("claims")

    def __init__(self):
        super().__init__()
        self.engine = open_jobs_database(self.database, pathlib.Path("/nowhere"))
        with write_transaction(self.engine) as connection:
            connection.execute(events.delete())
            connection.execute(jobs.delete())
        self.store = JobStore(self.engine)
        self.now = 1000.0
        self.incarnations = itertools.count()
        self.owners = {name: f"s/{name}/first" for name in ("a", "b")}
        self.statuses, self.holders, self.leases = {}, {}, {}

    def teardown(self):
        self.store.close()

    def is_held(self, claim):
        return self.statuses[claim.job_id] == "processing" and self.holders[claim.job_id] == claim

    @rule(target=made, priority=st.sampled_from(["low", "normal", "high"]))
    def accept(self, priority):
        record, created = self.store.accept(self.job(priority=priority), 1000, self.now)
        assert created
        self.statuses[record.id] = "starting"
        return record.id

    @rule(seconds=st.sampled_from([0.1, 4.0, LEASE_S + 1, 1000.0, -500.0]))
    def move_clock(self, seconds):
        self.now += seconds

    @rule(target=claims, worker=st.sampled_from(["a", "b"]), limit=st.integers(1, 3))
    def claim(self, worker, limit):
        free = {
            name
            for name, status in self.statuses.items()
            if status == "starting" or (status == "processing" and self.leases[name] < self.now)
        }
        claimed = self.store.claim(self.owners[worker], SHAPES, limit, self.now)
        assert len(claimed) == min(limit, len(free))
        assert {record.id for record in claimed} <= free
        for record in claimed:
            self.statuses[record.id] = "processing"
            self.holders[record.id] = claim_of(record)
            self.leases[record.id] = self.now + LEASE_S
        return multiple(*map(claim_of, claimed))

    @rule(claim=claims, progress=st.sampled_from([None, b'{"step": 1}']))
    def renew(self, claim, progress):
        lost = self.store.renew({claim: progress}, self.now)
        assert (claim not in lost) == self.is_held(claim)
        assert (claim in self.store.still_held([claim])) == self.is_held(claim)
        if self.is_held(claim):
            self.leases[claim.job_id] = self.now + LEASE_S

    @rule(claim=claims)
    def finish(self, claim):
        held = self.is_held(claim)
        assert self.store.finish(claim, [f"{claim.attempt}-0.png"], {}, self.now) == held
        if held:
            self.statuses[claim.job_id] = "succeeded"

    @rule(claim=claims)
    def fail(self, claim):
        held = self.is_held(claim)
        assert self.store.fail(claim, GenerationFailed("broken"), self.now) == held
        if held:
            self.statuses[claim.job_id] = "failed"

    @rule(claim=claims)
    def requeue(self, claim):
        held = self.is_held(claim)
        assert self.store.requeue(claim, -1e6) == held  # claimable from then on, wherever the clock jumps
        if held:
            self.statuses[claim.job_id] = "starting"

    @rule(name=made)
    def cancel(self, name):
        record = self.store.cancel(name, self.now)
        if self.statuses[name] not in TERMINAL_STATUSES:
            self.statuses[name] = "canceled"
        assert record.status == self.statuses[name]

    @rule(worker=st.sampled_from(["a", "b"]))
    def crash_and_restart(self, worker):
        old = self.owners[worker]
        self.owners[worker] = f"s/{worker}/{next(self.incarnations)}"
        held = [
            name for name in self.statuses if self.statuses[name] == "processing" and self.holders[name].owner == old
        ]
        assert len(self.store.reclaim(self.owners[worker], -1e6)) == len(held)
        for name in held:
            self.statuses[name] = "starting"

    @precondition(lambda self: self.statuses)
    @invariant()
    def each_job_ends_at_most_once_and_its_events_say_so(self):
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(jobs.c.id, jobs.c.status, jobs.c.last_event, jobs.c.output)).all()
            rows_of_events = connection.execute(sa.select(events).order_by(events.c.seq)).all()
        assert {row.id: row.status for row in rows} == self.statuses
        for row in rows:
            own_events = [event for event in rows_of_events if event.job_id == row.id]
            assert [event.seq for event in own_events] == list(range(1, row.last_event + 1))
            statuses = [json.loads(event.data)["status"] for event in own_events if event.type == "status"]
            assert statuses[-1] == row.status
            assert sum(status in TERMINAL_STATUSES for status in statuses) == (row.status in TERMINAL_STATUSES)
            assert (row.output is not None) == (row.status == "succeeded")


@on_both
def test_crashing_workers_and_jumping_clocks_end_each_job_once(database, job):
    machine = type("Machine", (TwoWorkers,), {"database": database, "job": staticmethod(job)})
    few = settings(
        max_examples=examples(10),
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=few)
