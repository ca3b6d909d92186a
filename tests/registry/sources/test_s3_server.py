"""A model in a real S3 server (moto), read by the package s3fs, as an operator installs both."""

import json
import os
import pathlib
import subprocess
import sys

import httpx
import pytest

from noria.registry.manifest import read_manifest
from s3_server import running_s3

# The server starts in some seconds; pip takes minutes, the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND = "import sys; sys.path.append({packages!r}); from noria.cli.main import main; sys.exit(main())"
BUCKET = "models"
# moto checks no signatures, but lets nobody replace a file without one.
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=key/20261124/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
}


@pytest.fixture(scope="module")
def s3(bundled_folder):
    """A server with the bundled model in s3://models/released/shapes."""
    with running_s3(BUCKET) as server:
        for file in bundled_folder.rglob("*"):
            if file.is_file():
                key = f"{server.url}/{BUCKET}/released/shapes/{file.relative_to(bundled_folder)}"
                assert httpx.put(key, content=file.read_bytes()).is_success
        yield server


@pytest.fixture
def noria(s3, tmp_path):
    """Runs a command on a registry of its own, with s3fs behind Noria's packages; returns its result."""
    environment = os.environ | s3.environment

    def run(*arguments):
        command = [sys.executable, "-c", COMMAND.format(packages=str(s3.packages)), *arguments, "--data-dir", tmp_path]
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
    assert httpx.put(f"{s3.url}/{BUCKET}/released/shapes/noria.json", content=settings, headers=SIGNED).is_success
    changed = noria(*add)
    assert json.loads(changed.stdout)["number"] == 2, changed.stderr
    assert len(list(pathlib.Path(tmp_path, "models").iterdir())) == 2


@pytest.mark.parametrize("folder", [f"{BUCKET}/nothing", "nothing/shapes"])
def test_what_the_store_does_not_have_is_one_sentence(noria, folder):
    result = noria("models", "add", "shapes", f"s3://{folder}")
    assert result.returncode == 3
    assert f"s3://{folder}" in result.stderr and result.stderr.count("\n") == 1
    assert "secret" not in result.stderr
