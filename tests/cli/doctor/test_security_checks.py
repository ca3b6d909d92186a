"""`noria doctor --security`: what each setting, file and address opens, and the exit status."""

import os

import pytest

from certificates import make_certificate
from noria.cli.doctor.security_checks import check_security
from noria.cli.main import main
from noria.config import Config, EndpointConfig
from noria.frontend.access.api_keys import generate_key
from noria.settings import load


@pytest.fixture
def findings_for(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 10001)

    def check(environment=None, **flags):
        keys = {name.replace("__", "."): value for name, value in flags.items()}
        config = load(None, {}, {"data_dir": str(tmp_path / "data")} | keys)
        found = list(check_security(config, environment or {}))
        return {finding.topic: (finding.verdict, finding.text) for finding in found}

    return check


@pytest.fixture
def keys_file(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text("".join(generate_key(name)[1] for name in ("alice", "bob")))
    file.chmod(0o600)
    return file


@pytest.fixture
def certificate(tmp_path):
    made = make_certificate(tmp_path)
    return {"frontend__ssl_certfile": str(made.certfile), "frontend__ssl_keyfile": str(made.keyfile)}


def test_by_default_nothing_is_open_without_need(findings_for):
    found = findings_for()
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    assert "127.0.0.1, port 8000: reached from this machine" in found["listener"][1]


def test_a_server_for_all_networks_with_nothing_else_set_warns_of_each_thing(findings_for):
    found = findings_for(frontend__host="0.0.0.0")
    warned = {topic for topic, (verdict, _) in found.items() if verdict == "warn"}
    assert warned == {"listener", "keys", "metrics", "live"}


def test_a_server_for_all_networks_may_be_without_warnings(findings_for, keys_file, certificate):
    keys_file.write_text(keys_file.read_text().replace("\nsha256", "\nimages_per_minute = 60\nsha256"))
    found = findings_for(
        frontend__host="0.0.0.0",
        frontend__api_keys_file=str(keys_file),
        frontend__metrics_address="127.0.0.1:9464",
        **certificate,
    )
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    assert "with TLS" in found["listener"][1]
    assert "without one: the pages" in found["keys"][1]


CASES = [
    ("listener", "fail", {"frontend__host": "no-such-host.invalid"}, "is no address of this machine"),
    ("listener", "ok", {"frontend__uds": "/run/noria.sock"}, "its owner and group"),
    ("listener", "fail", {"frontend__uds": "noria.sock"}, "allowed is an absolute path"),
    ("gRPC", "ok", {"frontend__grpc_port": "8001"}, "reached from this machine, without TLS, without a key"),
    ("gRPC", "warn", {"frontend__grpc_port": "8001", "frontend__host": "0.0.0.0"}, "all networks of this machine"),
    (
        "gRPC",
        "warn",
        {"frontend__grpc_port": "8001", "frontend__host": "0.0.0.0", "frontend__uds": "/run/n.sock"},
        "all networks",
    ),
    ("TLS", "fail", {"frontend__ssl_certfile": "/nowhere.pem"}, "No such file"),
    ("keys", "fail", {"frontend__api_keys_file": "/nowhere.toml"}, "cannot be read"),
    ("metrics", "warn", {"frontend__metrics_address": "0.0.0.0:9464"}, "the monitoring's network"),
    ("metrics", "ok", {"frontend__metrics_address": "10.0.0.1:9464"}, "private networks"),
    ("metrics", "warn", {"frontend__metrics_address": "8.8.8.8:9464"}, "the internet"),
    ("hosts", "warn", {"frontend__allowed_hosts": "*"}, "DNS rebinding"),
    ("hosts", "fail", {"frontend__allowed_hosts": "http://x"}, "Allowed are names"),
    ("proxies", "warn", {"frontend__trusted_proxies": "10.0.0.0/8,0.0.0.0/0"}, "everybody in 0.0.0.0/0 may claim"),
    ("proxies", "fail", {"frontend__trusted_proxies": "x"}, "Allowed are addresses"),
    ("live", "warn", {"frontend__host": "0.0.0.0", "frontend__live": "full"}, "thumbnails of all images"),
    ("jobs", "warn", {"jobs__database": "postgresql://noria@db.example/noria"}, "sslmode=verify-full"),
    ("jobs", "ok", {"jobs__database": "postgresql://noria@db.example/noria?sslmode=verify-full"}, "verify-full"),
    ("jobs", "ok", {"jobs__database": "postgresql:///noria?host=/var/run/postgresql"}, "on this machine"),
    ("secret", "fail", {"jobs__database": "postgresql:///noria"}, "must sign alike"),
    ("webhooks", "warn", {"jobs__webhook_allow_private": "true"}, "its own network"),
    ("secret", "fail", {"jobs__webhook_secret_file": "/nowhere"}, "cannot be looked at"),
    ("secret", "ok", {}, "does not exist yet"),
    ("results", "ok", {"jobs__results": "s3://bucket/folder"}, "s3://bucket"),
    ("limits", "warn", {"frontend__max_body_bytes": "1000000000"}, "frontend.max_body_bytes is 1e+09"),
    ("registry", "ok", {}, "for every user of this machine"),
    ("registry", "warn", {"registry__database": "postgresql://noria@db.example/noria"}, "to registry.database"),
    ("log", "warn", {"log_prompts": "full"}, "has all prompts"),
]


@pytest.mark.parametrize(("topic", "verdict", "flags", "words"), CASES)
def test_each_opening_is_found(topic, verdict, flags, words, findings_for):
    found = findings_for(**flags)
    assert found[topic][0] == verdict and words in found[topic][1]


@pytest.mark.parametrize(
    ("topic", "setting", "name", "mode", "verdict"),
    [
        ("data", "data_dir", "", 0o755, "warn"),
        ("data", "data_dir", "", 0o700, "ok"),
        ("results", "jobs__results", "results", 0o750, "warn"),
        ("jobs", "jobs__database", "jobs.sqlite", 0o644, "warn"),
        ("secret", "jobs__webhook_secret_file", "secret", 0o640, "warn"),
        ("secret", "jobs__webhook_secret_file", "secret", 0o600, "ok"),
    ],
)
def test_modes_of_files_and_folders_are_looked_at(topic, setting, name, mode, verdict, findings_for, tmp_path):
    folder = tmp_path / "stored"
    folder.mkdir()
    path = folder / name
    if name:
        path.touch()
    path.chmod(mode)
    value = f"sqlite:///{path}" if setting == "jobs__database" else str(path)
    found, text = findings_for(**{setting: value})[topic]
    assert found == verdict
    assert verdict == "ok" or f"mode {mode:o}" in text or f"mode is {mode:o}" in text


def test_the_automatic_webhook_secret_is_that_of_the_servers_environment(findings_for, tmp_path):
    secret = tmp_path / "noria" / "webhook-secret"
    secret.parent.mkdir()
    secret.touch(0o644)
    found = findings_for({"XDG_DATA_HOME": str(tmp_path)}, data_dir="auto")
    assert found["secret"][0] == "warn" and f"others may read {secret}" in found["secret"][1]


def test_keys_that_others_may_add_and_keys_without_quotas_are_said(findings_for, keys_file):
    keys_file.chmod(0o666)
    found = findings_for(frontend__api_keys_file=str(keys_file))
    assert found["keys"] == ("warn", f"others may add keys to {keys_file}, whose mode is 666; chmod go-w {keys_file}")
    assert found["quotas"][0] == "warn" and "none for alice, bob" in found["quotas"][1]


def test_keys_that_may_deploy_are_named(findings_for, keys_file):
    keys_file.write_text(keys_file.read_text().replace("\nsha256", '\nscopes = ["lineage", "deploy"]\nsha256', 1))
    assert findings_for(frontend__api_keys_file=str(keys_file))["registry"][1].endswith("lineage: alice; deploy: alice")


@pytest.mark.parametrize(("mode", "verdict"), [(0o600, "ok"), (0o666, "fail")])
def test_code_of_endpoints_is_looked_at_and_not_run(tmp_path, mode, verdict):
    file = tmp_path / "code.py"
    file.write_text("raise AssertionError")
    file.chmod(mode)
    config = Config(data_dir=str(tmp_path / "data"), endpoints=(EndpointConfig("mine", f"{file}:Mine"),))
    (found,) = (each for each in check_security(config, {}) if each.topic == "code")
    assert found.verdict == verdict and str(file) in found.text


def test_a_key_of_the_certificate_that_everybody_may_read_is_said(findings_for, certificate):
    os.chmod(certificate["frontend__ssl_keyfile"], 0o644)
    assert findings_for(**certificate)["TLS"][0] == "warn"


def test_the_exit_status_is_1_while_a_warning_stands(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    arguments = ["doctor", "--security", "--data-dir", str(tmp_path / "data")]
    assert main(arguments) == 0
    assert "Nothing is open without need." in capsys.readouterr().out
    assert main([*arguments, "--allowed-hosts", "*"]) == 1
    output = capsys.readouterr().out
    assert "warn  hosts" in output and "1 of 13 need a decision." in output


def test_root_is_said(findings_for, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert findings_for()["user"][0] == "warn"
