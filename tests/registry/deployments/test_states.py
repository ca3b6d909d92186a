"""The rules of deployments: which state follows which, what a rollback brings back, and the routes that follow."""

import itertools

import msgspec
import pytest

from noria.canary.judge import JudgeSettings, JudgeState
from noria.canary.ramp import RampPlan, RampState
from noria.canary.shadow import ShadowCounts, ShadowPlan, ShadowState
from noria.errors import RegistryError
from noria.protocol.routes import Route, Target
from noria.registry.deployments.states import (
    NEXT_STATES,
    UNFINISHED,
    Deployment,
    DeploymentEvent,
    become,
    begin,
    changes_nothing,
    check_swap,
    endpoints_of,
    format_share,
    is_progress,
    predecessor,
    promote,
    roll_back,
    routes_of,
    status_of,
    step,
    step_shadow,
    unfinished_error,
)
from noria.registry.versions import Version
from registry.samples import at

PLAN = RampPlan((5.0, 25.0, 100.0), 60.0)
FIRST = RampState("ramping", 0, 0.0, 10.0)


def version(number=1, model="shapes"):
    return Version(
        id=number,
        model=model,
        number=number,
        digest=f"sha256:{number}",
        kind="diffusion",
        fingerprint=f"print-{number}",
        source="file:///models",
        size_bytes=7,
        num_files=1,
        aliases=(),
        urls=("file:///models",),
        added=at(1),
        removed=None,
    )


def deployment(number=1, state="pending", endpoint="t2i", plan=None, content=None, **fields):
    """Return a deployment with version `number`, or `content`, whose share is that of its state."""
    ramp = FIRST if plan and state != "pending" else None
    traffic = {"serving": 1.0, "canary": 0.05}.get(state, 0.0)
    fields = {"ramp": ramp, "traffic": traffic} | fields
    return Deployment(number, endpoint, version(content or number), state, plan, JudgeSettings(), at(number), **fields)


def test_only_the_states_of_the_table_follow():
    for old, new in itertools.product(NEXT_STATES, repeat=2):
        before = deployment(state=old, plan=PLAN, ramp=FIRST)
        if new in NEXT_STATES[old]:
            after = become(before, new)
            assert (after.state, after.traffic) == (new, {"serving": 1.0, "canary": 0.05}.get(new, 0.0))
            assert after.is_unfinished == (new in UNFINISHED)
        else:
            with pytest.raises(RegistryError, match=f"deployment 1 of t2i is {old.replace('_', ' ')}, so it cannot"):
                become(before, new)


@pytest.mark.parametrize(
    ("plan", "state", "traffic", "ramp"),
    [
        (None, "serving", 1.0, None),
        (PLAN, "canary", 0.05, RampState("ramping", 0, 0.0, 7.0)),
        (RampPlan((10.0,)), "canary", 0.1, RampState("holding", 0, 0.0, 7.0)),
        (RampPlan((100.0,)), "serving", 1.0, RampState("promoted", 0, 0.0, 7.0)),
    ],
)
def test_what_is_loaded_gets_its_first_share(plan, state, traffic, ramp):
    after = begin(deployment(plan=plan), 7.0)
    assert (after.state, after.traffic, after.ramp) == (state, traffic, ramp)
    with pytest.raises(RegistryError, match="one that is pending"):
        begin(after, 8.0)


@pytest.mark.parametrize(
    ("ramp", "state", "traffic"),
    [
        (RampState("ramping", 1, 0.0, 70.0), "canary", 0.25),
        (RampState("waiting", 1, 60.0, 130.0), "canary", 0.25),
        (RampState("paused", 0, 30.0, 40.0), "canary", 0.05),
        (RampState("promoted", 2, 0.0, 140.0), "serving", 1.0),
        (RampState("rolled_back", 0, 9.0, 19.0), "rolled_back", 0.0),
    ],
)
def test_a_canary_follows_its_ramp(ramp, state, traffic):
    after = step(deployment(state="canary", plan=PLAN), ramp, JudgeState(3))
    assert (after.state, after.traffic, after.ramp, after.evidence) == (state, traffic, ramp, JudgeState(3))
    with pytest.raises(RegistryError, match="one that is canary"):
        step(deployment(state="serving", plan=PLAN), ramp, None)


@pytest.mark.parametrize(
    ("elapsed_s", "windows", "new_elapsed_s", "new_windows", "expected"),
    [
        (0.0, 0, 29.0, 0, False),
        (0.0, 0, 30.0, 0, True),
        (0.0, 0, 1.0, 1, True),
        (40.0, 4, 79.0, 7, False),
        (40.0, 4, 80.0, 4, True),
        (40.0, 4, 41.0, 8, True),
    ],
)
def test_time_and_evidence_are_written_when_they_doubled(elapsed_s, windows, new_elapsed_s, new_windows, expected):
    ramp = RampState("ramping", 0, elapsed_s, 0.0)
    before = deployment(state="canary", plan=PLAN, ramp=ramp, evidence=JudgeState(windows) if windows else None)
    after = step(before, RampState("ramping", 0, new_elapsed_s, 1.0), JudgeState(new_windows) if new_windows else None)
    assert is_progress(before, after) is expected


@pytest.mark.parametrize(("before", "after", "expected"), [(0, 1, True), (3, 5, False), (3, 6, True)])
def test_few_responses_are_written_before_a_window_of_them_is_judged(before, after, expected):
    ramp = RampState("holding", 0, 40.0, 0.0)
    canary = deployment(state="canary", plan=PLAN, ramp=ramp, evidence=JudgeState(waiting_canary=before))
    assert is_progress(canary, step(canary, ramp, JudgeState(waiting_canary=after))) is expected


@pytest.mark.parametrize(
    ("counts", "plan", "state"),
    [
        (ShadowCounts(num_answers=99), PLAN, "shadow"),
        (ShadowCounts(num_answers=100), PLAN, "canary"),
        (ShadowCounts(num_answers=100), None, "ended"),
        (ShadowCounts(num_answers=100, num_errors=9), PLAN, "ended"),
    ],
    ids=["goes on", "is over", "has no plan", "has errors"],
)
def test_a_shadow_that_is_over_begins_its_plan_unless_it_has_none_or_too_many_errors(counts, plan, state):
    known = ShadowState(counts, updated_at=5.0)
    shadow = deployment(state="shadow", plan=plan, ramp=None, shadow_plan=ShadowPlan(20.0, max_answers=100))
    after = step_shadow(shadow, known)
    assert (after.state, after.shadow) == (state, known)
    for other in (deployment(state="canary", plan=PLAN), deployment(state="shadow")):
        with pytest.raises(RegistryError, match="one that is shadow"):
            step_shadow(other, known)


def test_only_what_is_compared_with_nothing_is_swapped():
    for plan, shadow in ((PLAN, None), (None, ShadowPlan(20.0))):
        check_swap(plan, shadow, swap=False)
        with pytest.raises(RegistryError, match="swap unloads the version that serves"):
            check_swap(plan, shadow, swap=True)
    check_swap(None, None, swap=True)


def test_only_a_canary_is_promoted():
    promoted = promote(deployment(state="canary", plan=PLAN), 9.0)
    assert (promoted.state, promoted.traffic, promoted.ramp.status) == ("serving", 1.0, "promoted")
    with pytest.raises(RegistryError, match=r"not loaded.* noria rollback t2i"):
        promote(deployment(plan=PLAN), 9.0)
    with pytest.raises(RegistryError, match="one that is canary or shadow can"):
        promote(promoted, 9.0)


def test_what_gets_or_will_get_requests_is_rolled_back():
    for state in ("pending", "canary", "serving"):
        after = roll_back(deployment(state=state, plan=PLAN), 9.0)
        assert (after.state, after.traffic) == ("rolled_back", 0.0)
    with pytest.raises(RegistryError, match="replaced"):
        roll_back(deployment(state="replaced"), 9.0)


def test_a_rollback_brings_back_what_served_before():
    first, failed, second = deployment(1, "replaced"), deployment(2, "failed"), deployment(3, "serving")
    assert predecessor(second, [second, failed, first]) == first
    assert predecessor(first, [first]) is None  # the configuration's model
    failed_rollback = deployment(4, "failed", rolls_back=3)  # it can be tried again
    assert predecessor(second, [second, first, failed_rollback]) == first


def test_a_rollback_skips_what_has_the_same_content():
    first, second = deployment(1, "replaced"), deployment(2, "replaced", content=3)
    third = deployment(3, "serving", content=3)
    assert predecessor(third, [first, second, third]) == first
    assert predecessor(third, [second, third]) is None


@pytest.mark.parametrize(
    ("serving", "others", "words"),
    [
        (deployment(2, "serving"), [deployment(1, "replaced"), deployment(3, "rolled_back")], "3 was rolled back"),
        (deployment(2, "serving"), [deployment(1, "replaced"), deployment(3, "failed")], "3 failed"),
        (deployment(2, "serving"), [deployment(1, "replaced"), deployment(3, "ended")], "3 ended"),
        (deployment(1, "serving"), [deployment(2, "failed")], "2 failed"),
        (deployment(3, "serving", rolls_back=2), [deployment(2, "rolled_back")], "2 was rolled back"),
        (deployment(3, "serving", rolls_back=2), [deployment(2, "rolled_back"), deployment(4, "failed")], "4 failed"),
    ],
)
def test_a_rollback_of_what_nobody_deployed_last_is_rejected(serving, others, words):
    with pytest.raises(RegistryError) as caught:
        predecessor(serving, [serving, *others])
    message = caught.value.message
    assert f"deployment {words}" in message and f"; {serving.version.name} serves t2i. To serve another" in message


@pytest.mark.parametrize(
    ("content", "plan", "shadow", "expected"),
    [
        (1, None, None, True),
        (1, RampPlan((100.0,)), None, True),
        (2, None, None, False),
        (1, PLAN, None, False),
        (1, None, ShadowPlan(20.0), False),
    ],
)
def test_deploying_at_once_what_serves_changes_nothing(content, plan, shadow, expected):
    assert changes_nothing(deployment(1, "serving"), version(content), plan, shadow) is expected


def target(number):
    return Target(number, f"shapes@{number}", f"sha256:{number}", f"print-{number}", ("file:///models",))


@pytest.mark.parametrize(
    ("deployments", "routes"),
    [
        ([], ()),
        ([deployment(1), deployment(2, "failed"), deployment(3, "replaced"), deployment(4, "rolled_back")], ()),
        ([deployment(1, "serving")], (Route("t2i", target(1)),)),
        ([deployment(1, "serving"), deployment(2)], (Route("t2i", target(1)),)),
        ([deployment(2, "canary", plan=PLAN)], (Route("t2i", None, target(2), 0.05),)),
        (
            [deployment(2, "canary", plan=PLAN), deployment(1, "serving"), deployment(3, "serving", endpoint="a")],
            (Route("a", target(3)), Route("t2i", target(1), target(2), 0.05)),
        ),
    ],
)
def test_routes_follow_from_states(deployments, routes):
    assert routes_of(deployments) == routes


def test_what_an_endpoint_has():
    retired, serving, canary = deployment(1, "replaced"), deployment(2, "serving"), deployment(3, "canary", plan=PLAN)
    other = deployment(4, "failed", endpoint="a")
    found = endpoints_of([retired, serving, canary, other])
    assert [(one.name, one.serving, one.unfinished, one.latest) for one in found] == [
        ("a", None, None, other),
        ("t2i", serving, canary, canary),
    ]


def test_only_a_canary_has_a_verdict():
    deployments = [
        deployment(1, "serving"),
        deployment(2, "canary", plan=PLAN, events=(DeploymentEvent(1, "canary", 0.05, None, at(1)),)),
        deployment(3, "serving", endpoint="a"),
        deployment(4, "pending", endpoint="b", plan=PLAN),
    ]
    verdicts = {each.endpoint: each.verdict for each in status_of(deployments, {"a": "shapes"})}
    assert (verdicts["a"], verdicts["b"], verdicts["t2i"].outcome) == (None, None, "inconclusive")


def test_a_second_deployment_is_answered_with_what_can_be_done():
    def words(first):
        return unfinished_error(first).message

    assert words(deployment(state="canary", plan=PLAN)) == (
        "t2i has an unfinished deployment: deployment 1 (shapes@1, canary with 5 %), by ann. Wait until it is "
        "finished, promote it: noria promote t2i, or roll it back: noria rollback t2i."
    )
    assert words(deployment()).endswith("Wait until it is finished, or roll it back: noria rollback t2i.")
    assert words(deployment(3, rolls_back=2)).endswith("It rolls back deployment 2. Wait until it is finished.")


def test_when_and_why_a_deployment_got_into_its_state():
    events = tuple(
        DeploymentEvent(number, kind, 0.0, None, at(number, kind))
        for number, kind in enumerate(("pending", "canary", "step", "step"), 1)
    )
    one = deployment(state="canary", plan=PLAN, events=events)
    assert (one.last_change, one.has_served) == (at(2, "canary"), False)
    served = msgspec.structs.replace(one, events=(*events, DeploymentEvent(5, "serving", 1.0, 1, at(5))))
    assert (served.last_change, served.has_served) == (at(5), True)


@pytest.mark.parametrize(("share", "words"), [(0.05, "5 %"), (0.001, "0.1 %"), (1.0, "100 %"), (0.12345678, "12.35 %")])
def test_shares_are_per_cents(share, words):
    assert format_share(share) == words
