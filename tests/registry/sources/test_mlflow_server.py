"""A model that a real MLflow server has registered, added with the run that made it."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import uuid

import httpx
import pytest

from noria.cli.main import main
from noria.registry.manifest import read_manifest
from python_environment import environment_python
from waiting import wait_until

# The server starts in 40 s, its client in 30 s; pip takes up to twenty minutes, the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

MLFLOW = "mlflow==3.17.2"  # newer ones do not install beside the packages of 2026-11
SCRIPT = pathlib.Path(__file__).parent / "log_to_mlflow.py"
# Without its processes for jobs, and without sending what it was used for.
QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, python = tmp_path_factory.mktemp("mlflow"), environment_python("mlflow", MLFLOW)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [python, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/db", "--artifacts-destination", str(folder / "artifacts")]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, env=os.environ | QUIET, cwd=folder, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(
                lambda: process.poll() is not None or httpx.get(f"{url}/health").is_success,
                300,
                (httpx.TransportError,),
            )
            assert process.poll() is None, (folder / "log").read_text()
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def run_id(server, bundled_folder):
    command = [environment_python("mlflow", MLFLOW), SCRIPT, server, bundled_folder]
    logged = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    assert logged.returncode == 0, logged.stderr
    return str(uuid.UUID(logged.stdout.split()[-1]))


@pytest.fixture
def noria(server, run_id, tmp_path, monkeypatch, capsys):
    """Runs a command on a registry of its own; returns what it prints."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)

    def run(*arguments, status=0):
        capsys.readouterr()
        assert main([*arguments, "--data-dir", str(tmp_path)]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run


@pytest.mark.parametrize(("source", "revision"), [("shapes@prod", "shapes/1"), ("shapes/2", "shapes/2")])
def test_a_registered_model_is_added_with_its_run_and_data(noria, run_id, server, bundled_folder, source, revision):
    version = json.loads(noria("models", "add", "painter", f"mlflow:models:/{source}", "--json"))
    assert (version["source"], version["revision"]) == (f"mlflow:models:/{source}", revision)
    assert version["digest"] == read_manifest(bundled_folder).digest
    graph = json.loads(noria("trace", run_id, "--json"))
    run = graph["nodes"][0]
    assert (run["job_namespace"], run["job_name"], run["status"]) == (server, "train shapes", "complete")
    assert (run["params"], run["metrics"]) == ({"rate": "0.001", "steps": "200"}, {"loss": 0.047})
    assert "s3://bucket scenes  version mlflow-9c5e2f1a" in noria("trace", "painter")
    assert "model painter@1" in noria("trace", "s3://bucket/scenes@mlflow-9c5e2f1a", "--down")
    assert noria("registry", "check") == "ok\n"


def test_an_alias_that_the_server_does_not_have_is_one_sentence(noria):
    printed = noria("models", "add", "painter", "mlflow:models:/shapes@test", status=3)
    assert "answers 4" in printed and printed.count("\n") == 1
