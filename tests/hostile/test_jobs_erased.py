"""A job was once kept until its time was over, whatever its owner wanted; and only its owner may erase it."""

import sqlite3

import pytest

from frontend.conftest import captured_log_fields, folder, new_engine  # noqa: F401 - fixtures
from hostile.jobs_server import post_job, serving_jobs
from waiting import wait_until

SECRET = "a prompt that nobody else may read"


@pytest.mark.parametrize("has_ended", [True, False])
def test_an_erased_job_leaves_nothing_behind(
    new_engine,  # noqa: F811
    tmp_path,
    has_ended,
    captured_log_fields,  # noqa: F811
):
    with serving_jobs(new_engine, tmp_path, webhook_allow_private=True) as (mallory, alice, engine):
        engine.never_answers = not has_ended
        body = {"input": {"prompt": SECRET}, "webhook": "http://127.0.0.1:9/refused"}
        job = alice.post("/v1/jobs", json=body).json()
        url = f"/v1/jobs/{job['id']}"
        wait_until(lambda: engine.submitted)
        if has_ended:
            wait_until(lambda: alice.get(url).json()["status"] == "succeeded")
        assert mallory.delete(f"{url}?erase=true").status_code == 404
        assert alice.delete(f"{url}?erase=maybe").json()["error"]["param"] == "erase"
        assert alice.delete(url).status_code == alice.get(url).status_code == 200  # it is cancelled at most
        with captured_log_fields("noria.jobs") as lines:
            assert alice.delete(f"{url}?erase=true").status_code == 204
            (line,) = [line for line in lines() if line["event"] == "job_erased"]
        assert (line["key"], line["job_status"]) == ("alice", "succeeded" if has_ended else "canceled")
        assert [alice.get(path).status_code for path in (url, f"{url}/events", f"{url}/images/0")] == [404] * 3
        assert list((tmp_path / "data" / "results").glob("job_*")) == []
        assert post_job(alice).status_code == 202
    with sqlite3.connect(tmp_path / "data" / "jobs.sqlite") as database:
        assert SECRET not in "".join(database.iterdump())
    database.close()
