"""Every metric that Noria exports, declared once; dashboards use no others. `make docs` writes docs/metrics.md.

Front ends and engines are separate processes, so the supervisor sets PROMETHEUS_MULTIPROC_DIR to an empty folder before
it starts them: prometheus_client then keeps each process's values in a file there, and `exposition.py` sums them in any
front end. The counts of ended processes are kept: the supervisor merges them into one file per kind
(`dead_processes.py`). Without the variable (tests, a single process) the values are in memory.

Labels are bounded: a path is a route's template or "other", a model is one that is served or "other", an outcome or
reason is "ok" or a code of `noria.errors` (`outcomes.py`), a shape is one of the first `MAX_SHAPES` sizes generated or
"other", a version is one that is served, an endpoint is a configured one or a model, a variable one that is declared,
with at most 64 categories, and there is one engine for each kind of model on each device. Engine metrics have an
`engine` label, so that an idle, slow or faulty engine can be seen; a restarted engine continues its counters. Only the
iteration time has no `engine` label: by shape and engine it would be 600 series per engine, and an engine's busy time
divided by its iterations shows the same.
"""

from noria.observe.metrics.section import DECLARATIONS as DECLARATIONS  # noqa: PLC0414 - public here
from noria.observe.metrics.section import DURATION_BUCKETS_S, Section
from noria.observe.metrics.section import REGISTRY as REGISTRY  # noqa: PLC0414 - public here
from noria.statistics.variables import BUILT_IN_VARIABLES

MAX_SHAPES = 32
MAX_EXACT_TEXTS = 64  # the default of engine.encoder_batch_texts on a GPU

_ITERATION_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# The last is the largest number of slots that can be set.
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

_section = Section("Requests, counted by the front ends")

# A request here is an image request by any route, or a job.
REQUESTS = _section.counter(
    "noria_requests",
    "Image requests answered, rejected ones too; a job counts once, at its end.",
    "model",
    "outcome",
)
REJECTED = _section.counter(
    "noria_rejected", "Image requests rejected before any generation, by reason.", "model", "reason"
)
IMAGES = _section.counter("noria_images", "Images sent to clients.", "model")
IMAGES_REFUSED = _section.counter(
    "noria_images_refused", "Images that the safety classifier of their model has refused.", "model"
)
IMAGES_MOVED = _section.counter(
    "noria_images_moved",
    "Images that an engine handed over: `moved`, with their state; `waiting`, not begun; `refused` by the other "
    "engine or `dropped` for lack of room: both begin anew. `reason`: `leave`, it ends or releases the model, or "
    "`backlog`, another one had less to do.",
    "model",
    "outcome",
    "reason",
)
TEXTS = _section.counter("noria_texts", "Texts whose results were sent to clients.", "model")
REQUEST_SECONDS = _section.histogram(
    "noria_request_seconds",
    "Time of successful requests from admission to image files, or numbers of texts.",
    "model",
)
QUEUE_SECONDS = _section.histogram(
    "noria_queue_seconds", "Time until the last-finished image of a successful request got its slot.", "model"
)
STAGE_SECONDS = _section.histogram(
    "noria_stage_seconds",
    "Time of a request in one stage: `queue`, `image_encode` (start images), `text_encode` (the prompt), `denoise`, "
    "`decode` (latents to pixels), `postprocess` (pixels to files); of texts `tokenize`, `queue`, `infer` (the batch), "
    "`postprocess` (numbers to the response).",
    "model",
    "stage",
    buckets=(0.001, *DURATION_BUCKETS_S),
)
DEADLINES_MISSED = _section.counter(
    "noria_deadline_missed",
    "Accepted requests that missed their `deadline_ms`.",
    "model",
)
REQUESTS_IN_FLIGHT = _section.gauge("noria_requests_in_flight", "Image requests in progress.")
LIVE_SUBSCRIBERS = _section.gauge("noria_live_subscribers", "Clients subscribed to `GET /v1/live`.")
HTTP_REQUESTS = _section.counter(
    "noria_http_requests",
    "HTTP requests answered; 499: the client disconnected first.",
    "method",
    "path",
    "status",
)
HTTP_REQUEST_SECONDS = _section.histogram(
    "noria_http_request_seconds",
    "From an HTTP request's head to its response's end.",
    "method",
    "path",
    buckets=(0.001, *DURATION_BUCKETS_S),
)
EVENT_LOOP_LAG_SECONDS = _section.histogram(
    "noria_event_loop_lag_seconds",
    "How late a front end's event loop wakes up, twice a second.",
    buckets=_LAG_BUCKETS_S,
)

FRONTENDS = _section.gauge("noria_frontends", "Front ends that accept connections.")
FRONTEND_STARTS = _section.counter(
    "noria_frontend_starts",
    "Front-end processes started: `initial` (with the server), `load` (one more), `restarted` (after the previous one "
    "ended).",
    "process",
    "cause",
)
FRONTEND_STOPS = _section.counter(
    "noria_frontend_stops",
    "Front-end processes that stopped because the others suffice.",
    "process",
)

_section = Section("Deployments, counted by the front ends; canaries, by the registrar")

_VERSION_LABELS = ("model", "version")
DEPLOYMENT_REQUESTS = _section.counter(
    "noria_deployment_requests",
    "Requests to a deployed version, without jobs.",
    *_VERSION_LABELS,
    "outcome",
)
DEPLOYMENT_REQUEST_SECONDS = _section.histogram(
    "noria_deployment_request_seconds",
    "Time of these, if successful, from admission to their results.",
    *_VERSION_LABELS,
)
CANARY_SHARE = _section.gauge(
    "noria_canary_share_ratio",
    "Share of a model's requests that its canary gets; 0 when it is promoted or rolled back.",
    *_VERSION_LABELS,
)
CANARY_EVIDENCE = _section.gauge(
    "noria_canary_evidence",
    "Evidence that the canary is worse: it is rolled back at 20, by default.",
    *_VERSION_LABELS,
)
SHADOW_REQUESTS = _section.counter(
    "noria_shadow_requests",
    "Copies of requests for the model's shadow; `dropped`: not computed, under load.",
    *_VERSION_LABELS,
    "outcome",
)
SHADOW_SECONDS = _section.histogram(
    "noria_shadow_seconds",
    "Computing time of copied requests that both answered, by shadow and `control`.",
    *_VERSION_LABELS,
    "arm",
)
SHADOW_DISTANCE = _section.histogram(
    "noria_shadow_distance",
    "Distance of the shadow's output from the control's: of images the mean absolute difference of pixels, 0 to 1; of "
    "numbers the mean cosine distance of rows, 0 to 2.",
    *_VERSION_LABELS,
    buckets=(0.0001, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)

_section = Section("Endpoints with code of the operator's, counted by the front ends")

ENDPOINT_REQUESTS = _section.counter(
    "noria_endpoint_requests",
    "Requests of an endpoint, calls by the code of others included.",
    "endpoint",
    "outcome",
)
USER_CODE_SECONDS = _section.histogram(
    "noria_user_code_seconds",
    "Time of a call of `preprocess` or `postprocess` until it returns or is late, its own calls included.",
    "endpoint",
    "method",
    buckets=(0.001, *DURATION_BUCKETS_S),
)
USER_CODE_STUCK_THREADS = _section.gauge(
    "noria_user_code_stuck_threads",
    "Threads in calls that have exceeded their time limit, at the last change.",
)

_section = Section("Statistics of requests and results, counted by the front ends; drift, by the registrar")

_VARIABLE_LABELS = ("endpoint", "version", "variable")
STATISTICS_INVALID = _section.counter(
    "noria_statistics_invalid",
    "Values of a variable that are not finite; they are in no histogram.",
    *_VARIABLE_LABELS,
)
DRIFT_PSI = _section.gauge(
    "noria_drift_psi",
    "Population stability index of the last 12 windows and the reference, less its mean without drift; NaN with fewer "
    "than 200 values.",
    *_VARIABLE_LABELS,
)
DRIFT_KS = _section.gauge(
    "noria_drift_ks",
    "Largest difference of the cumulative shares (Kolmogorov–Smirnov), of scalars.",
    *_VARIABLE_LABELS,
)
DRIFT_JS = _section.gauge(
    "noria_drift_js", "Jensen–Shannon divergence from the reference, 0 to 1 bit.", *_VARIABLE_LABELS
)
DRIFT_P_VALUE = _section.gauge(
    "noria_drift_p_value",
    "Probability of as large a difference without drift, at one look: by chi-square of categories, by "
    "Kolmogorov–Smirnov of scalars.",
    *_VARIABLE_LABELS,
)
DRIFT_UNSEEN = _section.gauge(
    "noria_drift_unseen_ratio",
    "Share of values whose category the reference does not have; 0 if it has more than 1,000.",
    *_VARIABLE_LABELS,
)

for _variable in BUILT_IN_VARIABLES.values():  # `frontend/statistics/recorder.py` exports those that are counted
    _is_category = _variable.kind == "category"
    _section.declare(
        f"noria_stat_{_variable.name}{'_total' if _is_category else ''}",
        "counter" if _is_category else "histogram",
        _variable.description,
        ("endpoint", "version", "category") if _is_category else ("endpoint", "version"),
        _variable.edges,
    )

_section = Section("Jobs, counted by the front ends")

JOBS = _section.counter(
    "noria_jobs", "Jobs that ended, by final status.", "status", values=("succeeded", "failed", "canceled")
)
JOBS_ACCEPTED = _section.counter("noria_jobs_accepted", "Jobs accepted.")
WEBHOOK_ATTEMPTS = _section.counter(
    "noria_webhook_attempts",
    "Attempts to deliver a webhook; `failed` ones are retried.",
    "outcome",
    values=("delivered", "failed"),
)

_section = Section("The engine loop, counted by the engines")

ENGINE_UP = _section.gauge("noria_engine_up", "1 if the engine is ready; 0 if it is loading, or has ended.", "engine")
ENGINES_CONFIGURED = _section.gauge(
    "noria_engines_configured",
    "Configured engines, one for each kind of model on each device.",
    mode="livemax",
)
ENGINE_STARTS = _section.counter(
    "noria_engine_starts",
    "Engine processes started; the previous one was `none` (the first start), `crashed` or `killed`.",
    "engine",
    "previous_exit",
)
ENGINE_BUSY_SECONDS = _section.counter(
    "noria_engine_busy_seconds",
    "Time of an engine's iterations: steps, prompt encoding and decoding.",
    "engine",
)
KEY_BUSY_SECONDS = _section.counter(
    "noria_key_busy_seconds",
    "Time of engines by API key (empty: requests without one): of each model call, the share of its images or tokens.",
    "key",
)
ITERATIONS = _section.counter(
    "noria_iterations",
    "Iterations of the engine loop; `noria_batch_size_count` has those with a step or a batch of texts.",
    "engine",
)
DENOISE_STEPS = _section.counter(
    "noria_denoise_steps", "Denoising steps, one per image and iteration.", "engine", "model"
)
ITERATION_SECONDS = _section.histogram(
    "noria_iteration_seconds",
    "Time of an iteration with a denoising step, its encoding and decoding included, by image size (`WIDTHxHEIGHT`, or "
    "`WIDTHxHEIGHT+references`).",
    "shape",
    buckets=_ITERATION_BUCKETS_S,
)
BATCH_SIZE = _section.histogram(
    "noria_batch_size", "Images or texts in an iteration.", "engine", buckets=_BATCH_SIZE_BUCKETS
)
TOKENS = _section.counter("noria_tokens", "Tokens of encoded texts, without padding.", "engine", "model")
PADDING_TOKENS = _section.counter(
    "noria_padding_tokens", "Tokens of padding to the longest text of a batch.", "engine", "model"
)
FIDELITY = _section.gauge(
    "noria_fidelity_ratio",
    "How near a text encoder's results are to float32's, or a quantized denoiser's to those before; 1 is equal.",
    "engine",
    "model",
    "dtype",
    mode="livemax",
)
CALL_SPEEDUP = _section.gauge(
    "noria_call_speedup_ratio",
    "With `engine.compile_blocks` `auto`, how many times as fast a denoiser is as uncompiled and with torch's "
    "attention.",
    "engine",
    "model",
    "compile_blocks",
    "attention",
    mode="livemax",
)
# Without `engine`, as the iteration time.
TEXT_BATCHES = _section.counter(
    "noria_text_batches",
    f"Batches of texts; `texts` above {MAX_EXACT_TEXTS} are rounded up to a multiple of it.",
    "model",
    "texts",
)
TEXT_BATCH_SECONDS = _section.counter(
    "noria_text_batch_seconds", "Time that those batches were computed.", "model", "texts"
)
SLOTS = _section.gauge(
    "noria_slots",
    "Most images in the running batch. `source` is `set`, or of `auto` what decided: the free `memory`, its `maximum` "
    "or its `minimum`.",
    "engine",
    "source",
)
SLOTS_USED = _section.gauge("noria_slots_used", "Images in the running batch.", "engine")
QUEUE_DEPTH = _section.gauge("noria_queue_depth", "Images waiting for a slot.", "engine")
BACKLOG_SECONDS = _section.gauge(
    "noria_backlog_seconds",
    "Predicted time until all accepted requests are done.",
    "engine",
)
QUEUE_OLDEST_AGE_SECONDS = _section.gauge(
    "noria_queue_oldest_age_seconds", "Age of the oldest request that waits for a slot, or 0.", "engine"
)
JOINS = _section.counter("noria_joins", "Images that joined the running batch, each once.", "engine")
EVICTIONS = _section.counter(
    "noria_evictions", "Images that gave their slot to one ahead of them, and go on later.", "engine"
)
EVICTED = _section.gauge("noria_evicted", "Evicted images, whose states are in the host's memory.", "engine")
DEPARTURES = _section.counter(
    "noria_departures",
    "Images that left the running batch, but for those of a killed engine.",
    "engine",
    "outcome",
)
OUT_OF_MEMORY = _section.counter(
    "noria_out_of_memory",
    "Iterations that did not fit into device memory, repeated with a smaller batch; `phase` is `encodes`, "
    "`joins`, `steps` (also of texts) or `decodes`.",
    "engine",
    "phase",
)
DEVICE_MEMORY_BYTES = _section.gauge(
    "noria_device_memory_bytes",
    "Memory that an engine holds on its device; on a CPU its resident memory.",
    "engine",
)

_section = Section("Processes and devices, read by the front end that is scraped")

PROCESS_CPU_SECONDS = _section.declare(
    "noria_process_cpu_seconds_total",
    "counter",
    "CPU time of a process; a restarted one begins at 0.",
    ["process"],
)
PROCESS_MEMORY_BYTES = _section.declare(
    "noria_process_resident_memory_bytes", "gauge", "Resident memory of a process.", ["process"]
)
PROCESS_START_SECONDS = _section.declare(
    "noria_process_start_time_seconds", "gauge", "Start time of a process, in Unix time.", ["process"]
)
MACHINE_CORES = _section.declare("noria_machine_cores", "gauge", "CPU cores that the server may use.")
MACHINE_MEMORY_BYTES = _section.declare(
    "noria_machine_memory_bytes",
    "gauge",
    "Memory that the server may use: its control group's limit, or the machine's.",
)

_section = Section("Devices, under dcgm-exporter's names, if the machine has an NVIDIA GPU")

# Energy is a gauge too: dcgm-exporter's counter has no `_total`, which a counter must have here.
_GPU_LABELS = ("gpu", "UUID", "modelName")
GPU_METRICS = {
    name: _section.declare(name, "gauge", text, _GPU_LABELS)
    for name, text in (
        ("DCGM_FI_DEV_GPU_UTIL", "Share of time in which a kernel ran, in percent."),
        ("DCGM_FI_DEV_MEM_COPY_UTIL", "Share of time in which memory was read or written, in percent."),
        ("DCGM_FI_DEV_FB_USED", "Framebuffer memory in use, in MiB."),
        ("DCGM_FI_DEV_FB_FREE", "Framebuffer memory that is free, in MiB."),
        ("DCGM_FI_DEV_GPU_TEMP", "Temperature, in °C."),
        ("DCGM_FI_DEV_POWER_USAGE", "Power draw, in W."),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since the driver was loaded, in mJ."),
        ("DCGM_FI_DEV_SM_CLOCK", "Clock of the streaming multiprocessors, in MHz."),
    )
}
