"""The history of an endpoint, page by page: its deployments, their latest events, and what the judge said at each."""

import pytest

from noria.errors import RegistryError
from noria.registry.deployments import history
from noria.registry.deployments.history import read_history
from sample_registry import HOSTILE


@pytest.fixture
def read(month_old):
    """Returns a page of the history of an endpoint that has the deployments 6, 4, 3 and 1."""
    with month_old.connect() as connection:
        yield lambda before=None, limit=9, endpoint="t2i": read_history(connection, endpoint, before, limit)


@pytest.mark.parametrize(
    ("before", "limit", "numbers", "following"),
    [(None, 2, [6, 4], 4), (4, 2, [3, 1], None), (4, 1, [3], 3), (None, 9, [6, 4, 3, 1], None), (1, 9, [], None)],
)
def test_the_latest_deployments_come_first_page_by_page(read, before, limit, numbers, following):
    page = read(before, limit)
    assert ([each.id for each in page.data], page.next) == (numbers, following)


def test_the_judges_opinion_is_of_the_evidence_of_each_event(read):
    canary, bad, *_ = read().data
    assert (canary.version, canary.state, bad.state) == ("shapes@5", "canary", "rolled_back")
    assert (bad.created.why, bad.events[-1].type) == (HOSTILE, "rolled_back")
    before, last = [event.evidence for event in bad.events[-2:]]
    assert (last.verdict.outcome, last.num_canary >= 80) == ("fail", True)
    assert last.verdict.e >= 20 > before.verdict.e
    seen = [event.evidence.num_canary for event in canary.events if event.evidence]
    assert len(seen) > 5 and seen == sorted(seen)
    with_ramp = [event for event in canary.events if event.status is not None]
    assert {event.status for event in with_ramp} == {"ramping"} and with_ramp[0].step == 0
    assert [event.step for event in with_ramp] == sorted(event.step for event in with_ramp)


def test_of_a_long_deployment_the_latest_events_are_shown_and_all_are_counted(read, monkeypatch):
    (whole, *_) = read().data
    monkeypatch.setattr(history, "MAX_EVENTS", 3)
    (cut, *_) = read().data
    assert cut.events == whole.events[-3:]
    assert cut.num_events == whole.num_events == len(whole.events) > 3


def test_the_history_of_an_endpoint_without_deployments_says_so(read):
    with pytest.raises(RegistryError, match="nothing was ever deployed"):
        read(endpoint="nothing")
