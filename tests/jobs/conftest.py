"""Fixtures of the jobs tests: stores on both kinds of database, a tracer, and new jobs."""

import pytest

from databases import TablesOnce
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore
from noria.jobs.records import NewJob, new_job_id


@pytest.fixture
def tracer(collector):
    """A tracer whose spans are in the collector after `tracer.span_processor.force_flush()`."""
    from noria.observe.traces.otlp import open_otlp_provider

    provider = open_otlp_provider(collector.endpoint, 1.0, "frontend-0")
    yield provider.get_tracer("noria")
    provider.shutdown()


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    return TablesOnce(lambda url: open_jobs_database(url, folder).dispose(), folder)


@pytest.fixture
def database(request, tmp_path, tables):
    """The URL of a database without jobs; in SQLite, or as `on_both` says."""
    with tables.of(getattr(request, "param", "sqlite"), tmp_path, request) as url:
        yield url


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
