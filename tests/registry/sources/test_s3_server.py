"""A model in a real S3 server (moto), read by the package s3fs, as an operator installs both."""

import importlib.metadata
import json
import os
import pathlib
import socket
import subprocess
import sys

import httpx
import pytest

from noria.registry.manifest import read_manifest
from python_environment import environment_python
from waiting import wait_until

# The server starts in some seconds; pip takes minutes, the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGES = ("moto[server]==5.2.1", f"s3fs=={importlib.metadata.version('fsspec')}")
COMMAND = "import sys; sys.path.append({packages!r}); from noria.cli.main import main; sys.exit(main())"
BUCKET = "models"
# moto checks no signatures, but lets nobody replace a file without one.
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=key/20261124/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
}


@pytest.fixture(scope="module")
def s3(bundled_folder):
    """A server with the bundled model in s3://models/released/shapes: its URL, and the folder of its packages."""
    python = environment_python("s3", *PACKAGES)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with subprocess.Popen([python, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: httpx.get(f"{url}/moto-api").is_success, 120, (httpx.TransportError,))
            assert httpx.put(f"{url}/{BUCKET}").is_success
            for file in bundled_folder.rglob("*"):
                if file.is_file():
                    key = f"{url}/{BUCKET}/released/shapes/{file.relative_to(bundled_folder)}"
                    assert httpx.put(key, content=file.read_bytes()).is_success
            (packages,) = python.parent.parent.glob("lib/python*/site-packages")
            yield url, packages
        finally:
            process.kill()


@pytest.fixture
def noria(s3, tmp_path):
    """Runs a command on a registry of its own, with s3fs behind Noria's packages; returns its result."""
    url, packages = s3
    environment = os.environ | {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }

    def run(*arguments):
        command = [sys.executable, "-c", COMMAND.format(packages=str(packages)), *arguments, "--data-dir", tmp_path]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_model_is_copied_once_and_anew_when_the_store_has_changed(noria, s3, bundled_folder, tmp_path):
    add = ("models", "add", "shapes", f"s3://{BUCKET}/released/shapes", "--json")
    added = noria(*add)
    assert added.returncode == 0, added.stderr
    version = json.loads(added.stdout)
    assert (version["number"], version["source"]) == (1, f"s3://{BUCKET}/released/shapes")
    assert version["digest"] == read_manifest(bundled_folder).digest
    again = noria(*add)
    assert (json.loads(again.stdout)["number"], "copying" in again.stderr) == (1, False)
    settings = json.dumps({"default_steps": 12}).encode()
    assert httpx.put(f"{s3[0]}/{BUCKET}/released/shapes/noria.json", content=settings, headers=SIGNED).is_success
    changed = noria(*add)
    assert json.loads(changed.stdout)["number"] == 2, changed.stderr
    assert len(list(pathlib.Path(tmp_path, "models").iterdir())) == 2


@pytest.mark.parametrize("folder", [f"{BUCKET}/nothing", "nothing/shapes"])
def test_what_the_store_does_not_have_is_one_sentence(noria, folder):
    result = noria("models", "add", "shapes", f"s3://{folder}")
    assert result.returncode == 3
    assert f"s3://{folder}" in result.stderr and result.stderr.count("\n") == 1
    assert "secret" not in result.stderr
