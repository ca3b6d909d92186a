"""Generators of clients, unmodified, read /openapi.json; what they write compiles and calls a real server."""

import json
import os
import pathlib
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest

from noria.testing.server import running_server
from python_environment import environment_python, node_folder

# An engine, and packages of 0.4 GB, which take minutes the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PYTHON = ("openapi-python-client==0.29.1", "openapi-generator-cli==7.26.0", "pydantic>=2", "python-dateutil", "urllib3")
JAVASCRIPT = (
    "@hey-api/openapi-ts@0.95.0",
    "openapi-typescript@7.13.0",
    "orval@7.13.2",
    "typescript@5.9.3",
)
TSC = ("--strict", "--skipLibCheck", "--target", "es2022", "--lib", "es2022,dom,dom.iterable", "--module", "commonjs")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server(["bundled"]) as running:
        yield f"http://127.0.0.1:{running.port}"


@pytest.fixture(scope="module")
def document(server: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("document") / "openapi.json"
    with urllib.request.urlopen(f"{server}/openapi.json") as response:
        file.write_bytes(response.read())
    return file


@pytest.fixture(scope="module")
def python() -> pathlib.Path:
    try:
        return environment_python("generators", *PYTHON)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot install the generators here: {error}")


@pytest.fixture(scope="module")
def node() -> pathlib.Path:
    try:
        return node_folder("generators", *JAVASCRIPT)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"npm cannot install the generators here: {error}")


def run(command: list[str | os.PathLike[str]], folder: pathlib.Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def served_model(printed: str) -> str:
    return str(json.loads(printed.splitlines()[-1]))


def test_openapi_python_client(
    python: pathlib.Path, document: pathlib.Path, server: str, tmp_path: pathlib.Path
) -> None:
    command = [python.with_name("openapi-python-client"), "generate", "--path", document, "--output-path", "made"]
    told = run([*command, "--meta", "none"], tmp_path)
    assert "Unable to" not in told
    assert "Could not find" not in told
    code = f"""
import importlib, json, pkgutil, made
for module in pkgutil.walk_packages(made.__path__, "made."):
    importlib.import_module(module.name)
from made.api.default import get_v1_models
print(json.dumps(get_v1_models.sync(client=made.Client({server!r})).data[0].id))
"""
    assert served_model(run([python, "-c", code], tmp_path)) == "noria-shapes"


def openapi_generator(python: pathlib.Path, document: pathlib.Path, language: str, folder: pathlib.Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("openapi-generator needs java")
    options = ["--global-property", "models,apis,supportingFiles,skipFormModel=false"]
    command = [python.with_name("openapi-generator-cli"), "generate", "-g", language, "-i", document, "-o", "made"]
    run([*command, *options], folder)


def test_openapi_generator_for_python(
    python: pathlib.Path, document: pathlib.Path, server: str, tmp_path: pathlib.Path
) -> None:
    openapi_generator(python, document, "python", tmp_path)
    code = f"""
import importlib, json, pkgutil, openapi_client as made
for module in pkgutil.walk_packages(made.__path__, "openapi_client."):
    importlib.import_module(module.name)
api = made.DefaultApi(made.ApiClient(made.Configuration(host={server!r})))
print(json.dumps(api.get_v1_models().data[0].id))
"""
    assert served_model(run([python, "-c", code], tmp_path / "made")) == "noria-shapes"


def test_openapi_generator_for_typescript(
    python: pathlib.Path, node: pathlib.Path, document: pathlib.Path, server: str, tmp_path: pathlib.Path
) -> None:
    openapi_generator(python, document, "typescript-fetch", tmp_path)
    run([node / "node_modules/.bin/tsc", *TSC, "--outDir", "built", "made/index.ts"], tmp_path)
    code = f"""
const made = require("./built/index.js")
const api = new made.DefaultApi(new made.Configuration({{ basePath: {server!r} }}))
api.getV1Models().then((list) => console.log(JSON.stringify(list.data[0].id)))
"""
    assert served_model(run(["node", "-e", code], tmp_path)) == "noria-shapes"


def test_hey_api(node: pathlib.Path, document: pathlib.Path, server: str, tmp_path: pathlib.Path) -> None:
    run([node / "node_modules/.bin/openapi-ts", "-i", document, "-o", "made"], tmp_path)
    (tmp_path / "package.json").write_text('{"type": "commonjs"}')
    run([node / "node_modules/.bin/tsc", *TSC, "--outDir", "built", "made/index.ts", "made/client.gen.ts"], tmp_path)
    code = f"""
const made = require("./built/index.js")
made.getV1Models({{ baseUrl: {server!r} }}).then((got) => console.log(JSON.stringify(got.data.data[0].id)))
"""
    assert served_model(run(["node", "-e", code], tmp_path)) == "noria-shapes"


def test_openapi_typescript_and_orval(node: pathlib.Path, document: pathlib.Path, tmp_path: pathlib.Path) -> None:
    programs = node / "node_modules/.bin"
    run([programs / "openapi-typescript", document, "-o", "types.d.ts"], tmp_path)
    run([programs / "orval", "--input", document, "--output", "api.ts", "--client", "fetch"], tmp_path)
    run([programs / "tsc", *TSC, "--noEmit", "types.d.ts", "api.ts"], tmp_path)
