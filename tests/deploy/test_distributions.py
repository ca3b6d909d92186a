"""Both distributions are built, installed where nothing else is, and used without this repository."""

import importlib.metadata
import io
import os
import subprocess
import sys
import venv
import zipfile

import httpx
import pytest
from container import ROOT
from PIL import Image

from linked_packages import link_packages
from noria import __version__
from noria.testing.server import running_process

# two builds and a server: 45 s of CPU time
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = ("noria-serve", "noria-bench")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with what `make dist` builds: sdists of the repository, and wheels of the sdists."""
    folder = tmp_path_factory.mktemp("dist")
    for project in (ROOT, ROOT / "benchmarks"):
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(project)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def wheels(dist):
    """The wheels, by the names of their distributions."""
    return {name: dist / f"{name.replace('-', '_')}-{__version__}-py3-none-any.whl" for name in NAMES}


@pytest.fixture(scope="module")
def programs(wheels, tmp_path_factory):
    """The programs of an environment with the wheels and what they declare; pip finds all of it without an index."""
    environment = tmp_path_factory.mktemp("clean")
    venv.create(environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    infos = {name: f"{name.replace('-', '_')}-{__version__}.dist-info/" for name in NAMES}
    own = {name: importlib.metadata.PathDistribution(zipfile.Path(wheels[name], infos[name])) for name in NAMES}
    link_packages(packages, ["noria-bench"], own)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-compile"]
    without_index = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    subprocess.run([*pip, *map(str, wheels.values())], check=True, env=without_index | {"PIP_CONFIG_FILE": os.devnull})
    return python.parent


@pytest.fixture
def noria(programs, tmp_path, monkeypatch):
    """Run the installed `noria` in an empty folder, and return what it prints."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = subprocess.run([programs / "noria", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_twine_finds_nothing(dist):
    files = sorted(dist.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"] * 2
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True, stdout=subprocess.DEVNULL)


def test_the_wheel_has_what_the_commands_print(noria):
    assert noria("--version") == f"noria {__version__}\n"
    assert noria("docs", "install").startswith("# Install")
    assert "ExecStart=" in noria("config", "systemd")


def test_the_installed_server_draws_an_image(noria, programs, tmp_path):
    command = [str(programs / "noria"), "serve", "bundled", "--data-dir", str(tmp_path), "--port"]
    with running_process(lambda port: [*command, str(port)]) as server:
        answer = httpx.post(f"http://127.0.0.1:{server.port}/t2i", json={"prompt": "a red ring"}, timeout=120)
    assert Image.open(io.BytesIO(answer.content)).format == "PNG"
    (tmp_path / "image.png").write_bytes(answer.content)
    assert "a red ring" in noria("show", "image.png")


def test_the_installed_text_encoder_embeds(noria):
    assert '"embedding"' in noria("embed", "a water wheel")


def test_the_installed_benches_have_their_commands(noria):
    assert "deadlines" in noria("bench", "--help")
    assert "p99" in noria("simulate", "--duration", "1m")
