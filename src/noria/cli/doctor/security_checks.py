"""The checks of `noria doctor --security`: what of a server with these settings is open to whom, and what to do.

They look at the settings, at the modes of files and folders as they are now, and at addresses. They start nothing and
change nothing. A warning is a decision that an operator may have good reasons for, such as a proxy with TLS on another
machine.
"""

import ipaddress
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from noria.cli.doctor.finding import Finding
from noria.config import Config, FrontendConfig
from noria.errors import ConfigError
from noria.folders import data_folder
from noria.frontend.access.api_keys import read_keys
from noria.frontend.access.request_origin import check_hosts
from noria.frontend.access.trusted_proxies import check_proxies
from noria.frontend.http.connection import UNIX_CLIENT
from noria.frontend.http.paths import OPEN_PATHS
from noria.frontend.http.tls import check_certificate, open_key_warning
from noria.jobs.webhooks.signing import secret_file
from noria.settings import list_settings
from noria.storage.private_files import read_own_file
from noria.supervisor.listener import check_uds

Reach = Literal["this machine", "private networks", "all networks of this machine", "the internet"]

_GROUP_AND_OTHERS, _OTHERS_WRITE = 0o077, 0o022
_LIMITS = (
    "frontend.max_body_bytes",
    "frontend.max_image_bytes",
    "frontend.max_images",
    "frontend.max_prompt_chars",
    "frontend.request_timeout_s",
    "engine.queue_limit",
    "engine.queue_limit_s",
    "jobs.max_queued",
)
_RAISED_FACTOR = 10  # a limit that is raised to this many times its default gets a warning
_ENCRYPTED = ("require", "verify-ca", "verify-full")  # values of libpq's sslmode


def check_security(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, from the outside in."""
    frontend = config.frontend
    try:
        reach: Reach = "this machine" if frontend.uds else _reach(frontend.host)
    except OSError as error:
        yield Finding("fail", "listener", f"{frontend.host} is no address of this machine: {error}")
        return
    yield _check_listener(frontend, reach)
    yield from _check_grpc(frontend)
    yield from _check_certificate(frontend)
    yield from _check_keys(frontend, reach)
    yield _check_metrics(frontend, reach)
    yield _check_hosts(frontend)
    yield _check_proxies(frontend)
    yield _check_live(frontend, reach)
    yield from _check_stored(config, environment)
    yield from _check_registry(config, environment)
    yield from _check_endpoints(config)
    yield _check_webhooks(config)
    yield _check_webhook_secret(config, environment)
    yield _check_limits(config)
    yield _check_log(config)
    if os.geteuid() == 0:
        yield Finding(
            "warn", "user", "root: whatever breaks out of the server owns this machine; use a user of its own"
        )
    else:
        yield Finding("ok", "user", f"number {os.geteuid()}, not root")


def _reach(host: str) -> Reach:
    """Return from where an address of this machine can be reached. Raises OSError if it is none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    if all(address.is_loopback for address in addresses):
        return "this machine"
    if any(address.is_unspecified for address in addresses):
        return "all networks of this machine"
    return "private networks" if all(address.is_private for address in addresses) else "the internet"


def _check_listener(frontend: FrontendConfig, reach: Reach) -> Finding:
    if frontend.uds:
        try:
            check_uds(frontend.uds)
        except ConfigError as error:
            return Finding("fail", "listener", error.message)
        return Finding("ok", "listener", f"the Unix socket {frontend.uds}: its owner and group on this machine")
    tls = "with TLS" if frontend.ssl_certfile else "without TLS"
    text = f"{frontend.host}, port {frontend.port}: reached from {reach}, {tls}"
    if reach == "this machine" or frontend.ssl_certfile:
        return Finding("ok", "listener", text)
    return Finding(
        "warn",
        "listener",
        f"{text}: others on the way read prompts, images and keys; set frontend.ssl_certfile, or listen on 127.0.0.1 "
        "or a Unix socket (frontend.uds) behind a proxy with TLS",
    )


def _check_grpc(frontend: FrontendConfig) -> Iterator[Finding]:
    """The port of gRPC, which is on `host` also beside a Unix socket."""
    if not frontend.grpc_port:
        return
    try:
        reach = _reach(frontend.host)
    except OSError as error:
        yield Finding("fail", "gRPC", f"{frontend.host} is no address of this machine: {error}")
        return
    tls = "with TLS" if frontend.ssl_certfile else "without TLS"
    open_methods = "; without a key: ServerLive, ServerReady" if frontend.api_keys_file else ", without a key"
    text = f"{frontend.host}, port {frontend.grpc_port}: reached from {reach}, {tls}{open_methods}"
    if reach == "this machine" or (frontend.ssl_certfile and frontend.api_keys_file):
        yield Finding("ok", "gRPC", text)
    else:
        yield Finding("warn", "gRPC", f"{text}; set frontend.ssl_certfile and frontend.api_keys_file, or grpc_port = 0")


def _check_certificate(frontend: FrontendConfig) -> Iterator[Finding]:
    try:
        check_certificate(frontend)
    except ConfigError as error:
        yield Finding("fail", "TLS", error.message)
        return
    if warning := open_key_warning(frontend):
        yield Finding("warn", "TLS", warning)
    elif frontend.ssl_certfile:
        yield Finding("ok", "TLS", f"1.2 or later, with the certificate {frontend.ssl_certfile}")


def _check_keys(frontend: FrontendConfig, reach: Reach) -> Iterator[Finding]:
    file = frontend.api_keys_file
    try:
        keys = read_keys(file)
    except ConfigError as error:
        yield Finding("fail", "keys", error.message)
        return
    if not keys:
        text = (
            f"none: every client that reaches the server, from {reach}, may send requests, "
            "and see and cancel those of others"
        )
        if reach == "this machine":
            yield Finding("ok", "keys", text)
        else:
            yield Finding(
                "warn", "keys", f"{text}; `noria key create NAME >> keys.toml`, and set frontend.api_keys_file"
            )
        return
    mode = _mode(file)
    if mode & _OTHERS_WRITE:
        yield Finding("warn", "keys", f"others may add keys to {file}, whose mode is {mode:o}; chmod go-w {file}")
    else:
        yield Finding(
            "ok", "keys", f"{len(keys)} in {file}; without one: {', '.join(sorted(OPEN_PATHS))} and the pages"
        )
    if administrators := [key.name for key in keys if "admin" in key.scopes]:
        yield Finding("ok", "keys", f"with the scope admin, for the jobs of everybody: {', '.join(administrators)}")
    unlimited = [key.name for key in keys if key.max_images_in_flight is None and key.images_per_minute is None]
    if unlimited and len(keys) > 1:
        yield Finding(
            "warn",
            "quotas",
            f"none for {', '.join(unlimited)}: one of them can fill the queue for all; set max_images_in_flight or "
            f"images_per_minute in {file}",
        )


def _check_metrics(frontend: FrontendConfig, reach: Reach) -> Finding:
    if frontend.metrics_address:
        host = frontend.metrics_address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            reach = _reach(host)
        except OSError as error:
            return Finding("fail", "metrics", f"{frontend.metrics_address} is no address of this machine: {error}")
        text = f"/metrics on {frontend.metrics_address}: reached from {reach}, without a key"
        if reach in ("this machine", "private networks"):
            return Finding("ok", "metrics", text)
        return Finding("warn", "metrics", f"{text}; choose the address that the monitoring's network has")
    text = f"/metrics beside the other routes: reached from {reach}, without a key"
    if reach == "this machine":
        return Finding("ok", "metrics", text)
    return Finding("warn", "metrics", f"{text}; set frontend.metrics_address, or let the proxy block it")


def _check_hosts(frontend: FrontendConfig) -> Finding:
    try:
        check_hosts(frontend.allowed_hosts)
    except ConfigError as error:
        return Finding("fail", "hosts", error.message)
    if "*" in frontend.allowed_hosts:
        return Finding(
            "warn",
            "hosts",
            "any: a web page can read responses by a name of its own (DNS rebinding); list the server's names in "
            "frontend.allowed_hosts instead of *",
        )
    names = ", ".join(("IP addresses", "localhost", *frontend.allowed_hosts))
    return Finding("ok", "hosts", f"{names}; pages of other origins may change nothing")


def _check_proxies(frontend: FrontendConfig) -> Finding:
    try:
        check_proxies(frontend.trusted_proxies)
    except ConfigError as error:
        return Finding("fail", "proxies", error.message)
    networks = [ipaddress.ip_network(each) for each in frontend.trusted_proxies if each != UNIX_CLIENT]
    public = [str(each) for each in networks if each.num_addresses > 1 and not each.is_private]
    if public:
        return Finding(
            "warn",
            "proxies",
            f"everybody in {', '.join(public)} may claim any client's address, and so have no limits; list the "
            "proxies' own addresses in frontend.trusted_proxies",
        )
    return Finding(
        "ok", "proxies", f"X-Forwarded-For is believed from {', '.join(frontend.trusted_proxies) or 'no proxy'}"
    )


def _check_live(frontend: FrontendConfig, reach: Reach) -> Finding:
    with_thumbnails = frontend.live == "full" or (frontend.live == "auto" and not frontend.api_keys_file)
    if not with_thumbnails:
        return Finding("ok", "live", "/live shows no thumbnails" if frontend.live != "off" else "/live is off")
    text = "/live shows every caller thumbnails of all images in progress"
    if reach == "this machine":
        return Finding("ok", "live", text)
    return Finding("warn", "live", f"{text}; set frontend.live to no-previews, or API keys and auto")


def _check_stored(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The data folder, and the database and the results of jobs if they are elsewhere."""
    try:
        yield _check_folder("data", data_folder(config, environment))
    except ConfigError as error:
        yield Finding("fail", "data", error.message)
    yield from _check_database("jobs", config.jobs.database, environment)
    results = urlsplit(config.jobs.results)
    if config.jobs.results != "auto" and results.scheme in ("", "file"):
        yield _check_folder("results", pathlib.Path(results.path))
    elif results.scheme:
        yield Finding("ok", "results", f"in {results.scheme}://{results.hostname}: its own rights count")


def _check_database(topic: str, setting: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """A database that is not in the data folder."""
    url = urlsplit(setting)
    if url.scheme.startswith("sqlite"):
        yield _check_folder(topic, pathlib.Path(setting.partition(":///")[2]))
    elif url.scheme:
        yield _check_postgresql(topic, url.hostname, url.query, environment)


def _check_folder(topic: str, path: pathlib.Path) -> Finding:
    try:
        mode = _mode(path)
    except FileNotFoundError:
        return Finding("ok", topic, f"{path} does not exist yet; the server makes it for its own user only")
    except OSError as error:
        return Finding("fail", topic, f"{path} cannot be looked at: {error}")
    if mode & _GROUP_AND_OTHERS:
        text = f"{path} has the mode {mode:o}: others read prompts and images in it; chmod -R go= {path}"
        return Finding("warn", topic, text)
    return Finding("ok", topic, f"{path}: mode {mode:o}, for its owner only")


def _check_postgresql(topic: str, host: str | None, query: str, environment: Mapping[str, str]) -> Finding:
    host = parse_qs(query).get("host", [host or environment.get("PGHOST", "")])[0]
    mode = parse_qs(query).get("sslmode", [environment.get("PGSSLMODE", "")])[0]
    if not host or host.startswith("/") or host in ("localhost", "127.0.0.1", "::1"):
        return Finding("ok", topic, "PostgreSQL on this machine: its own rights count")
    if mode in _ENCRYPTED:
        return Finding("ok", topic, f"PostgreSQL on {host}, sslmode {mode}: its own rights count")
    return Finding(
        "warn",
        topic,
        f"PostgreSQL on {host}, perhaps without TLS: others on the way read and change what is stored; add "
        f"?sslmode=verify-full to {topic}.database, or set PGSSLMODE",
    )


def _check_registry(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Who may deploy models, and read and send lineage."""
    what = "/v1/deployments and lineage, and X-Noria-Version"
    try:
        keys = read_keys(config.frontend.api_keys_file)
    except ConfigError:  # the finding of the keys
        return
    if keys:
        names = [key.name for key in keys if "registry" in key.scopes]
        yield Finding("ok", "registry", f"{what}: keys with the scope registry, which are {', '.join(names) or 'none'}")
    else:
        yield Finding(
            "ok",
            "registry",
            f"{what}: without keys for every user of this machine, so for all clients of a proxy here that sends no "
            "X-Forwarded-For",
        )
    yield from _check_database("registry", config.registry.database, environment)


def _check_endpoints(config: Config) -> Iterator[Finding]:
    """The operator's own code."""
    for endpoint in config.endpoints:
        try:
            read_own_file(endpoint.file)
        except OSError as error:
            yield Finding("fail", "code", f"{endpoint.name}: {endpoint.file} cannot be used: {error.strerror or error}")
        else:
            text = (
                f"{endpoint.name}: {endpoint.file} runs in the front ends with the server's rights; nothing isolates it"
            )
            yield Finding("ok", "code", text)


def _check_webhooks(config: Config) -> Finding:
    if config.jobs.webhook_allow_private:
        return Finding(
            "warn",
            "webhooks",
            "to private addresses too: callers can make the server send requests to services of its own network; unset "
            "jobs.webhook_allow_private",
        )
    return Finding("ok", "webhooks", "to public addresses only")


def _check_webhook_secret(config: Config, environment: Mapping[str, str]) -> Finding:
    topic, setting = "secret", config.jobs.webhook_secret_file
    try:
        file = secret_file(config.jobs, data_folder(config, environment))
        mode = _mode(file)
    except ConfigError as error:
        return Finding("fail", topic, error.message)
    except OSError as error:
        if setting == "auto" and isinstance(error, FileNotFoundError):
            return Finding("ok", topic, f"{file} does not exist yet; the server makes it for its own user only")
        return Finding("fail", topic, f"{file} cannot be looked at: {error}")
    if mode & _GROUP_AND_OTHERS:
        text = f"others may read {file}, whose mode is {mode:o}, and forge webhooks; chmod go= {file}"
        return Finding("warn", topic, text)
    return Finding("ok", topic, f"those of the keys are derived from {file}, which only its owner reads")


def _check_limits(config: Config) -> Finding:
    defaults = {setting.key: setting.default for setting in list_settings()}
    raised = []
    for key in _LIMITS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value > _RAISED_FACTOR * defaults[key]:
            raised.append(f"{key} is {value:g} (default {defaults[key]:g})")
    if raised:
        return Finding("warn", "limits", f"{', '.join(raised)}: one caller may take that much; lower it")
    return Finding("ok", "limits", "near their defaults: docs/security.md lists them")


def _check_log(config: Config) -> Finding:
    if config.log_prompts == "full":
        return Finding("warn", "log", "has all prompts; set log_prompts to off, or to hash")
    return Finding("ok", "log", f"prompts: {config.log_prompts}; secrets are redacted")


def _mode(path: str | pathlib.Path) -> int:
    """Return the rights of a file. Raises OSError."""
    return os.stat(path).st_mode & 0o7777
