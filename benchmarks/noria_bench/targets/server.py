"""Starts a target as a server process on a free loopback port: `noria serve`, the reference server or a framework's."""

import contextlib
import os
import sys
from collections.abc import Iterator

import msgspec

from noria.config import Config
from noria.protocol.diffusion import DiffusionModelSpec
from noria.testing.server import RunningServer, config_flags, running_process, running_server
from noria_bench.targets import environments
from noria_bench.targets.catalog import Target, TargetSettings
from noria_bench.targets.triton import find_triton


@contextlib.contextmanager
def running_target(
    target: Target,
    spec: DiffusionModelSpec,
    config: Config,
    settings: TargetSettings | None = None,
    port: int | None = None,
) -> Iterator[RunningServer]:
    """A fresh server for `target`, with the engine settings of `config`; it is stopped at the end.

    Targets other than Noria take `settings` (None: the target's own).

    Raises:
        ConfigError: the target's virtual environment is not installed.
        RuntimeError: the server ended, or was not ready within five minutes.

    """
    if target.module is None:
        with running_server([config.model, *config_flags(config)], port) as server:
            yield server
        return
    python = interpreter_of(target.framework)

    def command(port: int) -> list[str]:
        job = {
            "spec": spec,
            "config": config.engine,
            "port": port,
            "settings": settings or target.settings,
            "parent_pid": os.getpid(),
        }
        return [python, "-m", str(target.module), msgspec.json.encode(job).decode()]

    ready_path = "/v2/health/ready" if target.protocol == "open-inference" else "/readyz"
    with running_process(command, port, ready_path=ready_path) as server:
        yield server


def interpreter_of(framework: str | None) -> str:
    """The Python that runs a framework's server; Triton, a program, is started by this one.

    Raises:
        ConfigError: the framework is not installed.

    """
    if framework == "triton":
        find_triton()
    elif framework is not None:
        return str(environments.python_of(framework))
    return sys.executable


def isolated_config(config: Config, folder: str) -> Config:
    """`config` for servers that are only measured: `quiet_config`, and costs are cached in `folder`.

    Cached costs of another time, such as those of a busier machine, would make wrong predictions.
    """
    engine = config.engine
    if not engine.cache_dir:
        engine = msgspec.structs.replace(engine, cache_dir=folder)
    return msgspec.structs.replace(quiet_config(config), engine=engine)


def quiet_config(config: Config) -> Config:
    """`config` with a log of warnings and errors only: a server writes a line for each request at the default level."""
    return msgspec.structs.replace(config, log_level="warning" if config.log_level == "info" else config.log_level)
