"""Streams of the events of jobs: 3,000 of one client once took a minute from every other."""

import contextlib
import re

from frontend.conftest import folder, new_engine  # noqa: F401 - fixtures
from hostile.jobs_server import counted_statements, post_job, serving_jobs
from noria.frontend.jobs.routes import MAX_STREAMS_PER_CLIENT
from waiting import wait_until

_POLL = "last_event, noria_jobs.made_by \n"  # part of the query for all watched jobs
_READS_JOB = re.compile(r"FROM noria_jobs \nWHERE noria_jobs\.id = |FROM noria_job_events")


def test_streams_of_one_client_are_bounded_and_cost_one_query_together(new_engine, tmp_path):  # noqa: F811
    with serving_jobs(new_engine, tmp_path) as (mallory, alice, engine), contextlib.ExitStack() as streams:
        job_id = post_job(mallory).json()["id"]
        wait_until(lambda: engine.submitted)
        path = f"/v1/jobs/{job_id}/events"

        def open_stream():
            answer = streams.enter_context(mallory.stream("GET", path))
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert any('"processing"' in line for line in lines)
            return lines

        with counted_statements() as statements:
            readers = [open_stream()]
            found = {match[0] for text in statements if (match := _READS_JOB.search(text))}
            assert len(found) == 2  # the first stream reads both, so the pattern finds the reads of others
        # Those that join it read nothing, nor do those that are rejected; a poll may read new events for all of them.
        with counted_statements() as statements:
            readers += [open_stream() for _ in range(MAX_STREAMS_PER_CLIENT - 1)]
            for _ in range(MAX_STREAMS_PER_CLIENT):
                rejected = mallory.get(path)
                assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "rate_limited")
                assert int(rejected.headers["retry-after"]) > 0
            assert sum(bool(_READS_JOB.search(text)) for text in statements) < MAX_STREAMS_PER_CLIENT / 4

        with counted_statements() as statements:
            wait_until(lambda: sum(_POLL in text for text in statements) >= 3)
            about_events = [text for text in statements if _POLL in text or "noria_job_events" in text]
            assert len(about_events) < MAX_STREAMS_PER_CLIENT / 4
            alices = post_job(alice).json()["id"]
            with alice.stream("GET", f"/v1/jobs/{alices}/events") as answer:
                assert any('"processing"' in line for line in answer.iter_lines())

        mallory.delete(f"/v1/jobs/{job_id}")
        assert all(any('"canceled"' in line for line in reader) for reader in readers)
        streams.close()
        wait_until(lambda: mallory.get(path, headers={"Last-Event-ID": "1"}).status_code == 200)
