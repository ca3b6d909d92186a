"""The settings of front ends: addresses, limits of requests, access."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct


class FrontendConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How HTTP requests are received and limited."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one and prints it")] = 8000
    uds: Annotated[
        str,
        Meta(
            description="absolute path of a Unix socket to listen on instead of `host` and `port`, without TLS; "
            "mode 0660"
        ),
    ] = ""
    ssl_certfile: Annotated[
        str,
        Meta(
            description="PEM file with the certificate and its chain: ports speak HTTPS only. Read again when it or "
            "`ssl_keyfile` has changed"
        ),
    ] = ""
    ssl_keyfile: Annotated[
        str,
        Meta(description="PEM file with the private key, without a passphrase; empty: it is in `ssl_certfile`"),
    ] = ""
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="addresses and networks (`10.0.0.0/8`) whose X-Forwarded-For and X-Forwarded-Proto are "
            "trusted, and `unix` for `uds`"
        ),
    ] = ("127.0.0.1", "::1", "unix")
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="names in clients' Host header: `images.example`, `*.example` for all below it, `*` for "
            "any. Always allowed are IP addresses, `localhost` and `host`; others are answered 421, against DNS "
            "rebinding"
        ),
    ] = ()
    metrics_address: Annotated[
        str,
        Meta(description="another `ADDRESS:PORT`, which serves /metrics in place of the server's port"),
    ] = ""
    grpc_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port on `host` for the Open Inference Protocol over gRPC; 0 is none. Needs "
            "`noria-serve[grpc]`",
        ),
    ] = 0
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Annotated[str, Meta(pattern=r"^(auto|\d{1,2}(-\d{1,2})?)\Z")],
        Meta(
            description="front-end processes sharing the port: a number, a range such as `1-4`, which follows the "
            "load, or `auto`, 1 to half of the cores: docs/operations.md"
        ),
    ] = 1
    sticky_header: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9-]{0,64}\Z",
            description="header, such as `X-User`, whose value decides between canary and control; else chance",
        ),
    ] = ""
    client_header: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9-]{0,64}\Z",
            description="header, such as `X-User`, by whose value requests without an API key share an engine: "
            "docs/scheduling.md. Only behind a proxy that sets it",
        ),
    ] = ""
    max_connections: Annotated[
        int,
        Meta(
            ge=16,
            description="HTTP connections of a front end, at most the files that it may open; more are closed",
        ),
    ] = 8192
    max_connections_per_client: Annotated[
        int,
        Meta(
            ge=1,
            description="connections of one address (IPv6: of one /64 network) that is not in `trusted_proxies`",
        ),
    ] = 1024
    max_body_bytes: Annotated[int, Meta(ge=1024, description="maximum size of a request body without images")] = (
        1_048_576
    )
    max_image_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="maximum size of all images of a request, as files; its body may be longer by that",
        ),
    ] = 16_777_216
    max_images: Annotated[int, Meta(ge=1, le=1024, description="maximum images of one request")] = 16
    max_steps: Annotated[int, Meta(ge=1, le=1000, description="maximum inference steps of one request")] = 200
    max_texts: Annotated[int, Meta(ge=1, le=65_536, description="maximum texts of one request to a text encoder")] = (
        2048
    )
    truncate_texts: Annotated[
        bool,
        Meta(
            description="cut too long texts, and say so in X-Noria-Truncated; false rejects them. A request can decide "
            "otherwise"
        ),
    ] = True
    max_text_chars: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum characters of a text to a text encoder",
        ),
    ] = 100_000
    max_prompt_chars: Annotated[int, Meta(ge=1, description="maximum characters of a prompt")] = 4000
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=86400,
            description="a request not finished after this is removed from the batch with 504",
        ),
    ] = 600.0
    user_code_threads: Annotated[
        int, Meta(ge=1, le=256, description="threads of a front end for the methods of `endpoints` that are not async")
    ] = 8
    restart_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="how long a request whose engine exited waits for a restarted one; then it is 503",
        ),
    ] = 60.0
    rebalance: Annotated[
        bool,
        Meta(
            description="requests move to an engine of the same model that has less than half of the work, also while "
            "images run. Set false where engines differ in hardware or PyTorch, which changes images "
            "slightly"
        ),
    ] = True
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="after SIGTERM, how long requests in flight may take; the rest are 503 with Retry-After. All "
            "processes exit at most 10 s later",
        ),
    ] = 20.0
    api_keys_file: Annotated[
        str,
        Meta(
            description="TOML file of API keys, their scopes and limits (`noria key`), read again when it has "
            "changed; empty: any client may do everything but change the registry"
        ),
    ] = ""
    live: Annotated[
        Literal["auto", "full", "no-previews", "off"],
        Meta(
            description="what /live shows: `full` includes thumbnails; `auto` is full without API keys and "
            "no-previews with them"
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        """Take an IPv6 address also as it stands in URLs: `[::1]`."""
        if self.host.startswith("[") and self.host.endswith("]"):
            msgspec.structs.force_setattr(self, "host", self.host[1:-1])
