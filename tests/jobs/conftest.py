"""Fixtures of the jobs tests: stores on both kinds of database, a tracer, and new jobs."""

import pytest

from noria.jobs.records import NewJob, new_job_id
from noria.jobs.schema import open_jobs_database
from noria.jobs.store import JobStore
from waiting import TIMEOUT_S


@pytest.fixture
def tracer(collector, monkeypatch):
    """A tracer that delivers all its spans to the collector when it is closed; a server drops them after a second and a
    half.
    """
    from noria.observe.traces.otlp import OtlpTracer

    monkeypatch.setattr("noria.observe.traces.otlp._CLOSE_TIMEOUT_S", TIMEOUT_S)
    opened = OtlpTracer(collector.endpoint, 1.0, "frontend-0")
    yield opened
    opened.close()


@pytest.fixture
def engine(database, tmp_path):
    opened = open_jobs_database(database, tmp_path)
    yield opened
    opened.dispose()


@pytest.fixture
def store(engine):
    return JobStore(engine)


@pytest.fixture(scope="session")
def job():
    """Creates jobs of the model `shapes`, version `v1`."""

    def new_job(**fields):
        usual = {
            "id": new_job_id(),
            "model": "shapes",
            "version": "v1",
            "input": b'{"prompt": "a red circle"}',
            "request": b'{"seed": 7}',
            "base_url": "http://noria.test/",
        }
        return NewJob(**(usual | fields))

    return new_job
