"""Events that are struck out count no more, and stay."""

import pytest

from databases import on_both
from noria.errors import ForeignRun, RegistryError
from noria.registry.changes import Change
from noria.registry.check import check
from noria.registry.lineage.nodes import NodeId, StruckOut, describe
from noria.registry.lineage.store import LineageStore, record_events
from noria.registry.lineage.struck_events import list_events, strike_out
from noria.registry.lineage.trace import trace
from noria.registry.lineage.trace_subjects import find_subjects
from noria.storage.database import write_transaction
from registry.samples import NOW, RUNS, SCENES, WEIGHTS, WORDS, at, dataset, event

TRAIN = [
    event(type="START", inputs=[dataset("/scenes", SCENES)], facets={"noria_metrics": {"metrics": {"loss": 0.5}}}),
    event(second=2, outputs=[dataset("models/shapes", WEIGHTS, namespace="noria")]),
]
WRONG = event(
    type="FAIL",
    second=9,
    inputs=[dataset("/stolen", "1")],
    facets={"errorMessage": {"message": "stolen"}, "noria_metrics": {"metrics": {"loss": 9}}},
)


@pytest.fixture
def store(engine):
    recorded = LineageStore(engine)
    recorded.record(TRAIN, "ann", NOW)
    return recorded


def node_of(engine, run=0):
    with engine.connect() as connection:
        return describe(connection, NodeId("run", RUNS[run]))


@on_both
def test_a_struck_event_counts_no_more_and_is_shown(engine, store):
    before = node_of(engine)
    store.record([WRONG], "ann", NOW)
    assert (node_of(engine).status, node_of(engine).error, node_of(engine).metrics) == ("failed", "stolen", {"loss": 9})
    change = Change(NOW + 9, "operator", "not ours")
    assert strike_out(engine, WRONG.digest, change).digests == [WRONG.digest]
    after = node_of(engine)
    assert after.struck_out == StruckOut(1, change)
    assert (after.status, after.error, after.metrics, after.ended_at) == (
        "complete",
        None,
        {"loss": 0.5},
        before.ended_at,
    )
    assert list(check(engine, with_files=False)) == []
    assert strike_out(engine, WRONG.digest, at(NOW + 10)).digests == []
    assert store.record([WRONG], "ann", NOW + 11) == 0 and node_of(engine) == after  # sent again it stays struck out
    with engine.connect() as connection:
        page = list_events(connection, RUNS[0], None, 2)
        rest = list_events(connection, RUNS[0], page.next, 2)
    assert [(row.digest, row.sender, row.struck_out) for row in page.data] == [
        (WRONG.digest, "ann", change),
        (max(TRAIN).digest, "ann", None),
    ]
    assert [row.digest for row in rest.data] == [min(TRAIN).digest] and rest.next is None


def test_a_struck_run_made_nothing_and_its_id_is_free(engine, store):
    false = event(1, outputs=[dataset("models/shapes", WEIGHTS, namespace="noria")])
    store.record([false], "eve", NOW)

    def origins():
        with engine.connect() as connection:
            graph = trace(connection, find_subjects(connection, WEIGHTS), "up")
        return {node.id: node.sender for node in graph.nodes if node.id.startswith("run:")}

    assert origins() == {f"run:{RUNS[0]}": "ann", f"run:{RUNS[1]}": "eve"}
    strike_out(engine, RUNS[1].upper(), at(NOW))
    assert origins() == {f"run:{RUNS[0]}": "ann"}
    node = node_of(engine, 1)
    assert (node.status, node.sender, node.struck_out.num_events) == ("struck_out", "", 1)
    assert list(check(engine, with_files=False)) == []
    assert store.record([event(1, second=3)], "ann", NOW) == 1
    assert (node_of(engine, 1).status, node_of(engine, 1).sender) == ("complete", "ann")
    with pytest.raises(ForeignRun):
        store.record([event(1, second=4)], "eve", NOW)
    assert list(check(engine, with_files=False)) == []


def record_as_operator(engine, events):
    with write_transaction(engine) as connection:
        return record_events(connection, events, "root", NOW, is_operator=True)


def test_a_run_stays_its_owners_while_one_of_its_events_counts_and_is_never_an_operators(engine, store):
    by_operator = event(second=20, outputs=[dataset("models/words", WORDS, namespace="noria")])
    record_as_operator(engine, [by_operator])
    strike_out(engine, min(TRAIN, key=lambda each: each.at).digest, at(NOW))
    assert node_of(engine).sender == "ann"
    assert store.record([event(second=5)], "ann", NOW) == 1
    for digest in (TRAIN[1].digest, event(second=5).digest):
        strike_out(engine, digest, at(NOW))
    assert (node_of(engine).status, node_of(engine).sender) == ("complete", "")  # by the operator's event
    record_as_operator(engine, [event(second=21)])
    assert node_of(engine).sender == ""
    with pytest.raises(ForeignRun, match="an operator has struck out what 'ann' sent"):
        store.record([event(second=6)], "ann", NOW)
    assert store.record([event(second=6)], "bob", NOW) == 1 and node_of(engine).sender == "bob"
    assert list(check(engine, with_files=False)) == []


@pytest.mark.parametrize("is_struck", [False, True])
def test_events_that_were_read_from_a_server_win_over_who_claimed_their_run(engine, store, is_struck):
    server = "mlflow http://mlflow"
    read = [event(1, "START")._replace(sender=server), event(1, second=3)._replace(sender=server)]
    claim = event(1, second=50, outputs=[dataset("models/shapes", WEIGHTS, namespace="noria")], job="stolen")
    store.record([event(1, "START"), claim], "eve", NOW)  # one of them as the server has it
    record_as_operator(engine, [event(1, second=20, outputs=[dataset("models/words", WORDS, namespace="noria")])])
    if is_struck:
        strike_out(engine, claim.digest, at(NOW))
    with write_transaction(engine) as connection:
        assert record_events(connection, read, "root", NOW) == 1
    node = node_of(engine, 1)
    assert (node.sender, node.job_name, node.ended_at - node.started_at) == (server, "train", 20)
    assert node.struck_out.num_events == 1
    with engine.connect() as connection:
        names = [each.name for each in trace(connection, [NodeId("run", RUNS[1])], "down").nodes[1:]]
    assert names == ["models/words"]
    with pytest.raises(ForeignRun, match="belongs to 'mlflow http://mlflow'"):
        store.record([event(1, second=51)], "eve", NOW)
    assert list(check(engine, with_files=False)) == []


@on_both
def test_a_run_that_is_read_becomes_the_servers_also_if_all_its_events_are_there(engine, store):
    server = "mlflow http://mlflow"
    read = [event(1, "START")._replace(sender=server), event(1, second=3)._replace(sender=server)]
    store.record([event(1, "START"), event(1, second=3), event(1, "FAIL", second=50)], "eve", NOW)
    assert node_of(engine, 1).status == "failed"
    for _ in range(2):
        with write_transaction(engine) as connection:
            assert record_events(connection, read, "root", NOW) == 0
        node = node_of(engine, 1)
        assert (node.sender, node.status, node.struck_out.num_events) == (server, "complete", 1)
    with pytest.raises(ForeignRun, match="belongs to 'mlflow http://mlflow'"):
        store.record([event(1, second=51)], "eve", NOW)
    assert list(check(engine, with_files=False)) == []


@pytest.mark.parametrize("what", [RUNS[5], "sha256:" + "0" * 64, "train", ""])
def test_what_is_not_there_is_not_struck_out(engine, store, what):
    with pytest.raises(RegistryError, match=r"the registry has no|is neither the id of a run nor the digest"):
        strike_out(engine, what, at(NOW))
