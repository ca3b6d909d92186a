"""Facts that events state of a run: the same in any order and with repetitions; what else they contain is kept."""

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import InvalidBody, InvalidField
from noria.registry.lineage.openlineage import DatasetRef, fold, merge, parse_event
from registry.samples import RUNS, SCENES, WORDS, body, dataset, event, refs, step_of

TYPES = ("START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER")


def values(entries):
    return {name: statement.value for name, statement in entries.items()}


datasets = st.lists(
    st.builds(
        dataset,
        st.sampled_from(["/scenes", "/words"]),
        st.sampled_from([None, SCENES, WORDS]),
        st.sampled_from([None, "file:///a", "file:///b"]),
    ),
    max_size=3,
)
facets = st.fixed_dictionaries(
    {},
    optional={
        "noria_metrics": st.builds(
            lambda metrics: {"metrics": metrics}, st.dictionaries(st.sampled_from("xy"), st.integers())
        ),
        "executionParameters": st.builds(
            lambda value: {"parameters": [{"key": "k", "value": value}]}, st.sampled_from([None, 1, "a"])
        ),
        "parent": st.integers(0, 3).map(lambda run: step_of(run)["parent"]),
        "errorMessage": st.sampled_from([{"message": "broke"}, {"message": 7}, "no object"]),
    },
)
events = st.builds(
    event,
    type=st.sampled_from(TYPES),
    second=st.integers(0, 3),
    inputs=datasets,
    outputs=datasets,
    facets=facets,
    job=st.sampled_from(["a", "b"]),
)


@given(st.lists(events, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_state_depends_neither_on_the_order_nor_on_repetitions_nor_on_how_events_are_grouped(said, random):
    state = fold(said)
    shuffled = said + random.choices(said, k=3)
    random.shuffle(shuffled)
    cut = random.randrange(len(shuffled))
    groups = [fold(group) for group in (shuffled[:cut], shuffled[cut:]) if group]
    assert functools.reduce(merge, groups) == state == merge(state, state)


def test_inputs_only_in_the_first_event_stay_inputs():
    state = fold(
        [
            event(type="START", inputs=[dataset("/scenes", SCENES)], facets=step_of(3)),
            event(second=2, outputs=[dataset("/latents", WORDS, "file:///latents")]),
        ]
    )
    assert refs(state.inputs) == {("file", "/scenes", SCENES): None}
    assert refs(state.outputs) == {("file", "/latents", WORDS): "file:///latents"}
    assert (state.status, state.parent.value, state.ended.at - state.started.at) == ("complete", RUNS[3], 2)


def test_a_version_that_only_one_event_states_is_that_of_the_data_set():
    state = fold([event(type="START", inputs=[dataset("/a"), dataset("/b")]), event(inputs=[dataset("/a", "7")])])
    assert [tuple(ref) for ref in refs(state.inputs)] == [("file", "/a", "7"), ("file", "/b", "")]


def test_the_latest_statement_holds_and_an_end_is_an_end():
    def measured(**metrics):
        return {"noria_metrics": {"metrics": metrics}}

    state = fold(
        [
            event(type="RUNNING", second=9, facets=measured(loss=0.5)),
            event(type="FAIL", second=5, facets={"errorMessage": {"message": "out of memory"}}),
            event(type="RUNNING", second=1, facets=measured(loss=0.9, steps=3)),
        ]
    )
    assert (state.status, state.error.value) == ("failed", "out of memory")
    assert values(state.metrics) == {"loss": 0.5, "steps": 3}


@pytest.mark.parametrize(
    ("types", "status"),
    [
        (["START"], "running"),
        (["RUNNING"], "running"),
        (["OTHER"], "unknown"),
        (["OTHER", "COMPLETE"], "complete"),
        (["START", "ABORT"], "aborted"),
    ],
)
def test_the_status_is_that_of_the_events_that_have_come(types, status):
    assert fold([event(type=each, second=second) for second, each in enumerate(types)]).status == status


@pytest.mark.parametrize("time", ["2026-11-22T09:00:00", "2026-11-22T09:00:00Z", "2026-11-22T10:00:00+01:00"])
def test_a_time_without_a_zone_is_utc(time):
    assert parse_event(json.dumps(body() | {"eventTime": time}).encode()).at == 1795338000.0


def test_a_version_is_a_digest_if_it_looks_like_one():
    digest = f"sha256:{64 * 'a'}"
    assert [DatasetRef("file", "/a", each).digest for each in ("", digest[:-1], digest)] == [None, None, digest]


def test_metrics_are_numbers_that_a_float_can_hold():
    metrics = {"loss": 0.5, "steps": 2**64, "large": 10**400, "best": True, "name": "x"}
    assert values(fold([event(facets={"noria_metrics": {"metrics": metrics}})]).metrics) == {
        "loss": 0.5,
        "steps": 2**64,
    }


def test_a_run_is_no_step_of_itself():
    assert event(facets=step_of(0)).statement.parent is None


def test_an_event_is_kept_whole_and_white_space_makes_no_other_event():
    whole = body(facets={"spark_unknown": {"plan": [1, {"deep": None}]}}, extra="kept")
    parsed = parse_event(json.dumps(whole, indent=2).encode())
    assert json.loads(parsed.body) == whole
    assert parsed.digest == parse_event(json.dumps(dict(reversed(whole.items()))).encode()).digest


def test_an_event_without_a_run_is_kept_and_states_nothing():
    parsed = parse_event(b'{"eventTime": "2026-11-22T09:00:00Z", "dataset": {"namespace": "file", "name": "/a"}}')
    assert (parsed.run_id, parsed.statement, parsed.at) == (None, None, 1795338000.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": {"runId": "7"}}, r"\[2\]\.run\.runId: Invalid UUID"),
        ({"eventTime": "yesterday"}, r"\[2\]\.eventTime: Invalid RFC3339"),
        ({"eventType": "DONE"}, r"\[2\]\.eventType: Invalid enum value 'DONE'"),
        ({"job": None}, r"\[2\]\.job is missing"),
        ({"job": {"namespace": "x" * 501, "name": "y"}}, r"\[2\]\.job\.namespace: Expected `str` of length <= 500"),
        ({"inputs": [dataset("/a"), dataset("a\0b")]}, r"\[2\]\.inputs\[1\]\.name: Expected `str` matching"),
        (
            {"outputs": [dataset("/a", "é" * 2001)]},
            r"\[2\]\.outputs\[0\]\.facets\.version\.datasetVersion .* 2000 char",
        ),
        ({"run": None, "job": None}, r"\[2\]\.run is missing, and so are job and dataset"),
    ],
)
def test_what_lineage_needs_is_checked(change, words):
    with pytest.raises(InvalidField, match=words):
        parse_event(json.dumps(body() | change).encode(), "[2].")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"a": NaN}', b'{"eventTime": "2026-11-22T09:00:00Z", "a": "\xff"}', b'{"a": ' + b"[" * 5000]
)
def test_what_is_no_json_is_rejected(raw):
    with pytest.raises(InvalidBody, match="is not JSON"):
        parse_event(raw)
