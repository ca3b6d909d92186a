"""compose.yaml conforms to the compose specification, and the files, settings, routes and services in it exist."""

import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest
import yaml
from container import DEPLOY, ROOT, STOP_S, configuration, image, is_pinned, stages

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SOURCES = [
    source
    for file in sorted((DEPLOY / "grafana" / "provisioning" / "datasources").glob("*.yaml"))
    for source in yaml.safe_load(file.read_text())["datasources"]
]
CHECK = [pathlib.Path(sys.executable).parent / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]


def by_default(text):
    """Return `text` with the default values of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def mounts(service):
    """Return (host path or volume name, container path) of each mount."""
    return [tuple(volume.split(":")[:2]) for volume in service.get("volumes", [])]


def check_images(compose):
    for name, service in compose["services"].items():
        assert is_pinned(service["image"]), f"{name}: {service['image']}"
        if build := service.get("build"):
            file = DEPLOY / build["context"] / build["dockerfile"]
            declared = {arg.partition("=")[0] for stage in stages(file.read_text()) for arg in stage.all("ARG")}
            assert set(build.get("args", ())) <= declared, name


def check_mounts(compose):
    for name, service in compose["services"].items():
        for source, _ in mounts(service):
            if source.startswith("."):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            elif not source.startswith("/"):  # a path of the host; else a volume
                assert source in compose["volumes"], f"{name}: {source}"
    used = {source for service in compose["services"].values() for source, _ in mounts(service)}
    assert set(compose["volumes"]) <= used


def check_paths(compose):
    """Files of mounted folders in commands and variables exist."""
    for name, service in compose["services"].items():
        texts = [*service.get("command", ()), *service.get("environment", {}).values()]
        for text in texts:
            for source, target in mounts(service):
                if source.startswith("./") and (found := re.search(rf"{re.escape(target)}/(\S+)", text)):
                    assert (DEPLOY / source / found[1]).exists(), f"{name}: {text}"


def check_noria(compose):
    for name in ("noria", "noria-gpu"):
        service = compose["services"][name]
        environment = {key: by_default(value) for key, value in service["environment"].items()}
        config = configuration(service.get("command", image().command[1:]), environment)
        assert service["ports"] == [f"127.0.0.1:8000:{config.frontend.port}"]
        assert "user" not in service  # the image's, which is not root
        assert config.data_dir in [target for _, target in mounts(service)]  # all else is read-only
        assert int(service["stop_grace_period"].removesuffix("s")) >= config.frontend.drain_s + STOP_S


def check_targets(compose):
    """The targets and alert managers of Prometheus are services."""
    names = set(compose["services"])
    for service in compose["services"].values():
        names |= set(service.get("networks", {}).get("default", {}).get("aliases", ()))
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    sections = [*config["scrape_configs"], *config["alerting"]["alertmanagers"]]
    targets = [
        target for section in sections for each in section.get("static_configs", ()) for target in each["targets"]
    ]
    targets += [
        f"{name}:{each['port']}"
        for section in sections
        for each in section.get("dns_sd_configs", ())
        for name in each["names"]
    ]
    assert len(targets) == 5
    assert {target.partition(":")[0] for target in targets} <= names
    assert f"noria:{configuration(['serve'], {}).frontend.port}" in targets
    folder = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/noria.yaml").read_text())
    assert folder["providers"][0]["options"]["path"] in [target for _, target in mounts(compose["services"]["grafana"])]


def check_sources(compose, sources):
    """Grafana's data sources are services, and exemplars link to a data source for traces."""
    by_uid = {source["uid"]: source for source in sources}
    assert len(by_uid) == len(sources)
    assert [source["type"] for source in sources if source.get("isDefault")] == ["prometheus"]
    for source in sources:
        url = urllib.parse.urlsplit(source["url"])
        assert url.hostname == source["type"] and url.hostname in compose["services"]
        assert url.port == {"prometheus": 9090, "jaeger": 16686}[url.hostname]
        for destination in source.get("jsonData", {}).get("exemplarTraceIdDestinations", ()):
            assert destination["name"] == "trace_id"  # as `frontend/services/images/generation.py` labels it
            assert by_uid[destination["datasourceUid"]]["type"] == "jaeger"


def check_exposure(compose):
    """Ports are published on the loopback address only, and each service has a profile."""
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert set(service["profiles"]) <= {"cpu", "gpu", "traces"}, name
        for other in service.get("depends_on", ()):
            assert other in compose["services"], name


def check_rights(compose):
    """Logs and memory are limited, rights are dropped where a service needs none, and no password has a default."""
    for name, service in compose["services"].items():
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        assert service["mem_limit"] and service["pids_limit"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name not in ("cadvisor", "dcgm-exporter"):  # which read what only root may
            assert service["read_only"] and service["cap_drop"] == ["ALL"] and "privileged" not in service, name
        assert all("size=" in mount for mount in service.get("tmpfs", ())), name
        for key, value in service.get("environment", {}).items():
            if "PASSWORD" in key:
                assert re.fullmatch(r"\$\{\w+:\?.+\}", value), f"{name}: {key}"


CHECKS = (check_images, check_mounts, check_paths, check_noria, check_targets, check_exposure, check_rights)


def test_grafanas_data_sources_exist_and_exemplars_link_to_traces():
    check_sources(COMPOSE, SOURCES)
    (metrics,) = (source for source in SOURCES if source["type"] == "prometheus")
    assert metrics["jsonData"]["exemplarTraceIdDestinations"]


@pytest.mark.parametrize("check", CHECKS)
def test_names_in_compose_exist(check):
    check(COMPOSE)


def test_it_conforms_to_the_specification():
    done = subprocess.run([*CHECK, DEPLOY / "compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["noria", "noria-gpu"])
def test_devices_and_keys_are_set_from_outside(name):
    given = {"NORIA_ENGINE_DEVICES": "cuda:0,cuda:1", "NORIA_FRONTEND_API_KEYS_FILE": "/keys/keys.toml"}
    service = COMPOSE["services"][name]
    environment = {
        key: given[key] if f"${{{key}:-" in value and key in given else by_default(value)
        for key, value in service["environment"].items()
    }
    config = configuration(["serve"], environment)
    assert config.engine.devices == ("cuda:0", "cuda:1")
    assert config.frontend.api_keys_file == "/keys/keys.toml"
    assert "/keys" in [target for _, target in mounts(service)]


def test_the_docs_and_the_file_name_the_profiles():
    for file in (DEPLOY / "compose.yaml", ROOT / "docs" / "operations.md"):
        assert re.search(r"--profile (cpu|gpu)", file.read_text(encoding="utf-8"))
