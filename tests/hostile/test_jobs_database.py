"""A PostgreSQL that stands still: it once held callers up for as long as it stood, and the stop until SIGKILL."""

import concurrent.futures
import contextlib
import pathlib
import urllib.parse

import httpx
import psutil
import pytest
import sqlalchemy as sa

from frontend.conftest import folder, new_engine  # noqa: F401 - fixtures
from hostile.jobs_server import post_job, serving_jobs
from noria.jobs.thread_offloader import NUM_REQUEST_THREADS
from waiting import wait_until


@contextlib.contextmanager
def standing_still(url):
    """Suspend all processes of the PostgreSQL server at `url`."""
    folder = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)["host"][0]  # noqa: F811
    postmaster = psutil.Process(int((pathlib.Path(folder) / "postmaster.pid").read_text().split()[0]))
    processes = [postmaster, *postmaster.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_callers_of_a_database_that_stands_still_get_503_and_nobody_else_notices(
    new_engine,  # noqa: F811
    tmp_path,
    database,
    caplog,
):
    with serving_jobs(new_engine, tmp_path, database=database, database_timeout_s=1) as (mallory, alice, engine):
        path = f"/v1/jobs/{post_job(mallory).json()['id']}"
        wait_until(lambda: engine.submitted)
        engine.never_answers = False
        num_callers = 4 * NUM_REQUEST_THREADS
        with concurrent.futures.ThreadPoolExecutor(num_callers) as pool, standing_still(database):
            answers = [pool.submit(mallory.get, path) for _ in range(num_callers)]
            assert alice.get("/healthz").status_code == 200
            assert alice.post("/t2i", json={"prompt": "p"}).status_code == 200
            for answer in answers:
                assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (
                    503,
                    "jobs_unavailable",
                )
                assert int(answer.result().headers["retry-after"]) > 0
            assert post_job(alice).status_code == 503
            assert alice.get("/readyz").json()["jobs_unavailable"] == "the jobs' database: it does not answer"
        assert wait_until(lambda: mallory.get(path).status_code == 200)
        assert post_job(alice).status_code == 202
    caplog.clear()  # its exceptions hold the sockets of connections that could not be made


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_front_end_whose_database_stands_still_stops(new_engine, tmp_path, database, caplog):  # noqa: F811
    with contextlib.ExitStack() as front_end:
        serving = serving_jobs(new_engine, tmp_path, database=database, database_timeout_s=600)
        mallory, _, engine = front_end.enter_context(serving)
        post_job(mallory)
        wait_until(lambda: engine.submitted)
        with standing_still(database):
            with contextlib.suppress(httpx.ReadTimeout):
                mallory.get("/v1/jobs", timeout=1)
            front_end.close()
    engine = sa.create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:  # it could not be requeued: its lease expires
        assert connection.scalar(sa.text("SELECT status FROM noria_jobs")) == "processing"
    engine.dispose()
    caplog.clear()  # its exceptions hold the sockets of connections that could not be made
