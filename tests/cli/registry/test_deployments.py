"""`noria deploy`, `promote`, `rollback` and `status`, on a registry that no server runs with."""

import json
import re
import threading

import pytest

from noria.canary.judge import JudgeState
from noria.canary.ramp import RampState
from noria.canary.shadow import ShadowCounts, ShadowState
from noria.cli.main import main
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from noria.registry.versions import Change
from registry.samples import at, folder


@pytest.fixture
def store(tmp_path):
    """Deployments in a registry with shapes@1 and shapes@2."""
    engine = open_registry_database("auto", tmp_path)
    for content in "ab":
        ModelStore(engine).add("shapes", folder(content), at(1))
    yield DeploymentStore(engine)
    engine.dispose()


@pytest.fixture
def noria(store, tmp_path, capsys):
    """Runs a command on that registry; returns what it prints, after checking its exit status."""

    def run(*arguments, status=0):
        assert main([*arguments, "--data-dir", str(tmp_path)]) == status
        printed = capsys.readouterr()
        return printed.err if status > 1 else printed.out

    return run


def mount(store):
    """Load what is pending, as a server does."""
    (pending,) = store.unfinished()
    assert store.try_lease(pending.id, "server", 10.0, 10.0)
    return store.mounted(pending.id, "server", Change(10.0, "server"))


def rows(printed):
    """The cells of the lines of a table that are not its header."""
    header, *lines = printed.splitlines()
    starts = [header.index(name) for name in ("endpoint", "version", "state", "requests", "since", "by", "why")]
    return [
        tuple(line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True))
        for line in lines
        if not line.startswith((" ", "events", "judge", "latest"))
    ]


def test_a_version_is_deployed_beside_another_and_promoted(noria, store):
    assert noria("status") == "nothing is deployed; deploy a version: noria deploy ENDPOINT MODEL\n"
    assert noria("deploy", "t2i", "shapes@1", "--why", "first") == (
        "shapes@1 is to be deployed to t2i, for all requests. A running server takes it up within a second: noria "
        "status t2i\n"
    )
    mount(store)
    assert "5, 25, 100 % of the requests, 60 s each" in noria("deploy", "t2i", "shapes", "--ramp", "5,25,100 every 1m")
    assert "is already being deployed" in noria("deploy", "t2i", "shapes", "--ramp", "5,25,100 every 1m")
    canary = mount(store)
    evidence = JudgeState(3, 300, 1, 30, 2)
    store.step(canary.id, "server", RampState("ramping", 1, 0.0, 70.0), evidence, Change(70.0, "judge"))
    printed = noria("status", "t2i")
    user = canary.created.by
    assert rows(printed) == [
        ("t2i", "shapes@1", "serving", "75 %", "1970-01-01 00:00 UTC", user, "first"),
        ("t2i", "shapes@2", "canary, ramping", "25 %", "1970-01-01 00:00 UTC", user, ""),
    ]
    (verdict,) = [line for line in printed.splitlines() if line.startswith("judge")]
    assert verdict.startswith("judge of t2i: inconclusive, error rate -")
    assert "30 of 80 responses of the canary" in verdict
    assert printed.endswith(f"  2  shapes@2 pending  by {user}\n")  # by time: the server's clock is behind
    assert "  1970-01-01 00:01 UTC  2  shapes@2 canary with 25 %, ramping  by judge" in printed.splitlines()
    assert noria("promote", "t2i", "--why", "good") == "shapes@2 serves all requests to t2i\n"
    assert [row[:4] for row in rows(noria("status"))] == [("t2i", "shapes@2", "serving", "100 %")]
    assert "deployment 2 (shapes@2, serving)" in noria("promote", "t2i", status=2)


def test_status_in_json_has_evidence_and_verdict(noria, store):
    judge = ("--min-responses", "20", "--max-error-increase", "5 %", "--guard", "image_brightness")
    noria("deploy", "a", "shapes@1", "--canary", "10%", *judge)
    mount(store)
    noria("deploy", "b", "shapes@1")
    first, second = map(json.loads, noria("status", "--json").splitlines())
    assert (first["endpoint"], first["serving"], first["unfinished"]["traffic"]) == ("a", None, 0.1)
    assert (first["verdict"]["outcome"], len(first["verdict"]["interval"])) == ("inconclusive", 2)
    settings = first["unfinished"]["judge_settings"]
    assert (settings["min_responses"], settings["max_error_increase"]) == (20, 0.05)
    assert settings["guards"] == ["image_brightness"]
    assert "image_brightness: 0 of 200 values" in first["verdict"]["reason"]
    assert "--guard: guards are" in noria("deploy", "c", "shapes", "--canary", "5", "--guard", "errors", status=2)
    assert (second["unfinished"]["state"], second["verdict"]) == ("pending", None)
    assert json.loads(noria("status", "b", "--json"))["unfinished"]["version"]["number"] == 1


def test_a_rollback_says_what_serves_then(noria, store):
    for version in ("shapes@1", "shapes@2"):
        noria("deploy", "t2i", version)
        mount(store)
    noria("deploy", "t2i", "shapes@1", "--canary", "5")
    assert noria("rollback", "t2i") == "shapes@1 gets no requests to t2i\n"
    assert "was rolled back already; shapes@2 serves." in noria("rollback", "t2i", status=2)
    noria("deploy", "t2i", "shapes@2")
    mount(store)
    assert noria("rollback", "t2i", "--why", "bad").startswith("shapes@2 serves t2i again as soon as a server has")
    mount(store)
    assert [row[:2] for row in rows(noria("status"))] == [("t2i", "shapes@2")]
    noria("deploy", "other", "shapes@1")
    mount(store)
    printed = noria("rollback", "other", "--why", "no")
    assert printed == "the configuration's model other serves again, not shapes@1\n"
    status = noria("status", "other")
    assert [row[:4] for row in rows(status)] == [("other", "(configuration)", "serving", "100 %")]
    assert "latest of other: shapes@1 was rolled back by " in status


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("t2i", "shapes", "--canary", "0"), "--canary is '0'; allowed are per cents above 0"),
        (("t2i", "shapes", "--canary", "nan"), "--canary is 'nan'"),
        (("t2i", "shapes", "--canary", "5,6"), "--canary is '5,6'"),
        (("t2i", "shapes", "--canary", "100%"), "leave --canary out to serve all requests"),
        (("t2i", "shapes", "--ramp", "25,5"), "--ramp is '25,5'; each step of a ramp is above the one before"),
        (("t2i", "shapes", "--ramp", ""), "--ramp is ''; a ramp is per cents and a time"),
        (("t2i", "shapes", "--ramp", "5", "--canary", "5"), "--canary and --ramp are given; use one"),
        (("t2i", "shapes", "--min-responses", "9"), "give --canary or --ramp, too"),
        (("t2i", "shapes", "--canary", "5", "--min-responses", "0"), "--min-responses is '0'; allowed is 1 to"),
        (("t2i", "shapes", "--canary", "5", "--max-error-increase", "x"), "--max-error-increase is 'x'"),
        (("a b", "shapes"), "the endpoint 'a b' is not allowed"),
        (("t2i", "shape"), "no model 'shape'. Did you mean 'shapes'?"),
        (("t2i", "shapes@9"), "has no version 9. Its versions are 1, 2."),
    ],
)
def test_what_is_wrong_is_one_line_and_writes_nothing(noria, store, arguments, words):
    printed = noria("deploy", *arguments, status=2)
    assert words in printed and printed.count("\n") == 1
    assert store.all() == []


def test_an_unknown_endpoint_names_the_known(noria):
    noria("deploy", "t2i", "shapes")
    for command in ("status", "promote", "rollback"):
        printed = noria(command, "t2", status=2)
        assert "to the endpoint 't2'. Did you mean 't2i'? Known are t2i." in printed


def test_waiting_ends_with_what_happened(noria, store, monkeypatch):
    monkeypatch.setattr("noria.cli.registry.deployments._FOLLOW_S", 0.0)  # there is no server

    def server(act):
        """Act on the pending deployment as soon as there is one, in a thread."""

        def run():
            while not stopped.wait(0.02):
                for pending in store.unfinished():
                    if pending.state == "pending" and store.try_lease(pending.id, "server", 10.0, 10.0):
                        act(pending.id)

        stopped = threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        return lambda: (stopped.set(), thread.join())

    def load(number):
        store.mounted(number, "server", at(10))

    def fail(number):
        store.fail(number, "server", Change(10.0, "server", "no space left"))

    for act, arguments, status, words in [
        (load, (), 0, "shapes@2 serves all requests to t2i\n"),
        (fail, (), 1, "shapes@2 could not be loaded by server: no space left\n"),
        (load, ("--canary", "5"), 0, "shapes@2 gets 5 % of the requests to t2i\n"),
    ]:
        stop = server(act)
        assert noria("deploy", "t2i", "shapes", "--wait", "600", *arguments, status=status) == words
        stop()


def test_waiting_in_vain_says_so(noria, capsys):
    printed = noria("deploy", "t2i", "shapes", "--wait", "0.1", status=1)
    assert printed == "shapes@2 is still not loaded for t2i after 0.1 s. Does a server run with this registry?\n"
    with pytest.raises(SystemExit):
        main(["deploy", "t2i", "shapes", "--wait", "never"])
    assert "'never'; allowed are seconds above 0" in capsys.readouterr().err


def test_a_trace_of_an_endpoint_begins_with_what_serves_it(noria, store):
    noria("deploy", "shapes", "shapes@1")  # a model has this name, too
    assert noria("trace", "shapes").startswith("model shapes@2")
    mount(store)
    up = noria("trace", "shapes").splitlines()
    assert (up[0], up[2]) == ("endpoint shapes", f"   └─ version: model shapes@1  {folder('a').manifest.digest}")
    assert re.fullmatch(r"└─ serving: deployment 1  serving, .* UTC by \S+", up[1])
    down = noria("trace", "shapes@1", "--down").splitlines()
    assert down[1].startswith("└─ deployed as: deployment 1  serving")
    assert down[2] == "   └─ serves: endpoint shapes"
    assert noria("trace", "shapes", "--down").startswith("model shapes@2")


def test_a_shadow_is_compared_in_status_and_promoted_to_its_canary(noria, store):
    noria("deploy", "t2i", "shapes@1")
    mount(store)
    assert "for copies of requests: 20 % for 600 s" in noria(
        "deploy", "t2i", "shapes", "--shadow", "20% for 10m", "--canary", "5%"
    )
    shadow = mount(store)
    counts = ShadowCounts(num_answers=40, num_errors=1, num_timed=39, shadow_s=6.0, control_s=3.0)
    store.step_shadow(shadow.id, "server", ShadowState(counts, 9.0, 19.0), Change(19.0, "server"))
    printed = noria("status", "t2i")
    assert "shadow of t2i: 40 copies answered, 0 dropped; errors 1, of the control 0; computing time 2.00" in printed
    assert noria("promote", "t2i") == "shapes@2 gets 5 % of the requests to t2i\n"
    assert "shadow of" not in noria("status", "t2i")
    assert "--shadow is 0 %; a shadow gets" in noria("deploy", "other", "shapes", "--shadow", "0%", status=2)
