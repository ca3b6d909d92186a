"""Deployments in a running server: real processes, real models, and clients that never stop asking."""

import concurrent.futures
import contextlib
import json
import pathlib
import shutil
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from encoders import make_encoder, sentence_transformer
from noria.cli.main import main
from noria.models.location import BUNDLED
from noria.testing.server import RunningServer, running_server
from waiting import wait_until

pytestmark = pytest.mark.slow  # engines load models several times

_WAIT = ["--wait", "280"]
_UNET = "unet/diffusion_pytorch_model.safetensors"
_IMAGE = {"prompt": "a red circle", "inference_steps": 2, "seed": 7, "metadata": False}


def with_other_weights(
    folder: pathlib.Path, copy: pathlib.Path, file: str, *, is_broken: bool = False, num_bytes: int = 4096
) -> pathlib.Path:
    """Copy a model folder and set its last weights to zero, or to what is no number."""
    shutil.copytree(folder, copy)
    weights = bytearray((copy / file).read_bytes())
    weights[-num_bytes:] = (b"\xff" if is_broken else b"\0") * num_bytes
    (copy / file).write_bytes(weights)
    return copy


class Registry:
    """The commands of the registry, in the server's data folder."""

    def __init__(self, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._settings, self._capsys = ["--data-dir", str(folder)], capsys

    def __call__(self, *arguments: str, status: int = 0) -> str:
        """Run a command; return what it prints."""
        self._capsys.readouterr()
        assert main([*arguments, *self._settings]) == status
        return self._capsys.readouterr().out

    def endpoint(self, name: str) -> dict:
        """Return what `noria status` says of an endpoint."""
        return json.loads(self("status", name, "--json"))


@pytest.fixture
def registry(data: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Registry:
    return Registry(data, capsys)


@pytest.fixture(autouse=True)
def _deploy_returns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `deploy` return at once, so that a test sees how the version is loaded."""
    monkeypatch.setattr("noria.cli.registry.deployments._FAST_S", 0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_encoder(tmp_path_factory.mktemp("encoders") / "small", **sentence_transformer())


@contextlib.contextmanager
def serving(data: pathlib.Path, encoder: pathlib.Path) -> Iterator[RunningServer]:
    arguments = ["bundled", "--additional-models", str(encoder), "--data-dir", str(data), "--processes", "2"]
    arguments += ["--mount-niceness", "5"]  # at 19, where clients take both cores, an export takes minutes
    with running_server([*arguments, "--slots", "2", "--threads", "1", "--restart-wait-s", "280"]) as running:
        with httpx.Client(base_url=f"http://127.0.0.1:{running.port}") as web:
            wait_until(lambda: all(each["state"] == "ready" for each in web.get("/readyz").json()["engines"]))
        yield running


@pytest.fixture(scope="module")
def server(data: pathlib.Path, encoder: pathlib.Path) -> Iterator[RunningServer]:
    with serving(data, encoder) as running:
        yield running


@pytest.fixture(scope="module")
def image_name(server: RunningServer) -> str:
    return model_names(server, "diffusion")[0]


@pytest.fixture(scope="module")
def text_name(server: RunningServer) -> str:
    return model_names(server, "encoder")[0]


def model_names(server: RunningServer, kind: str) -> list[str]:
    models = httpx.get(f"http://127.0.0.1:{server.port}/v1/models").json()["data"]
    return [each["id"] for each in models if each["noria"]["kind"] == kind]


def ask_image(web: httpx.Client) -> httpx.Response:
    return web.post("/t2i", json=_IMAGE)


def ask_text(web: httpx.Client) -> httpx.Response:
    return web.post("/v1/embeddings", json={"input": "a red circle"})


class Clients:
    """Users who ask, each `pause_s` after its last answer: what they were answered, by the version that says so."""

    def __init__(
        self, server: RunningServer, ask: Callable[[httpx.Client], httpx.Response], num_users: int, pause_s: float = 0.0
    ) -> None:
        self._url, self._ask, self._stopping = f"http://127.0.0.1:{server.port}", ask, threading.Event()
        self._pause_s = pause_s
        self.failures: list[str] = []
        self.num_broken = 0  # connections
        self.versions: Counter[str] = Counter()
        self._pool = concurrent.futures.ThreadPoolExecutor(num_users)
        self._users = [self._pool.submit(self._use) for _ in range(num_users)]

    def _use(self) -> None:
        with httpx.Client(base_url=self._url, timeout=280) as web:
            while not self._stopping.is_set():
                try:
                    response = self._ask(web)
                except httpx.TransportError:  # a front end was killed
                    self.num_broken += 1
                    continue
                self.versions[response.headers.get("x-noria-model-version", "")] += 1
                if response.status_code != 200:
                    self.failures.append(response.text)
                self._stopping.wait(self._pause_s)

    def wait_for(self, version: str, num_answers: int = 3) -> None:
        """Wait until so many more were answered by a version."""
        wanted = self.versions[version] + num_answers
        wait_until(lambda: self.versions[version] >= wanted or self.failures, timeout_s=280)

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._pool.shutdown()
        for user in self._users:
            user.result()


def test_versions_change_under_load_without_a_failed_request(
    server: RunningServer,
    registry: Registry,
    image_name: str,
    text_name: str,
    encoder: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as web:
        before = ask_image(web)
        configured = before.headers["x-noria-model-version"]
        assert "x-noria-deployment" not in before.headers
        registry("models", "add", "shapes", str(with_other_weights(BUNDLED, tmp_path / "second", _UNET)))
        registry("models", "add", "small", str(with_other_weights(encoder, tmp_path / "small2", "model.safetensors")))
        with Clients(server, ask_image, 8, pause_s=1) as images, Clients(server, ask_text, 64, pause_s=1) as texts:
            images.wait_for(configured)
            registry("deploy", image_name, "shapes@1", "--canary", "50%", *_WAIT)
            images.wait_for("shapes@1")
            images.wait_for(configured)
            registry("promote", image_name)
            registry("deploy", text_name, "small@1", *_WAIT)
            wait_until(lambda: held(web, image_name) != before.headers["x-noria-model-version"], timeout_s=280)
            images.wait_for("shapes@1")
            texts.wait_for("small@1")
            promoted = ask_image(web)
            assert (promoted.headers["x-noria-model-version"], promoted.headers["x-noria-deployment"]) == (
                "shapes@1",
                "1",
            )
            registry("rollback", image_name)
            registry("rollback", text_name)
            images.wait_for(configured, 8)
        assert (images.failures, texts.failures, images.num_broken, texts.num_broken) == ([], [], 0, 0)
        wait_until(lambda: held(web, image_name) == configured, timeout_s=280)
        after = ask_image(web)
    assert after.headers["x-noria-model-version"] == configured
    assert after.content == before.content != promoted.content


def is_loading(data: pathlib.Path) -> bool:
    """Whether a registrar has taken the lease of a deployment, and so loads it or will do so at once."""
    with contextlib.closing(sqlite3.connect(data / "registry.sqlite")) as connection:
        unfinished = "SELECT 1 FROM noria_deployment_heads WHERE owner IS NOT NULL AND finished_at IS NULL"
        return connection.execute(unfinished).fetchone() is not None


def held(web: httpx.Client, name: str) -> str:
    """The version that answers requests without a deployment of their own."""
    return web.get(f"/v1/models/{name}").json()["noria"]["version"]


def test_a_version_that_cannot_be_loaded_gets_no_request(
    server: RunningServer, registry: Registry, image_name: str, tmp_path: pathlib.Path
) -> None:
    broken = with_other_weights(BUNDLED, tmp_path / "broken", _UNET, is_broken=True)
    registry("models", "add", "broken", str(broken))
    with Clients(server, ask_image, 2) as images:
        wait_until(lambda: images.versions)
        assert "not finite" in registry("deploy", image_name, "broken@1", *_WAIT, status=1)
        images.wait_for(next(iter(images.versions)))
    assert not images.failures
    assert not any(version.startswith("broken") for version in images.versions)
    missing = with_other_weights(BUNDLED, tmp_path / "missing", "text_encoder/model.safetensors")
    registry("models", "add", "missing", str(missing))
    shutil.rmtree(missing)
    assert "cannot be loaded" in registry("deploy", image_name, "missing@1", *_WAIT, status=1)


@pytest.mark.parametrize("killed", ["registrar", "engine", "frontend"])
def test_a_deploy_is_completed_whatever_process_is_killed(
    server: RunningServer,
    registry: Registry,
    data: pathlib.Path,
    image_name: str,
    tmp_path: pathlib.Path,
    killed: str,
) -> None:
    # Each is another version: one that an engine holds still would be deployed at once.
    version = with_other_weights(BUNDLED, tmp_path / "next", _UNET, num_bytes=1024 * len(killed))
    model = f"after-{killed}"
    registry("models", "add", model, str(version))
    with Clients(server, ask_image, 2) as images:
        registry("deploy", image_name, f"{model}@1")
        wait_until(lambda: is_loading(data))
        wait_until(lambda: server.children(killed))
        for process in server.children(killed):
            process.kill()
        registry("deploy", image_name, f"{model}@1", *_WAIT)
        wait_until(lambda: images.versions[f"{model}@1"] >= 2, timeout_s=280)
    assert not images.failures
    assert killed == "frontend" or not images.num_broken
    assert registry.endpoint(image_name)["serving"]["version"]["model"] == model
    registry("rollback", image_name)
    wait_until(lambda: registry.endpoint(image_name)["unfinished"] is None, timeout_s=280)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_deploy_is_completed_after_the_whole_server_was_ended_while_it_loaded(
    encoder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    data = tmp_path / "data"
    registry = Registry(data, capsys)
    registry("models", "add", "small", str(with_other_weights(encoder, tmp_path / "second", "model.safetensors")))
    with serving(data, encoder) as server:
        name = model_names(server, "encoder")[0]
        registry("deploy", name, "small@1")
        wait_until(lambda: is_loading(data))
        for process in (*server.process.children(), server.process):  # as service managers do
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        assert server.process.wait(120) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert registry.endpoint(name)["unfinished"]["state"] == "pending"
    with serving(data, encoder) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as web:
        registry("deploy", name, "small@1", *_WAIT)
        wait_until(lambda: ask_text(web).headers["x-noria-model-version"] == "small@1")


def test_a_server_starts_with_what_is_deployed_also_without_its_registry(
    encoder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    registry = Registry(data, capsys)
    registry("models", "add", "shapes", str(with_other_weights(BUNDLED, tmp_path / "second", _UNET)))
    with serving(data, encoder) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as web:
        registry("deploy", model_names(server, "diffusion")[0], "shapes@1", *_WAIT)
        wait_until(lambda: ask_image(web).headers["x-noria-model-version"] == "shapes@1")
    for file in data.glob("registry.sqlite*"):
        file.unlink()
    (data / "registry.sqlite").write_text("this is no database")
    with serving(data, encoder) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as web:
        assert ask_image(web).headers["x-noria-model-version"] == "shapes@1"
