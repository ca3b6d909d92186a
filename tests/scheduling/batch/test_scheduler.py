"""The batch scheduler, by example and as a Hypothesis state machine."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from msgspec.structs import replace

from noria.protocol.model_spec import ModelKey
from noria.scheduling.batch.scheduler import BatchScheduler
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.policies import POLICIES
from noria.scheduling.types import (
    BatchKey,
    BatchResult,
    FinishReason,
    ItemId,
    RequestFinished,
    RequestTimings,
    SchedulableRequest,
)
from noria.testing.simulated_sessions import TEXT_KEY, text_request
from searching import examples

OOM = BatchResult(fits=False)
OTHER_MODEL = BatchKey(0, 0, ModelKey("other"))
FINISHED, UNMEETABLE, REJECTED = FinishReason.FINISHED, FinishReason.UNMEETABLE, FinishReason.REJECTED


def known_costs():
    """A call takes 10 ms, and 1 ms per token."""
    return CostModel(steps={TEXT_KEY: CostCurve({1: 0.011, 512: 0.522})})


def make_scheduler(num_sessions=1, **more):
    return BatchScheduler(num_sessions, **{"costs": known_costs()} | more)


def submit(scheduler, attempt_id, *num_tokens, now=0.0, **more):
    return scheduler.submit(text_request(attempt_id, *num_tokens, **more), now)


def names(plan):
    return [row.attempt_id for row in plan.rows]


def run_batch(scheduler, now=0.0, result=None, seconds=0.0):
    plan = scheduler.plan(now)
    return plan, scheduler.commit(plan, result or BatchResult(), now + seconds, seconds)


def ends(events):
    return {event.attempt_id: event.finish_reason for event in events}


def drain(scheduler, now=0.0):
    order = []
    while (plan := scheduler.plan(now)) is not None:
        order.append(names(plan))
        scheduler.commit(plan, BatchResult(), now)
    return order


def test_texts_of_similar_length_share_a_batch_and_each_request_ends_with_its_last_text():
    scheduler = make_scheduler()
    submit(scheduler, "a", 30, 200)
    submit(scheduler, "b", 201, now=1.0)
    plan = scheduler.plan(2.0)
    assert (plan.rows, plan.length, plan.padded_tokens) == ((ItemId("a", 1), ItemId("b", 0)), 201, 402)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.oldest_age_s(2.5)) == (1, 2, 2.5)
    events = scheduler.commit(plan, BatchResult(), 3.0)
    assert events == [
        RequestFinished(
            "b",
            FINISHED,
            "",
            RequestTimings(queue_s=1.0, slot_s=1.0, mean_batch=2, num_calls=1),
            finished_at=3.0,
            predicted_s=pytest.approx(1.1 * 0.522 * 230 / 512 + 0.211),  # the texts before it, and its own batch
        )
    ]
    assert ends(run_batch(scheduler, 3.0)[1]) == {"a": FINISHED}
    assert scheduler.plan(4.0) is None
    assert scheduler.num_waiting == scheduler.num_running == scheduler.oldest_age_s(4.0) == 0


@pytest.mark.parametrize("more", [{"priority": "high"}, {"deadline": 2.0}])
def test_an_urgent_request_leads_instead_of_the_oldest(more):
    scheduler = make_scheduler()
    submit(scheduler, "oldest", 250)
    submit(scheduler, "urgent", 30, now=0.1, **more)
    assert drain(scheduler, 0.1) == [["urgent"], ["oldest"]]


def test_other_priorities_take_rows_that_are_left_and_only_if_no_longer():
    scheduler = make_scheduler()
    for name, num_tokens in (("same", 40), ("shorter", 39), ("longer", 41)):
        submit(scheduler, name, num_tokens, priority="low")
    submit(scheduler, "high", 40, priority="high")
    assert drain(scheduler) == [["high", "shorter", "same"], ["longer"]]


def test_a_text_waits_for_no_more_than_the_batch_of_somebody_elses_heap_and_is_hardly_delayed_by_it():
    scheduler = make_scheduler(max_rows=8, policy=POLICIES["fair"])
    submit(scheduler, "heap", *[20] * 40, client="a")
    submit(scheduler, "more", *[20] * 40, client="a")
    plan = scheduler.plan(0.0)
    submit(scheduler, "one", 20, now=0.1, client="b")
    scheduler.commit(plan, BatchResult(), 0.2, 0.2)
    assert (names(plan), names(scheduler.plan(0.2))) == (["heap"] * 8, ["one"])


def test_clients_take_turns_by_the_texts_of_a_batch_not_by_requests():
    scheduler = make_scheduler(max_rows=4, token_budget=80, policy=POLICIES["fair"])
    for client in "ab":
        submit(scheduler, client, *[20] * 40, client=client)
    num_done = Counter()
    for batch in drain(scheduler):
        num_done.update(batch)
        assert abs(num_done["a"] - num_done["b"]) <= 4


def test_one_client_alone_is_served_in_the_order_of_arrival():
    orders = []
    for policy in ("fair", "least-slack"):
        scheduler = make_scheduler(max_rows=4, policy=POLICIES[policy])
        for number, num_texts in enumerate((6, 1, 9, 2)):
            submit(scheduler, str(number), *range(10, 10 + num_texts), now=0.001 * number)
        orders.append(drain(scheduler, 0.01))
    assert orders[0] == orders[1]


def test_a_model_without_padding_takes_texts_in_order_and_fills_the_tokens():
    scheduler = make_scheduler()
    scheduler.costs.packed_models.add(TEXT_KEY.model)
    for name, num_tokens in (("a", (3, 200)), ("b", (10,)), ("c", (299,)), ("d", (1,))):
        submit(scheduler, name, *num_tokens)
    plan, _ = run_batch(scheduler)
    assert (names(plan), plan.num_tokens, plan.padded_tokens) == (["a", "a", "b", "c"], (200, 3, 10, 299), 512)
    assert names(scheduler.plan(0.0)) == ["d"]


def test_a_model_without_padding_takes_no_text_of_another_priority_and_few_of_each_other_client():
    scheduler = make_scheduler(policy=POLICIES["fair"], max_rows=4)
    scheduler.costs.packed_models.add(TEXT_KEY.model)
    submit(scheduler, "low", 30, priority="low", client="c")
    submit(scheduler, "own", 30, 30, client="a")
    submit(scheduler, "heap", *[20] * 9, client="b")
    assert names(scheduler.plan(0.0)) == ["own", "own", "heap"]


def test_a_lone_text_gets_all_threads_once_others_were_alone_and_until_one_comes_meanwhile():
    scheduler = make_scheduler(num_sessions=2, is_faster_alone=True)

    def run_alone(num_tokens):
        submit(scheduler, "a", num_tokens)
        return run_batch(scheduler)[0].is_alone

    assert [run_alone(32) for _ in range(5)] == [False, False, False, True, True]
    assert not run_alone(31)
    submit(scheduler, "a", 32)
    plan = scheduler.plan(0.0)
    submit(scheduler, "b", 32)
    assert scheduler.plan(0.0) is None
    assert scheduler.progress(["b"], 0.0)["b"].start_in_s > 0
    assert ends(scheduler.commit(plan, BatchResult(), 1.0)) == {"a": FINISHED}
    assert drain(scheduler, 1.0) == [["b"]]
    assert [run_alone(32) for _ in range(3)] == [False, False, True]


def test_a_batch_leaves_its_share_of_the_texts_to_the_other_session():
    scheduler = make_scheduler(num_sessions=2)
    submit(scheduler, "a", *[30] * 6)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert (first.session, second.session) == (0, 1)
    assert [len(plan.rows) for plan in (first, second)] == [3, 3]
    assert scheduler.plan(0.0) is None
    assert not ends(scheduler.commit(second, BatchResult(), 1.0))
    assert ends(scheduler.commit(first, BatchResult(), 2.0)) == {"a": FINISHED}


def test_a_batch_waits_for_company_only_while_another_runs_and_only_until_its_limit():
    scheduler = make_scheduler(num_sessions=2, max_wait_s=0.5)
    submit(scheduler, "alone", 30)
    running = scheduler.plan(0.0)
    assert names(running) == ["alone"], "the device was idle"
    submit(scheduler, "waits", 256, now=1.0)  # another one as long just fits
    assert (scheduler.plan(1.0), scheduler.next_deadline()) == (None, 1.5)
    scheduler.commit(running, BatchResult(), 1.1)
    waited = scheduler.plan(1.1)
    assert (names(waited), scheduler.next_deadline()) == (["waits"], None)
    submit(scheduler, "until its limit", 30, now=1.2)
    assert scheduler.plan(1.6) is None
    assert names(scheduler.plan(scheduler.next_deadline())) == ["until its limit"]


@pytest.mark.parametrize(
    "full",
    [
        pytest.param(lambda scheduler: submit(scheduler, "x", *[30] * 8), id="enough texts wait"),
        pytest.param(lambda scheduler: submit(scheduler, "x", 300), id="its length uses up the budget"),
        pytest.param(lambda scheduler: submit(scheduler, "x", 257), id="no other as long fits"),
        pytest.param(lambda scheduler: submit(scheduler, "x", 30, deadline=0.7), id="its deadline allows no wait"),
    ],
)
def test_a_batch_that_is_full_or_urgent_does_not_wait_for_company(full):
    scheduler = make_scheduler(num_sessions=2, max_wait_s=5.0)
    submit(scheduler, "running", 30)
    scheduler.plan(0.0)
    full(scheduler)
    assert scheduler.plan(0.1) is not None


def test_a_batch_is_small_enough_for_its_leaders_deadline():
    scheduler = make_scheduler()
    for number in range(8):
        submit(scheduler, f"r{number}", 30)
    submit(scheduler, "urgent", 30, deadline=0.102)
    assert len(scheduler.plan(0.0).rows) == 3  # 10 + 90 ms


def test_before_anything_is_measured_deadlines_limit_no_batch():
    scheduler = BatchScheduler(1)
    for num_texts in (2, 8):
        submit(scheduler, "a", *[30] * num_texts, deadline=1.0)
        assert len(run_batch(scheduler)[0].rows) == num_texts


def test_a_request_that_cannot_meet_its_deadline_any_more_goes_last():
    scheduler = make_scheduler()
    submit(scheduler, "late", 200, deadline=0.5)
    submit(scheduler, "other", 30)
    assert drain(scheduler, 0.4) == [["other"], ["late"]]


def test_cancelled_and_expired_texts_are_in_no_batch_and_their_results_are_ignored():
    scheduler = make_scheduler()
    submit(scheduler, "running", 30, 30)
    submit(scheduler, "expires", 30, now=0.25, expires_at=1.0)
    plan = scheduler.plan(0.25)
    submit(scheduler, "cancelled", 30, now=0.25)
    assert ends(scheduler.cancel("cancelled", 0.5)) == {"cancelled": FinishReason.CANCELLED}
    assert scheduler.cancel("cancelled", 0.5) == []
    (ended,) = scheduler.expire(1.0)
    assert (ended.finish_reason, ended.num_departures) == (FinishReason.EXPIRED, 1)
    assert (ended.timings.slot_s, ended.timings.mean_batch) == (0.75, 3)
    assert ended.message.startswith("it did not finish within 0.750 s")
    assert ends(scheduler.cancel("running", 1.0)) == {"running": FinishReason.CANCELLED}
    submit(scheduler, "running", 30, now=1.0)  # again, with the same id
    assert scheduler.commit(plan, BatchResult(), 1.0) == []
    assert drain(scheduler, 1.0) == [["running"]]


def test_a_failed_text_fails_its_request_and_no_other():
    scheduler = make_scheduler()
    submit(scheduler, "bad", 30, 30)
    submit(scheduler, "good", 30)
    events = run_batch(scheduler, result=BatchResult({ItemId("bad", 1): "NaN"}))[1]
    assert ends(events) == {"bad": FinishReason.FAILED, "good": FINISHED}
    assert [event.message for event in events if event.message] == ["text 1: NaN"]


def test_what_runs_out_of_memory_is_tried_again_in_half_and_fails_only_alone():
    scheduler = make_scheduler()
    submit(scheduler, "a", *[64] * 8)
    submit(scheduler, "long", 1100)
    plan, events = run_batch(scheduler, result=OOM)
    assert (len(plan.rows), events) == (8, [])
    assert [len(run_batch(scheduler)[0].rows) for _ in range(2)] == [4, 4]
    assert ends(run_batch(scheduler, result=OOM)[1]) == {"long": FinishReason.FAILED}
    submit(scheduler, "b", *[64] * 8)  # the limit that "a" has taught is not raised again
    assert len(run_batch(scheduler)[0].rows) == 4


def test_a_text_that_does_not_fit_beside_another_batch_is_tried_alone():
    scheduler = make_scheduler(num_sessions=2)
    submit(scheduler, "a", 250)
    submit(scheduler, "b", 30)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert scheduler.commit(first, OOM, 0.1) == []
    assert scheduler.plan(0.1) is None, "beside another batch"
    scheduler.commit(second, BatchResult(), 0.2)
    submit(scheduler, "c", 250, now=0.2)
    alone = scheduler.plan(0.2)
    assert (names(alone), scheduler.plan(0.2)) == (["a"], None)
    assert ends(scheduler.commit(alone, OOM, 0.3)) == {"a": FinishReason.FAILED}
    assert names(scheduler.plan(0.3)) == ["c"]


def test_an_exclusive_request_runs_with_no_other():
    scheduler = make_scheduler(num_sessions=2)
    submit(scheduler, "before", 30)
    before = scheduler.plan(0.0)
    submit(scheduler, "exclusive", 30, 30, exclusive=True)
    submit(scheduler, "after", 30)
    assert scheduler.plan(0.0) is None
    scheduler.commit(before, BatchResult(), 0.1)
    own = [scheduler.plan(0.1), scheduler.plan(0.1)]
    assert {name for plan in own for name in names(plan)} == {"exclusive"}
    scheduler.commit(own[0], BatchResult(), 0.2)
    assert scheduler.plan(0.2) is None
    scheduler.commit(own[1], BatchResult(), 0.2)
    assert names(scheduler.plan(0.2)) == ["after"]


# Admission and predictions.


def test_a_lone_request_is_predicted_by_the_cost_model():
    scheduler = make_scheduler(num_sessions=2)
    submit(scheduler, "a", 30, 40)
    progress = scheduler.progress(["a", "unknown"], 0.0)["a"]
    assert (progress.queue_position, progress.start_in_s) == (1, 0.0)
    assert progress.finish_in_s == pytest.approx(0.050)  # each session takes one
    scheduler.plan(0.0)
    scheduler.plan(0.0)
    assert scheduler.backlog_s == pytest.approx((0.040 + 0.050) / 2)
    progress = scheduler.progress(["a"], 0.01)["a"]
    assert (progress.queue_position, progress.finish_in_s) == (None, pytest.approx(0.040))


def test_texts_that_just_fill_a_call_are_predicted_to_take_one_and_more_to_take_several():
    for texts, finish_in_s in (
        ([64] * 8, 0.522),
        ([64] * 9, 1.1 * 0.522 * 576 / 512),
        ([20] * 9, 1.1 * 0.522 * 180 / 512),
        ([300] * 2, 1.1 * 0.522 * 600 / 512),
    ):
        scheduler = make_scheduler()
        submit(scheduler, "a", *texts)
        assert scheduler.progress(["a"], 0.0)["a"].finish_in_s == pytest.approx(finish_in_s)


def test_a_client_gets_back_the_turns_of_texts_that_it_cancels_before_they_run():
    scheduler = make_scheduler(max_rows=4, policy=POLICIES["fair"])
    for name, num_texts, client in (("kept", 4, "a"), ("cancelled", 40, "a"), ("others", 40, "b")):
        submit(scheduler, name, *[20] * num_texts, client=client)
    scheduler.cancel("cancelled", 0.0)
    submit(scheduler, "again", *[20] * 4, client="a")
    batches = drain(scheduler)
    assert next(number for number, batch in enumerate(batches) if "again" in batch) <= 4 < len(batches) / 2


def test_a_full_queue_rejects_and_says_when_to_try_again():
    by_texts, by_work = make_scheduler(queue_limit=4), make_scheduler(queue_limit_s=1.0)
    for scheduler in (by_texts, by_work, make_scheduler(queue_limit=4, queue_limit_s=1000.0)):
        assert submit(scheduler, "an empty queue takes any", *[250] * 8) == []
        (rejected,) = submit(scheduler, "b", 250, now=1.0)
        assert rejected.finish_reason is REJECTED
        assert 0.0 < rejected.retry_after_s <= scheduler.backlog_s
        assert rejected.finished_at == 1.0
        assert scheduler.num_waiting == 8


def test_an_unmeetable_deadline_is_rejected_at_once():
    scheduler = make_scheduler()
    (never,) = submit(scheduler, "never", 250, deadline=0.2)
    assert (never.finish_reason, never.retry_after_s) == (UNMEETABLE, None)
    assert "even on an idle server it takes 0.260 s" in never.message
    submit(scheduler, "before", 250, priority="high")
    scheduler.plan(0.0)
    (later,) = submit(scheduler, "later", 250, deadline=0.4)
    assert later.finish_reason is UNMEETABLE
    assert later.retry_after_s == pytest.approx(0.260 + 0.260 - 0.4)
    assert submit(scheduler, "meetable", 100, deadline=0.4) == []


def test_a_request_that_would_break_an_accepted_deadline_is_rejected_or_waits():
    scheduler = make_scheduler()
    submit(scheduler, "accepted", *[250] * 20, deadline=6.5)
    (rejected,) = submit(scheduler, "earlier deadline", *[250] * 6, deadline=6.0)
    assert (rejected.finish_reason, rejected.retry_after_s) == (UNMEETABLE, 6.5)
    assert submit(scheduler, "high", *[251] * 6, priority="high") == []
    assert names(scheduler.plan(0.0))[0] == "accepted"


def test_the_cost_model_and_the_backlog_learn_from_commits():
    scheduler = BatchScheduler(1)
    for number in range(60):
        submit(scheduler, f"r{number}", *[32] * 8)
        run_batch(scheduler, seconds=0.266)
    submit(scheduler, "alone", *[32] * 8)
    assert scheduler.progress(["alone"], 0.0)["alone"].finish_in_s == pytest.approx(0.266, rel=0.05)
    for number in range(60):
        submit(scheduler, f"queued {number}", *[32] * 8)
        run_batch(scheduler, seconds=0.266)
    assert scheduler.backlog_s == pytest.approx(0.266, rel=0.1)


@pytest.mark.parametrize("leaves_some", [False, True])
def test_only_batches_that_leave_texts_waiting_teach_how_long_a_full_queue_takes(leaves_some):
    scheduler = make_scheduler()
    submit(scheduler, "first", 500, priority="low")
    before_s = scheduler.backlog_s
    if not leaves_some:
        run_batch(scheduler)
    for _ in range(60):  # batches of one token, with all the overhead of a call
        submit(scheduler, "short", 1)
        assert names(run_batch(scheduler, seconds=0.011)[0]) == ["short"]
    if not leaves_some:
        submit(scheduler, "again", 500)
    assert scheduler.backlog_s == pytest.approx((7.0 if leaves_some else 1.0) * before_s, rel=0.01)


def test_a_slowdown_fades_while_the_server_is_idle():
    scheduler = make_scheduler()
    scheduler.costs.slowdown = 3.0
    submit(scheduler, "a", 30)
    slow_s = scheduler.backlog_s
    run_batch(scheduler)
    submit(scheduler, "b", 30, now=60.0)
    assert scheduler.costs.slowdown == pytest.approx(1.0)
    assert slow_s == pytest.approx(3 * scheduler.backlog_s)


def test_a_snapshot_shows_batches_and_waiting_requests():
    scheduler = make_scheduler()
    submit(scheduler, "a", 250, 30)
    submit(scheduler, "b", 30)
    plan = scheduler.plan(0.0)
    snapshot = scheduler.snapshot(0.1, max_waiting=1)
    ((running,), (waiting,)) = snapshot.running, snapshot.waiting
    assert (running.plan, running.started_at, running.finish_in_s) == (plan, 0.0, pytest.approx(0.16))
    assert (waiting.request.attempt_id, waiting.num_images) == ("a", 1)
    assert waiting.start_in_s == pytest.approx(0.16)


def test_nothing_of_a_forgotten_model_is_left_and_the_others_keep_theirs():
    scheduler = make_scheduler()
    for batch_key in (TEXT_KEY, OTHER_MODEL):
        for name in ("a", "b"):
            scheduler.submit(replace(text_request(name, 30), batch_key=batch_key), 0.0)
        run_batch(scheduler, result=OOM)
        while scheduler.num_waiting:
            run_batch(scheduler, seconds=0.1)
    predictor = scheduler._predictor
    known = (scheduler.costs.steps, predictor._token_limits, predictor.table.waiting_tokens)
    assert [set(each) for each in known] == [{TEXT_KEY, OTHER_MODEL}] * 3
    assert predictor.batch_s(OTHER_MODEL, 30) > 0.0
    scheduler.forget_model(OTHER_MODEL.model)
    assert predictor.batch_s(OTHER_MODEL, 30) == 0.0
    known = (scheduler.costs.steps, predictor._token_limits, predictor.table.waiting_tokens)
    assert [set(each) for each in known] == [{TEXT_KEY}] * 3


class BatchSchedulerMachine(RuleBasedStateMachine):
    """In any sequence of events, no text is lost or computed twice, no limit is exceeded, every request ends once."""

    requests = Bundle("requests")

    @initialize(
        policy=st.sampled_from(list(POLICIES)),
        costs=st.booleans(),
        wait_s=st.sampled_from([0.0, 1.0]),
        is_faster_alone=st.booleans(),
        packed_models=st.sampled_from([set(), {TEXT_KEY.model}]),
    )
    def start(self, policy, costs, wait_s, is_faster_alone, packed_models):
        self.scheduler = BatchScheduler(
            num_sessions=2,
            max_rows=3,
            token_budget=100,
            is_faster_alone=is_faster_alone,
            max_wait_s=wait_s,
            queue_limit=12,
            queue_limit_s=30.0,
            policy=POLICIES[policy],
            costs=known_costs() if costs else CostModel(),
        )
        self.scheduler.costs.packed_models |= packed_models

    def __init__(self):
        super().__init__()
        self.now, self.count = 0.0, 0
        self.open: dict[str, SchedulableRequest] = {}
        self.ended: set[str] = set()
        self.done: set[ItemId] = set()
        self.plans = []

    def record(self, events):
        for event in events:
            assert event.attempt_id not in self.ended, "ended twice"
            self.ended.add(event.attempt_id)
            request = self.open.pop(event.attempt_id)
            if event.finish_reason is FINISHED:
                assert all(ItemId(request.attempt_id, index) in self.done for index in range(request.num_images))

    def commit(self, plan, result):
        open_rows = {row for row in plan.rows if row.attempt_id in self.open}
        assert not open_rows & self.done, "computed twice"
        self.done |= open_rows - result.failed.keys() if result.fits else set()
        self.record(self.scheduler.commit(plan, result, self.now, 1.0))

    @rule(
        target=requests,
        num_tokens=st.lists(st.integers(1, 120), min_size=1, max_size=5),
        batch_key=st.sampled_from([TEXT_KEY, TEXT_KEY, OTHER_MODEL]),
        timeout_s=st.none() | st.floats(0, 20),
        deadline_s=st.none() | st.floats(0, 20),
        others=st.fixed_dictionaries(
            {
                "exclusive": st.booleans() | st.just(False),
                "priority": st.sampled_from(["low", "normal", "high"]),
                "client": st.sampled_from(["", "a", "b"]),
                "weight": st.sampled_from([1.0, 0.25]),
            }
        ),
    )
    def submit(self, num_tokens, batch_key, timeout_s, deadline_s, others):
        self.count += 1
        request = SchedulableRequest(
            f"r{self.count}",
            batch_key,
            len(num_tokens),
            1,
            None if timeout_s is None else self.now + timeout_s,
            None if deadline_s is None else self.now + deadline_s,
            num_tokens=tuple(num_tokens),
            **others,
        )
        self.open[request.attempt_id] = request
        self.record(self.scheduler.submit(request, self.now))
        return request.attempt_id

    @invariant()
    def the_tokens_of_the_clients_are_those_of_all(self):
        table = self.scheduler._table
        by_client = Counter()
        for tokens in table.tokens_by_client.values():
            by_client.update(tokens)
        assert by_client == table.waiting_tokens
        assert by_client.total() == sum(each.waiting_tokens for each in table.requests.values())

    @rule(attempt_id=consumes(requests))
    def cancel(self, attempt_id):
        known = attempt_id in self.open
        events = self.scheduler.cancel(attempt_id, self.now)
        assert len(events) == known
        self.record(events)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds):
        self.now += seconds
        self.record(self.scheduler.expire(self.now))

    @rule()
    def plan_batch(self):
        first = self.scheduler._table.first()
        plan = self.scheduler.plan(self.now)
        if plan is None:
            wakes_at = self.scheduler.next_deadline()
            assert self.plans or not self.scheduler.num_waiting, "idle with work to do"
            assert wakes_at is None or wakes_at > self.now
            return
        assert first.is_late or first.request.attempt_id in names(plan), "the first one is left waiting"
        assert len(set(plan.rows)) == len(plan.rows) <= 3
        assert plan.padded_tokens <= 100 or len(plan.rows) == 1
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            assert self.open[row.attempt_id].num_tokens[row.index] == num_tokens, "planned after it ended"
            assert self.open[row.attempt_id].batch_key == plan.batch_key
            assert row not in self.done
        for other in self.plans:
            assert other.session != plan.session
            assert not other.is_alone
            assert not set(other.rows) & set(plan.rows), "in flight twice"
        in_flight = {row.attempt_id for each in (*self.plans, plan) for row in each.rows if row.attempt_id in self.open}
        assert len(in_flight) == 1 or not any(self.open[name].exclusive for name in in_flight)
        self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def commit_batch(self, data):
        plan = self.plans.pop(data.draw(st.integers(0, len(self.plans) - 1)))
        failed = data.draw(st.sets(st.sampled_from(plan.rows), max_size=1))
        fits = data.draw(st.sampled_from([True, True, True, False]))
        self.now += 1.0
        self.commit(plan, BatchResult(dict.fromkeys(failed, "selected at random"), fits))

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(400):
            while (plan := self.scheduler.plan(self.now)) is not None:
                self.plans.append(plan)
            if not self.plans:
                break
            self.commit(self.plans.pop(), BatchResult())
        assert not self.open, f"never ended: {self.open}"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.scheduler._table.groups
        assert not any(self.scheduler._table.waiting_tokens.values())
        assert not self.scheduler._table.tokens_by_client
        assert not self.scheduler._table.waiting_by_client and not self.scheduler._turns
        assert not self.scheduler._shares.weight


TestBatchSchedulerMachine = BatchSchedulerMachine.TestCase
TestBatchSchedulerMachine.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
