"""The settings, each declared once, in a field below, with its unit, default and effect; one frozen tree.

The TOML file, the environment variables (`NORIA_ENGINE_SLOTS`), the flags (`--slots`) and docs/settings.md all come from these
declarations: `settings.py` reads them.
"""

import pathlib
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from noria.errors import ConfigError

Auto = Literal["auto"]


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a device runs the model."""

    devices: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")], ...],
        Meta(
            min_length=1,
            description="one engine process each: `auto` (the GPU if there is one, else the CPU), `cpu`, `cuda` or `cuda:N`",
        ),
    ] = ("auto",)
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="precision of the model; `auto` is float16 on a GPU and float32 on a CPU"),
    ] = "auto"
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Auto,
        Meta(
            description="images in the running batch; `auto` is 32 on a GPU, 16 on a CPU, 2 on a CPU with a full-size model"
        ),
    ] = "auto"
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1024)], ...],
        Meta(
            description="numbers of UNet rows that a step is padded up to (a guided image has two); empty is no padding, "
            "one number makes every image bitwise independent of the load"
        ),
    ] = ()
    decode_batch: Annotated[
        int,
        Meta(
            ge=1, le=64, description="most images that one turn decodes, so that running images never wait for a crowd"
        ),
    ] = 4
    policy: Annotated[
        Literal["least-slack", "fcfs", "shortest-first"],
        Meta(description="who goes first when not all can: docs/scheduling.md"),
    ] = "least-slack"
    queue_limit_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="seconds of work that may be ahead of an image that has to wait; more is refused with 429",
        ),
    ] = 120.0
    cache_dir: Annotated[
        str,
        Meta(description="folder in which measured costs are kept; empty is `noria` in XDG_CACHE_HOME or ~/.cache"),
    ] = ""
    queue_limit: Annotated[int, Meta(ge=0, description="most images waiting for a slot; more are refused with 429")] = (
        256
    )
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="CPU threads of one operation; `auto` is the usable cores over the engines"),
    ] = "auto"
    attention: Annotated[
        Literal["sdpa", "plain", "sliced", "xformers"],
        Meta(
            description="`sdpa` and `xformers` are memory-efficient; `sliced` is attention slicing; `plain` is neither"
        ),
    ] = "sdpa"
    channels_last: Annotated[bool, Meta(description="keep the UNet's and VAE's tensors in NHWC memory order")] = True
    cudnn_benchmark: Annotated[
        bool, Meta(description="let cuDNN time its algorithms for each bucket (on a GPU, and only with buckets)")
    ] = True
    inference_mode: Annotated[bool, Meta(description="run under torch.inference_mode; false is torch.no_grad")] = True
    compile: Annotated[bool, Meta(description="torch.compile the UNet: about a minute at start-up; needs buckets")] = (
        False
    )
    embedding_cache: Annotated[int, Meta(ge=0, description="encoded prompts kept for re-use, in prompts")] = 256
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine whose turn takes longer than this, and longer than ten times its longest turn so far, or that "
            "answers nothing for so long, is killed and started again",
        ),
    ] = 60.0
    start_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine that has not loaded and warmed up after this many seconds is killed and started again",
        ),
    ] = 900.0


class FrontendConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests come in."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one and prints it")] = 8000
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="addresses and networks (`10.0.0.0/8`) of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; of anybody "
            "else they are not"
        ),
    ] = ("127.0.0.1", "::1")
    processes: Annotated[int, Meta(ge=1, le=64, description="front-end processes sharing the port")] = 1
    max_body_bytes: Annotated[int, Meta(ge=1024, description="longest request body read")] = 1_048_576
    max_images: Annotated[int, Meta(ge=1, le=1024, description="most images that one request may ask for")] = 16
    max_steps: Annotated[int, Meta(ge=1, le=1000, description="most inference steps that one request may ask for")] = (
        200
    )
    max_prompt_chars: Annotated[int, Meta(ge=1, description="longest prompt, in characters")] = 4000
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=86400,
            description="a request not done after this many seconds leaves the wheel and is answered 504",
        ),
    ] = 600.0
    restart_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="how long a request whose engine ended waits for a new one before it is answered 503",
        ),
    ] = 60.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="after SIGTERM, how long what is in flight may still take; the rest is answered 503 with Retry-After. "
            "All has ended 10 s later: within Kubernetes' 30 s",
        ),
    ] = 20.0
    keys_file: Annotated[
        str,
        Meta(
            description="TOML file of API keys and their limits (`noria key`), read at the start; empty is no keys: whoever reaches the port "
            "may ask for images"
        ),
    ] = ""
    live: Annotated[
        Literal["auto", "full", "no-previews", "off"],
        Meta(
            description="what /live shows of the running batch: `full` has pictures of everybody's images on their way, `auto` is full "
            "without API keys and no-previews with them"
        ),
    ] = "auto"


class JobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are kept that nobody waits for."""

    database: Annotated[
        str,
        Meta(
            description="where jobs are kept: `auto` is SQLite in `data_dir`, else `sqlite:///FILE` or `postgresql://USER@HOST/NAME` "
            "(a password goes into PGPASSWORD or PGPASSFILE: process listings show settings)"
        ),
    ] = "auto"
    results: Annotated[
        str,
        Meta(
            description="folder of the images of jobs, a path or a URL that fsspec knows, without a password; `auto` is `results` in `data_dir`"
        ),
    ] = "auto"
    ttl_s: Annotated[
        float,
        Meta(
            ge=60,
            le=31_536_000,
            description="an ended job and its images are deleted after this many seconds, and a job that nobody could draw for as long fails",
        ),
    ] = 86_400.0
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="jobs that one front end has drawn at once; `auto` is enough to fill the engines twice"),
    ] = "auto"
    max_queued: Annotated[int, Meta(ge=0, description="most jobs waiting to be drawn; more are refused with 429")] = (
        10_000
    )
    webhook_secret_file: Annotated[
        str,
        Meta(
            description="file with the secret that signs webhooks, `whsec_` and base64; `auto` is `webhook-secret` in `data_dir`, "
            "made at the first start"
        ),
    ] = "auto"  # noqa: S105 - where it is, not what
    webhook_allow_private: Annotated[
        bool,
        Meta(description="let webhooks go to loopback, private and other addresses that are not public"),
    ] = False


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole: what is served, by which engines, through which front ends."""

    model: Annotated[str, Meta(description="a folder in diffusers format, a hub id, or `bundled`")] = "bundled"
    additional_models: Annotated[
        tuple[str, ...],
        Meta(description="further models, served by the same engines to requests that name them as `model`"),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe event that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Meta(
            description="`json` is one object a line, `text` is for people; `auto` is text on a terminal and JSON elsewhere"
        ),
    ] = "auto"
    log_prompts: Annotated[
        Literal["off", "hash", "full"],
        Meta(
            description="what a request's line says of its prompts: nothing, a SHA-256 that tells equal ones, or the words"
        ),
    ] = "off"
    traces_endpoint: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector, OTLP over HTTP (`http://HOST:4318/v1/traces`); empty is no traces. Needs `noria-serve[traces]`: docs/traces.md"
        ),
    ] = ""
    traces_ratio: Annotated[
        float,
        Meta(
            ge=0, le=1, description="share of the requests traced that did not come with a decision of their caller's"
        ),
    ] = 1.0
    data_dir: Annotated[
        str,
        Meta(
            description="folder of what outlives the server, such as jobs; `auto` is `noria` in $XDG_DATA_HOME, else in ~/.local/share"
        ),
    ] = "auto"
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    frontend: FrontendConfig = msgspec.field(default_factory=FrontendConfig)
    jobs: JobsConfig = msgspec.field(default_factory=JobsConfig)


def data_folder(config: Config, environment: Mapping[str, str]) -> pathlib.Path:
    """Where `config.data_dir` is on this machine; nothing is made there.

    As the XDG Base Directory Specification has it, a relative $XDG_DATA_HOME counts as none.

    Raises:
        ConfigError: `auto`, and there is no home either.

    """
    if config.data_dir != "auto":
        return pathlib.Path(config.data_dir).absolute()
    home = pathlib.Path(environment.get("XDG_DATA_HOME", ""))
    if home.is_absolute():
        return home / "noria"
    try:
        return pathlib.Path.home() / ".local" / "share" / "noria"
    except RuntimeError as error:
        raise ConfigError(
            "setting data_dir is 'auto', and there is neither $XDG_DATA_HOME nor a home. Set --data-dir FOLDER."
        ) from error
