"""Fixtures of several suites: a tiny random diffusers model, the bundled model, a browser, a trace collector."""

import gc
import os
import pathlib
import shutil
import signal
import uuid
from typing import NamedTuple

import pytest

import tiny_models
from databases import database, postgresql, postgresql_database, postgresql_server  # noqa: F401 - fixtures
from http_servers import HttpServer
from leaks import no_leaks  # noqa: F401 - a fixture of every test
from ray_cluster import ray_world  # noqa: F401 - a fixture
from waiting import wait_until

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers
except ImportError:  # on a machine that runs only the tests marked gpu
    settings = None
else:
    # The same examples at every run, so that a failure comes from the change; `make test-random` searches for others.
    # No deadline per example (Hypothesis's default is 200 ms), because a busy machine would miss it.
    _NO_DEADLINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("repeatable", derandomize=True, **_NO_DEADLINE)
    settings.register_profile("searching", derandomize=False, print_blob=True, **_NO_DEADLINE)
    settings.load_profile("repeatable")

CHROMIUM = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
# A shell's background jobs ignore SIGINT, and so would their child processes: tests that send it would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These start whole servers, generate hundreds of images or take Hypothesis half a minute. With several workers they run
# first, so that no worker ends with one of them.
LONGEST = (
    "test_end_to_end.py",
    "test_adapters_end_to_end.py",
    "engine/diffusion/test_executor.py",
    "supervisor/test_supervisor.py",
    "frontend/jobs/test_routes.py",
    "scheduling/test_virtual_time.py",
    "jobs/test_worker.py",
    "sampling/test_parity.py",
    "engine/test_multi_model.py",
    "engine/encoder/test_sessions.py",
    "jobs/test_completion.py",
    "cli/top/test_command.py",
)
TESTS = pathlib.Path(__file__).parent

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else torch's compiler keeps a pool of threads
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores, so torch computes in one thread.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

BUNDLED = pathlib.Path(__file__).parent.parent / "src" / "noria" / "models" / "bundled"


def pytest_configure(config):
    """Without a profile, draw no constants from the loaded modules: examples would depend on the tests run before."""
    gc.disable()  # until all is imported
    if settings is not None and not config.getoption("hypothesis_profile", None):
        providers.is_local_module_file = lambda path: False


def pytest_collection_finish():
    """Take what is imported by now out of garbage collections, and make them rarer: each takes 0.2 s with torch."""
    gc.freeze()  # with the little garbage of imports, which takes a second to find
    gc.set_threshold(50_000)
    gc.enable()


def pytest_collection_modifyitems(config, items):
    """Let workers begin with the longest files; in one process, all keep their order."""
    if missing := [name for name in LONGEST if not (TESTS / name).exists()]:
        raise pytest.UsageError(f"LONGEST in tests/conftest.py names missing files: {', '.join(missing)}")
    if hasattr(config, "workerinput"):
        ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Give this run a cache folder of its own. Servers share it, so only the first start measures costs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the folder of all workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory):
    """The default `data_dir` of tests and of the processes that they start, outside of the user's home."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def anyio_backend():
    """Run async tests in asyncio, as the server runs."""
    return "asyncio"


@pytest.fixture(scope="session")
def bundled_folder():
    """The model in the package."""
    return BUNDLED


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A model folder like Stable Diffusion 1.x (epsilon, AutoencoderKL, PNDM) with few random weights: 32 × 32 px."""
    return tiny_models.save_stable_diffusion(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_xl_folder(tmp_path_factory):
    """A model folder like Stable Diffusion XL with few random weights: 32 × 32 px."""
    return tiny_models.save_stable_diffusion_xl(tmp_path_factory.mktemp("tiny-xl"))


@pytest.fixture(scope="session")
def tiny_refiner_folder(tmp_path_factory):
    """A refiner for `tiny_xl_folder`."""
    return tiny_models.save_xl_refiner(tmp_path_factory.mktemp("refiners") / "tiny-refiner")


@pytest.fixture(scope="session")
def tiny_z_image_folder(tmp_path_factory):
    """A model folder like Z-Image with few random weights: up to 64 × 64 px."""
    return tiny_models.save_z_image(tmp_path_factory.mktemp("tiny-z-image"))


@pytest.fixture(scope="session")
def tiny_qwen_image_folder(tmp_path_factory):
    """A model folder like Qwen-Image with few random weights."""
    return tiny_models.save_qwen_image(tmp_path_factory.mktemp("tiny-qwen-image"))


@pytest.fixture(scope="session")
def tiny_flux_folder(tmp_path_factory):
    """A model folder like FLUX.1 dev with few random weights."""
    return tiny_models.save_flux(tmp_path_factory.mktemp("tiny-flux"))


@pytest.fixture(scope="session")
def chromium():
    """The system's browser, headless."""
    from playwright.sync_api import sync_playwright

    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"none of {', '.join(CHROMIUM)} is installed; apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Collector(HttpServer):
    """An OpenTelemetry collector: receives OTLP over HTTP on loopback and keeps every span."""

    def __init__(self):
        super().__init__(self._receive)
        self.spans, self.endpoint = [], f"{self.url}/v1/traces"

    def _receive(self, request):
        self.ingest(request.body)
        request.send()

    def ingest(self, body):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = plain(of_process.resource.attributes)
            for of_scope in of_process.scope_spans:
                self.spans += [CollectedSpan(span, resource) for span in of_scope.spans]

    def of_trace(self, trace_id):
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def wait(self, condition, timeout_s=60):
        """Return the first true value of `condition(spans)`."""
        return wait_until(lambda: condition(list(self.spans)), timeout_s)


class CollectedSpan:
    """A span, with plain attributes and times in seconds."""

    def __init__(self, span, resource):
        self.name, self.resource, self.attributes = span.name, resource, plain(span.attributes)
        self.trace_id, self.span_id, self.parent_id = (
            part.hex() for part in (span.trace_id, span.span_id, span.parent_span_id)
        )
        self.tracestate = span.trace_state
        self.kind = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}[span.kind]
        self.began, self.ended = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
        self.failed = span.status.code == 2

    def __repr__(self):
        return f"{self.name} of {self.resource.get('service.instance.id')}: {self.attributes}"


def plain(attributes):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


class Caller(NamedTuple):
    """A client's sampled trace context."""

    trace_id: str
    span_id: str
    traceparent: str


@pytest.fixture
def caller():
    trace_id, span_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    return Caller(trace_id, span_id, f"00-{trace_id}-{span_id}-01")


@pytest.fixture(scope="session")
def collector():
    """The collector for all tests, which find their spans by trace id."""
    with Collector() as opened:
        yield opened
