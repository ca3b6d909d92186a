"""KEDA's autoscaler of the Deployment: its fields are known, and it scales by a metric that exists."""

import msgspec
import promql_parser
import pytest
import yaml
from container import DEPLOY
from custom_resources import check
from planting import plant

from noria.dashboards.promql import metrics_in
from noria.observe.metrics.declarations import DECLARATIONS


def read(path):
    return yaml.safe_load((DEPLOY / path).read_text())


SCALED_OBJECT = read("keda/scaledobject.yaml")
HPA, PODS = read("kubernetes/hpa.yaml"), read("kubernetes/podmonitor.yaml")
TRIGGER = ("spec", "triggers", 0, "metadata")
BEHAVIOR = ("spec", "advanced", "horizontalPodAutoscalerConfig", "behavior")


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


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("spec", "minReplicas"), 1, msgspec.ValidationError),
        (("spec", "maxReplicaCount"), "8", msgspec.ValidationError),
        ((*TRIGGER, "metricName"), "backlog", msgspec.ValidationError),
        ((*TRIGGER, "threshold"), 10, msgspec.ValidationError),
    ],
)
def test_an_unknown_field_and_another_type_are_found(path, value, error):
    with pytest.raises(error):
        check(plant(SCALED_OBJECT, path, value))


@pytest.mark.parametrize("consistent", [check_like_hpa, check_query])
def test_it_is_consistent_with_the_deployments_files(consistent):
    consistent(SCALED_OBJECT)


@pytest.mark.parametrize(
    ("consistent", "path", "value", "error"),
    [
        (check_like_hpa, ("spec", "scaleTargetRef", "name"), "server", AssertionError),
        (check_like_hpa, ("spec", "maxReplicaCount"), 80, AssertionError),
        (check_like_hpa, (*BEHAVIOR, "scaleDown", "stabilizationWindowSeconds"), 0, AssertionError),
        (check_query, (*TRIGGER, "query"), 'sum(noria_backlog{job="noria"})', KeyError),
        (check_query, (*TRIGGER, "query"), 'sum(noria_backlog_seconds{job="noria"}', ValueError),
        (check_query, (*TRIGGER, "query"), "sum(noria_backlog_seconds)", AssertionError),
        (check_query, (*TRIGGER, "ignoreNullValues"), "true", AssertionError),
    ],
)
def test_a_planted_fault_is_found(consistent, path, value, error):
    with pytest.raises(error):
        consistent(plant(SCALED_OBJECT, path, value))


def test_kustomization_takes_the_deployments_files_without_their_autoscaler():
    kustomization = read("keda/kustomization.yaml")
    assert kustomization["resources"] == ["../kubernetes", "scaledobject.yaml"]
    (patch,) = kustomization["patches"]
    deleted = yaml.safe_load(patch["patch"])
    assert deleted.pop("$patch") == "delete"
    assert deleted.pop("metadata") == {"name": HPA["metadata"]["name"]}
    assert deleted == {key: HPA[key] for key in ("apiVersion", "kind")}
