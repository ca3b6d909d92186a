"""KubeRay's manifests: their fields are known, and the settings, names, ports and times in them fit Noria."""

import copy
import importlib
import re

import pytest
import yaml
from container import DEPLOY, ROOT, image, is_pinned
from custom_resources import check

from noria.settings import list_settings, load

FOLDER = DEPLOY / "kuberay"
PATCH = FOLDER / "head-fault-tolerance.yaml"
MANIFESTS = {
    f"{document['kind']} {document['metadata']['name']}": document
    for file in sorted(FOLDER.glob("*.yaml"))
    if file not in (PATCH, FOLDER / "kustomization.yaml")
    for document in yaml.safe_load_all(file.read_text())
}
SERVICE = "RayService noria-ray"
REPLICA_STOP_S = 10.0  # what a replica may take to stop after frontend.drain_s
FRONTEND_CPUS = 0.1


def service(manifests):
    return manifests[SERVICE]["spec"]


def cluster(manifests):
    return service(manifests)["rayClusterConfig"]


def workers(manifests):
    return cluster(manifests)["workerGroupSpecs"]


def pods(manifests):
    return [group["template"] for group in (cluster(manifests)["headGroupSpec"], *workers(manifests))]


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


def variables(pod):
    return {each["name"]: each["value"] for each in container(pod)["env"] if "value" in each}


def ports(pod):
    return {each["name"]: each["containerPort"] for each in container(pod)["ports"]}


def serve_config(manifests):
    return yaml.safe_load(service(manifests)["serveConfigV2"])


def application(manifests):
    (found,) = serve_config(manifests)["applications"]
    return found


def settings(manifests):
    """The configuration with which the application would be built in a worker. Raises for unknown settings."""
    args = application(manifests)["args"]
    assert set(args) <= {setting.key for setting in list_settings()}
    return load(None, image().environment | variables(pods(manifests)[1]), args)


def check_application(manifests):
    module, _, attribute = application(manifests)["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    config = settings(manifests)
    assert len(config.engine.devices) == 1 and not config.endpoints
    assert config.jobs.database.startswith("postgresql://")  # one that all front ends reach
    assert "://" in config.jobs.results
    assert "auto" not in (config.jobs.webhook_secret_file, config.frontend.api_keys_file)


def check_ports(manifests):
    options = serve_config(manifests)["http_options"]
    assert options["host"] == settings(manifests).frontend.host == "0.0.0.0"
    for pod in pods(manifests):
        assert ports(pod)["serve"] == options["port"]
    for pod in pods(manifests)[1:]:
        assert container(pod)["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    # KubeRay's name for the Service
    assert f"{manifests[SERVICE]['metadata']['name']}-serve-svc" in settings(manifests).frontend.allowed_hosts


def check_engines(manifests):
    """The groups have room for all engines and front ends, and a Ray of the image's version."""
    config = settings(manifests)
    _, most = map(int, config.cluster.engine_replicas.split("-"))
    assert sum(group["maxReplicas"] for group in workers(manifests)) >= most
    for group in workers(manifests):
        resources = container(group["template"])["resources"]
        assert resources["limits"]["nvidia.com/gpu"] == "1"
        assert float(resources["requests"]["cpu"]) >= config.cluster.engine_cpus + FRONTEND_CPUS
    assert cluster(manifests)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster(manifests)["rayVersion"] == pinned[1]


def check_times(manifests):
    """A replica has enough time to finish, a node to drain, and an old cluster to answer what it has accepted."""
    frontend = settings(manifests).frontend
    for pod in pods(manifests):
        drain_s = float(variables(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert drain_s >= 2 * (frontend.drain_s + REPLICA_STOP_S)  # the half of it for the replacement to start
        pre_stop = container(pod).get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
        needed_s = float(pre_stop["exec"]["command"][1]) + drain_s + REPLICA_STOP_S
        assert pod["spec"]["terminationGracePeriodSeconds"] >= needed_s
    assert service(manifests)["rayClusterDeletionDelaySeconds"] >= frontend.request_timeout_s


def check_spot(manifests):
    """Workers on spot nodes are those of other nodes, which are taken second."""
    on_demand, spot = copy.deepcopy(workers(manifests))
    assert spot["priority"] > on_demand.get("priority", 0)
    tolerated = spot["template"]["spec"].pop("tolerations")
    assert spot["template"]["spec"].pop("nodeSelector")
    common = on_demand["template"]["spec"].pop("tolerations")
    assert len(tolerated) > len(common) and all(each in tolerated for each in common)
    assert spot["template"] == on_demand["template"]
    assert cluster(manifests)["autoscalerOptions"]["version"] == "v2"  # v1 has no priorities


def check_selectors(manifests):
    labels = [pod["metadata"]["labels"].items() for pod in pods(manifests)]

    def matched(selector):
        return [selector["matchLabels"].items() <= each for each in labels]

    budget = manifests["PodDisruptionBudget noria-ray"]["spec"]
    assert matched(budget["selector"]) == [False, True, True]
    assert budget["minAvailable"] < sum(group["minReplicas"] for group in workers(manifests))
    assert "maxUnavailable" not in budget  # a RayCluster has no scale subresource
    policy, head = (manifests[f"NetworkPolicy {name}"]["spec"] for name in ("noria-ray", "noria-ray-head"))
    assert matched(policy["podSelector"]) == [True, True, True]
    assert {"from": [{"podSelector": policy["podSelector"]}]} in policy["ingress"]  # engines' ports are free ones
    assert {"to": [{"podSelector": policy["podSelector"]}]} in policy["egress"]
    assert matched(head["podSelector"]) == [True, False, False]
    found = [port for each in (policy, head) for rule in each["ingress"] for port in rule.get("ports", ())]
    named = {port["port"] for port in found if "endPort" not in port}  # replicas' metrics are at free ones
    assert named == {"serve", "metrics", "dashboard"}
    assert named <= set(ports(pods(manifests)[0]))
    assert {"serve", "metrics"} <= set(ports(pods(manifests)[1]))


def check_security(manifests):
    assert cluster(manifests)["authOptions"] == {"mode": "token"}
    for pod in pods(manifests):
        user = pod["spec"]["securityContext"]
        assert user["runAsNonRoot"] and f"{user['runAsUser']}:{user['runAsGroup']}" == image().one("USER")
        own = container(pod)["securityContext"]
        assert not own["allowPrivilegeEscalation"] and own["capabilities"] == {"drop": ["ALL"]}
        assert is_pinned(container(pod)["image"])
    assert all(pod["spec"]["automountServiceAccountToken"] is False for pod in pods(manifests)[1:])


def check_volumes(manifests):
    """Files of the settings are mounted, and what must be there before is in the documents."""
    config = settings(manifests)
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    for pod in pods(manifests):
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        mounts = {each["mountPath"]: each["name"] for each in container(pod)["volumeMounts"]}
        assert set(mounts.values()) == set(volumes)
        assert {config.data_dir, "/tmp"} <= set(mounts)
        for file in (config.model, config.frontend.api_keys_file, config.jobs.webhook_secret_file):
            assert file.rpartition("/")[0] in mounts, file
        needed = [each["valueFrom"]["secretKeyRef"]["name"] for each in container(pod)["env"] if "valueFrom" in each]
        for each in volumes.values():
            needed += [each["secret"]["secretName"]] if "secret" in each else []
            needed += [each["persistentVolumeClaim"]["claimName"]] if "persistentVolumeClaim" in each else []
        assert [name for name in needed if f"`{name}`" not in text] == []


CHECKS = (
    check_application,
    check_ports,
    check_engines,
    check_times,
    check_spot,
    check_selectors,
    check_security,
    check_volumes,
)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_fields_of_each_manifest_are_known(name):
    check(MANIFESTS[name])


def test_the_patch_for_the_heads_end_makes_a_valid_service():
    patched, patch = copy.deepcopy(MANIFESTS[SERVICE]), yaml.safe_load(PATCH.read_text())
    assert {key: patch[key] for key in ("apiVersion", "kind")}.items() <= patched.items()
    assert patch["metadata"]["name"] == patched["metadata"]["name"]
    cluster({SERVICE: patched}).update(patch["spec"]["rayClusterConfig"])
    check(patched)
    assert f"#   - path: {PATCH.name}" in (FOLDER / "kustomization.yaml").read_text()


def test_kustomization_names_every_file_but_the_patch():
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {file.name for file in FOLDER.glob("*.yaml")} - {PATCH.name, "kustomization.yaml"}
    assert set(kustomization["resources"]) == files


@pytest.mark.parametrize("consistent", CHECKS)
def test_the_manifests_are_consistent(consistent):
    consistent(MANIFESTS)


_CLUSTER = (SERVICE, "spec", "rayClusterConfig")
_GPU, _SPOT = ((*_CLUSTER, "workerGroupSpecs", number) for number in (0, 1))
