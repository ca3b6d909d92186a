"""`noria serve --on`: runs the application on a Ray that is started here, or on a cluster that runs."""

import contextlib
import re
import socket
from collections.abc import Iterator

from noria.config import Config
from noria.errors import ConfigError, short_repr
from noria.extras import check_installed

_APPLICATION = "noria"
_CLUSTER = re.compile(r"ray://(?P<host>\[[^\]]+\]|[^:/]+):(?P<port>\d{1,5})")
_PROBE_TIMEOUT_S = 5.0  # Ray itself says after 31 s that nothing listens


@contextlib.contextmanager
def running_on(target: str, config: Config) -> Iterator[str]:
    """Serve `config` on Ray in this context, which yields the URL of the server when it is ready.

    `target` is `local`, which starts a Ray on this machine, or `ray://HOST:PORT`, the client port of a cluster. At the
    end the application is removed, and the Ray that was started here ends.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: the target is neither, nothing listens there, it is of another version, or the application does not
            become ready.

    """
    host = _check_target(target)
    check_installed(("ray", "ray.serve"), "ray", "noria serve --on")  # a folder `ray` passes for the first
    import ray
    from ray import serve

    from noria.cluster.application import build

    try:
        if target == "local":
            ray.init("local", include_dashboard=False)
        else:
            ray.init(target)
    except (ConnectionError, RuntimeError) as error:  # such as "Version mismatch", which names both versions
        raise ConfigError(f"Ray at {target} cannot be used: {error}") from error
    try:
        serve.start(http_options={"host": config.frontend.host, "port": config.frontend.port})
        application = build(config)
        try:
            serve.run(application, name=_APPLICATION)
        except RuntimeError as error:
            raise ConfigError(f"the application does not become ready on Ray: {_cause(serve, error)}") from error
        yield f"http://{host or config.frontend.host}:{config.frontend.port}"
    finally:
        with contextlib.suppress(Exception):  # the cluster may be gone
            if target == "local":
                serve.shutdown()
            else:
                serve.delete(_APPLICATION)
        ray.shutdown()


def _check_target(target: str) -> str | None:
    """Return the host of the cluster; None: this machine. Raises ConfigError."""
    if target == "local":
        return None
    match = _CLUSTER.fullmatch(target)
    if match is None:
        raise ConfigError(
            f"--on is {short_repr(target)}; allowed are `local`, which starts a Ray on this machine, and "
            "`ray://HOST:PORT`, the client port of a Ray cluster (10001 unless it was set)."
        )
    host, port = match["host"].strip("[]"), int(match["port"])
    try:
        socket.create_connection((host, port), _PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--on is {target!r}, and nothing answers there: {error}. Start the cluster with `ray start --head` on "
            "that host, whose client port is 10001 unless --ray-client-server-port is another."
        ) from error
    return host


def _cause(serve: object, error: RuntimeError) -> str:
    """What Ray knows of why a deployment failed; its own error only says where to look."""
    status = serve.status()  # type: ignore[attr-defined]
    application = status.applications.get(_APPLICATION)
    if application is None:
        return str(error)
    messages = [each.message for each in application.deployments.values() if each.status == "DEPLOY_FAILED"]
    text = " ".join(messages) or application.message or str(error)
    # Ray's text has a traceback, whose end is what the replica raised.
    _, found, raised = text.rpartition("RuntimeError: ")
    return raised.strip() if found else text
