"""The model that an engine replica starts with: the control of the model's endpoint, as the registry has it now."""

import logging

from sqlalchemy.exc import SQLAlchemyError

from noria.config import Config
from noria.errors import ConfigError
from noria.observe.logs.log_record import fields
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.routes import Routes
from noria.registry.deployments.routed_models import routed_models
from noria.registry.deployments.store import DeploymentStore
from noria.registry.schema import open_registry
from noria.supervisor.child_tasks import log_unusable

log = logging.getLogger("noria.engine")


def models_to_load(config: Config, configured: AnyModelSpec) -> list[AnyModelSpec]:
    """Return the control of the endpoint that has the name of `configured`; nothing if the registry does not answer.

    That is `configured` itself without a deployment, or if the deployed version cannot be opened here. Canaries, and
    endpoints that no model of the configuration has, are loaded by the registrar when the engine is ready. Blocks.
    """
    if not config.registry.deployments:
        return [configured]
    try:
        registry = open_registry(config)
        try:
            routes = DeploymentStore(registry).routes()
        finally:
            registry.dispose()
    except (SQLAlchemyError, OSError, ConfigError) as error:
        extra = fields(event="registry_away", database="registry")
        log.error("the registry does not answer, %s is loaded as before: %s", configured.name, error, extra=extra)
        return []
    route = routes.find(configured.name)
    own = Routes(routes.generation, () if route is None else (route,))
    return routed_models([configured], own, log_unusable, config.registry.source_roots)
