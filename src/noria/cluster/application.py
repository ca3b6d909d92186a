"""The Serve application of a configuration: deployments of front ends, of engines for each model, and the registrar."""

import os
import pathlib
import re
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from noria.cluster.check import check_servable
from noria.cluster.engine_replica import EngineReplica
from noria.cluster.frontend_replica import FrontendReplica
from noria.cluster.registrar_replica import RegistrarReplica
from noria.config import Config
from noria.errors import ConfigError, did_you_mean
from noria.settings import list_settings, load

# Ray asks each replica for its health every second. One that has failed once is replaced.
_HEALTH_CHECKS = {"health_check_period_s": 1.0, "health_check_timeout_s": 30.0}
_STATS_PERIOD_S = 1.0
# Requests of one front end at once. The engines' queues and the API keys limit them first.
_MAX_ONGOING_REQUESTS = 4096
_STOP_GRACE_S = 10.0
_REGISTRAR_STOP_S = 5.0
_SMALL_ACTOR = {"num_cpus": 0.1}
_MAX_CONSTRUCTOR_RETRIES = 3
# By default Ray runs the application of a front end in a second event loop, to which each message of a request passes
# by a thread. A front end blocks no event loop, and needs one only: 14 % less CPU time a request.
_FRONTEND_VARIABLES = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}


def config_of(args: dict[str, Any]) -> Config:
    """Return the configuration of the arguments of `noria.cluster.app`. Raises ConfigError."""
    known = [setting.key for setting in list_settings()]
    flags = {key: value for key, value in args.items() if key != "config"}
    for key in flags:
        if key not in known:
            raise ConfigError(f"argument {key!r} is not a setting.{did_you_mean(key, known)} See docs/settings.md.")
    return load(args.get("config"), os.environ, flags)


def build(config: Config) -> Any:
    """Return the application of `config`; connects to Ray first, which `serve run` does later.

    Raises ConfigError: a setting cannot be served on Ray.
    """
    if not ray.is_initialized():  # as `serve run` does it; its GPUs and nodes are asked for below
        ray.init(namespace="serve")
    config = check_servable(config, num_nodes=len(ray.nodes()))
    sources = [config.model, *config.additional_models]
    names = deployment_names(sources)
    engines = {name: _engine(config, name, source) for name, source in zip(names, sources, strict=True)}
    frontend = serve.deployment(
        FrontendReplica,
        name="frontend",
        num_replicas=config.cluster.frontend_replicas,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        **_HEALTH_CHECKS,
        graceful_shutdown_timeout_s=config.frontend.drain_s + _STOP_GRACE_S,
        ray_actor_options={**_SMALL_ACTOR, "runtime_env": {"env_vars": _FRONTEND_VARIABLES}},
        logging_config={"enable_access_log": False},  # Noria's log has each request
        max_constructor_retry_count=_MAX_CONSTRUCTOR_RETRIES,
    )
    return frontend.bind(_json(config), engines, _registrar(config, engines) if config.registry.deployments else None)


def _registrar(config: Config, engines: dict[str, Any]) -> Any:
    deployment = serve.deployment(
        RegistrarReplica,
        name="registrar",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        **_HEALTH_CHECKS,
        graceful_shutdown_timeout_s=_REGISTRAR_STOP_S,
        ray_actor_options=_SMALL_ACTOR,
        logging_config={"enable_access_log": False},  # each front end calls twice a second
    )
    return deployment.bind(_json(config), engines)


def _engine(config: Config, name: str, source: str) -> Any:
    cluster = config.cluster
    num_gpus = cluster.engine_gpus
    if num_gpus == "auto":
        num_gpus = float(config.engine.devices != ("cpu",) and ray.cluster_resources().get("GPU", 0) > 0)
    engine = config.engine
    if not num_gpus:
        threads = max(1, int(cluster.engine_cpus)) if engine.threads == "auto" else engine.threads
        engine = msgspec.structs.replace(engine, devices=("cpu",), threads=threads)
    deployment = serve.deployment(
        EngineReplica,
        name=name,
        **_scale(config),
        **_HEALTH_CHECKS,
        graceful_shutdown_timeout_s=config.frontend.drain_s + _STOP_GRACE_S,
        max_constructor_retry_count=_MAX_CONSTRUCTOR_RETRIES,
        max_replicas_per_node=None if cluster.max_engines_per_node == "auto" else cluster.max_engines_per_node,
        ray_actor_options={
            "num_cpus": cluster.engine_cpus,
            "num_gpus": num_gpus,
            "memory": cluster.engine_memory_bytes,
        },
        request_router_config=RequestRouterConfig(
            request_router_class="noria.cluster.request_router.BacklogRouter",
            request_routing_stats_period_s=_STATS_PERIOD_S,
        ),
    )
    return deployment.bind(_json(msgspec.structs.replace(config, engine=engine)), source, config.frontend.drain_s)


def _scale(config: Config) -> dict[str, Any]:
    replicas = config.cluster.engine_replicas
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    fewest, most = map(int, replicas.split("-"))
    policy = AutoscalingPolicy(
        policy_function="noria.cluster.autoscaling:BacklogPolicy",
        policy_kwargs={"target_backlog_s": config.cluster.target_backlog_s},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=fewest,
            max_replicas=most,
            policy=policy,
            upscale_delay_s=0.0,  # the policy has its own
            downscale_delay_s=0.0,
        )
    }


def deployment_names(sources: list[str]) -> list[str]:
    """Return a name for each model's engine deployment: that of its folder, numbered if it is taken."""
    names: list[str] = []
    for source in sources:
        word = re.sub(r"[^A-Za-z0-9_.-]+", "-", pathlib.PurePath(source).name).strip("-") or "model"
        name = f"engine-{word}"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names


def _json(config: Config) -> str:
    return msgspec.json.encode(config).decode()
