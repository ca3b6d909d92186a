"""The checks of `noria doctor --security`: what of a server with these settings is open to whom, and what to do.

They look at the settings, at the modes of files and folders as they are now, and at addresses. They start nothing and
change nothing. A warning is a decision that an operator may have good reasons for, such as a proxy with TLS on another
machine.
"""

import ipaddress
import os
import pathlib
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from noria.cli.doctor.finding import Finding, fail, ok, warn
from noria.config import Config, FrontendConfig
from noria.errors import ConfigError
from noria.folders import data_folder
from noria.frontend.access.api_keys import read_keys
from noria.frontend.access.request_origin import check_hosts
from noria.frontend.access.trusted_proxies import UNIX_CLIENT, check_proxies
from noria.frontend.server.tls import check_certificate, open_key_warning
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
    except ConfigError as error:
        yield fail("listener", error.message)
        return
    yield from _checked("listener", _check_listener, frontend, reach)
    yield from _checked("gRPC", _check_grpc, frontend)
    yield from _checked("TLS", _check_certificate, frontend)
    yield from _checked("keys", _check_keys, frontend, reach)
    yield from _checked("metrics", _check_metrics, frontend, reach)
    yield from _checked("hosts", _check_hosts, frontend)
    yield from _checked("proxies", _check_proxies, frontend)
    yield _check_live(frontend, reach)
    yield from _checked("data", lambda: _check_folder("data", data_folder(config, environment)))
    yield from _check_stored(config, environment)
    yield from _check_registry(config, environment)
    yield from _check_endpoints(config)
    yield _check_webhooks(config)
    yield from _checked("secret", _check_webhook_secret, config, environment)
    yield _check_limits(config)
    yield _check_log(config)
    if os.geteuid() == 0:
        yield warn("user", "root: whatever breaks out of the server owns this machine; use a user of its own")
    else:
        yield ok("user", f"number {os.geteuid()}, not root")


def _checked(topic: str, check: Callable[..., Finding | Iterator[Finding]], *arguments: object) -> Iterator[Finding]:
    """Yield what a check finds; a setting that cannot be used is a finding, too."""
    try:
        found = check(*arguments)
        yield from [found] if isinstance(found, Finding) else found
    except ConfigError as error:
        yield fail(topic, error.message)


def _reach(host: str, address: str = "") -> Reach:
    """Return from where a host of this machine, part of `address`, can be reached. Raises ConfigError if it is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{address or host} is no address of this machine: {error}") from error
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    if all(address.is_loopback for address in addresses):
        return "this machine"
    if any(address.is_unspecified for address in addresses):
        return "all networks of this machine"
    return "private networks" if all(address.is_private for address in addresses) else "the internet"


def _judge(topic: str, text: str, advice: str, *, is_open: bool) -> Finding:
    return warn(topic, f"{text}; {advice}") if is_open else ok(topic, text)


def _check_listener(frontend: FrontendConfig, reach: Reach) -> Finding:
    if frontend.uds:
        check_uds(frontend.uds)
        return ok("listener", f"the Unix socket {frontend.uds}: its owner and group on this machine")
    tls = "with TLS" if frontend.ssl_certfile else "without TLS"
    text = f"{frontend.host}, port {frontend.port}: reached from {reach}, {tls}"
    return _judge(
        "listener",
        text,
        "others on the way read prompts, images and keys: set frontend.ssl_certfile, or listen on 127.0.0.1 or a Unix "
        "socket (frontend.uds) behind a proxy with TLS",
        is_open=reach != "this machine" and not frontend.ssl_certfile,
    )


def _check_grpc(frontend: FrontendConfig) -> Iterator[Finding]:
    """The port of gRPC, which is on `host` also beside a Unix socket."""
    if not frontend.grpc_port:
        return
    reach = _reach(frontend.host)
    tls = "with TLS" if frontend.ssl_certfile else "without TLS"
    open_methods = "; without a key: ServerLive, ServerReady" if frontend.api_keys_file else ", without a key"
    text = f"{frontend.host}, port {frontend.grpc_port}: reached from {reach}, {tls}{open_methods}"
    is_open = reach != "this machine" and not (frontend.ssl_certfile and frontend.api_keys_file)
    advice = "set frontend.ssl_certfile and frontend.api_keys_file, or grpc_port = 0"
    yield _judge("gRPC", text, advice, is_open=is_open)


def _check_certificate(frontend: FrontendConfig) -> Iterator[Finding]:
    check_certificate(frontend)
    if warning := open_key_warning(frontend):
        yield warn("TLS", warning)
    elif frontend.ssl_certfile:
        yield ok("TLS", f"1.2 or later, with the certificate {frontend.ssl_certfile}")


def _check_keys(frontend: FrontendConfig, reach: Reach) -> Iterator[Finding]:
    file = frontend.api_keys_file
    keys = read_keys(file)
    if not keys:
        text = (
            f"none: every client that reaches the server, from {reach}, may send requests, "
            "and see and cancel those of others"
        )
        advice = "`noria key create NAME >> keys.toml`, and set frontend.api_keys_file"
        yield _judge("keys", text, advice, is_open=reach != "this machine")
        return
    mode = _mode(file)
    if mode & _OTHERS_WRITE:
        advice = f"chmod go-w {shlex.quote(str(file))}"
        yield warn("keys", f"others may add keys to {file}, whose mode is {mode:o}; {advice}")
    else:
        yield ok("keys", f"{len(keys)} in {file}; without one: the pages, the documents, /metrics, health checks")
    if administrators := [key.name for key in keys if "admin" in key.scopes]:
        yield ok("keys", f"with the scope admin, for the jobs of everybody: {', '.join(administrators)}")
    unlimited = [key.name for key in keys if key.max_images_in_flight is None and key.images_per_minute is None]
    if unlimited and len(keys) > 1:
        yield warn(
            "quotas",
            f"none for {', '.join(unlimited)}: one of them can fill the queue for all; set max_images_in_flight or "
            f"images_per_minute in {file}",
        )


def _check_metrics(frontend: FrontendConfig, reach: Reach) -> Finding:
    if frontend.metrics_address:
        host = frontend.metrics_address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        reach = _reach(host, frontend.metrics_address)
        text = f"/metrics on {frontend.metrics_address}: reached from {reach}, without a key"
        advice = "choose the address that the monitoring's network has"
        return _judge("metrics", text, advice, is_open=reach not in ("this machine", "private networks"))
    text = f"/metrics beside the other routes: reached from {reach}, without a key"
    advice = "set frontend.metrics_address, or let the proxy block it"
    return _judge("metrics", text, advice, is_open=reach != "this machine")


def _check_hosts(frontend: FrontendConfig) -> Finding:
    check_hosts(frontend.allowed_hosts)
    if "*" in frontend.allowed_hosts:
        return warn(
            "hosts",
            "any: a web page can read responses by a name of its own (DNS rebinding); list the server's names in "
            "frontend.allowed_hosts instead of *",
        )
    names = ", ".join(("IP addresses", "localhost", *frontend.allowed_hosts))
    return ok("hosts", f"{names}; pages of other origins may change nothing")


def _check_proxies(frontend: FrontendConfig) -> Finding:
    check_proxies(frontend.trusted_proxies)
    networks = [ipaddress.ip_network(each) for each in frontend.trusted_proxies if each != UNIX_CLIENT]
    public = [str(each) for each in networks if each.num_addresses > 1 and not each.is_private]
    if public:
        return warn(
            "proxies",
            f"everybody in {', '.join(public)} may claim any client's address, and so have no limits; list the "
            "proxies' own addresses in frontend.trusted_proxies",
        )
    return ok("proxies", f"X-Forwarded-For is believed from {', '.join(frontend.trusted_proxies) or 'no proxy'}")


def _check_live(frontend: FrontendConfig, reach: Reach) -> Finding:
    with_thumbnails = frontend.live == "full" or (frontend.live == "auto" and not frontend.api_keys_file)
    if not with_thumbnails:
        return ok("live", "/live shows no thumbnails" if frontend.live != "off" else "/live is off")
    text = "/live shows every caller thumbnails of all images in progress"
    advice = "set frontend.live to no-previews, or API keys and auto"
    return _judge("live", text, advice, is_open=reach != "this machine")


def _check_stored(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    """The database and the results of jobs, if they are not in the data folder."""
    yield from _check_database("jobs", config.jobs.database, environment)
    results = urlsplit(config.jobs.results)
    if config.jobs.results != "auto" and results.scheme in ("", "file"):
        yield _check_folder("results", pathlib.Path(results.path))
    elif results.scheme:
        yield ok("results", f"in {results.scheme}://{results.hostname}: its own rights count")


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
        return ok(topic, f"{path} does not exist yet; the server makes it for its own user only")
    except OSError as error:
        return fail(topic, f"{path} cannot be looked at: {error}")
    if mode & _GROUP_AND_OTHERS:
        text = (
            f"{path} has the mode {mode:o}: others read prompts and images in it; chmod -R go= {shlex.quote(str(path))}"
        )
        return warn(topic, text)
    return ok(topic, f"{path}: mode {mode:o}, for its owner only")


def _check_postgresql(topic: str, host: str | None, query: str, environment: Mapping[str, str]) -> Finding:
    host = parse_qs(query).get("host", [host or environment.get("PGHOST", "")])[0]
    mode = parse_qs(query).get("sslmode", [environment.get("PGSSLMODE", "")])[0]
    if not host or host.startswith("/") or host in ("localhost", "127.0.0.1", "::1"):
        return ok(topic, "PostgreSQL on this machine: its own rights count")
    if mode in _ENCRYPTED:
        return ok(topic, f"PostgreSQL on {host}, sslmode {mode}: its own rights count")
    return warn(
        topic,
        f"PostgreSQL on {host}, perhaps without TLS: others on the way read and change what is stored; add "
        f"?sslmode=verify-full to {topic}.database, or set PGSSLMODE",
    )


def _check_registry(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    what = "/v1/deployments and lineage, and X-Noria-Version"
    try:
        keys = read_keys(config.frontend.api_keys_file)
    except ConfigError:  # the finding of the keys
        return
    if keys:
        of_scopes = [
            f"{scope}: {', '.join(key.name for key in keys if scope in key.scopes) or 'none'}"
            for scope in ("lineage", "deploy")
        ]
        yield ok("registry", f"{what}: keys with the scopes {'; '.join(of_scopes)}")
    else:
        yield ok(
            "registry",
            f"{what}: without keys for every user of this machine, so for all clients of a proxy here that sends no "
            "X-Forwarded-For",
        )
    yield from _check_database("registry", config.registry.database, environment)


def _check_endpoints(config: Config) -> Iterator[Finding]:
    for endpoint in config.endpoints:
        try:
            read_own_file(endpoint.file)
        except OSError as error:
            yield fail("code", f"{endpoint.name}: {endpoint.file} cannot be used: {error.strerror or error}")
        else:
            text = (
                f"{endpoint.name}: {endpoint.file} runs in the front ends with the server's rights; nothing isolates it"
            )
            yield ok("code", text)


def _check_webhooks(config: Config) -> Finding:
    if config.jobs.webhook_allow_private:
        return warn(
            "webhooks",
            "to private addresses too: callers can make the server send requests to services of its own network; unset "
            "jobs.webhook_allow_private",
        )
    return ok("webhooks", "to public addresses only")


def _check_webhook_secret(config: Config, environment: Mapping[str, str]) -> Finding:
    topic, setting = "secret", config.jobs.webhook_secret_file
    try:
        file = secret_file(config.jobs, data_folder(config, environment))
        mode = _mode(file)
    except OSError as error:
        if setting == "auto" and isinstance(error, FileNotFoundError):
            return ok(topic, f"{file} does not exist yet; the server makes it for its own user only")
        return fail(topic, f"{file} cannot be looked at: {error}")
    if mode & _GROUP_AND_OTHERS:
        advice = f"chmod go= {shlex.quote(str(file))}"
        text = f"others may read {file}, whose mode is {mode:o}, and forge webhooks; {advice}"
        return warn(topic, text)
    return ok(topic, f"those of the keys are derived from {file}, which only its owner reads")


def _check_limits(config: Config) -> Finding:
    defaults = {setting.key: setting.default for setting in list_settings()}
    raised = []
    for key in _LIMITS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value > _RAISED_FACTOR * defaults[key]:
            raised.append(f"{key} is {value:g} (default {defaults[key]:g})")
    if raised:
        return warn("limits", f"{', '.join(raised)}: one caller may take that much; lower it")
    return ok("limits", "near their defaults: docs/security.md lists them")


def _check_log(config: Config) -> Finding:
    if config.log_prompts == "full":
        return warn("log", "has all prompts; set log_prompts to off, or to hash")
    return ok("log", f"prompts: {config.log_prompts}; secrets are redacted")


def _mode(path: str | pathlib.Path) -> int:
    return os.stat(path).st_mode & 0o7777
