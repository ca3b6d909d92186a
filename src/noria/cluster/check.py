"""PURE: whether Ray can serve a configuration, before anything starts."""

import msgspec

from noria.config import Config
from noria.errors import ConfigError, short_repr


def check_servable(config: Config, num_nodes: int) -> Config:
    """Return the configuration as replicas on so many nodes use it: each model once, and no gRPC.

    Raises ConfigError: an engine would have several devices, or checkpoints on demand, or replicas on several nodes a
    database that one node has, or metrics an address of their own, Ray's proxy would leave TLS out, or the range of
    engines is none.
    """
    if len(config.engine.devices) != 1:
        raise ConfigError(
            f"setting engine.devices is {', '.join(config.engine.devices)}; on Ray each engine has one device, which "
            "Ray assigns: leave it, or set `cpu`, and set cluster.engine_replicas."
        )
    if config.registry.deployments and config.registry.database == "auto" and num_nodes > 1:
        raise ConfigError(
            "setting registry.database is 'auto', a file of one node, and Ray has several nodes. Set it to "
            "postgresql://USER@HOST/NAME, or registry.deployments to false: then no deployments are carried out."
        )
    reads_jobs = config.cluster.frontend_replicas + config.registry.deployments  # front ends, and the registrar
    if reads_jobs > 1 and config.jobs.database == "auto" and num_nodes > 1:
        raise ConfigError(
            "setting jobs.database is 'auto', a file of one node, and several front ends, or a front end and the "
            "registrar, may be on several nodes. Set it to postgresql://USER@HOST/NAME, and jobs.results to a folder "
            "that all nodes reach."
        )
    if config.frontend.metrics_address:
        raise ConfigError(
            f"setting frontend.metrics_address is {short_repr(config.frontend.metrics_address)}; on Ray each replica "
            "has a port of its own for metrics, and a front end has /metrics at the server's port, too. Leave it out; "
            "to keep /metrics private, block that path in the proxy before Ray's."
        )
    for name in ("ssl_certfile", "ssl_keyfile", "uds"):  # what without an effect would leave the server open
        if value := getattr(config.frontend, name):
            raise ConfigError(
                f"setting frontend.{name} is {short_repr(value)}; Ray's proxy listens in the place of front ends, on a "
                "port and without TLS. Leave it out, and put a proxy with TLS before Ray's."
            )
    fewest, _, most = str(config.cluster.engine_replicas).partition("-")
    if most and not 1 <= int(fewest) <= int(most):
        raise ConfigError(
            f"setting cluster.engine_replicas is {config.cluster.engine_replicas!r}; the first number is the fewest "
            "engines, at least 1, and the second the most."
        )
    if config.engine.checkpoints:
        raise ConfigError(
            f"setting engine.checkpoints is {short_repr(config.engine.checkpoints)}; on Ray each engine has one model. "
            "Leave it out, and name the models in additional_models."
        )
    sources = tuple(dict.fromkeys([config.model, *config.additional_models]))
    frontend = msgspec.structs.replace(config.frontend, grpc_port=0)  # Ray's proxy is the only way to front ends
    return msgspec.structs.replace(config, additional_models=sources[1:], frontend=frontend)
