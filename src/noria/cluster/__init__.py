"""Serves Noria on Ray Serve: front ends and engines as deployments, on many machines. docs/ray.md describes it.

    client → Ray's proxy → frontend_replica: the ASGI application of a front end, N of them
                              │ replica_list: which engines there are (Ray; control)
                              │ ZeroMQ over TCP: the same messages as on one machine (data)
                              ▼
                           engine_replica: an actor with one device
                              └ engine_runner: the engine process as its child
    registrar_replica: an actor that has engines load what the registry deploys; front ends call it for the routes

Ray places, restarts, scales and drains replicas. Requests, previews and images never pass Ray: a handle's call takes 30
times the CPU of a message. `serve run noria.cluster:app` and `noria serve --on` start it. This package needs the extra
`ray`; no other one imports it but the command.
"""

import importlib.metadata
import re
from typing import Any

from noria.errors import ConfigError
from noria.extras import check_installed

_MIN_RAY = (2, 60)  # Serve of older ones does not read draining nodes


def app(args: dict[str, Any]) -> Any:
    """Return the application, for `serve run noria.cluster:app` and the `import_path` of a Serve config file.

    `args` are settings by their keys, such as `model=… engine.slots=8`, and `config`, the path of a TOML file; NORIA_
    variables count, too.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: a setting is unknown, has a value that is not allowed, or cannot be served on Ray.
    """
    check_ray("serving on Ray")
    from noria.cluster.application import build, config_of

    return build(config_of(args))


def check_ray(purpose: str) -> None:
    """Check that Ray is installed, and new enough.

    Raises:
        MissingExtra: it is not installed.
        ConfigError: it is too old.
    """
    check_installed(("ray", "ray.serve"), "ray", purpose)  # a folder `ray` passes for the first
    version = importlib.metadata.version("ray")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _MIN_RAY:
        wanted = ".".join(map(str, _MIN_RAY))
        raise ConfigError(
            f"{purpose} needs Ray {wanted} or newer, and {version} is installed. Install the same version on every "
            f"node: pip install 'ray[serve]>={wanted}'."
        )
