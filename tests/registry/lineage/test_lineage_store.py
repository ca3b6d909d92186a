"""Events in the database: recorded once, and folded into runs, datasets and their versions."""

import concurrent.futures

import pytest
import sqlalchemy as sa

from noria.registry.lineage.store import LineageStore
from noria.registry.schema import dataset_versions, datasets, lineage_events, run_io, runs
from registry.samples import RUNS, SCENES, WORDS, dataset, event, step_of


@pytest.fixture
def store(engine):
    return LineageStore(engine)


def rows(engine, *columns):
    with engine.connect() as connection:
        joined = run_io.join(dataset_versions).join(datasets)
        return {tuple(row) for row in connection.execute(sa.select(*columns).select_from(joined))}


def test_a_repeated_event_is_recorded_once(engine, store):
    events = [event(type="START", inputs=[dataset("/scenes", SCENES)]), event(second=1)]
    assert [store.record(events, "airflow", 5.0), store.record(events[::-1], "spark", 6.0)] == [2, 0]
    with engine.connect() as connection:
        found = connection.execute(sa.select(lineage_events.c.received_from, lineage_events.c.received_at)).all()
        run = connection.execute(sa.select(runs)).one()
    assert found == [("airflow", 5.0)] * 2
    assert (run.run_id, run.job_name, run.status, run.ended_at - run.started_at) == (RUNS[0], "train", "complete", 1)


def test_inputs_and_outputs_follow_the_events(engine, store):
    read = (run_io.c.direction, datasets.c.name, dataset_versions.c.version, dataset_versions.c.digest)
    store.record([event(type="START", inputs=[dataset("/scenes"), dataset("/words", "7")])], "", 1.0)
    assert rows(engine, *read) == {("input", "/scenes", "", None), ("input", "/words", "7", None)}
    store.record([event(inputs=[dataset("/scenes", SCENES)], outputs=[dataset("/out", WORDS)])], "", 1.0)
    assert rows(engine, *read) == {
        ("input", "/scenes", SCENES, SCENES),
        ("input", "/words", "7", None),
        ("output", "/out", WORDS, WORDS),
    }


def test_a_step_may_come_before_its_run_and_events_of_no_run_are_kept(engine, store):
    store.record([event(1, facets=step_of(0)), event(0, second=1)], "", 1.0)
    with engine.connect() as connection:
        assert set(connection.execute(sa.select(runs.c.run_id, runs.c.parent_id)).all()) == {
            (RUNS[0], None),
            (RUNS[1], RUNS[0]),
        }


def test_events_that_arrive_at_once_by_several_senders_all_count(engine, store):
    sent = [
        event(run, type="RUNNING", second=second, inputs=[dataset(f"/{second}", "1"), dataset("/all", "1")])
        for run in range(3)
        for second in range(6)
    ]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        new = list(threads.map(lambda first: store.record(sent[first::3] + sent[:4], "", 1.0), range(6)))
    assert sum(new) == len(sent)
    expected = {(RUNS[run], f"/{name}") for run in range(3) for name in (*range(6), "all")}
    assert rows(engine, run_io.c.run_id, datasets.c.name) == expected
