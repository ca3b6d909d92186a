"""Deployments in a database: what people want, what servers did, and both at once; SQLite and PostgreSQL."""

import subprocess
import sys

import pytest
import sqlalchemy as sa

from databases import on_both
from noria.canary.judge import JudgeSettings, JudgeState
from noria.canary.ramp import RampPlan, RampState, advance
from noria.canary.shadow import ShadowCounts, ShadowPlan, ShadowState
from noria.errors import RegistryError
from noria.protocol.routes import Routes
from noria.registry.changes import Change
from noria.registry.check import check
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_store import ModelStore
from noria.registry.schema import deployment_events, deployment_heads, deployments, endpoints, routes
from noria.storage.database import write_transaction
from registry.samples import at, folder
from waiting import TIMEOUT_S

PLAN = RampPlan((5.0, 25.0, 100.0), 60.0)
HOLD = RampPlan((10.0,))
SETTINGS = JudgeSettings()
JUDGE = Change(50.0, "judge", "no worse")


@pytest.fixture
def store(engine):
    """Deployments in a registry with shapes@1 to shapes@4."""
    models = ModelStore(engine)
    for content in "abcd":
        models.add("shapes", folder(content, f"file:///models/{content}"), at(1))
    return DeploymentStore(engine)


def deploy(store, number, plan=None, now=2, endpoint="t2i", judge_settings=SETTINGS, **options):
    return store.deploy(endpoint, f"shapes@{number}", plan, judge_settings, at(now), **options)[0]


def mount(store, deployment, now=3):
    """Load a pending one, as a registrar does."""
    assert store.try_lease(deployment.id, "server", float(now), 10.0)
    return store.mounted(deployment.id, "server", Change(float(now), "server"))


def serve(store, number, **options):
    return mount(store, deploy(store, number, **options))


def states(store, endpoint="t2i"):
    return [f"{one.version.number} {one.state}" for one in store.all(endpoint)]


def table(store):
    """The latest routes: by endpoint the versions of control and canary, and the share."""
    return {
        route.endpoint: (
            route.control and route.control.version,
            route.canary and route.canary.version,
            route.canary_share,
        )
        for route in store.routes().routes
    }


def num_rows(engine):
    tables = (endpoints, deployments, deployment_events, deployment_heads, routes)
    with engine.connect() as connection:
        return [connection.scalar(sa.select(sa.func.count()).select_from(one)) for one in tables]


@on_both
def test_a_deployment_without_a_plan_serves_once_it_is_loaded(engine, store):
    first, was_there = store.deploy("t2i", "shapes@1", None, SETTINGS, at(2, "first"))
    assert (first.state, first.version.name, first.created, was_there) == ("pending", "shapes@1", at(2, "first"), False)
    assert (store.routes(), store.unfinished()) == (Routes(), [first])
    served = mount(store, first)
    assert (served.state, served.traffic, [event.type for event in served.events]) == (
        "serving",
        1.0,
        ["pending", "serving"],
    )
    assert [event.generation for event in served.events] == [None, 1]
    assert (table(store), store.unfinished()) == ({"t2i": ("shapes@1", None, 0.0)}, [])
    (route,) = store.routes().routes
    assert (route.control.deployment, route.control.urls) == (first.id, ("file:///models/a",))
    assert (route.control.digest, route.control.fingerprint) == (first.version.digest, "print-a")
    second = serve(store, 2)
    assert states(store) == ["1 replaced", "2 serving"]
    assert store.find(first.id).events[-1].generation == second.events[-1].generation == 2
    found = store.get("t2i")
    assert (found.serving, found.unfinished, found.latest) == (second, None, second)
    assert list(check(engine, with_files=False)) == []


def test_a_canary_gets_its_shares_and_serves(engine, store):
    serve(store, 1)
    canary = mount(store, deploy(store, 2, PLAN), 10)
    assert (canary.state, canary.traffic, canary.ramp) == ("canary", 0.05, RampState("ramping", 0, 0.0, 10.0))
    assert table(store) == {"t2i": ("shapes@1", "shapes@2", 0.05)}
    stepped = store.step(canary.id, "server", RampState("ramping", 1, 0.0, 70.0), JudgeState(9, 90, 1), JUDGE)
    assert (stepped.traffic, stepped.evidence, stepped.events[-1].type) == (0.25, JudgeState(9, 90, 1), "step")
    assert table(store) == {"t2i": ("shapes@1", "shapes@2", 0.25)}
    promoted = store.step(canary.id, "server", RampState("promoted", 2, 0.0, 130.0), JudgeState(20), JUDGE)
    assert (promoted.state, promoted.last_change, promoted.evidence) == ("serving", JUDGE, JudgeState(20))
    assert (states(store), table(store)) == (["1 replaced", "2 serving"], {"t2i": ("shapes@2", None, 0.0)})
    assert store.routes().generation == 4
    assert list(check(engine, with_files=False)) == []


def test_polls_write_nothing_until_time_or_evidence_doubled(engine, store):
    canary = mount(store, deploy(store, 2, PLAN), 0)
    ramp, evidence = canary.ramp, JudgeState()
    for second in range(1, 60):
        evidence = JudgeState(second)
        ramp = advance(PLAN, ramp, "inconclusive", float(second))
        stored = store.step(canary.id, "server", ramp, evidence, Change(float(second), "judge"))
    numbers = [event.evidence.num_windows for event in stored.events if event.type == "step"]
    assert numbers == [1, 2, 4, 8, 16, 32]
    assert store.routes().generation == 1  # the share stayed
    assert store.find(canary.id) == stored
    assert list(check(engine, with_files=False)) == []


def test_a_shadow_gets_copies_and_then_becomes_the_canary_of_its_plan(engine, store):
    serve(store, 1)
    shadow = mount(store, deploy(store, 2, PLAN, shadow=ShadowPlan(20.0)), 10)
    assert (shadow.state, shadow.traffic, table(store)) == ("shadow", 0.0, {"t2i": ("shapes@1", None, 0.0)})
    route = store.routes().find("t2i")
    assert (route.shadow.version, route.shadow_share) == ("shapes@2", 0.2)
    known = ShadowState(ShadowCounts(num_answers=3), 5.0, 15.0)
    stored = store.step_shadow(shadow.id, "server", known, Change(15.0, "server"))
    assert (stored.state, stored.shadow, stored.last_change.at) == ("shadow", known, 10.0)
    with pytest.raises(RegistryError, match="promote it: noria promote t2i"):
        deploy(store, 3)
    promoted = store.promote("t2i", at(20))
    assert (promoted.state, promoted.traffic, store.routes().find("t2i").shadow) == ("canary", 0.05, None)
    assert promoted.shadow == known  # as it was
    assert list(check(engine, with_files=False)) == []


def test_a_shadow_that_is_over_begins_its_plan_unless_it_has_too_many_errors(engine, store):
    serve(store, 1)
    for plan, num_errors, expected in [
        (PLAN, 1, ("2 ended", ("shapes@1", None, 0.0))),
        (PLAN, 0, ("2 canary", ("shapes@1", "shapes@2", 0.05))),
        (RampPlan((100.0,)), 0, ("3 serving", ("shapes@3", None, 0.0))),
    ]:
        shadow = mount(store, deploy(store, expected[0][0], plan, shadow=ShadowPlan(20.0, max_answers=5)), 10)
        known = ShadowState(ShadowCounts(num_answers=5, num_errors=num_errors), 9.0, 19.0)
        after = store.step_shadow(shadow.id, "server", known, Change(19.0, "server", "it is over"))
        assert (states(store)[-1], table(store)["t2i"]) == expected
        assert (after.last_change.why, after.shadow) == ("it is over", known)
        if after.state == "canary":
            assert after.ramp == RampState("ramping", 0, 0.0, 19.0)
            store.roll_back("t2i", at(20))
    assert list(check(engine, with_files=False)) == []


def test_a_shadow_that_is_over_ends_and_what_serves_stays(engine, store):
    serve(store, 1)
    serve(store, 2)
    shadow = mount(store, deploy(store, 3, shadow=ShadowPlan(20.0, max_answers=5)))
    ended = store.step_shadow(shadow.id, "server", ShadowState(ShadowCounts(num_answers=5)), Change(9.0, "server"))
    assert (ended.state, table(store)) == ("ended", {"t2i": ("shapes@2", None, 0.0)})
    with pytest.raises(RegistryError, match="no server has it, or the deployment is finished"):
        store.step_shadow(shadow.id, "server", ShadowState(), at(10))
    with pytest.raises(RegistryError, match=rf"deployment {shadow.id} ended; shapes@2 serves t2i"):
        store.roll_back("t2i", at(11))
    ModelStore(engine).remove("shapes@3", at(12))
    assert list(check(engine, with_files=False)) == []


def test_a_swap_leaves_nothing_to_compare_with(store):
    with pytest.raises(RegistryError, match="swap unloads the version that serves"):
        deploy(store, 1, swap=True, plan=PLAN)
    serve(store, 1, swap=True)
    serve(store, 2, swap=True)
    assert store.roll_back("t2i", at(9)).swap


def test_what_cannot_be_loaded_fails_and_changes_no_route(store):
    serve(store, 1)
    before, pending = store.routes(), deploy(store, 2)
    assert store.try_lease(pending.id, "server", 3.0, 10.0)
    failed = store.fail(pending.id, "server", Change(4.0, "server", "no space left"))
    assert (failed.state, failed.last_change.why, store.routes()) == ("failed", "no space left", before)
    with pytest.raises(RegistryError, match=rf"deployment {pending.id} failed; shapes@1 serves t2i"):
        store.roll_back("t2i", at(5))
    assert table(store) == {"t2i": ("shapes@1", None, 0.0)}
    assert deploy(store, 2).id != pending.id  # it can be tried again


def test_the_same_command_finds_its_deployment_until_it_is_finished(store):
    first = deploy(store, 1, PLAN)
    assert store.deploy("t2i", "shapes@1", PLAN, SETTINGS, at(9, "again")) == (first, True)
    mount(store, first)
    assert store.deploy("t2i", "shapes@1", PLAN, SETTINGS, at(9)) == (store.find(first.id), True)
    store.promote("t2i", at(10))
    again, was_there = store.deploy("t2i", "shapes@1", PLAN, SETTINGS, at(11))
    assert (again.id != first.id, was_there) == (True, False)


def test_deploying_what_serves_changes_nothing(engine, store):
    ModelStore(engine).add("copy", folder("b", "file:///copies/b"), at(1))  # as shapes@2
    serve(store, 1)
    served = serve(store, 2)
    before = num_rows(engine)
    for spec in ("shapes@2", "copy"):
        for options in ({}, {"swap": True}):
            assert store.deploy("t2i", spec, None, SETTINGS, at(5), **options) == (served, True)
    assert (num_rows(engine), states(store)) == (before, ["1 replaced", "2 serving"])
    follow(store, "copy")
    assert (store.followed(), store.deploy_followed(at(6))) == ({"t2i": "copy"}, [])
    rollback = mount(store, store.roll_back("t2i", at(7)))
    assert (rollback.version.name, rollback.state) == ("shapes@1", "serving")


def test_a_second_deployment_is_rejected_with_the_name_of_the_first(engine, store):
    canary = mount(store, deploy(store, 1, PLAN))
    before = num_rows(engine)
    for number, plan, judge_settings in [
        (2, PLAN, SETTINGS),
        (1, None, SETTINGS),
        (1, HOLD, SETTINGS),
        (1, PLAN, JudgeSettings(min_responses=9)),
        (1, PLAN, SETTINGS),
    ]:
        options = {"shadow": ShadowPlan(1.0)} if (number, plan, judge_settings) == (1, PLAN, SETTINGS) else {}
        with pytest.raises(
            RegistryError, match=rf"deployment {canary.id} \(shapes@1, canary with 5 %\), by ann\. Wait"
        ):
            deploy(store, number, plan, judge_settings=judge_settings, **options)
    assert num_rows(engine) == before
    assert deploy(store, 2, endpoint="other").state == "pending"  # other endpoints are free


@pytest.mark.parametrize(
    ("endpoint", "spec", "words"),
    [
        ("a b", "shapes", "the endpoint 'a b' is not allowed"),
        ("", "shapes", "the endpoint '' is not allowed"),
        ("x" * 129, "shapes", "is not allowed"),
        ("t2i", "shape", "no model 'shape'. Did you mean 'shapes'?"),
        ("t2i", "shapes@9", "has no version 9. Its versions are 1, 2, 3"),
        ("t2i", "shapes@prod", "no alias 'prod'"),
        ("t2i", "shapes@4", "shapes@4 was removed by ann. Add it again"),
        ("t2i", "", "there is no model ''"),
    ],
)
def test_what_is_wrong_writes_nothing(engine, store, endpoint, spec, words):
    ModelStore(engine).remove("shapes@4", at(2))
    with pytest.raises(RegistryError) as caught:
        store.deploy(endpoint, spec, None, SETTINGS, at(2))
    assert words in caught.value.message
    assert not any(num_rows(engine))


def test_an_alias_is_read_once(engine, store):
    models = ModelStore(engine)
    models.set_alias("shapes@1", "prod", at(2))
    first = store.deploy("t2i", "shapes@prod", None, SETTINGS, at(2))[0]
    models.set_alias("shapes@2", "prod", at(3))
    assert mount(store, first).version.name == "shapes@1"


@on_both
def test_a_canary_is_promoted_by_hand(store):
    serve(store, 1)
    canary = deploy(store, 2, HOLD)
    with pytest.raises(RegistryError, match="not loaded"):
        store.promote("t2i", at(5))
    mount(store, canary)
    store.step(canary.id, "server", RampState("holding", 0, 9.0, 12.0), JudgeState(3), JUDGE)
    promoted = store.promote("t2i", at(20, "looks good"))
    assert (promoted.state, promoted.last_change, promoted.ramp.status) == ("serving", at(20, "looks good"), "promoted")
    assert promoted.evidence == JudgeState(3)  # as the judge left it
    assert table(store) == {"t2i": ("shapes@2", None, 0.0)}
    with pytest.raises(RegistryError, match=r"deployment 2 \(shapes@2, serving\)"):
        store.promote("t2i", at(21))
    with pytest.raises(RegistryError, match=r"'t2'.*'t2i'"):
        store.promote("t2", at(21))


def test_a_canary_beside_the_configured_model_may_have_its_fingerprint(store):
    canary = mount(store, deploy(store, 1, HOLD))
    assert table(store) == {"t2i": (None, "shapes@1", 0.1)}
    store.promote("t2i", at(5))
    same = mount(store, deploy(store, 1, HOLD))
    assert table(store) == {"t2i": ("shapes@1", "shapes@1", 0.1)}
    store.promote("t2i", at(6))
    assert [one.state for one in (store.find(canary.id), store.find(same.id))] == ["replaced", "serving"]


def test_an_unfinished_deployment_is_cancelled(store):
    serve(store, 1)
    for plan, is_mounted in ((None, False), (HOLD, False), (HOLD, True)):
        new = deploy(store, 2, plan)
        if is_mounted:
            mount(store, new)
        ended = store.roll_back("t2i", at(6, "not good"))
        assert (ended.id, ended.state, ended.last_change) == (new.id, "rolled_back", at(6, "not good"))
        assert table(store) == {"t2i": ("shapes@1", None, 0.0)}
        with pytest.raises(RegistryError, match=rf"{new.id} was rolled back already; shapes@1"):
            store.roll_back("t2i", at(7))
        with pytest.raises(RegistryError):  # its registrar learns it
            store.mounted(new.id, "server", at(8))
        assert not store.try_lease(new.id, "server", 100.0, 10.0)


def test_a_rollback_deploys_the_version_that_served_before(engine, store):
    serve(store, 1)
    bad = serve(store, 2)
    rollback = store.roll_back("t2i", at(5, "bad"))
    assert (rollback.state, rollback.version.name, rollback.plan, rollback.rolls_back) == (
        "pending",
        "shapes@1",
        None,
        bad.id,
    )
    assert rollback.created.why == f"rolls back deployment {bad.id} (shapes@2): bad"
    assert table(store) == {"t2i": ("shapes@2", None, 0.0)}  # until it is loaded
    assert store.roll_back("t2i", at(6)) == rollback  # it is the rollback in progress
    with pytest.raises(RegistryError, match=f"{bad.id}. Wait"):
        deploy(store, 3)
    mount(store, rollback)
    assert (states(store), table(store)) == (
        ["1 replaced", "2 rolled_back", "1 serving"],
        {"t2i": ("shapes@1", None, 0.0)},
    )
    with pytest.raises(RegistryError, match=rf"{bad.id} was rolled back already; shapes@1"):
        store.roll_back("t2i", at(7))
    serve(store, 3)
    assert mount(store, store.roll_back("t2i", at(8))).version.name == "shapes@1"
    assert list(check(engine, with_files=False)) == []


def test_before_the_first_deployment_the_configured_model_served(engine, store):
    serve(store, 1)
    ended = store.roll_back("t2i", at(5))
    assert (ended.state, store.routes()) == ("rolled_back", Routes(2, ()))
    with pytest.raises(RegistryError, match="nothing to roll back"):
        store.roll_back("t2i", at(6))
    serve(store, 2)
    assert store.roll_back("t2i", at(7)).state == "rolled_back"
    serve(store, 1)
    assert (table(store), list(check(engine, with_files=False))) == ({"t2i": ("shapes@1", None, 0.0)}, [])


def test_a_version_that_was_removed_is_not_rolled_back_to(engine, store):
    serve(store, 1)
    serve(store, 2)
    ModelStore(engine).remove("shapes@1", at(4))
    with pytest.raises(RegistryError, match=r"shapes@2 goes on serving t2i: shapes@1 .* ann\. Add"):
        store.roll_back("t2i", at(5))
    ModelStore(engine).add("shapes", folder("a"), at(6))
    store.roll_back("t2i", at(7))
    with pytest.raises(RegistryError, match="deployed to the endpoint t2i"):
        ModelStore(engine).remove("shapes@1", at(8))


@on_both
def test_a_lease_has_one_owner_until_it_runs_out(engine, store):
    pending = deploy(store, 1, PLAN)
    with pytest.raises(RegistryError, match="no server has it"):
        store.mounted(pending.id, "server", at(3))
    assert store.try_lease(pending.id, "server", 10.0, 5.0)
    assert not store.try_lease(pending.id, "other", 15.0, 5.0)
    assert store.try_lease(pending.id, "server", 14.0, 5.0)  # renewed
    assert not store.try_lease(pending.id, "other", 19.0, 5.0)
    assert store.try_lease(pending.id, "other", 19.5, 5.0)
    for call in (
        lambda: store.mounted(pending.id, "server", at(20)),
        lambda: store.fail(pending.id, "server", at(20)),
        lambda: store.step(pending.id, "server", RampState("ramping", 1, 0.0, 20.0), None, JUDGE),
    ):
        with pytest.raises(RegistryError, match="server other has it"):
            call()
    assert store.mounted(pending.id, "other", at(20)).state == "canary"
    with engine.connect() as connection:
        assert connection.scalar(sa.select(deployment_heads.c.row_version)) == 5
    assert not store.try_lease(99, "server", 1.0, 1.0)
    for find in (lambda: store.find(99), lambda: store.mounted(99, "server", at(1))):
        with pytest.raises(RegistryError, match="deployment 99"):
            find()


def test_a_registrar_that_comes_late_changes_nothing(store):
    served = serve(store, 1)
    store.deploy("t2i", "shapes@2", PLAN, SETTINGS, at(4))
    canary = mount(store, store.get("t2i").unfinished)
    for call, words in [
        (lambda: store.mounted(canary.id, "server", at(5)), "is canary, so it cannot be loaded"),
        (lambda: store.fail(canary.id, "server", at(5)), "is canary, so it cannot be failed; one that is pending can"),
        (lambda: store.fail(served.id, "server", at(5)), "no server has it"),
    ]:
        with pytest.raises(RegistryError, match=words):
            call()
    assert store.find(canary.id) == canary


def test_evidence_of_another_version_of_the_judge_is_left_out(engine, store):
    canary = mount(store, deploy(store, 1, PLAN), 10)
    evidence = '{"ramp":{"status":"ramping","step":1,"elapsed_s":3,"updated_at":9},"judge":{"errors_log_e":[0]}}'
    values = {"deployment_id": canary.id, "number": 3, "type": "step", "traffic": 0.25, "evidence": evidence}
    with write_transaction(engine) as connection:
        connection.execute(deployment_events.insert().values(values | {"at": 9.0, "by": "judge", "why": ""}))
    found = store.find(canary.id)
    assert (found.evidence, found.ramp) == (None, RampState("ramping", 1, 3.0, 9.0))


PROCESS = """
import os, pathlib, sys
from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan
from noria.errors import RegistryError
from noria.registry.deployments.store import DeploymentStore
from noria.registry.schema import open_registry_database
from noria.registry.changes import Change

me = "one" if os.fork() else "two" if os.fork() else "three"
engine = open_registry_database(sys.argv[1], pathlib.Path("/nowhere"))
store = DeploymentStore(engine)

def load(now):
    for deployment in store.unfinished():
        if store.try_lease(deployment.id, me, now, -1.0):  # so that the others can take it at once
            store.mounted(deployment.id, me, Change(now, me))

for number in range(8):
    endpoint, change = "ab"[number % 2], Change(float(number), me)
    plan = RampPlan((5.0,)) if number % 4 else None
    for call in (
        lambda: store.deploy(endpoint, f"shapes@{number % 3 + 1}", plan, JudgeSettings(), change),
        lambda: load(float(number)),
        lambda: store.roll_back(endpoint, change) if number % 3 == 2 else store.promote(endpoint, change),
    ):
        try:
            call()
        except RegistryError:  # another process was first
            pass
engine.dispose()
if me != "three":
    sys.exit(os.wait()[1] != 0)
"""


@on_both
def test_processes_at_once_leave_no_half_state(engine, store, database):
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, database], check=False, stderr=subprocess.PIPE, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert list(check(engine, with_files=False)) == []
    with engine.connect() as connection:
        generations = connection.scalars(sa.select(routes.c.generation).order_by(routes.c.generation)).all()
    assert generations == list(range(1, len(generations) + 1)) and len(generations) > 5
    for endpoint in ("a", "b"):
        found = store.all(endpoint)
        assert sum(one.state == "serving" for one in found) <= 1 and sum(one.is_unfinished for one in found) <= 1
        assert all([event.number for event in one.events] == list(range(1, len(one.events) + 1)) for one in found)


def follow(store, spec="shapes@prod", plan=None):
    return store.deploy("t2i", spec, plan, SETTINGS, at(2), follow=True)[0]


@on_both
def test_what_an_alias_names_later_is_deployed_likewise_once(store, engine):
    models = ModelStore(engine)
    models.set_alias("shapes@1", "prod", at(1))
    mount(store, follow(store, plan=HOLD))
    assert store.followed() == {"t2i": "shapes@prod"}
    models.set_alias("shapes@2", "prod", at(3))
    assert store.deploy_followed(at(4)) == []  # the first is a canary still
    store.promote("t2i", at(5))
    (second,) = store.deploy_followed(at(6))
    assert (second.version.name, second.plan, second.created.why) == ("shapes@2", HOLD, "follows shapes@prod")
    assert store.deploy_followed(at(7)) == []
    store.roll_back("t2i", at(8))
    assert store.deploy_followed(at(9)) == []  # what was rolled back is not deployed again
    models.set_alias("shapes@3", "prod", at(10))
    assert [one.version.name for one in store.deploy_followed(at(11))] == ["shapes@3"]


def test_the_latest_version_of_a_model_is_followed_until_a_deployment_without(store, engine):
    mount(store, follow(store, "shapes"))
    new, _ = ModelStore(engine).add("shapes", folder("e", "file:///models/e"), at(3))
    (followed,) = store.deploy_followed(at(4))
    assert followed.version.id == new.id
    mount(store, followed)
    serve(store, 1, now=5)
    ModelStore(engine).add("shapes", folder("f", "file:///models/f"), at(6))
    assert (store.deploy_followed(at(7)), store.followed()) == ([], {})


def test_who_let_an_endpoint_follow_something_and_who_ended_that_is_in_its_history(store, engine):
    def changes():
        events = [(one.id, event.change) for one in store.all() for event in one.events if event.type == "follow"]
        return [(number, change.at, change.by, change.why) for number, change in events]

    first = mount(store, follow(store, "shapes"))
    ModelStore(engine).set_alias(first.version.name, "prod", at(3))
    by_alice = Change(4.0, "alice", "frozen")
    store.deploy("t2i", "shapes", None, SETTINGS, Change(4.0, "alice"), follow=True)  # as before
    store.deploy("t2i", "shapes@prod", None, SETTINGS, by_alice, follow=True)
    expected = [
        (first.id, 2.0, "ann", "follows shapes"),
        (first.id, 4.0, "alice", "follows shapes@prod, not shapes: frozen"),
    ]
    assert changes() == expected
    second = serve(store, 1, now=5)
    expected.append((second.id, 5.0, "ann", "follows nothing any more, not shapes@prod"))
    assert changes() == expected
    followed = follow(store)
    store.roll_back("t2i", at(6))
    gone, _ = store.undeploy("t2i", Change(7.0, "bob", "moved"))
    assert (gone.id, gone.state, gone.last_change.why) == (second.id, "rolled_back", "undeployed: moved")
    expected.append((followed.id, 2.0, "ann", "follows shapes@prod"))
    assert sorted(changes()) == sorted(
        [*expected, (gone.id, 7.0, "bob", "follows nothing any more, not shapes@prod: moved")]
    )
    assert table(store) == {}
    assert list(check(engine, with_files=False)) == []


@on_both
def test_the_latest_version_with_a_tag_is_followed(store, engine):
    models = ModelStore(engine)
    models.tag("shapes@1", {"stage=prod"}, at(1))
    mount(store, follow(store, "shapes@stage=prod"))
    models.add("shapes", folder("z"), at(3))
    assert store.deploy_followed(at(4)) == []  # it has no tag yet
    latest = models.tag("shapes", {"stage=prod"}, at(5))
    (followed,) = store.deploy_followed(at(6))
    assert (followed.version.name, followed.created.why) == (latest.name, "follows shapes@stage=prod")
    assert store.deploy_followed(at(7)) == []


@on_both
def test_a_number_is_not_followed_and_a_deleted_alias_deploys_nothing(store, engine):
    with pytest.raises(RegistryError, match="for good"):
        follow(store, "shapes@1")
    assert (store.all(), store.followed()) == ([], {})
    ModelStore(engine).set_alias("shapes@1", "prod", at(1))
    mount(store, follow(store))
    ModelStore(engine).delete_alias("shapes", "prod", at(3))
    assert store.deploy_followed(at(4)) == []
