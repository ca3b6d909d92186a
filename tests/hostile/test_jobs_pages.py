"""The sizes that jobs store and list: one page was once 99 MB, because the `user` of each of its jobs had 1 MB."""

import time

import pytest

from frontend.conftest import folder, new_engine  # noqa: F401 - fixtures
from hostile.jobs_server import post_job, serving_jobs
from noria.frontend.protocols.openai.images import IGNORED_FIELDS, MAX_IGNORED_CHARS
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore
from noria.jobs.records import NewJob, new_job_id

NUM_JOBS, JOB_CHARS = 40, 200_000


@pytest.mark.parametrize("field", IGNORED_FIELDS)
def test_ignored_fields_are_bounded_and_not_stored(new_engine, tmp_path, field):  # noqa: F811
    with serving_jobs(new_engine, tmp_path) as (mallory, _, _):
        endpoint = {"endpoint": "/v1/images/generations"}
        rejected = post_job(mallory, **endpoint, **{field: "x" * 900_000})
        assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, f"input.{field}")
        assert f"more than {MAX_IGNORED_CHARS} characters" in rejected.json()["error"]["message"]
        job = post_job(mallory, **endpoint, **{field: "x" * MAX_IGNORED_CHARS}).json()
        assert job["input"] == endpoint | {"prompt": "p", "seed": 7}
        assert mallory.get(job["urls"]["get"]).json()["input"] == job["input"]


def test_a_host_too_long_for_a_name_is_not_stored(new_engine, tmp_path):  # noqa: F811
    with serving_jobs(new_engine, tmp_path) as (mallory, _, _):
        answer = mallory.post("/v1/jobs", json={"input": {"prompt": "p"}}, headers={"Host": "h" * 5000})
        assert 400 <= answer.status_code < 500
        assert mallory.get("/v1/jobs").json()["results"] == []


def test_pages_of_long_jobs_are_bounded_in_bytes_and_complete(new_engine, tmp_path):  # noqa: F811
    """Older versions have stored such jobs."""
    store = JobStore(open_jobs_database("auto", tmp_path / "data"))
    long = b'{"user": "%s"}' % (b"x" * JOB_CHARS)
    names = []
    for _ in range(NUM_JOBS):
        new = NewJob(new_job_id(), "other", "v1", long, b"{}", "http://noria.test/", made_by="mallory")
        names.append(store.accept(new, 1000, time.time())[0].id)
    store.close()
    with serving_jobs(new_engine, tmp_path) as (mallory, alice, _):
        url, found = "/v1/jobs?limit=100", []
        while url:
            answer = mallory.get(url)
            assert len(answer.content) < 1.5 * 2**20
            found += [job["id"] for job in answer.json()["results"]]
            url = answer.json()["next"]
        assert found == names[::-1]
        assert alice.get("/v1/jobs").json() == {"results": [], "next": None}
