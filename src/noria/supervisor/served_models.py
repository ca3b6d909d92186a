"""The models to serve: opens them, and says which engine runs which."""

from collections.abc import Sequence

from noria.config import Config
from noria.errors import ConfigError
from noria.models.catalog import open_model
from noria.protocol.model_spec import ModelSpec
from noria.protocol.text import EncoderModelSpec


def open_models(config: Config) -> list[ModelSpec]:
    """Return the specs of all models to serve, the default model first.

    Raises:
        ConfigError: two models have the same name.
        ModelError: a model cannot be served.

    """
    models: dict[str, ModelSpec] = {}
    for source in (config.model, *config.additional_models):
        model_spec = open_model(source)
        if model_spec.name in models:
            raise ConfigError(
                f"the models in {models[model_spec.name].folder} and {model_spec.folder} are both called "
                f"{model_spec.name!r}. "
                'Rename one: {"name": …} in its noria.json.'
            )
        models[model_spec.name] = model_spec
    return list(models.values())


def endpoint_models(config: Config, models: Sequence[ModelSpec]) -> dict[str, EncoderModelSpec]:
    """Return the text encoder of each endpoint, by the endpoint's name; without those that name none if there is none.

    Raises:
        ConfigError: two endpoints, or an endpoint and a model, have the same name, or a model is no served encoder.

    """
    encoders = {spec.name: spec for spec in models if isinstance(spec, EncoderModelSpec)}
    found: dict[str, EncoderModelSpec] = {}
    taken = {spec.name for spec in models}
    for endpoint in config.endpoints:
        if endpoint.name in taken:
            raise ConfigError(
                f"endpoint {endpoint.name!r}: another endpoint or a model has this name; each needs its own."
            )
        taken.add(endpoint.name)
        if endpoint.model and endpoint.model not in encoders:
            raise ConfigError(
                f"endpoint {endpoint.name!r}: model is {endpoint.model!r}; allowed are the text encoders of this "
                f"server: {', '.join(map(repr, encoders)) or 'it has none'}."
            )
        if encoders:
            found[endpoint.name] = encoders[endpoint.model or next(iter(encoders))]
    return found


def engine_groups(config: Config, models: Sequence[ModelSpec]) -> list[tuple[str, list[ModelSpec]]]:
    """Return the device and the models of each engine: on every device, one for each kind of model."""
    kinds = dict.fromkeys(spec.kind for spec in models)
    return [
        (device, [spec for spec in models if spec.kind == kind]) for kind in kinds for device in config.engine.devices
    ]
