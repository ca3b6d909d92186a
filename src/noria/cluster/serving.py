"""`noria serve --on`: runs the application on a Ray that is started here, or on a cluster that runs."""

import contextlib
import logging
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil

from noria.cluster import check_ray
from noria.config import Config
from noria.errors import ConfigError, short_repr
from noria.observe.logs.log_record import fields
from noria.protocol.process_signals import blocking_signals, sigterm_interrupts

_APPLICATION = "noria"
_CLUSTER = re.compile(r"ray://(?P<host>\[[^\]]+\]|[^:/]+):(?P<port>\d{1,5})")
_STATUS_POLL_S = 0.5
_HAPROXY_END_S = 5.0
_PROBE_TIMEOUT_S = 5.0  # Ray itself says after 31 s that nothing listens

log = logging.getLogger("noria.cluster")


@contextlib.contextmanager
def running_on(target: str, config: Config) -> Iterator[str]:
    """Serve `config` on Ray in this context, which yields the URL of the server when it is ready.

    `target` is `local`, which starts a Ray on this machine, or `ray://HOST:PORT`, the client port of a cluster. At the
    end the application is removed, and the Ray that was started here ends. SIGTERM, SIGINT and SIGHUP raise
    KeyboardInterrupt, once Ray has started. Main thread only.

    Raises:
        MissingExtra: Ray is not installed.
        ConfigError: Ray is too old, the target is neither, nothing listens there, it is of another version, it runs an
            application `noria` already, or the application does not become ready.
    """
    host = _check_target(target)
    check_ray("noria serve --on")
    import ray
    from ray import serve

    from noria.cluster.application import build

    with contextlib.ExitStack() as stack:  # a signal during one step of the end leaves out no other
        try:
            with blocking_signals():  # Ray's own processes inherit this: those of a process group do not end them
                if target == "local":
                    ray.init("local", include_dashboard=False)
                else:
                    ray.init(target)
                stack.enter_context(sigterm_interrupts())  # in place of Ray's handler
                stack.callback(_end_ray, target)
        except (ConnectionError, RuntimeError) as error:  # such as "Version mismatch", which names both versions
            raise ConfigError(f"Ray at {target} cannot be used: {error}") from error
        if target == "local":
            stack.callback(_end_serve)
        try:
            serve.start(http_options={"host": config.frontend.host, "port": config.frontend.port})
        except ray.exceptions.RayError as error:  # such as a proxy that Ray gave up, on a busy machine
            raise ConfigError(f"Ray at {target} does not start its proxy: {error}. Try again.") from error
        stack.enter_context(deployed(build(config), _APPLICATION))
        for reason in failures(_APPLICATION):
            extra = fields(event="replica_failed")
            log.warning("a replica does not start, Ray tries again: %s", reason, extra=extra)
        yield f"http://{host or config.frontend.host}:{config.frontend.port}"


def _end_ray(target: str) -> None:
    import ray

    with contextlib.ExitStack() as stack:
        if target == "local":
            stack.callback(end_haproxy, ray.get_runtime_context().get_node_id())
        ray.shutdown()


def _end_serve() -> None:
    from ray import serve

    with contextlib.suppress(Exception):  # it may have ended
        serve.shutdown()


def end_haproxy(node_id: str) -> None:
    """End the HAProxy of a node of Ray, whose id is in the path of its configuration file.

    Ray starts it anew when front ends change, and one that it starts while it ends itself is left behind; its ports
    would be missing at the next start.
    """
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(f"/{node_id}/haproxy.cfg" in argument for argument in process.info["cmdline"] or ())
    ]
    for process in left:
        with contextlib.suppress(psutil.Error):  # it ends itself, or is another user's
            process.terminate()
    psutil.wait_procs(left, timeout=_HAPROXY_END_S)


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


@contextlib.contextmanager
def deployed(application: Any, name: str, route_prefix: str = "/") -> Iterator[None]:
    """Have Ray run an application in this context, without waiting for it.

    Raises ConfigError: Ray runs one of this name, which is not touched.
    """
    from ray import serve

    if (present := serve.status().applications.get(name)) is not None:
        raise ConfigError(
            f"Ray runs an application {name!r} already, which is {present.status.value}. End the `noria serve --on` "
            f"that has started it; if there is none, remove it with ray.serve.delete({name!r})."
        )
    target = serve.RunTarget(target=application, name=name, route_prefix=route_prefix)
    try:
        serve.run_many([target], wait_for_applications_running=False)
        yield
    finally:
        with contextlib.suppress(Exception):  # the cluster may be gone
            serve.delete(name)


def failures(name: str) -> Iterator[str]:
    """Yield why replicas of an application do not start, each reason once, until it serves.

    Ray tries again for ever once a replica of the deployment has started, perhaps on a node that has what others lack.

    Raises ConfigError: Ray has given up.
    """
    from ray import serve

    reported = {""}
    while (application := serve.status().applications[name]).status != "RUNNING":
        messages = [each.message for each in application.deployments.values()]
        if application.status == "DEPLOY_FAILED":
            failed = [each.message for each in application.deployments.values() if each.status == "DEPLOY_FAILED"]
            text = " ".join(map(_raised, failed)) or application.message
            raise ConfigError(f"the application does not become ready on Ray: {text}")
        for reason in map(_raised, messages):
            if reason not in reported:
                reported.add(reason)
                yield reason
        time.sleep(_STATUS_POLL_S)


def _raised(message: str) -> str:
    """Return what a replica raised: the end of the traceback in Ray's text; all of the text if it has none."""
    return message.rpartition("RuntimeError: ")[2].strip()
