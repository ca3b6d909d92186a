"""KEDA's autoscaler of the Deployment: its fields are known, and it scales by a metric that exists."""

import promql_parser
import pytest
import yaml
from container import DEPLOY
from custom_resources import check

from noria.dashboards.promql import metrics_in
from noria.observe.metrics.declarations import DECLARATIONS


def read(path):
    return yaml.safe_load((DEPLOY / path).read_text())


SCALED_OBJECT = read("keda/scaledobject.yaml")
HPA, PODS = read("kubernetes/hpa.yaml"), read("kubernetes/podmonitor.yaml")


def check_like_hpa(manifest):
    """It scales the same Deployment between the same numbers at the same rate as hpa.yaml, which it replaces."""
    spec, hpa = manifest["spec"], HPA["spec"]
    (metric,) = hpa["metrics"]
    assert spec["scaleTargetRef"] == hpa["scaleTargetRef"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert spec["triggers"][0]["metadata"]["threshold"] == metric["pods"]["target"]["averageValue"]


def check_query(manifest):
    (trigger,) = manifest["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    promql_parser.parse(query)
    (metric,) = metrics_in(query)
    assert DECLARATIONS[metric].kind == "gauge"
    assert f'job="{PODS["metadata"]["labels"][PODS["spec"]["jobLabel"]]}"' in query
    assert trigger["metadata"]["ignoreNullValues"] == "false"  # pods without an engine are not idle
    (scrapes,) = PODS["spec"]["podMetricsEndpoints"]
    assert f"{manifest['spec']['pollingInterval']}s" == scrapes["interval"]


def test_its_fields_are_known():
    check(SCALED_OBJECT)


@pytest.mark.parametrize("consistent", [check_like_hpa, check_query])
def test_it_is_consistent_with_the_deployments_files(consistent):
    consistent(SCALED_OBJECT)


def test_kustomization_takes_the_deployments_files_without_their_autoscaler():
    kustomization = read("keda/kustomization.yaml")
    assert kustomization["resources"] == ["../kubernetes", "scaledobject.yaml"]
    (patch,) = kustomization["patches"]
    deleted = yaml.safe_load(patch["patch"])
    assert deleted.pop("$patch") == "delete"
    assert deleted.pop("metadata") == {"name": HPA["metadata"]["name"]}
    assert deleted == {key: HPA[key] for key in ("apiVersion", "kind")}
