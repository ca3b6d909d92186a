"""The models to serve: opens them, and says which engine runs which, and with how much of the CPU."""

import logging
import os
from collections.abc import Sequence

import msgspec

from noria.config import Config, EngineConfig
from noria.errors import ConfigError
from noria.models.adapters.adapter_folders import BESIDE_MODELS
from noria.models.adapters.upscaler_folders import UpscalerFolders
from noria.models.catalog import open_model
from noria.models.checkpoint_folder import checkpoint_files, list_checkpoints
from noria.models.location import is_single_file
from noria.observe.cgroup import cpu_limit, usable_cores
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.text import EncoderModelSpec

log = logging.getLogger("noria.supervisor")

IMAGE_NICENESS = 7
"""Of image engines beside text encoders. A thread then has a sixth of a core that others want too (sched(7): a weight
of 215 to 1024), so that an iteration is slowed down by less than the ten times that count as a hang."""


def open_models(config: Config) -> list[AnyModelSpec]:
    """Return the specs of all models to serve, the default model first.

    Raises:
        ConfigError: two models have the same name, a folder of LoRAs, embeddings or upscalers does not exist, one of
            LoRAs or embeddings is for a model that is not served, a ControlNet, an IP-Adapter, a refiner or a safety
            classifier is for no model, or a VAE or parts are given and no single file.
        MissingExtra: the package that reads upscalers is not installed.
        ModelError: a model or one of these cannot be served.
    """
    UpscalerFolders.of(config.engine).check_folders()
    beside_models = [kind.of(config.engine) for kind in BESIDE_MODELS]
    for entries in beside_models:  # first, since models take long to open
        entries.check_folders()
    sources = (config.model, *config.additional_models)
    for setting, what in (("vae", "its VAE"), ("parts", "all parts")):
        value = getattr(config.engine, setting)
        if value and not config.engine.checkpoints and not any(map(is_single_file, sources)):
            raise ConfigError(
                f"engine.{setting} is {value!r}, but no model is a single file; a folder has {what} in itself. Remove "
                "the setting, or name the file of a model."
            )
    models: dict[str, AnyModelSpec] = {}
    for source in sources:
        model_spec = open_model(source, config.engine)
        if model_spec.name in models:
            raise ConfigError(
                f"the models in {models[model_spec.name].folder} and {model_spec.folder} are both called "
                f"{model_spec.name!r}. "
                'Rename one: {"name": …} in its noria.json.'
            )
        models[model_spec.name] = model_spec
    specs = list(models.values())
    if not config.engine.checkpoints:  # entries may be for one of these, which are not known yet
        for entries in beside_models:
            entries.check(specs)
    return specs


def open_checkpoints(config: Config, served: Sequence[AnyModelSpec]) -> tuple[str, ...]:
    """Return the files and folders of `engine.checkpoints` that can be loaded beside `served`; log the others.

    Raises ConfigError: the folder has none, two models have one name, or no engine is for images.
    """
    if not config.engine.checkpoints:
        return ()
    if not any(isinstance(spec, DiffusionModelSpec) for spec in served):
        raise ConfigError(
            f"engine.checkpoints is {config.engine.checkpoints!r}, but no model is for images, and an engine starts "
            "with one. Add bundled, or the one that you use most, to additional_models."
        )
    found, refused = list_checkpoints(config.engine, (config.model, *config.additional_models))
    taken = {spec.name for spec in served} | {endpoint.name for endpoint in config.endpoints}
    for name, file in checkpoint_files(config.engine.checkpoints, found).items():
        if name in taken:
            raise ConfigError(
                f"engine.checkpoints: {file.name} would be called {name!r}, as a model or an endpoint is. Rename one."
            )
    for reason in refused:
        log.warning("not served: %s", reason, extra=fields(event="checkpoint_refused"))
    return found


def endpoint_models(config: Config, models: Sequence[AnyModelSpec]) -> dict[str, EncoderModelSpec]:
    """Return the text encoder of each endpoint, by the endpoint's name; without those that name none if there is none.

    Raises ConfigError: two endpoints, or an endpoint and a model, have the same name, or a model is no served encoder.
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


def engine_groups(config: Config, models: Sequence[AnyModelSpec]) -> list[tuple[str, list[AnyModelSpec]]]:
    """Return the device and the models of each engine: on every device, one for each kind of model."""
    kinds = dict.fromkeys(spec.kind for spec in models)
    return [
        (device, [spec for spec in models if spec.kind == kind]) for kind in kinds for device in config.engine.devices
    ]


def divide_cores(
    config: EngineConfig, models: Sequence[AnyModelSpec], served: Sequence[AnyModelSpec], num_cores: int | None = None
) -> tuple[EngineConfig, int]:
    """Return the settings and the niceness of an engine with `models`, one of the engines of all `served` models.

    `num_cores` is the cores that the server may use; None: those of this process.

    Raises ConfigError: `config.encoder_cores` leaves images no core.
    """
    has_images = any(isinstance(spec, DiffusionModelSpec) for spec in models)
    if not has_images or not any(isinstance(spec, EncoderModelSpec) for spec in served):
        return config, 0
    if not isinstance(config.encoder_cores, int):
        return config, IMAGE_NICENESS if config.encoder_cores == "auto" else 0
    num_cores = num_cores or usable_cores(len(os.sched_getaffinity(0)), cpu_limit())
    rest = num_cores - config.encoder_cores
    if rest < 1:
        raise ConfigError(
            f"engine.encoder_cores is {config.encoder_cores}, and this server may use {num_cores} cores: images would "
            "have none. Use a smaller number, `auto` or `shared`."
        )
    threads = max(1, rest // len(config.devices)) if config.threads == "auto" else config.threads
    return msgspec.structs.replace(config, threads=threads), 0
