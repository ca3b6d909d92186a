"""All settings: a frozen tree of structs, one field for each setting with its type, default and description.

`settings.py` derives the keys of the TOML file, the environment variables (`NORIA_ENGINE_SLOTS`), the flags (`--slots`)
and docs/settings.md from these declarations.
"""

import pathlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Auto = Literal["auto"]


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a device runs the model."""

    devices: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")], ...],
        Meta(
            min_length=1,
            description="devices, each with an engine process for each kind of model: `auto` (the GPU if there is one, "
            "else the CPU), `cpu`, `cuda` or `cuda:N`",
        ),
    ] = ("auto",)
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="precision of the model; `auto` is float16 on a GPU and float32 on a CPU"),
    ] = "auto"
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Auto,
        Meta(
            description="images in the running batch; `auto` is 32 on a GPU, 16 on a CPU, 2 on a CPU with a full-size "
            "model"
        ),
    ] = "auto"
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1024)], ...],
        Meta(
            description="batch sizes, in UNet rows, that a step is padded to (a guided image has two rows); empty is "
            "no padding, "
            "one number makes every image bitwise independent of the load"
        ),
    ] = ()
    decode_batch: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="maximum images decoded, and start images encoded, in one iteration; bounds how long they "
            "delay running images",
        ),
    ] = 4
    policy: Annotated[
        Literal["least-slack", "fcfs", "shortest-first"],
        Meta(description="order in which waiting images get slots: docs/scheduling.md"),
    ] = "least-slack"
    queue_limit_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="maximum seconds of work queued ahead of a new image; a longer queue is rejected with 429",
        ),
    ] = 120.0
    cache_dir: Annotated[
        str,
        Meta(
            description="folder of measured costs, compiled code and exported encoders; empty is `noria` in "
            "$XDG_CACHE_HOME or ~/.cache"
        ),
    ] = ""
    queue_limit: Annotated[
        int, Meta(ge=0, description="maximum images waiting for a slot; more are rejected with 429")
    ] = 256
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="CPU threads of one operation; `auto` is the usable cores divided by the engines"),
    ] = "auto"
    attention: Annotated[
        Literal[
            "auto",
            "sdpa",
            "plain",
            "sliced",
            "xformers",
            "flash",
            "flash_varlen",
            "sage",
            "sage_varlen",
            "_flash_3",
            "_flash_varlen_3",
            "_native_cudnn",
            "_native_efficient",
            "_native_flash",
            "_native_math",
        ],
        Meta(
            description="attention implementation: `auto` is `sdpa`, torch's own; `plain`, `sliced` and `xformers` are "
            "for UNets, the others diffusers' names of those for transformers. Which a model allows: docs/models.md. "
            "Those of the hub (`…_hub`) are not allowed, because they download code"
        ),
    ] = "auto"
    channels_last: Annotated[
        bool | Auto,
        Meta(description="keep the UNet's and VAE's tensors in NHWC memory order; `auto` is on a CPU, not on a GPU"),
    ] = "auto"
    text_encoder_device: Annotated[
        str,
        Meta(
            pattern=r"^(same|cpu|cuda:\d{1,3})$",
            description="where an image model's text encoders are: `same` as the model, `cpu` (in float32), or "
            "`cuda:N`; prompts whose embeddings are not cached are encoded there while steps wait",
        ),
    ] = "same"
    vae_tiling: Annotated[
        bool | Auto,
        Meta(
            description="decode and encode images that are larger than a tile in overlapping tiles: less memory, "
            "slower, and slightly other pixels near the seams; `auto` only those of more than 2048 × 2048 pixels"
        ),
    ] = "auto"
    cudnn_benchmark: Annotated[
        bool, Meta(description="let cuDNN benchmark its algorithms for each bucket (on a GPU, and only with buckets)")
    ] = True
    inference_mode: Annotated[bool, Meta(description="run under torch.inference_mode; false is torch.no_grad")] = True
    compile: Annotated[
        bool,
        Meta(
            description="torch.compile the UNet of a Stable Diffusion or XL, or a text encoder: about a minute at "
            "start-up; needs buckets. Other models refuse it, and take `compile_blocks`"
        ),
    ] = False
    compile_blocks: Annotated[
        bool,
        Meta(
            description="torch.compile only the blocks that the denoiser repeats, of any family, for any number of "
            "rows and tokens: minutes at start-up, later only calls of kinds that were not warmed up are not "
            "compiled: docs/models.md"
        ),
    ] = False
    encoder_precision: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"],
        Meta(
            description="precision of text encoders; `auto` is bfloat16 on a GPU and float32 on a CPU, where bfloat16 "
            "needs `noria-serve[openvino]`"
        ),
    ] = "auto"
    encoder_min_fidelity: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="an encoder whose precision keeps less of float32's results is rejected: the smallest cosine "
            "of an embedding on 200 lines of documents, or 1 less the largest difference of a score",
        ),
    ] = 0.999
    encoder_sessions: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Auto,
        Meta(
            description="batches that a text encoder computes at once on a CPU, each with `threads`; `auto` is one for "
            "each core, 2 for a large model"
        ),
    ] = "auto"
    encoder_cores: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto", "shared"],
        Meta(
            description="how text encoders and image models divide the cores of a CPU: with `auto` both use all, and "
            "texts go first; with `shared` both use all as equals; a number is the cores of the encoders, and images "
            "have the rest"
        ),
    ] = "auto"
    embedding_cache_bytes: Annotated[
        int, Meta(ge=0, description="prompt embeddings kept for reuse; a prompt of SD 1.5 has 118,272 in float16")
    ] = 134_217_728
    loras: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of LoRA files (.safetensors) that requests can name; `FOLDER` is for all image "
            "models, `MODEL=FOLDER` for one, `hf://ORG/NAME` is downloaded from the hub, `bundled` has those of the "
            "bundled model: docs/models.md. None with `compile`"
        ),
    ] = ("bundled",)
    lora_cache_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="LoRAs of a model kept on the device, in use or for reuse; those of accepted requests are "
            "never evicted, and a request that does not fit beside them is rejected with 429",
        ),
    ] = 2_147_483_648
    controlnets: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of ControlNets for Stable Diffusion 1.x, 2.x and XL, loaded with the models that they "
            "fit; `FOLDER` is for all of these, `MODEL=FOLDER` for one, `hf://ORG/NAME` is downloaded from the hub: "
            "docs/models.md. None with `compile`"
        ),
    ] = ()
    refiners: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of refiners for models of Stable Diffusion XL, loaded with the models and used by "
            "requests that ask for them; `FOLDER` is for all of these, `MODEL=FOLDER` for one, `hf://ORG/NAME` is "
            "downloaded from the hub: docs/models.md"
        ),
    ] = ()
    encoder_batch_texts: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="maximum texts of one batch of a text encoder; `auto` is 8 on a CPU, 64 on a GPU"),
    ] = "auto"
    encoder_batch_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | Auto,
        Meta(
            description="maximum tokens of one batch of a text encoder, padding included; a longer text is a batch of "
            "its own; `auto` is 512 on a CPU, 16384 on a GPU"
        ),
    ] = "auto"
    encoder_max_wait_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=10_000,
            description="how long a batch of texts waits for more of them while another batch runs; a lone request "
            "never waits",
        ),
    ] = 0.0
    mount_niceness: Annotated[
        int,
        Meta(
            ge=0,
            le=19,
            description="CPU niceness of the threads that load a version of a model beside those that serve: with 19 "
            "requests are delayed least, and the load takes longest; an export to ONNX then pauses while others want "
            "its core",
        ),
    ] = 19
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine is killed and restarted when one iteration takes longer than this and than ten "
            "times its longest "
            "iteration so far, or when it does not answer pings for this long",
        ),
    ] = 60.0
    start_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine that has not loaded and warmed up after this many seconds is killed and restarted",
        ),
    ] = 900.0


class FrontendConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How HTTP requests are received and limited."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one and prints it")] = 8000
    uds: Annotated[
        str,
        Meta(
            description="absolute path of a Unix socket to listen on instead of `host` and `port`, without TLS; its "
            "mode is 0660"
        ),
    ] = ""
    ssl_certfile: Annotated[
        str,
        Meta(
            description="PEM file with the server's certificate and the chain to its authority: with it the ports "
            "speak HTTPS only, TLS 1.2 or later. Read again when it or `ssl_keyfile` has changed"
        ),
    ] = ""
    ssl_keyfile: Annotated[
        str,
        Meta(
            description="PEM file with the private key of `ssl_certfile`, without a passphrase; empty is that the key "
            "is in `ssl_certfile`"
        ),
    ] = ""
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="addresses and networks (`10.0.0.0/8`) of proxies whose X-Forwarded-For and X-Forwarded-Proto "
            "are trusted, and `unix` for those that connect to `uds`; those of all others are ignored"
        ),
    ] = ("127.0.0.1", "::1", "unix")
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="names by which clients reach the server, as in their Host header: `images.example`, "
            "`*.example` for all below it, `*` for any. Always allowed are IP addresses, `localhost` and `host`; "
            "others are answered 421, so that no web page reaches the server by a name of its own (DNS rebinding)"
        ),
    ] = ()
    metrics_address: Annotated[
        str,
        Meta(
            description="another `ADDRESS:PORT` to listen on, which serves /metrics only; then the server's port does "
            "not. Empty is /metrics on the server's port"
        ),
    ] = ""
    grpc_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port on `host` for the Open Inference Protocol over gRPC (docs/encoders.md), with TLS as the "
            "others; 0 is none. Needs `noria-serve[grpc]`",
        ),
    ] = 0
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | Annotated[str, Meta(pattern=r"^(auto|\d{1,2}(-\d{1,2})?)\Z")],
        Meta(
            description="front-end processes sharing the port: a number, the fewest and the most, such as `1-4`, "
            "between which it follows the load, or `auto`, which is 1 to half of the cores: docs/operations.md"
        ),
    ] = 1
    sticky_header: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9-]{0,64}\Z",
            description="header, such as `X-User`, whose value decides which version answers while an endpoint has a "
            "canary: requests with the same value get the same version. Empty, or without the header, each request is "
            "chosen by itself",
        ),
    ] = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, description="maximum size of a request body without images")] = (
        1_048_576
    )
    max_image_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="maximum size of all images of a request together, as files; a body with them may be longer "
            "than `max_body_bytes` by that, in base64",
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
            description="cut texts that are longer than a text encoder takes, and say so in X-Noria-Truncated; false "
            "rejects them. A request can decide otherwise"
        ),
    ] = True
    max_text_chars: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum length of a text to a text encoder, in characters; a longer one would hold up the "
            "tokenizing of others",
        ),
    ] = 100_000
    max_prompt_chars: Annotated[int, Meta(ge=1, description="maximum length of a prompt, in characters")] = 4000
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=86400,
            description="a request not finished after this many seconds is removed from the running batch and answered "
            "504",
        ),
    ] = 600.0
    user_code_threads: Annotated[
        int,
        Meta(ge=1, le=256, description="threads of a front end for the methods of `endpoints` that are not async"),
    ] = 8
    restart_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="how long a request whose engine exited waits for a restarted one before it is answered 503",
        ),
    ] = 60.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="after SIGTERM, how long requests in flight may still take; the rest are answered 503 with "
            "Retry-After. "
            "All processes exit at most 10 s later: within Kubernetes' 30 s",
        ),
    ] = 20.0
    api_keys_file: Annotated[
        str,
        Meta(
            description="TOML file of API keys, their scopes and limits (`noria key`), read again when it has changed; "
            "empty is no keys: any client that reaches the port may do everything but change the registry"
        ),
    ] = ""
    live: Annotated[
        Literal["auto", "full", "no-previews", "off"],
        Meta(
            description="what /live shows of the running batch: `full` includes thumbnails of all images in progress; "
            "`auto` is full "
            "without API keys and no-previews with them"
        ),
    ] = "auto"


class JobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How jobs (asynchronous requests) are stored and executed."""

    database: Annotated[
        str,
        Meta(
            description="database of jobs: `auto` is SQLite in `data_dir`, else `sqlite:///FILE` or "
            "`postgresql://USER@HOST/NAME` "
            "(a password goes into PGPASSWORD or PGPASSFILE: process listings show settings)"
        ),
    ] = "auto"
    database_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=600,
            description="a statement that PostgreSQL does not answer within this time fails, and a request that waits "
            "as long for a free thread; either is answered 503",
        ),
    ] = 10.0
    results: Annotated[
        str,
        Meta(
            description="folder for the results of jobs, a path or an fsspec URL without a password; `auto` is "
            "`results` in `data_dir`"
        ),
    ] = "auto"
    ttl_s: Annotated[
        float,
        Meta(
            ge=60,
            le=31_536_000,
            description="finished jobs and their results are deleted after this many seconds; jobs not started within "
            "this time fail",
        ),
    ] = 86_400.0
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(
            description="maximum jobs that one front end runs at once, of images and of texts; `auto` is enough to "
            "fill the engines twice with images, and 4 of texts"
        ),
    ] = "auto"
    max_queued: Annotated[int, Meta(ge=0, description="maximum queued jobs; more are rejected with 429")] = 10_000
    max_queued_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | Auto,
        Meta(description="maximum queued jobs of one API key; `auto` is a quarter of `jobs.max_queued`"),
    ] = "auto"
    max_job_texts: Annotated[int, Meta(ge=1, description="maximum texts of one job")] = 100_000
    max_job_bytes: Annotated[int, Meta(ge=1024, description="maximum size of the texts of one job")] = 67_108_864
    max_queued_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="maximum size of the stored texts and start images of all jobs that have not ended, of one API "
            "key a quarter; more are rejected with 429",
        ),
    ] = 1_073_741_824
    max_pending_webhooks: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum webhooks that wait for their receivers, of one API key a quarter; more jobs with a "
            "webhook are rejected with 429",
        ),
    ] = 40_000
    webhook_secret_file: Annotated[
        str,
        Meta(
            description="file with the server's secret, `whsec_` and base64, from which those are derived that sign "
            "each API key's webhooks (`noria key webhook-secret`); in a second line, the one before it during a "
            "rotation. `auto` is `webhook-secret` beside the SQLite file, by default in `data_dir`, created at the "
            "first start; not with PostgreSQL"
        ),
    ] = "auto"  # noqa: S105 - where it is, not what
    webhook_allow_private: Annotated[
        bool,
        Meta(description="allow webhooks to loopback, private and other non-public addresses"),
    ] = False


class EndpointConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One table of `endpoints`: a class of the operator's, served at `POST /v1/endpoints/NAME`."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    code: Annotated[str, Meta(pattern=r"^.+:[A-Za-z_]\w*\Z")]  # FILE.py:CLASS
    model: str = ""  # the text encoder of its texts; empty: the first one
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 30.0  # of each call of preprocess and postprocess
    load_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0  # of the file and its `load`
    settings: dict[str, Any] = {}  # what `load` gets as `ctx.settings`

    @property
    def file(self) -> pathlib.Path:
        """The file of `code`."""
        return pathlib.Path(self.code.rpartition(":")[0]).absolute()

    @property
    def class_name(self) -> str:
        """The class of `code`."""
        return self.code.rpartition(":")[2]


class RegistryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where models, their versions, and what made them are registered."""

    database: Annotated[
        str,
        Meta(
            description="database of the registry: `auto` is SQLite in `data_dir`, else `sqlite:///FILE` or "
            "`postgresql://USER@HOST/NAME`, which may be that of the jobs (a password goes into PGPASSWORD or "
            "PGPASSFILE)"
        ),
    ] = "auto"
    deployments: Annotated[
        bool,
        Meta(
            description="follow the registry's deployments: load, serve and release versions while the server runs. "
            "Without it the server serves the models of its configuration only"
        ),
    ] = True
    source_roots: Annotated[
        tuple[str, ...],
        Meta(
            description="folders of this machine, and URLs of folders in stores (`s3://BUCKET/FOLDER`), below which "
            "`POST /v1/registry/versions` may read models; besides them the hub, the MLflow server of the environment, "
            "and models in packages"
        ),
    ] = ()
    max_source_gib: Annotated[
        float,
        Meta(gt=0, le=100_000, description="largest model that `POST /v1/registry/versions` copies, GiB"),
    ] = 64.0


class ClusterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a server on Ray is spread: `noria serve --on`, `serve run noria.cluster:app`. Else unused."""

    engine_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)] | Annotated[str, Meta(pattern=r"^\d{1,5}-\d{1,5}\Z")],
        Meta(
            description="engines of each model, each with one device: a number, or the fewest and the most, such as "
            "`1-8`, between which it follows the backlog: docs/ray.md"
        ),
    ] = 1
    frontend_replicas: Annotated[int, Meta(ge=1, le=1000, description="front ends")] = 1
    max_engines_per_node: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(
            description="engines of one model on one node; `auto` sets no limit: Ray spreads them over the nodes, and "
            "puts several on one if no other has room"
        ),
    ] = "auto"
    engine_gpus: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | Auto,
        Meta(
            description="GPUs that Ray reserves for an engine, or the share of one, so that engines of small models "
            "are on one GPU; `auto` is 1 if Ray has GPUs and `engine.devices` asks for no CPU"
        ),
    ] = "auto"
    engine_cpus: Annotated[
        float,
        Meta(ge=0, le=1024, description="CPUs that Ray reserves for an engine; without GPU also its `engine.threads`"),
    ] = 1.0
    engine_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="memory that Ray reserves on a node for an engine, so that no node gets more than it can hold; "
            "no engine is limited to it",
        ),
    ] = 0
    target_backlog_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="backlog of an engine, in seconds of work, above which a range of "
            "`engine_replicas` adds engines",
        ),
    ] = 10.0


VariableKind = Literal["scalar", "category", "value", "counter"]


class VariableConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One table of `statistics.variables`: a variable that is counted at the endpoints of a pattern."""

    variable: Annotated[str, Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}\Z")]
    endpoint: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+/*?-]{1,128}\Z")] = "*"  # `*` is any characters, `?` is one
    kind: VariableKind | None = None  # None: that of the built-in variable
    edges: Annotated[tuple[float, ...], Meta(max_length=64)] = ()  # of a scalar; empty: those of the built-in variable
    sampling: Annotated[float, Meta(ge=0, le=1)] | None = None  # share of requests; None: `statistics.sampling`


class StatisticsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Which distributions of requests and results are counted."""

    builtin: Annotated[
        tuple[Literal["prompts", "parameters", "images", "texts"], ...],
        Meta(
            description="built-in variables that are counted at all endpoints, by group: `prompts`, `parameters` (of "
            "image requests), `images` (that were generated), `texts` (and their embeddings and labels): "
            "docs/statistics.md"
        ),
    ] = ()
    sampling: Annotated[
        float, Meta(ge=0, le=1, description="share of the requests whose built-in variables are counted")
    ] = 1.0
    window_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="length of a window; 288 are kept, and the last 12 together are compared with the reference",
        ),
    ] = 300.0
    variables: Annotated[
        tuple[VariableConfig, ...],
        Meta(
            description="variables that code of your own records, and other edges or endpoints of built-in ones, "
            "[[statistics.variables]] tables in the file: `variable`, `endpoint` (`*` and `?` are wildcards), `kind` "
            "(scalar, category, value, counter), `edges`, `sampling`"
        ),
    ] = ()


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration: models, engines, front ends, jobs, registry, statistics, cluster, logs, traces."""

    model: Annotated[
        str, Meta(description="a folder in diffusers or transformers format, a hub id, `bundled` or `minilm`")
    ] = "bundled"
    additional_models: Annotated[
        tuple[str, ...],
        Meta(description="additional models, of either kind, on the same devices; a request selects one with `model`"),
    ] = ()
    endpoints: Annotated[
        tuple[EndpointConfig, ...],
        Meta(
            description="endpoints with code of your own, [[endpoints]] tables in the file: `name`, `code` "
            "(`FILE.py:CLASS`), `model`, `timeout_s`, `load_timeout_s`, `settings`; in variables and flags a TOML "
            "array of tables: docs/user-code.md"
        ),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="minimum severity of logged events")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Meta(
            description="`json` is one object a line, `text` is human-readable; `auto` is text on a terminal and JSON "
            "elsewhere"
        ),
    ] = "auto"
    log_prompts: Annotated[
        Literal["off", "hash", "full"],
        Meta(description="how prompts are logged: not at all, as SHA-256, or in full"),
    ] = "off"
    traces_endpoint: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector, OTLP over HTTP (`http://HOST:4318/v1/traces`); empty is no "
            "traces. "
            "Needs `noria-serve[traces]`: docs/traces.md"
        ),
    ] = ""
    traces_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="share of requests that are traced when the caller sent no sampling decision"),
    ] = 1.0
    data_dir: Annotated[
        str,
        Meta(
            description="folder for data that outlives the server, such as jobs and the registry; `auto` is `noria` in "
            "$XDG_DATA_HOME, else in ~/.local/share"
        ),
    ] = "auto"
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    frontend: FrontendConfig = msgspec.field(default_factory=FrontendConfig)
    jobs: JobsConfig = msgspec.field(default_factory=JobsConfig)
    registry: RegistryConfig = msgspec.field(default_factory=RegistryConfig)
    statistics: StatisticsConfig = msgspec.field(default_factory=StatisticsConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
