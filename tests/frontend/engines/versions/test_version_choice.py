"""The choice of the version that answers a request, and the counts of a canary."""

import msgspec
import pytest

from noria.canary.windows import WINDOW_S, InFlight
from noria.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    EngineUnavailable,
    GenerationFailed,
    InternalError,
    InvalidField,
    JobsUnavailable,
    NoriaError,
    QueueFull,
    RateLimited,
    UnreadableImage,
    UserCodeBusy,
    UserCodeFailed,
)
from noria.frontend.engines.versions.version_choice import RequestVersions, VersionChooser
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

    def answer(self, key: str, *, outcome: str = "ok", is_sticky: bool = False, override: str | None = None) -> str:
        """Serve a request; return the version that answered."""
        with RequestVersions(key, is_sticky=is_sticky) as versions:
            versions.override = override
            chosen = self.chooser.choose(CONTROL, versions)
            versions.record("tiny", outcome, seconds=0.25, shape=lambda: "small")
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
        assert chooser.choose(CONTROL, versions) is CONTROL
    assert versions.choice is not None and versions.choice.target is None


def test_what_is_no_request_gets_the_control(fixture: Fixture) -> None:
    fixture.chooser.follow(canary_routes(1.0, 2))
    assert fixture.chooser.choose(CONTROL, None) is CONTROL
    assert fixture.chooser.in_flight() == ()


@pytest.mark.parametrize(
    ("override", "version"), [("control", CONTROL), ("canary", CANARY), ("tiny@1", CONTROL), ("tiny@2", CANARY)]
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


def test_while_all_engines_restart_requests_have_their_versions_and_nothing_is_compared(fixture: Fixture) -> None:
    chosen = [fixture.answer(str(number)) for number in range(50)]
    held, fixture.held = fixture.held, []
    known = lambda name, version: next((spec for spec in held if spec.matches(name, version)), None)  # noqa: E731
    chooser = VersionChooser(fixture.find, lambda: fixture.now, known)
    chooser.follow(canary_routes(0.5))
    for number, version in enumerate(chosen):
        with RequestVersions(str(number)) as versions:
            assert chooser.choose(CONTROL, versions).fingerprint == version
            versions.record("tiny", "error", seconds=0.0, shape=lambda: "small")
        assert versions.choice.target.fingerprint == version
    assert chooser.take_ended() == ()


def test_what_answers_in_place_of_the_control_is_named_and_not_compared(fixture: Fixture) -> None:
    other = msgspec.structs.replace(FAKE_MODEL, fingerprint="cccccccccccc")
    for number in range(40):
        with RequestVersions(str(number)) as versions:
            chosen = fixture.chooser.choose(other, versions)
            versions.record("tiny", "error", seconds=1.0, shape=lambda: "")
        assert versions.choice.target == (target(2, CANARY) if chosen is CANARY else None)
    assert fixture.chooser.take_ended() == ()


def test_a_request_counts_once_and_then_delays_no_window(fixture: Fixture) -> None:
    with RequestVersions("key") as versions:
        fixture.chooser.choose(CONTROL, versions)
        fixture.now += WINDOW_S
        for _ in range(3):
            versions.record("tiny", "ok", seconds=1.0, shape=lambda: "")
            assert fixture.chooser.first_open_window() == 100 // WINDOW_S
        versions.answer()
        assert fixture.chooser.first_open_window() == 100 // WINDOW_S + 1
    (report,) = fixture.chooser.take_ended()
    assert report.control.n + report.canary.n == 1


def test_a_request_keeps_its_version_when_the_routes_change(fixture: Fixture) -> None:
    fixture.chooser.follow(canary_routes(1.0, 2))
    with RequestVersions("key") as versions:
        assert fixture.chooser.choose(CONTROL, versions) is CANARY
        fixture.chooser.follow(Routes(3, (Route("tiny", target(1, CONTROL)),)))
        assert fixture.chooser.choose(CONTROL, versions) is CANARY
        assert fixture.chooser.in_flight() == (InFlight("tiny", CANARY.fingerprint, 1),)
    assert fixture.chooser.in_flight() == ()


def test_outcomes_are_counted_in_the_window_of_the_admission(fixture: Fixture) -> None:
    fixture.chooser.follow(canary_routes(1.0, 2))
    with RequestVersions("slow") as versions:
        fixture.chooser.choose(CONTROL, versions)
        fixture.now += 3 * WINDOW_S
        fixture.answer("fails", outcome="error")
        assert fixture.chooser.first_open_window() == 100 // WINDOW_S
        versions.record("tiny", "ok", seconds=6.0, shape=lambda: "large")
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
    both = report.control.merge(report.canary)
    assert (both.n, both.repeats) == (1, 4)


def test_a_request_that_counts_nothing_leaves_its_sticky_key_to_the_next_one(fixture: Fixture) -> None:
    with RequestVersions("user 1", is_sticky=True) as versions:  # no outcome at all: code of an endpoint ended it
        fixture.chooser.choose(CONTROL, versions)
        fixture.answer("user 1", is_sticky=True)  # meanwhile another, which is no first one
    for outcome in ("none", "none", "error", "none", "ok"):
        fixture.answer("user 1", outcome=outcome, is_sticky=True)
    (report,) = fixture.chooser.take_ended()
    both = report.control.merge(report.canary)
    assert (both.n, both.errors, both.repeats) == (1, 1, 2)
    assert fixture.chooser.first_open_window() == fixture.now // WINDOW_S


OK, ERROR, REJECTION, NOTHING = (1, 0, 0), (1, 1, 0), (1, 0, 1), (0, 0, 0)  # responses, errors, rejections


@pytest.mark.parametrize(
    ("recorded", "error", "counted"),
    [
        ("ok", None, OK),
        ("error", GenerationFailed(""), ERROR),
        ("rejection", InvalidField(""), REJECTION),
        ("none", DeadlineExceeded(""), NOTHING),  # the client's deadline
        ("none", RateLimited("", retry_after_s=1.0), NOTHING),
        # Code that runs after the model, and what makes the response of its result:
        ("ok", UserCodeFailed(""), ERROR),
        ("ok", InternalError(""), ERROR),
        ("ok", InvalidField(""), REJECTION),
        ("ok", UserCodeBusy(""), OK),
        ("ok", DeadlineExceeded(""), OK),
        # Before the model's part, after the choice:
        (None, InvalidField(""), REJECTION),
        (None, UnreadableImage(""), REJECTION),
        (None, DeadlineUnmeetable("the model needs longer"), REJECTION),
        (None, DeadlineUnmeetable("now", retry_after_s=1.0), NOTHING),
        (None, QueueFull("", retry_after_s=1.0), NOTHING),
        (None, RateLimited(""), NOTHING),
        (None, JobsUnavailable(""), NOTHING),
        (None, None, NOTHING),  # a route that needs no answer of the model
    ],
)
def test_an_error_counts_for_the_version_that_causes_it(
    fixture: Fixture, recorded: str | None, error: NoriaError | None, counted: tuple[int, int, int]
) -> None:
    fixture.chooser.follow(canary_routes(1.0, 2))
    with RequestVersions("key") as versions:
        fixture.chooser.choose(CONTROL, versions)
        if recorded:
            versions.record("tiny", recorded, seconds=1.0, shape=lambda: "")
        versions.error = error
    arms = [report.canary for report in fixture.chooser.take_ended()]
    assert [(arm.n, arm.errors, arm.rejections) for arm in arms] == ([counted] if counted != NOTHING else [])
    assert fixture.chooser.first_open_window() == fixture.now // WINDOW_S


def test_the_values_of_both_arms_keep_their_names_though_one_has_far_more(fixture: Fixture) -> None:
    fixture.chooser.follow(canary_routes(0.05, 2))
    for number in range(4000):
        with RequestVersions(str(number)) as versions:
            fixture.chooser.choose(CONTROL, versions)
            fixture.chooser.add_value(versions.choice, "topic", f"t{number % 200}")
    (report,) = fixture.chooser.take_ended()
    assert len(report.control.cells["topic"]) == 200 and 64 < len(report.canary.cells["topic"]) <= 200


def test_the_outcome_of_a_stream_counts_after_its_response_has_begun(fixture: Fixture) -> None:
    with RequestVersions("key") as versions:
        fixture.chooser.choose(CONTROL, versions)
        versions.answer()
        assert fixture.chooser.take_ended() == ()
        versions.record("tiny", "error", seconds=1.0, shape=lambda: "")
        (report,) = fixture.chooser.take_ended()
    assert report.control.errors + report.canary.errors == 1


def test_a_model_is_not_blamed_for_the_error_of_another(fixture: Fixture) -> None:
    other = msgspec.structs.replace(FAKE_MODEL, name="other")
    with RequestVersions("key") as versions:
        for model, outcome in ((CONTROL, "ok"), (other, "error")):
            fixture.chooser.choose(model, versions)
            versions.record(model.name, outcome, seconds=1.0, shape=lambda: "")
        versions.error = GenerationFailed("")
    (report,) = fixture.chooser.take_ended()
    both = report.control.merge(report.canary)
    assert (both.n, both.errors) == (1, 0)


def test_the_control_without_a_deployment_is_the_configurations_model(fixture: Fixture) -> None:
    fixture.chooser.configure({"tiny": CONTROL.fingerprint})
    fixture.chooser.follow(Routes(2, (Route("tiny", None, target(2, CANARY), 0.5),)))
    assert fixture.chooser.control_version("tiny") == CONTROL.fingerprint
    with RequestVersions("key") as versions:
        fixture.chooser.choose(CONTROL, versions)
        assert fixture.chooser.target_of(CANARY, versions) is versions.choice.target
    assert fixture.chooser.target_of(CANARY).deployment == 2  # the target of a job, which is no request
