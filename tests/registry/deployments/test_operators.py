"""Whatever operators, registrars and judges do to an endpoint, in any order: what serves changes only as wanted.

A Hypothesis state machine over a SQLite database. Two operators act on it through connections of their own, each as if
the other did not exist; versions fail to load, shadows end, servers restart, and some versions have equal content.
"""

import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Callable

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from noria.canary import ramp
from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan
from noria.canary.shadow import ShadowCounts, ShadowPlan, ShadowState
from noria.canary.traffic_split import TrafficSplit
from noria.errors import RegistryError
from noria.registry.changes import Change
from noria.registry.check import check
from noria.registry.deployments.states import Deployment
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from registry.samples import at, folder
from searching import examples

ENDPOINT = "t2i"
CONTENTS = {"shapes@1": "a", "shapes@2": "b", "copy@1": "b"}
AT_ONCE = [None, RampPlan((100.0,))]
CANARIES = [RampPlan((40.0,)), RampPlan((10.0, 50.0, 100.0), 10.0), None]
SHADOWS = [None, None, ShadowPlan(20.0), ShadowPlan(100.0, max_answers=4)]
USERS = [f"user-{number}" for number in range(20)]

operators = st.sampled_from(["ann", "bob"])
versions = st.sampled_from(list(CONTENTS))
fates = st.sampled_from(["loaded", "loaded", "promoted", "regretted", "fails", "pending"])


@functools.cache
def registry_with_models() -> bytes:
    with tempfile.TemporaryDirectory(prefix="noria-operators-") as name:
        engine = open_registry_database("auto", pathlib.Path(name))
        models = ModelStore(engine)
        for version, content in CONTENTS.items():
            models.add(version.partition("@")[0], folder(content, f"file:///models/{version}"), at(1))
        engine.dispose()
        return (pathlib.Path(name) / "registry.sqlite").read_bytes()


class Operators(RuleBasedStateMachine):
    """An endpoint, its two operators, and the registrar of its server."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="noria-operators-")
        (pathlib.Path(self.folder.name) / "registry.sqlite").write_bytes(registry_with_models())
        self.engines = {name: self.open() for name in ("ann", "bob", "server")}
        self.now, self.known = 10.0, None
        self.served: list[str | None] = [None]  # contents that have served, None for the configuration's model
        self.canary_users: dict[int, set[str]] = {}  # who have met it, by deployment

    def open(self):
        return open_registry_database("auto", pathlib.Path(self.folder.name))

    def teardown(self) -> None:
        assert list(check(self.engines["ann"], with_files=False)) == []
        for engine in self.engines.values():
            engine.dispose()
        self.folder.cleanup()

    def store(self, who: str = "server") -> DeploymentStore:
        return DeploymentStore(self.engines[who])

    def change(self, who: str) -> Change:
        self.known = None
        self.now += 1.0
        return Change(self.now, who, "")

    def all(self) -> list[Deployment]:
        """Return the deployments of the endpoint, read once after each change."""
        if self.known is None:
            self.known = self.store().all()
        return self.known

    def serving(self) -> Deployment | None:
        return next((one for one in self.all() if one.state == "serving"), None)

    def unfinished(self) -> Deployment | None:
        return next((one for one in self.all() if one.is_unfinished), None)

    def content(self) -> str | None:
        """Return the content of the version that is the routes' control."""
        route = self.store().routes().find(ENDPOINT)
        return None if route is None or route.control is None else CONTENTS[route.control.version]

    def has(self, *states: str) -> bool:
        unfinished = self.unfinished()
        return unfinished is not None and unfinished.state in states

    # ── Operators ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(who=operators, version=versions, plan=st.sampled_from(AT_ONCE), fate=fates)
    def deploy_at_once(self, who: str, version: str, plan: RampPlan | None, fate: str) -> None:
        self.deploy(who, version, plan, None, fate)

    @rule(who=operators, version=versions, plan=st.sampled_from(CANARIES), shadow=st.sampled_from(SHADOWS), fate=fates)
    def deploy_beside(self, who: str, version: str, plan: RampPlan, shadow: ShadowPlan | None, fate: str) -> None:
        self.deploy(who, version, plan, shadow, fate)

    def deploy(self, who: str, version: str, plan: RampPlan | None, shadow: ShadowPlan | None, fate: str) -> None:
        before, serving, unfinished = self.all(), self.serving(), self.unfinished()
        call = lambda: self.store(who).deploy(  # noqa: E731
            ENDPOINT, version, plan, JudgeSettings(), self.change(who), shadow=shadow
        )
        if unfinished is not None:
            with contextlib.suppress(RegistryError):  # raised unless it is the same command
                assert call() == (unfinished, True)
            assert self.all() == before
            return
        deployment, was_there = call()
        at_once = shadow is None and plan in AT_ONCE
        if at_once and serving is not None and CONTENTS[version] == CONTENTS[serving.version.name]:
            assert (deployment, was_there, self.all()) == (serving, True, before)
        else:
            assert (deployment.state, was_there) == ("pending", False)
            if fate in ("loaded", "promoted", "regretted"):
                self.load()
                while fate != "loaded" and self.has("shadow", "canary"):
                    self.store(who).promote(ENDPOINT, self.change(who))
                    self.served.append(self.content())
                if fate == "regretted":
                    self.roll_back_once(who)
            elif fate == "fails":
                self.fail()
                self.roll_back_once(who)  # a natural reaction, which must not take away what serves

    @precondition(lambda self: self.unfinished() is not None)
    @rule(who=operators)
    def promote(self, who: str) -> None:
        allowed = self.has("shadow", "canary")
        assert self.is_done(lambda: self.store(who).promote(ENDPOINT, self.change(who))) is allowed
        self.served.append(self.content())

    @precondition(lambda self: self.all())
    @rule(who=operators, is_noticed_by_both=st.sampled_from([False, False, True]))
    def roll_back(self, who: str, is_noticed_by_both: bool) -> None:
        """Take something away; a second operator, who saw the same alarm, must not take away what is good then."""
        self.roll_back_once(who)
        if is_noticed_by_both:
            if self.has("pending"):
                self.load()
            content, unfinished = self.content(), self.unfinished()
            self.roll_back_once("bob" if who == "ann" else "ann")
            assert unfinished is not None or (self.content(), self.unfinished()) == (content, None)

    def roll_back_once(self, who: str) -> None:
        before, serving, unfinished = self.all(), self.serving(), self.unfinished()
        serves = (
            "the model of this name in a server's configuration"
            if serving is None
            else f"{serving.version.name} serves"
        )
        try:
            changed = self.store(who).roll_back(ENDPOINT, self.change(who))
        except RegistryError as error:
            refusal = error.message
            assert (unfinished, self.all()) == (None, before), "what is not finished can be taken away"
            assert serves in refusal
            return
        if unfinished is not None:
            assert changed.id == unfinished.id
            assert changed.state == ("rolled_back" if unfinished.rolls_back is None else "pending")
            return
        assert serving is not None, "there is something to roll back"
        taken = CONTENTS[serving.version.name]
        last = before[-1]
        assert last.id == serving.id or (last.state, last.rolls_back) == ("failed", serving.id), "it was deployed last"
        if changed.state == "pending":
            assert (changed.rolls_back, changed.plan, changed.shadow_plan) == (serving.id, None, None)
            back = CONTENTS[changed.version.name]
            assert back != taken and back in self.served, "it has served, and is other content"
        else:
            assert (changed.id, changed.state) == (serving.id, "rolled_back")
            self.served.append(None)
        assert self.content() in (taken, None)

    # ── Registrar and judge ───────────────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.has("pending"))
    @rule(fails=st.sampled_from([False, False, True]))
    def take_up(self, fails: bool) -> None:
        (self.fail if fails else self.load)()

    def load(self) -> None:
        self.act(lambda one: self.store().mounted(one.id, "server", self.change("server")))

    def fail(self) -> None:
        content = self.content()
        self.act(lambda one: self.store().fail(one.id, "server", self.change("server")))
        assert self.content() == content

    @precondition(lambda self: self.has("shadow"))
    @rule(num_answers=st.integers(0, 4), num_errors=st.sampled_from([0, 0, 1]), num_lost=st.sampled_from([0, 0, 2]))
    def count(self, num_answers: int, num_errors: int, num_lost: int) -> None:
        content = self.content()

        def step(one: Deployment) -> None:
            counts = ShadowCounts(num_answers=num_answers, num_errors=num_errors, num_lost=num_lost)
            state = ShadowState(one.shadow.counts + counts, one.shadow.elapsed_s + 1.0, self.now)
            after = self.store().step_shadow(one.id, "server", state, self.change("server"))
            if state.counts.num_lost or (after.state in ("canary", "serving") and state.counts.num_errors):
                assert after.state in ("ended", "shadow")

        self.act(step)
        assert self.content() == content or self.all()[-1].plan == RampPlan((100.0,))

    @precondition(lambda self: self.has("canary"))
    @rule(outcome=st.sampled_from(["pass", "fail", "inconclusive"]))
    def judge(self, outcome: str) -> None:
        def step(one: Deployment) -> None:
            self.now += 10.0
            after = ramp.advance(one.plan, one.ramp, outcome, self.now)
            stored = self.store().step(one.id, "server", after, None, self.change("judge"))
            assert outcome != "fail" or stored.state == "rolled_back"
            assert stored.state != "serving" or outcome == "pass"

        self.act(step)

    @rule(who=st.sampled_from(["ann", "bob", "server"]))
    def restart(self, who: str) -> None:
        before = self.all(), self.store().routes()
        self.engines[who].dispose()
        self.engines[who], self.known = self.open(), None
        assert (self.all(), self.store().routes()) == before

    def act(self, change: Callable[[Deployment], object]) -> None:
        """Apply a change as the registrar that holds the lease of what is not finished."""
        unfinished = self.unfinished()
        assert unfinished is not None and self.store().try_lease(unfinished.id, "server", self.now, 1e6)
        change(unfinished)
        if self.serving() is not None:
            self.served.append(self.content())

    @staticmethod
    def is_done(call: Callable[[], object]) -> bool:
        """Whether a call is allowed."""
        try:
            call()
        except RegistryError:
            return False
        return True

    # ── What always holds ─────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def one_serves_and_the_routes_follow(self) -> None:
        deployed = self.all()
        assert sum(one.state == "serving" for one in deployed) <= 1
        assert sum(one.is_unfinished for one in deployed) <= 1
        route, serving, unfinished = self.store().routes().find(ENDPOINT), self.serving(), self.unfinished()
        if route is None:
            assert serving is None and not self.has("shadow", "canary")
            return
        assert (route.control and route.control.deployment) == (serving and serving.id)
        canary = unfinished if self.has("canary") else None
        assert (route.canary and route.canary.deployment) == (canary and canary.id)
        assert route.canary_share == (0.0 if canary is None else canary.traffic)
        assert (route.shadow is not None) == self.has("shadow")

    @invariant()
    def a_user_who_has_met_the_canary_stays_with_it(self) -> None:
        route = self.store().routes().find(ENDPOINT)
        if route is None or route.canary is None:
            return
        split = TrafficSplit("control", "canary", route.canary_share, f"noria-{route.canary.deployment}")
        users = {user for user in USERS if split.choose(user) == "canary"}
        assert users >= self.canary_users.get(route.canary.deployment, set())
        self.canary_users[route.canary.deployment] = users


TestOperators = Operators.TestCase
TestOperators.settings = settings(
    max_examples=examples(5), stateful_step_count=40, deadline=None, phases=set(Phase) - {Phase.shrink}
)  # fmt: skip  # shrinking takes minutes
