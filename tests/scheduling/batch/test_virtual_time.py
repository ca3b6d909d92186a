"""Guarantees of the batch scheduler in virtual time: two sessions, a call takes 15 tokens more than it has."""

import heapq

import pytest

from noria.scheduling.batch.scheduler import BatchScheduler
from noria.scheduling.types import BatchResult, FinishReason
from noria.testing.simulated_sessions import FifoBatches, run_closed_loop, run_open_loop, text_request

TOKEN_S = 0.00023


def batch_s(padded_tokens):
    return TOKEN_S * (15 + padded_tokens)


# Computed for log-normal lengths: 0.79, 0.87, 0.90, 0.90; two hundredths are allowed for the short run.
@pytest.mark.parametrize(("users", "share"), [(8, 0.77), (32, 0.85), (64, 0.88), (128, 0.88)])
def test_far_more_of_the_devices_time_goes_to_real_tokens_than_first_come_first_served(users, share):
    ours = run_closed_loop(BatchScheduler(), users, 1000, batch_s, TOKEN_S)
    fifo = run_closed_loop(FifoBatches(8), users, 1000, batch_s, TOKEN_S)
    assert ours.useful_share >= max(share, 2.0 * fifo.useful_share)
    assert ours.p99_s < min(fifo.p99_s, 1.5 * run_closed_loop(FifoBatches(1), users, 1000, batch_s, TOKEN_S).p99_s)


def test_predictions_are_right_on_average():
    scheduler, predicted, errors, latencies = BatchScheduler(), {}, [], []

    def on_submit(attempt_id, now):
        predicted[attempt_id] = now, scheduler.progress([attempt_id], now)[attempt_id].finish_in_s

    def on_end(attempt_id, now):
        sent_at, finish_in_s = predicted.pop(attempt_id)
        errors.append(now - sent_at - finish_in_s)
        latencies.append(now - sent_at)

    run_closed_loop(scheduler, 32, 1000, batch_s, TOKEN_S, on_submit=on_submit, on_end=on_end)
    mean_s = sum(latencies[200:]) / len(latencies[200:])
    assert abs(sum(errors[200:]) / len(errors[200:])) < 0.15 * mean_s


@pytest.mark.parametrize(("load", "met"), [(0.5, 0.99), (1.0, 0.9)])
def test_nearly_all_accepted_deadlines_are_met(load, met):
    """A load of 1, 167 texts per second, keeps both sessions busy if 90 % of their time goes to real tokens."""
    outcomes = run_open_loop(BatchScheduler(), 167.0 * load, 1000, batch_s, (0.1, 0.3, 1.0))
    assert outcomes["met"] >= met * (1000 - outcomes["rejected"])
    assert outcomes["met"] >= (met - 0.1) * 1000


def test_no_text_starves_under_an_endless_stream_of_other_lengths():
    """Before it lead only the requests ahead of it: 40, two batches at a time, each of at most 527 token times."""
    scheduler, running, number, ended = BatchScheduler(), [], 0, {}
    now = 0.0
    for _ in range(40):
        scheduler.submit(text_request(f"r{number}", 16), now)
        number += 1
    scheduler.submit(text_request("odd", 256), now)
    while "odd" not in ended:
        while scheduler.num_waiting < 40:
            scheduler.submit(text_request(f"r{number}", 16), now)
            number += 1
        while (plan := scheduler.plan(now)) is not None:
            heapq.heappush(running, (now + batch_s(plan.padded_tokens), plan.session, plan))
        now, _, plan = heapq.heappop(running)
        events = scheduler.commit(plan, BatchResult(), now, batch_s(plan.padded_tokens))
        ended |= {each.attempt_id: each.finish_reason for each in events}
        assert now <= (40 / 2 + 2) * batch_s(512), "starved"
    assert ended["odd"] is FinishReason.FINISHED
