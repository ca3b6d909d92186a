"""The fields of KEDA's ScaledObject (2.20) and KubeRay's RayService (1.7.0) that the manifests use.

No package of Kubernetes' schemas has these kinds, so their fields are written down here. As in the API server, unknown
fields and other types are errors. A manifest's new field is added here, after a look at the kind's schema.
"""

from typing import Any, Literal

import kubernetes_validate
import msgspec
from msgspec import Struct


class Resource(Struct, forbid_unknown_fields=True):
    """A resource that is rejected if it has a field that is not declared."""


class Metadata(Resource):
    name: str = ""
    labels: dict[str, str] = {}


class PrometheusMetadata(Resource):
    """The parameters of KEDA's scaler `prometheus`, which are strings."""

    serverAddress: str
    query: str
    threshold: str
    ignoreNullValues: Literal["true", "false"] = "true"


class Trigger(Resource):
    type: Literal["prometheus"]
    metricType: Literal["AverageValue", "Value"]
    metadata: PrometheusMetadata


class AutoscalerConfig(Resource):
    behavior: dict[str, Any]  # that of a HorizontalPodAutoscaler


class Advanced(Resource):
    horizontalPodAutoscalerConfig: AutoscalerConfig


class ScaleTarget(Resource):
    apiVersion: str
    kind: str
    name: str


class ScaledObjectSpec(Resource):
    scaleTargetRef: ScaleTarget
    minReplicaCount: int
    maxReplicaCount: int
    pollingInterval: int
    triggers: list[Trigger]
    advanced: Advanced


class ScaledObject(Resource):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


class PodTemplate(Resource):
    metadata: Metadata
    spec: dict[str, Any]  # spec of a Pod


class HeadGroup(Resource):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    groupName: str
    minReplicas: int
    maxReplicas: int
    replicas: int
    priority: int = 0


class AuthOptions(Resource):
    mode: Literal["token", "disabled"]


class AutoscalerOptions(Resource):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: int
    securityContext: dict[str, Any]


class RedisPassword(Resource):
    valueFrom: dict[str, Any]


class GcsFaultTolerance(Resource):
    redisAddress: str
    redisPassword: RedisPassword


class RayCluster(Resource):
    rayVersion: str
    authOptions: AuthOptions
    enableInTreeAutoscaling: bool
    autoscalerOptions: AutoscalerOptions
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]
    gcsFaultToleranceOptions: GcsFaultTolerance | None = None


class UpgradeStrategy(Resource):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]


class RayServiceSpec(Resource):
    upgradeStrategy: UpgradeStrategy
    rayClusterDeletionDelaySeconds: int
    excludeHeadPodFromServeSvc: bool
    serveConfigV2: str
    rayClusterConfig: RayCluster


class RayService(Resource):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


def check(manifest):
    """Raise msgspec.ValidationError or kubernetes_validate.ValidationError if `manifest` is invalid."""
    match manifest["kind"]:
        case "ScaledObject":
            spec = msgspec.convert(manifest, ScaledObject).spec
            behavior = spec.advanced.horizontalPodAutoscalerConfig.behavior
            target = msgspec.to_builtins(spec.scaleTargetRef)
            autoscaler = {"scaleTargetRef": target, "maxReplicas": spec.maxReplicaCount, "behavior": behavior}
            _check_schema("autoscaling/v2", "HorizontalPodAutoscaler", autoscaler)
        case "RayService":
            cluster = msgspec.convert(manifest, RayService).spec.rayClusterConfig
            for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
                _check_schema("v1", "Pod", group.template.spec)
        case _:
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def _check_schema(api_version, kind, spec):
    manifest = {"apiVersion": api_version, "kind": kind, "metadata": {"name": "noria"}, "spec": spec}
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
