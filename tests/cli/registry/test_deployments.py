"""`noria deploy`, `promote`, `rollback` and `status`, on a registry that no server runs with."""

import json
import re
import subprocess
import sys
import threading

import pytest

from noria.canary.judge import JudgeState
from noria.canary.ramp import RampState
from noria.canary.shadow import ShadowCounts, ShadowState
from noria.cli.main import main
from noria.registry.changes import Change
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from registry.samples import at, folder

CANARY = (
    "shapes@2 gets 5 % of the requests to t2i until it is promoted or rolled back; its judge needs 80 responses of the "
    "canary to roll it back, about 1600 requests, and 230 or more to pass it, about 4600"
)


@pytest.fixture
def store(tmp_path):
    """Deployments in a registry with shapes@1 and shapes@2."""
    engine = open_registry_database("auto", tmp_path)
    for content in "ab":
        ModelStore(engine).add("shapes", folder(content), at(1))
    yield DeploymentStore(engine)
    engine.dispose()


@pytest.fixture
def noria(store, tmp_path, capsys, monkeypatch):
    """Runs a command on that registry; returns what it prints, after checking its exit status."""
    for name in ("_FAST_S", "_FOLLOW_S"):  # there is no server
        monkeypatch.setattr(f"noria.cli.registry.deployments.{name}", 0.0)

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
        "shapes@1 is to be deployed to t2i, for all requests. A server that follows this registry takes it up "
        "within a second: noria status t2i\n"
    )
    mount(store)
    assert "5, 25, 100 % of the requests, 60 s each" in noria("deploy", "t2i", "shapes", "--ramp", "5,25,100 every 1m")
    assert "is already being deployed" in noria("deploy", "t2i", "shapes", "--ramp", "5,25,100 every 1m")
    canary = mount(store)
    evidence = JudgeState(3, 300, 1, 30, 2, control_rejections=4, canary_rejections=5)
    store.step(canary.id, "server", RampState("ramping", 1, 0.0, 70.0), evidence, Change(70.0, "judge"))
    printed = noria("status", "t2i")
    user = canary.created.by
    assert rows(printed) == [
        ("t2i", "shapes@1", "serving", "75 %", "1970-01-01 00:00 UTC", user, "first"),
        ("t2i", "shapes@2", "canary, ramping", "25 %", "1970-01-01 00:00 UTC", user, ""),
    ]
    (verdict,) = [line for line in printed.splitlines() if line.startswith("judge")]
    assert verdict.startswith("judge of t2i: inconclusive, its error rate is between 3.2 lower and ")
    assert "30 responses of the canary in 60 s; its judge needs 80 responses of the canary" in verdict
    assert "about 320 requests, and 230 or more to pass it, about 920: at this rate 7 min more" in verdict
    assert "responses of the canary 30, errors 2, rejections 5; of the control 300, errors 1, rejections 4" in verdict
    assert printed.endswith(f"  2  shapes@2 pending  by {user}\n")  # by time: the server's clock is behind
    assert "  1970-01-01 00:01 UTC  2  shapes@2 canary with 25 %, ramping  by judge" in printed.splitlines()
    assert noria("promote", "t2i", "--why", "good") == "shapes@2 serves all requests to t2i\n"
    assert [row[:4] for row in rows(noria("status"))] == [("t2i", "shapes@2", "serving", "100 %")]
    assert "deployment 2 (shapes@2, serving)" in noria("promote", "t2i", status=2)


def test_status_in_json_has_evidence_and_verdict(noria, store):
    increases = ("--max-error-increase", "5 %", "--max-rejection-increase", "100")
    judge = ("--min-responses", "20", *increases, "--guard", "image_brightness")
    noria("deploy", "a", "shapes@1", "--canary", "10%", *judge)
    mount(store)
    noria("deploy", "b", "shapes@1")
    first, second = map(json.loads, noria("status", "--json").splitlines())
    assert (first["endpoint"], first["serving"], first["unfinished"]["traffic"]) == ("a", None, 0.1)
    assert (first["verdict"]["outcome"], len(first["verdict"]["interval"])) == ("inconclusive", 2)
    settings = first["unfinished"]["judge_settings"]
    names = ("min_responses", "max_error_increase", "max_rejection_increase")
    assert [settings[name] for name in names] == [20, 0.05, 1.0]
    assert settings["guards"] == ["image_brightness"]
    assert "image_brightness: 0 of 200 values" in first["verdict"]["reason"]
    assert "--guard: guards are" in noria("deploy", "c", "shapes", "--canary", "5", "--guard", "errors", status=2)
    assert (second["unfinished"]["state"], second["verdict"]) == ("pending", None)
    assert json.loads(noria("status", "b", "--json"))["unfinished"]["version"]["number"] == 1


def test_a_deployment_says_what_its_endpoint_follows(noria, store):
    begun = "shapes@2 is to be deployed to t2i, for all requests."
    assert noria("deploy", "t2i", "shapes", "--follow").startswith(f"t2i now follows shapes; {begun}")
    mount(store)
    assert noria("deploy", "t2i", "shapes") == "t2i no longer follows shapes; shapes@2 serves t2i already\n"
    assert noria("deploy", "t2i", "shapes", "--follow") == "t2i now follows shapes; shapes@2 serves t2i already\n"
    printed = noria("deploy", "t2i", "shapes@1", "--canary", "5")
    assert printed.startswith("t2i no longer follows shapes; shapes@1 is to be deployed to t2i")


def test_a_rollback_says_what_serves_then(noria, store):
    for version in ("shapes@1", "shapes@2"):
        noria("deploy", "t2i", version)
        mount(store)
    noria("deploy", "t2i", "shapes@1", "--canary", "5")
    assert noria("rollback", "t2i") == "shapes@1 gets no requests to t2i\n"
    assert "was rolled back already; shapes@2 serves t2i." in noria("rollback", "t2i", status=2)
    assert noria("deploy", "t2i", "shapes@2") == "nothing changes: shapes@2 serves t2i already\n"
    noria("deploy", "t2i", "shapes@1")
    mount(store)
    assert noria("rollback", "t2i", "--why", "bad").startswith("shapes@2 serves t2i again as soon as a server has")
    mount(store)
    assert [row[:2] for row in rows(noria("status"))] == [("t2i", "shapes@2")]
    noria("deploy", "other", "shapes@1")
    mount(store)
    printed = noria("rollback", "other", "--why", "no")
    assert printed == (
        "shapes@1 serves other no more, and nothing else is deployed there: requests get the model of this name in a "
        "server's configuration, or 404\n"
    )
    assert [row[:2] for row in rows(noria("status"))] == [("t2i", "shapes@2")]  # `other` is as if it never was
    assert len(noria("status", "--json").splitlines()) == 2  # as GET /v1/deployments has it
    status = noria("status", "other")
    assert [row[:4] for row in rows(status)] == [("other", "(configuration)", "if configured", "100 %")]
    assert "latest of other: shapes@1 was rolled back by " in status


def test_undeploy_takes_away_all_that_an_endpoint_has(noria, store):
    for version in ("shapes@1", "shapes@2"):
        noria("deploy", "t2i", version)
        mount(store)
    noria("deploy", "t2i", "shapes", "--canary", "5", "--follow")
    mount(store)
    assert noria("undeploy", "t2i", "--why", "moved").startswith("shapes@2 serves t2i no more, and nothing else is")
    assert store.routes().routes == ()
    assert store.followed() == {}
    assert noria("status").startswith("nothing is deployed")
    assert noria("status", "t2i").count("rolled back") >= 2
    assert "nothing is deployed to t2i any more" in noria("undeploy", "t2i", status=2)
    noria("deploy", "t2i", "shapes", "--follow")
    noria("rollback", "t2i")
    assert "t2i followed shapes, and does not any more" in noria("undeploy", "t2i", "--why", "moved again")
    status = noria("status", "t2i")
    assert re.search(r" shapes@2 rolled back  by \w+: undeployed: moved\n", status)
    assert re.search(
        r" t2i changes what it follows  by \w+: follows nothing any more, not shapes: moved again\n", status
    )
    assert store.followed() == {}
    assert "nothing was ever deployed to the endpoint 'tti'. Did you mean 't2i'?" in noria("undeploy", "tti", status=2)


def test_commands_name_the_registry_and_whether_a_server_follows_it(store, tmp_path, capsys, monkeypatch):
    for name in ("_FAST_S", "_FOLLOW_S"):
        monkeypatch.setattr(f"noria.cli.registry.deployments.{name}", 0.0)

    def said(*arguments, status=0):
        assert main([*arguments, "--data-dir", str(tmp_path)]) == status
        return capsys.readouterr().err

    place = tmp_path / "registry.sqlite"
    assert f"registry {place}: no server on this machine follows it" in said("deploy", "t2i", "shapes@1")
    assert said("status") == ""
    code = (
        "import sys; from noria.registry import watching; from sqlalchemy.engine.url import URL;"
        "watching.watch(URL.create('sqlite', database=sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        assert f"registry {place}: a server follows it" in said("undeploy", "t2i")
        server.kill()
    assert "no server on this machine follows it" in said("deploy", "t2i", "shapes@1")
    assert f"(Registry: {place}.)" in said("promote", "other", status=2)


READING = ("status", "models list", "models show a", "trace a", "registry check", "registry backup FILE")


@pytest.mark.parametrize("command", READING)
def test_reading_creates_no_registry_and_says_that_there_is_none(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status = main([*command.split(), "--data-dir", str(tmp_path / "none")])
    assert status == (0 if command in ("status", "models list") else 2)
    printed = capsys.readouterr().err
    assert str(tmp_path / "none") in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("t2i", "shapes", "--canary", "0"), "--canary is '0'; allowed are per cents above 0"),
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
    monkeypatch.setattr("noria.cli.registry.deployments._POLL_S", 0.05)

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
        (fail, (), 1, "shapes@2 could not be loaded by server: no space left\n"),
        (load, (), 0, "shapes@2 serves all requests to t2i\n"),
        (load, (), 0, "nothing changes: shapes@2 serves t2i already\n"),
        (load, ("--canary", "5"), 0, f"{CANARY}\n"),
    ]:
        stop = server(act)
        try:
            assert noria("deploy", "t2i", "shapes", "--wait", "600", *arguments, status=status) == words
        finally:
            stop()
    noria("rollback", "t2i")
    ramp = ("--ramp", "5,25,50,100 every 10m")
    words = "5 % of the requests to t2i: step 1 of 4, ramping; planned for 5, 25, 50, 100 % of the requests, 600 s each"
    stop = server(load)
    try:
        assert noria("deploy", "t2i", "shapes@1", "--wait", "2", *ramp) == f"shapes@1 gets {words}\n"
    finally:
        stop()
    noria("rollback", "t2i")
    monkeypatch.setattr("noria.cli.registry.deployments._FAST_S", 60.0)  # without --wait, too, if it fails fast
    stop = server(fail)
    try:
        printed = noria("deploy", "t2i", "shapes@1", status=1)
        assert printed == "shapes@1 could not be loaded by server: no space left\n"
    finally:
        stop()


def test_waiting_in_vain_says_so(noria, capsys):
    printed = noria("deploy", "t2i", "shapes", "--wait", "0.1", status=1)
    assert printed == (
        "shapes@2 is still not loaded for t2i after 0.1 s. A server that follows this registry goes on to load it: "
        "noria status t2i\n"
    )
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
    assert (
        "for copies of requests: 20 % for 600 s, then for 5 % of the requests, until it is promoted or rolled back."
        in noria("deploy", "t2i", "shapes", "--shadow", "20% for 10m", "--canary", "5%")
    )
    shadow = mount(store)
    counts = ShadowCounts(num_answers=40, num_errors=1, num_timed=39, shadow_s=6.0, control_s=3.0)
    store.step_shadow(shadow.id, "server", ShadowState(counts, 9.0, 19.0), Change(19.0, "server"))
    printed = noria("status", "t2i")
    assert "shadow of t2i: 40 copies answered, 0 dropped; errors 1, of the control 0; computing time 2.00" in printed
    assert noria("promote", "t2i") == f"{CANARY}\n"
    assert "shadow of" not in noria("status", "t2i")
    assert "--shadow is 0 %; a shadow gets" in noria("deploy", "other", "shapes", "--shadow", "0%", status=2)
