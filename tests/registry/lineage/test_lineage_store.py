"""Events in the database: recorded once, and folded into runs, datasets and their versions."""

import concurrent.futures
import json
import threading
import time
import uuid

import pytest
import sqlalchemy as sa

from databases import on_both
from noria.errors import BodyTooLarge, ForeignRun, InvalidField, RegistryError
from noria.registry.check import check
from noria.registry.lineage.nodes import NodeId, describe
from noria.registry.lineage.openlineage import parse_event
from noria.registry.lineage.run_rows import price_of
from noria.registry.lineage.store import MAX_ROWS, MAX_SKEW_S, LineageStore
from noria.registry.lineage.struck_events import strike_out
from noria.registry.schema import dataset_versions, datasets, lineage_events, models, run_io, runs
from noria.storage.database import write_transaction
from registry.samples import NOW, RUNS, SCENES, WORDS, at, dataset, event


@pytest.fixture
def store(engine):
    return LineageStore(engine)


def rows(engine, *columns):
    with engine.connect() as connection:
        joined = run_io.join(dataset_versions).join(datasets)
        return {tuple(row) for row in connection.execute(sa.select(*columns).select_from(joined))}


@on_both
def test_a_repeated_event_is_recorded_once(engine, store):
    events = [event(type="START", inputs=[dataset("/scenes", SCENES)]), event(second=1)]
    assert [store.record(events, "airflow", NOW), store.record(events[::-1], "spark", NOW + 1)] == [2, 0]
    with engine.connect() as connection:
        found = connection.execute(sa.select(lineage_events.c.received_from, lineage_events.c.received_at)).all()
        run = connection.execute(sa.select(runs)).one()
    assert found == [("airflow", NOW)] * 2
    assert (run.run_id, run.job_name, run.status, run.ended_at - run.started_at) == (RUNS[0], "train", "complete", 1)


@on_both
def test_inputs_and_outputs_follow_the_events(engine, store):
    read = (run_io.c.direction, datasets.c.name, dataset_versions.c.version, dataset_versions.c.digest)
    store.record([event(type="START", inputs=[dataset("/scenes"), dataset("/words", "7")])], "", NOW)
    assert rows(engine, *read) == {("input", "/scenes", "", None), ("input", "/words", "7", None)}
    store.record([event(inputs=[dataset("/scenes", SCENES)], outputs=[dataset("/out", WORDS)])], "", NOW)
    assert rows(engine, *read) == {
        ("input", "/scenes", SCENES, SCENES),
        ("input", "/words", "7", None),
        ("output", "/out", WORDS, WORDS),
    }


@on_both
def test_events_that_arrive_at_once_by_several_senders_all_count(engine, store):
    sent = [
        event(run, type="RUNNING", second=second, inputs=[dataset(f"/{second}", "1"), dataset("/all", "1")])
        for run in range(3)
        for second in range(6)
    ]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        new = list(threads.map(lambda first: store.record(sent[first::3] + sent[:4], "", NOW), range(6)))
    assert sum(new) == len(sent)
    expected = {(RUNS[run], f"/{name}") for run in range(3) for name in (*range(6), "all")}
    assert rows(engine, run_io.c.run_id, datasets.c.name) == expected


def run_row(engine, run=0):
    with engine.connect() as connection:
        return connection.execute(sa.select(runs).where(runs.c.run_id == RUNS[run])).one()


def params(**values):
    return {"executionParameters": {"parameters": [{"key": name, "value": each} for name, each in values.items()]}}


@on_both
def test_a_run_belongs_to_who_sent_its_first_event(engine, store):
    store.record([event(type="START", facets=params(rate="1e-3"))], "ann", NOW)
    before = run_row(engine)
    with pytest.raises(ForeignRun, match=rf"the run {RUNS[0]} belongs to 'ann'.*'eve' may not"):
        store.record([event(1), event(0, second=9, facets=params(rate="stolen"))], "eve", NOW)
    with engine.connect() as connection:
        assert connection.scalars(sa.select(lineage_events.c.received_from)).all() == ["ann"]
    assert run_row(engine) == before
    assert store.record([event(type="START", facets=params(rate="1e-3"))], "eve", NOW) == 0  # it is there
    store.record([event(second=1)], "ann", NOW)
    assert (run_row(engine).owner, run_row(engine).status) == ("ann", "complete")


@on_both
@pytest.mark.parametrize(("ahead_s", "is_accepted"), [(MAX_SKEW_S - 1, True), (MAX_SKEW_S + 1, False)])
def test_an_event_of_the_future_is_rejected(engine, store, ahead_s, is_accepted):
    events = [event(type="START"), event(second=30)]
    now = events[1].at - ahead_s
    if is_accepted:
        assert store.record(events, "ann", now) == 2
        return
    with pytest.raises(
        InvalidField, match=r"eventTime is 2026-11-22T09:00:30\+00:00, which is in the future"
    ) as caught:
        store.record(events, "ann", now)
    assert caught.value.field == "eventTime"
    with engine.connect() as connection:
        assert not connection.execute(sa.select(lineage_events)).all() + connection.execute(sa.select(runs)).all()


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("MAX_EVENTS", 3, "would have 4 events; 3 are allowed"),
        ("MAX_BYTES", 1500, r"bytes of events; 1500 are allowed"),
        ("MAX_ENTRIES", 7, "would have 8 parameters, metrics, inputs and outputs; 7 are allowed"),
    ],
)
def test_what_a_run_keeps_is_bounded(engine, store, monkeypatch, limit, value, words):
    monkeypatch.setattr(f"noria.registry.lineage.store.{limit}", value)
    sent = [
        event(type="RUNNING", second=second, inputs=[dataset(f"/{second}", "1")], facets=params(**{str(second): 1}))
        for second in range(4)
    ]
    store.record(sent[:3], "ann", NOW)
    before = run_row(engine)
    with pytest.raises(RegistryError, match=words):
        store.record(sent[3:], "ann", NOW)
    assert run_row(engine) == before
    assert store.record([event(1)], "ann", NOW) == 1  # other runs go on


@on_both
def test_what_a_sender_keeps_is_bounded_and_is_no_limit_that_passes(engine, store, caplog):
    price = price_of(event())
    limit = {"max_sender_bytes": 2.4 * price}
    store.record([event(0)], "ann", NOW, **limit)
    assert not caplog.records
    store.record([event(1)], "ann", NOW, **limit)
    store.record([event(1)], "ann", NOW, **limit)
    assert [each.noria_fields for each in caplog.records] == [{"event": "lineage_nearly_full", "sender": "ann"}]
    with pytest.raises(RegistryError, match=rf"the lineage of 'ann' would take {3 * price} bytes") as caught:
        store.record([event(2)], "ann", NOW, **limit)
    assert not caught.value.retryable and caught.value.retry_after_s is None
    store.record([event(0), event(2)], "bob", NOW, **limit)  # what is there takes nothing
    strike_out(engine, RUNS[0], at(NOW))
    store.record([event(3)], "ann", NOW, **limit)


def bare(run_id, facets=None, **more):
    """An event of as few bytes as possible, of a run of its own."""
    raw = {"eventTime": "2026-11-22T09:00:00Z", "job": {"namespace": "a", "name": "b"}, **more}
    return parse_event(json.dumps(raw | {"run": {"runId": run_id, "facets": facets or {}}}).encode())


def parameters(count):
    listed = [{"key": str(number), "value": 1} for number in range(count)]
    return {"executionParameters": {"parameters": listed}}


SHAPES = {
    "runs": [bare(str(uuid.UUID(int=number))) for number in range(2000)],
    "events": [bare(RUNS[0], x=number) for number in range(2000)],
    "data": [
        bare(RUNS[number], outputs=[{"namespace": "a", "name": f"{number}-{k}"} for k in range(1000)])
        for number in range(3)
    ],
    "parameters": [bare(RUNS[0], parameters(9000))],
    "jobs": [
        bare(str(uuid.UUID(int=number)), job={"namespace": "a" * 500, "name": "b" * 2000}) for number in range(300)
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_sender_keeps_is_what_its_events_take_on_the_disk(engine, store, shape):
    """Bodies alone were a seventeenth of it."""

    def size():
        with engine.connect() as connection:
            num_pages, page_size = (
                connection.exec_driver_sql(f"PRAGMA {x}").scalar() for x in ("page_count", "page_size")
            )
            return num_pages * page_size

    before = size()
    store.record(SHAPES[shape], "ann", NOW)
    assert size() - before < 1.3 * sum(map(price_of, SHAPES[shape]))


@on_both
def test_the_largest_batch_takes_few_statements_and_lets_others_write(engine, store):
    """A batch of 381 kB held the lock for 8.6 s of CPU: eight statements for each run."""
    batch = [bare(str(uuid.UUID(int=number))) for number in range(MAX_ROWS // 2)]
    with pytest.raises(BodyTooLarge, match=rf"would write {MAX_ROWS + 2} rows of the registry; {MAX_ROWS} at once"):
        store.record([*batch, event()], "ann", NOW)
    statements, begun = [], threading.Event()

    def listen(_connection, _cursor, statement, *_):
        statements.append(statement)
        begun.set()

    def deploy():
        begun.wait(60)
        with write_transaction(engine) as connection:
            connection.execute(models.insert().values(name="shapes"))

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        deployment = threads.submit(deploy)
        sa.event.listen(engine, "before_cursor_execute", listen)
        began = time.thread_time()
        assert store.record(batch, "ann", NOW) == len(batch)
        cpu_s = time.thread_time() - began
        deployment.result(60)
    assert len(statements) < 60
    assert cpu_s < 4, "0.7 s on a machine of its own"


@on_both
def test_an_event_writes_no_rows_but_those_that_it_states(engine, store):
    """Each event wrote the state of its run, with all it had, and all its inputs anew."""
    data = [dataset(f"/{number}", "1") for number in range(1000)]
    for second in range(4):
        store.record([event(type="RUNNING", second=second, inputs=data[second * 250 :][:250])], "ann", NOW)
    assert len(run_row(engine).state) < 500
    statements = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2:4]))
    store.record([event(type="RUNNING", second=5, facets=params(rate="1e-3"))], "ann", NOW)
    assert len(statements) < 12 and max(len(str(parameters)) for _, parameters in statements) < 2000
    assert len(rows(engine, datasets.c.name)) == 1000


def test_events_that_arrive_one_by_one_in_another_order_have_the_rows_of_their_fold(engine, store):
    events = [
        event(type="RUNNING", second=second, inputs=[dataset("/a"), dataset("/b", str(second % 3), f"s3://{second}")])
        for second in range(12)
    ] + [event(type="RUNNING", second=20 + k, facets=params(rate=str(k), **{f"p{k}": k})) for k in range(4)]
    for number, each in enumerate(events[::-1] + events):
        store.record([each], "ann", NOW + number)
    assert list(check(engine, with_files=False)) == []
    with engine.connect() as connection:
        node = describe(connection, NodeId("run", RUNS[0]))
    assert node.params == {"rate": "3", "p0": 0, "p1": 1, "p2": 2, "p3": 3}
