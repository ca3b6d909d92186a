"""The jobs in their database, on SQLite and on PostgreSQL: each ends exactly once, whoever races and whatever the clocks say."""

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

from noria.errors import GenerationFailed, IdempotencyConflict, JobNotFound, QueueFull
from noria.jobs.outbox import Outbox
from noria.jobs.records import ENDED, Claim
from noria.jobs.schema import database_url, events, jobs, open_database, writing
from noria.jobs.store import LEASE_S, MAX_LOSSES, Store

SHAPES = {("shapes", "v1")}


def claim_of(record):
    return Claim(record.id, record.owner, record.attempt)


def accept(store, new, now=0.0):
    return store.accept(new, 1000, now)[0]


# ── Accepting ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_key_and_body_give_the_same_job(store, job):
    first, created = store.accept(job(idempotency_key="k", body_digest="d"), 1, 0.0)
    again, created_again = store.accept(job(idempotency_key="k", body_digest="d"), 1, 5.0)  # although the line is full
    assert (again, created, created_again) == (first, True, False)


def test_the_same_key_with_another_body_is_refused(store, job):
    accept(store, job(idempotency_key="k", body_digest="d"))
    with pytest.raises(IdempotencyConflict, match="'k' came before with another body, for job job_"):
        accept(store, job(idempotency_key="k", body_digest="e"))


def test_a_key_sent_by_many_at_once_makes_one_job(store, job):
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        answers = list(
            threads.map(lambda _: store.accept(job(idempotency_key="k", body_digest="d"), 99, 0.0), range(12))
        )
    assert len({record.id for record, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1


def test_keys_of_several_makers_do_not_clash(store, job):
    made = [accept(store, job(made_by=maker, idempotency_key="k", body_digest=maker)) for maker in ("", "alice", "bob")]
    again = [
        accept(store, job(made_by=maker, idempotency_key="k", body_digest=maker)) for maker in ("", "alice", "bob")
    ]
    assert made == again
    assert len({record.id for record in made}) == 3


def test_a_makers_jobs_are_nobody_elses_but_all_are_everybodys(store, job):
    alices, bobs, nobodys = (accept(store, job(made_by=maker)) for maker in ("alice", "bob", ""))
    assert store.get(alices.id, "alice") == store.get(alices.id) == alices
    assert store.page(9, made_by="alice") == [alices]
    assert store.page(9, bobs.seq, made_by="bob") == []
    assert store.page(9) == [nobodys, bobs, alices]
    for stranger in ("bob", "", "alic"):
        with pytest.raises(JobNotFound, match="it never was"):
            store.get(alices.id, stranger)
        with pytest.raises(JobNotFound, match="it never was"):
            store.cancel(alices.id, 1.0, stranger)
    assert store.get(alices.id).status == "starting"
    assert store.cancel(alices.id, 1.0, "alice").status == "canceled"


def test_a_full_line_is_refused_and_says_when_to_come_again(store, job):
    accept(store, job())
    with pytest.raises(QueueFull, match="1 jobs wait; at most 1 may") as caught:
        store.accept(job(), 1, 0.0)
    assert caught.value.retry_after_s


def test_an_unknown_job_is_not_found(store):
    with pytest.raises(JobNotFound, match="there is no job 'job_x'"):
        store.get("job_x")
    with pytest.raises(JobNotFound):
        store.cancel("job_x", 0.0)


def test_pages_do_not_move_while_jobs_come_in(store, job):
    old = [accept(store, job()).id for _ in range(5)]
    first = store.page(2)
    for _ in range(3):
        accept(store, job())
    second = store.page(2, first[-1].seq)
    third = store.page(2, second[-1].seq)
    assert [record.id for record in (*first, *second, *third)] == old[::-1]


def test_a_deleted_jobs_place_in_the_list_is_not_given_again(store, job):
    last = accept(store, job())
    store.cancel(last.id, 0.0)
    store.delete(last.id)
    assert accept(store, job()).seq > last.seq


# ── Claiming, and ending once ───────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_are_claimed_in_order_and_by_priority(store, job):
    low, normal, high = (accept(store, job(priority=name), now) for now, name in enumerate(("low", "normal", "high")))
    assert [record.id for record in store.claim("s/f/1", SHAPES, 9, 10.0)] == [high.id, normal.id, low.id]


def test_a_runner_claims_only_what_it_serves(store, job):
    accept(store, job(version="v2"))
    accept(store, job(model="other"))
    assert store.claim("s/f/1", SHAPES, 9, 0.0) == []
    assert store.claim("s/f/1", set(), 9, 0.0) == []
    assert len(store.claim("s/f/1", {("shapes", "v2"), ("other", "v1")}, 9, 0.0)) == 2


def test_two_runners_never_claim_the_same_job(store, job):
    wanted = {accept(store, job()).id for _ in range(20)}
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        owners = [f"s/f{k}/1" for k in range(4)]
        claimed = list(threads.map(lambda owner: [store.claim(owner, SHAPES, 4, 0.0) for _ in range(8)], owners))
    names = [record.id for runner in claimed for batch in runner for record in batch]
    assert sorted(names) == sorted(wanted)


def test_a_lease_that_ran_out_is_claimed_by_another_and_its_first_holder_has_no_say(store, job):
    accept(store, job())
    (old,) = store.claim("s/f/1", SHAPES, 1, 0.0)
    assert store.claim("t/f/1", SHAPES, 1, LEASE_S) == []
    assert store.beat({claim_of(old): None}, 10.0) == set()
    assert store.claim("t/f/1", SHAPES, 1, LEASE_S + 1) == []
    (new,) = store.claim("t/f/1", SHAPES, 1, 10.0 + LEASE_S + 1)
    assert (new.attempt, new.num_losses) == (2, 1)
    assert not store.finish(claim_of(old), ["1-0.png"], {}, 30.0)
    assert not store.fail(claim_of(old), GenerationFailed("x"), 30.0)
    assert not store.hand_back(claim_of(old), 30.0)
    assert store.beat({claim_of(old): b"{}", claim_of(new): b"{}"}, 30.0) == {claim_of(old)}
    assert store.still_held([claim_of(old)]) == set()
    assert store.still_held([claim_of(new)]) == {claim_of(new)}
    assert store.finish(claim_of(new), ["2-0.png"], {}, 31.0)
    assert store.get(new.id).output == "2-0.png"


def test_a_restarted_front_end_takes_back_at_once_what_its_predecessor_held(store, job):
    for _ in range(3):
        accept(store, job())
    (its,) = store.claim("s/f1/old", SHAPES, 1, 0.0)
    store.claim("s/f10/old", SHAPES, 1, 0.0)
    store.claim("s/f1/new", SHAPES, 1, 0.0)
    assert [record.id for record in store.take_back("s/f1/new", 1.0)] == [its.id]
    (mine,) = store.claim("s/f1/new", SHAPES, 9, 1.0)
    assert (mine.attempt, mine.num_losses) == (2, 1)


def test_a_job_that_ends_every_process_is_failed_with_a_reason(store, job):
    record = accept(store, job())
    for turn in range(MAX_LOSSES):
        assert store.claim(f"s/f/{turn}", SHAPES, 1, 0.0)
        store.take_back(f"s/f/{turn + 1}", 0.0)
    assert store.claim("s/f/last", SHAPES, 1, 0.0) == []
    failed = store.get(record.id)
    assert (failed.status, failed.error_code) == ("failed", "engine_lost")
    assert str(MAX_LOSSES) in failed.error


def test_what_is_handed_back_waits_as_long_as_said(store, job):
    accept(store, job())
    (mine,) = store.claim("s/f/1", SHAPES, 1, 0.0)
    assert store.hand_back(claim_of(mine), 1.0, delay_s=5.0)
    assert store.claim("s/f/1", SHAPES, 1, 5.9) == []
    (again,) = store.claim("s/f/1", SHAPES, 1, 6.0)
    assert (again.owner, again.num_losses, again.num_engine_losses) == ("s/f/1", 0, 0)


@pytest.mark.parametrize("claimed", [False, True])
def test_cancelling_ends_a_job_wherever_it_is(store, job, claimed):
    record = accept(store, job())
    holders = [claim_of(mine) for mine in store.claim("s/f/1", SHAPES, 1, 0.0)] if claimed else []
    assert store.cancel(record.id, 1.0).status == "canceled"
    assert store.claim("s/f/2", SHAPES, 1, 100.0) == []
    assert store.still_held(holders) == set()
    assert not any(store.finish(holder, ["1-0.png"], {}, 2.0) for holder in holders)
    assert store.cancel(record.id, 9.0).completed_at == 1.0  # a second time does nothing


# ── Events and webhooks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_events_are_numbered_without_gaps_and_can_be_resumed(store, job):
    record = accept(store, job())
    (mine,) = store.claim("s/f/1", SHAPES, 1, 1.0)
    store.beat({claim_of(mine): b'{"step": 1}'}, 2.0)
    store.beat({claim_of(mine): None}, 3.0)  # renews, and tells nothing
    store.finish(claim_of(mine), ["1-0.png"], {}, 4.0)
    told = store.events(record.id, 0)
    assert [(event.seq, event.type) for event in told] == [(1, "status"), (2, "status"), (3, "progress"), (4, "status")]
    assert [json.loads(event.data).get("status") for event in told] == ["starting", "processing", None, "succeeded"]
    assert store.events(record.id, 2) == told[2:]
    assert store.events(record.id, 99) == []


def test_a_webhook_is_told_of_the_first_start_and_of_the_end(store, engine, job):
    record = accept(store, job(webhook="https://example.com/"))
    (mine,) = store.claim("s/f/1", SHAPES, 1, 1.0)
    store.hand_back(claim_of(mine), 2.0)
    (mine,) = store.claim("s/f/1", SHAPES, 1, 3.0)
    store.fail(claim_of(mine), GenerationFailed("broken"), 4.0)
    bodies = [json.loads(delivery.body) for delivery in Outbox(engine).take(9, 5.0)]
    assert [(body["id"], body["status"], body["error"]) for body in bodies] == [
        (record.id, "processing", None),
        (record.id, "failed", "broken"),
    ]


def test_a_webhook_is_told_only_what_it_asked_for(store, engine, job):
    for webhook, wanted in ((None, ("start", "completed")), ("https://example.com/", ("completed",))):
        accept(store, job(webhook=webhook, webhook_events=wanted))
    for mine in store.claim("s/f/1", SHAPES, 9, 1.0):
        store.finish(claim_of(mine), ["1-0.png"], {}, 2.0)
    assert [json.loads(delivery.body)["status"] for delivery in Outbox(engine).take(9, 5.0)] == ["succeeded"]


# ── Time to live ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_ended_long_ago_goes_with_its_events(store, engine, job):
    ended, fresh, waiting = (accept(store, job()) for _ in range(3))
    store.cancel(ended.id, 10.0)
    store.cancel(fresh.id, 90.0)
    assert store.past_their_time(60.0, 100.0, 10) == [ended.id]
    store.delete(ended.id)
    store.delete(waiting.id)  # has not ended: stays
    with engine.connect() as connection:
        assert set(connection.scalars(sa.select(events.c.job_id).distinct())) == {fresh.id, waiting.id}
        assert set(connection.scalars(sa.select(jobs.c.id))) == {fresh.id, waiting.id}


def test_a_job_that_nobody_could_draw_in_time_fails_and_says_so(store, job):
    record = accept(store, job(model="gone"), 0.0)
    assert store.expire(60.0, 59.0) == 0
    assert store.expire(60.0, 61.0) == 1
    assert store.get(record.id).error_code == "job_expired"
    assert store.expire(60.0, 61.0) == 0


# ── Everything at once ──────────────────────────────────────────────────────────────────────────────────────────────────────


class TwoRunners(RuleBasedStateMachine):
    """Two runners that crash and come back, clients, and a clock that jumps; beside them a model of who holds what."""

    database = ""
    job = None  # makes jobs
    made = Bundle("made")
    claims = Bundle("claims")

    def __init__(self):
        super().__init__()
        self.engine = open_database(database_url(self.database, pathlib.Path("/nowhere")))
        with writing(self.engine) as connection:
            connection.execute(events.delete())
            connection.execute(jobs.delete())
        self.store = Store(self.engine)
        self.now = 1000.0
        self.incarnations = itertools.count()
        self.owners = {name: f"s/{name}/first" for name in ("a", "b")}
        self.status, self.holder, self.lease = {}, {}, {}

    def teardown(self):
        self.store.close()

    def holds(self, claim):
        return self.status[claim.job_id] == "processing" and self.holder[claim.job_id] == claim

    @rule(target=made, priority=st.sampled_from(["low", "normal", "high"]))
    def accept(self, priority):
        record, created = self.store.accept(self.job(priority=priority), 1000, self.now)
        assert created
        self.status[record.id] = "starting"
        return record.id

    @rule(seconds=st.sampled_from([0.1, 4.0, LEASE_S + 1, 1000.0, -500.0]))
    def clock_moves(self, seconds):
        self.now += seconds

    @rule(target=claims, who=st.sampled_from(["a", "b"]), limit=st.integers(1, 3))
    def claim(self, who, limit):
        free = {
            name
            for name, status in self.status.items()
            if status == "starting" or (status == "processing" and self.lease[name] < self.now)
        }
        claimed = self.store.claim(self.owners[who], SHAPES, limit, self.now)
        assert len(claimed) == min(limit, len(free))
        assert {record.id for record in claimed} <= free
        for record in claimed:
            self.status[record.id] = "processing"
            self.holder[record.id] = claim_of(record)
            self.lease[record.id] = self.now + LEASE_S
        return multiple(*map(claim_of, claimed))

    @rule(claim=claims, progress=st.sampled_from([None, b'{"step": 1}']))
    def beat(self, claim, progress):
        lost = self.store.beat({claim: progress}, self.now)
        assert (claim not in lost) == self.holds(claim)
        assert (claim in self.store.still_held([claim])) == self.holds(claim)
        if self.holds(claim):
            self.lease[claim.job_id] = self.now + LEASE_S

    @rule(claim=claims)
    def finish(self, claim):
        held = self.holds(claim)
        assert self.store.finish(claim, [f"{claim.attempt}-0.png"], {}, self.now) == held
        if held:
            self.status[claim.job_id] = "succeeded"

    @rule(claim=claims)
    def fail(self, claim):
        held = self.holds(claim)
        assert self.store.fail(claim, GenerationFailed("broken"), self.now) == held
        if held:
            self.status[claim.job_id] = "failed"

    @rule(claim=claims)
    def hand_back(self, claim):
        held = self.holds(claim)
        assert self.store.hand_back(claim, -1e6) == held  # free from then on, wherever the clock jumps
        if held:
            self.status[claim.job_id] = "starting"

    @rule(name=made)
    def cancel(self, name):
        record = self.store.cancel(name, self.now)
        if self.status[name] not in ENDED:
            self.status[name] = "canceled"
        assert record.status == self.status[name]

    @rule(who=st.sampled_from(["a", "b"]))
    def crash_and_come_back(self, who):
        old = self.owners[who]
        self.owners[who] = f"s/{who}/{next(self.incarnations)}"
        held = [name for name in self.status if self.status[name] == "processing" and self.holder[name].owner == old]
        assert len(self.store.take_back(self.owners[who], -1e6)) == len(held)
        for name in held:
            self.status[name] = "starting"

    @precondition(lambda self: self.status)
    @invariant()
    def each_job_ends_at_most_once_and_its_events_say_so(self):
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(jobs.c.id, jobs.c.status, jobs.c.last_event, jobs.c.output)).all()
            told = connection.execute(sa.select(events).order_by(events.c.seq)).all()
        assert {row.id: row.status for row in rows} == self.status
        for row in rows:
            mine = [event for event in told if event.job_id == row.id]
            assert [event.seq for event in mine] == list(range(1, row.last_event + 1))
            statuses = [json.loads(event.data)["status"] for event in mine if event.type == "status"]
            assert statuses[-1] == row.status
            assert sum(status in ENDED for status in statuses) == (row.status in ENDED)
            assert (row.output is not None) == (row.status == "succeeded")


def test_two_runners_that_crash_and_clocks_that_jump_end_each_job_once(database, job):
    machine = type("Machine", (TwoRunners,), {"database": database, "job": staticmethod(job)})
    few = settings(
        max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(machine, settings=few)
