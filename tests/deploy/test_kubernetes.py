"""The Kubernetes manifests conform to Kubernetes' schemas, and the settings, routes and names in them exist."""

import ipaddress

import kubernetes_validate
import pytest
import yaml
from container import DEPLOY, STOP_S, configuration, image, is_pinned, probed_paths

from noria.observe.metrics.declarations import DECLARATIONS

FOLDER = DEPLOY / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
NO_SCHEMA = {"Kustomization", "PodMonitor"}  # kustomize's and the Prometheus operator's
MANIFESTS = {document["kind"]: document for file in FILES for document in yaml.safe_load_all(file.read_text())}


def schema_of(manifest):
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]


def container(manifests):
    (found,) = pod(manifests)["spec"]["containers"]
    return found


def set_up(manifests):
    environment = {each["name"]: each["value"] for each in container(manifests).get("env", ())}
    return configuration(container(manifests)["args"], environment)


def check_labels(manifests):
    """All selectors match the Deployment's pods."""
    labels = pod(manifests)["metadata"]["labels"].items()
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert manifests[kind]["spec"]["selector"]["matchLabels"].items() <= labels, kind
    assert manifests["Service"]["spec"]["selector"].items() <= labels
    assert (manifests["PodMonitor"]["spec"]["jobLabel"], "noria") in labels  # alerts use up{job="noria"}
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    deployment = manifests["Deployment"]
    assert target == {key: deployment[key] for key in ("apiVersion", "kind")} | {"name": deployment["metadata"]["name"]}


def check_ports(manifests):
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    assert ports["http"] == set_up(manifests).frontend.port
    assert set_up(manifests).frontend.host == "0.0.0.0"
    assert {port["targetPort"] for port in manifests["Service"]["spec"]["ports"]} <= set(ports)
    assert {end["port"] for end in manifests["PodMonitor"]["spec"]["podMetricsEndpoints"]} == {"metrics"}
    assert set_up(manifests).frontend.metrics_address == f"0.0.0.0:{ports['metrics']}"


def check_probes(manifests):
    probes = [container(manifests)[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} == {"http"}
    asked = [probe["path"] for probe in probes] + [
        end["path"] for end in manifests["PodMonitor"]["spec"]["podMetricsEndpoints"]
    ]
    assert set(asked) <= probed_paths()
    assert container(manifests)["livenessProbe"]["httpGet"]["path"] != "/readyz"  # a pod that loads is not dead
    for name in ("startup", "readiness", "liveness"):
        assert container(manifests)[f"{name}Probe"].get("timeoutSeconds", 1) >= 5, name  # a busy front end answers late


def check_times(manifests):
    """A pod has enough time to load its model and to stop."""
    config, startup = set_up(manifests), container(manifests)["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= config.engine.start_timeout_s
    pre_stop_s = float(container(manifests)["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = pre_stop_s + config.frontend.drain_s + STOP_S
    assert pod(manifests)["spec"]["terminationGracePeriodSeconds"] >= needed


def check_image(manifests):
    assert is_pinned(container(manifests)["image"])
    security, own = pod(manifests)["spec"]["securityContext"], container(manifests)["securityContext"]
    assert security["runAsNonRoot"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == image().one("USER")
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}


def check_network(manifests):
    """Each port has its callers; pods reach names and public addresses, and no token of the cluster is in them."""
    assert pod(manifests)["spec"]["automountServiceAccountToken"] is False
    policy = manifests["NetworkPolicy"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    callers = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    assert set(callers) == {port["name"] for port in container(manifests)["ports"]}
    assert all(callers.values())  # an empty list is everybody
    assert {"podSelector": {}} not in callers["metrics"]
    reached = [peer["ipBlock"] for rule in policy["egress"] for peer in rule["to"] if "ipBlock" in peer]
    for address in ("10.0.0.1", "169.254.169.254", "168.63.129.16", "192.168.1.1", "172.20.0.1", "fd00:ec2::254"):
        parsed = ipaddress.ip_address(address)
        for block in reached:
            excepted = any(parsed in ipaddress.ip_network(each) for each in block.get("except", ()))
            assert parsed not in ipaddress.ip_network(block["cidr"]) or excepted, address
    node_local_dns = {"ipBlock": {"cidr": "169.254.20.10/32"}}
    ports = [port for rule in policy["egress"] if node_local_dns in rule["to"] for port in rule["ports"]]
    assert ports == [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]


def check_volumes(manifests):
    mounted = {each["mountPath"]: each["name"] for each in container(manifests)["volumeMounts"]}
    assert set(mounted.values()) == {volume["name"] for volume in pod(manifests)["spec"]["volumes"]}
    assert {set_up(manifests).data_dir, "/tmp"} <= set(mounted)  # the rest is read-only
    assert all(volume["emptyDir"]["sizeLimit"] for volume in pod(manifests)["spec"]["volumes"])


def check_scaling(manifests):
    for metric in manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]:
        assert DECLARATIONS[metric["pods"]["metric"]["name"]].kind == "gauge"


CHECKS = (
    check_labels,
    check_ports,
    check_probes,
    check_times,
    check_image,
    check_network,
    check_volumes,
    check_scaling,
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_manifest_conforms_to_kubernetes_schema(file):
    for manifest in yaml.safe_load_all(file.read_text()):
        if manifest["kind"] in NO_SCHEMA:
            with pytest.raises(kubernetes_validate.SchemaNotFoundError):
                schema_of(manifest)
        else:
            schema_of(manifest)


def test_kustomization_names_every_file():
    assert sorted(MANIFESTS["Kustomization"]["resources"]) == [
        file.name for file in FILES if file.name != "kustomization.yaml"
    ]


@pytest.mark.parametrize("check", CHECKS)
def test_the_manifests_are_consistent(check):
    check(MANIFESTS)
