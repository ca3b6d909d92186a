"""Which version answers a request, and what is counted of a canary."""

import msgspec
import pytest

from noria.canary.windows import WINDOW_S, InFlight
from noria.errors import EngineUnavailable, InvalidField
from noria.frontend.engines.version_choice import RequestVersions, VersionChooser
from noria.protocol.routes import Route, Routes, Target
from noria.testing.fake_engine import FAKE_MODEL

CONTROL = msgspec.structs.replace(FAKE_MODEL, fingerprint="aaaaaaaaaaaa")
CANARY = msgspec.structs.replace(FAKE_MODEL, fingerprint="bbbbbbbbbbbb")


def target(deployment: int, spec: object) -> Target:
    return Target(deployment, f"tiny@{deployment}", "sha256:0", spec.fingerprint, ())


def canary_routes(share: float, generation: int = 1) -> Routes:
    return Routes(generation, (Route("tiny", target(1, CONTROL), target(2, CANARY), share),))


class Fixture:
    def __init__(self, share: float = 0.5) -> None:
        self.held, self.now = [CONTROL, CANARY], 100.0
        self.chooser = VersionChooser(self.find, lambda: self.now)
        self.chooser.follow(canary_routes(share))

    def find(self, name: str, version: str) -> object:
        return next((spec for spec in self.held if spec.matches(name, version)), None)

    def answer(self, key: str, *, ok: bool = True, is_sticky: bool = False, override: str | None = None) -> str:
        """Serve a request; return the version that answered."""
        with RequestVersions(key, is_sticky=is_sticky) as versions:
            versions.override = override
            chosen = self.chooser.choose(CONTROL)
            self.chooser.record("tiny", ok=ok, seconds=0.25, shape="small")
        return chosen.fingerprint


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_a_share_of_the_keys_goes_to_the_canary_and_always_the_same_ones(fixture: Fixture) -> None:
    first = [fixture.answer(f"key {number}") for number in range(400)]
    assert 140 < first.count(CANARY.fingerprint) < 260
    assert [fixture.answer(f"key {number}") for number in range(400)] == first


def test_an_endpoint_without_a_route_has_one_version_and_no_deployment() -> None:
    chooser = VersionChooser(lambda *_: None)
    with RequestVersions("key") as versions:
        assert chooser.choose(CONTROL) is CONTROL
    assert versions.choice is not None and versions.choice.target is None


def test_what_is_no_request_gets_the_control(fixture: Fixture) -> None:
    fixture.chooser.follow(canary_routes(1.0, 2))
    assert fixture.chooser.choose(CONTROL) is CONTROL
    assert fixture.chooser.in_flight() == ()


@pytest.mark.parametrize(
    ("override", "version"),
    [("control", CONTROL), ("canary", CANARY), ("tiny@1", CONTROL), ("tiny@2", CANARY)],
)
def test_a_tester_chooses_the_version_and_is_not_counted(fixture: Fixture, override: str, version: object) -> None:
    assert {fixture.answer(str(number), override=override) for number in range(20)} == {version.fingerprint}
    assert fixture.chooser.take_ended() == ()


@pytest.mark.parametrize("routes", [canary_routes(0.5), Routes(1, (Route("tiny", target(1, CONTROL)),)), Routes()])
def test_a_version_that_is_not_served_is_an_error_that_names_those_that_are(routes: Routes) -> None:
    fixture = Fixture()
    fixture.chooser.follow(routes)
    with pytest.raises(InvalidField, match=r"tiny@7.*control"):
        fixture.answer("key", override="tiny@7")
    assert fixture.chooser.in_flight() == ()


def test_the_control_answers_while_no_engine_holds_the_canary_and_nothing_is_compared(fixture: Fixture) -> None:
    fixture.held = [CONTROL]
    assert {fixture.answer(str(number)) for number in range(50)} == {CONTROL.fingerprint}
    assert fixture.chooser.take_ended() == ()
    with pytest.raises(EngineUnavailable, match="tiny@2"):
        fixture.answer("key", override="canary")


def test_what_answers_in_place_of_the_control_is_named_and_not_compared(fixture: Fixture) -> None:
    other = msgspec.structs.replace(FAKE_MODEL, fingerprint="cccccccccccc")
    for number in range(40):
        with RequestVersions(str(number)) as versions:
            chosen = fixture.chooser.choose(other)
            fixture.chooser.record("tiny", ok=False, seconds=1.0, shape="")
        assert versions.choice.target == (target(2, CANARY) if chosen is CANARY else None)
    assert fixture.chooser.take_ended() == ()


def test_a_request_counts_once_and_then_delays_no_window(fixture: Fixture) -> None:
    with RequestVersions("key"):
        fixture.chooser.choose(CONTROL)
        fixture.now += WINDOW_S
        assert fixture.chooser.first_open_window() == 100 // WINDOW_S
        for _ in range(3):
            fixture.chooser.record("tiny", ok=True, seconds=1.0, shape="")
        assert fixture.chooser.first_open_window() == 100 // WINDOW_S + 1
    (report,) = fixture.chooser.take_ended()
    assert report.control.n + report.canary.n == 1


def test_a_request_keeps_its_version_when_the_routes_change(fixture: Fixture) -> None:
    fixture.chooser.follow(canary_routes(1.0, 2))
    with RequestVersions("key"):
        assert fixture.chooser.choose(CONTROL) is CANARY
        fixture.chooser.follow(Routes(3, (Route("tiny", target(1, CONTROL)),)))
        assert fixture.chooser.choose(CONTROL) is CANARY
        assert fixture.chooser.in_flight() == (InFlight("tiny", CANARY.fingerprint, 1),)
    assert fixture.chooser.in_flight() == ()


def test_outcomes_are_counted_in_the_window_of_the_admission(fixture: Fixture) -> None:
    fixture.chooser.follow(canary_routes(1.0, 2))
    with RequestVersions("slow"):
        fixture.chooser.choose(CONTROL)
        fixture.now += 3 * WINDOW_S
        fixture.answer("fails", ok=False)
        assert fixture.chooser.first_open_window() == 100 // WINDOW_S
        fixture.chooser.record("tiny", ok=True, seconds=6.0, shape="large")
    first, second = sorted(fixture.chooser.take_ended(), key=lambda report: report.window)
    assert (first.window, second.window) == (100 // WINDOW_S, 100 // WINDOW_S + 3)
    assert (first.deployment, first.canary.n, first.canary.errors) == (2, 1, 0)
    assert first.canary.latencies == {"large": [6.0]}
    assert (second.canary.n, second.canary.errors, second.canary.latencies) == (1, 1, {})
    assert first.control.n == second.control.n == 0
    assert fixture.chooser.take_ended() == ()
    assert fixture.chooser.first_open_window() == fixture.now // WINDOW_S


def test_only_the_first_request_of_a_sticky_key_counts(fixture: Fixture) -> None:
    for _ in range(5):
        fixture.answer("user 1", is_sticky=True)
    (report,) = fixture.chooser.take_ended()
    assert report.control.n + report.canary.n == 1


def test_the_control_without_a_deployment_is_the_configurations_model(fixture: Fixture) -> None:
    fixture.chooser.configured = {"tiny": CONTROL.fingerprint}
    fixture.chooser.follow(Routes(2, (Route("tiny", None, target(2, CANARY), 0.5),)))
    assert fixture.chooser.control_version("tiny") == CONTROL.fingerprint
    with RequestVersions("key") as versions:
        fixture.chooser.choose(CONTROL)
        assert fixture.chooser.target_of(CANARY) is versions.choice.target
    assert fixture.chooser.target_of(CANARY).deployment == 2  # of a job, which is no request
