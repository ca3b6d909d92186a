"""The life cycle and the public form of a job."""

import msgspec
import pytest

from noria.jobs.records import (
    TERMINAL_STATUSES,
    TRANSITIONS,
    Claim,
    JobRecord,
    allowed_previous,
    as_job,
    new_job_id,
    queue_order,
    webhook_event_for,
)


def test_terminal_statuses_have_no_successor():
    assert {"succeeded", "failed", "canceled"} == TERMINAL_STATUSES
    assert all(allowed_previous(status) <= {"starting", "processing"} for status in TRANSITIONS)


def test_only_a_processing_job_can_succeed_or_be_requeued():
    assert allowed_previous("succeeded") == allowed_previous("starting") == {"processing"}


def test_job_ids_are_random_and_fit_into_a_path():
    names = {new_job_id() for _ in range(1000)}
    assert len(names) == 1000
    assert all(name.removeprefix("job_").isalnum() and len(name) == 30 for name in names)


def test_a_low_priority_job_is_overtaken_for_a_limited_time():
    assert queue_order(100, "high") < queue_order(100, "normal") < queue_order(100, "low")
    assert queue_order(0, "low") < queue_order(1201, "high")


def test_a_job_has_replicates_fields(store, job):
    new = job(webhook="https://example.com/hook", webhook_events=("completed",))
    record, _ = store.accept(new, 10, 1_795_230_000.5)
    assert msgspec.to_builtins(as_job(record)) == {
        "id": record.id,
        "model": "shapes",
        "version": "v1",
        "input": {"prompt": "a red circle"},
        "output": None,
        "logs": "",
        "error": None,
        "error_code": None,
        "status": "starting",
        "created_at": "2026-11-21T03:00:00.500Z",
        "started_at": None,
        "completed_at": None,
        "metrics": {},
        "urls": {
            "get": f"http://noria.test/v1/jobs/{record.id}",
            "cancel": f"http://noria.test/v1/jobs/{record.id}",
            "stream": f"http://noria.test/v1/jobs/{record.id}/events",
        },
        "webhook": "https://example.com/hook",
        "webhook_events_filter": ["completed"],
    }


@pytest.mark.parametrize(
    ("status", "attempt", "event"),
    [
        ("starting", 0, None),
        ("processing", 1, "start"),
        ("processing", 2, None),
        ("starting", 1, None),
        *[(status, 2, "completed") for status in sorted(TERMINAL_STATUSES)],
    ],
)
def test_webhooks_are_of_the_first_start_and_of_each_end(status, attempt, event):
    record = JobRecord(**dict.fromkeys(JobRecord.__match_args__) | {"status": status, "attempt": attempt})
    assert webhook_event_for(record) == event


@pytest.mark.parametrize(("now", "spent_s"), [(12.0, 2.0), (5.0, 0.0)])
def test_times_are_never_negative_with_differing_clocks(store, job, now, spent_s):
    store.accept(job(), 10, 8.0)
    (mine,) = store.claim("s/f/1", {("shapes", "v1")}, 1, 10.0)
    assert store.finish(Claim(mine.id, "s/f/1", 1), ["1-0.png", "1-1.png"], {"denoise_s": 1.5}, now)
    done = as_job(store.get(mine.id))
    assert done.metrics == {"denoise_s": 1.5, "total_time": max(now - 8.0, 0.0), "predict_time": spent_s}
    assert done.output == [f"http://noria.test/v1/jobs/{mine.id}/images/{k}" for k in (0, 1)]
