"""Other people's clients, unmodified, in Python and JavaScript, in front of one real server with models of all kinds.

Each script has a table of calls. Their packages lie in the user's cache, where pip and npm put them once.
"""

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from encoders import make_encoder
from noria.testing.server import reserve_port, running_server
from python_environment import environment_python, node_folder

# Two engines, and packages of 1.1 GB, which take minutes the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PYTHON = (
    "cohere==7.3.1",
    "huggingface_hub==1.33.0",
    "kserve==0.21.0",
    "langchain-huggingface==1.2.3",
    "langchain-openai==1.7.4",
    "litellm==1.110.2",
    "llama-index-embeddings-openai-like==0.4.0",
    "llama-index-embeddings-text-embeddings-inference==0.6.0",
    "openai==3.57.0",
    "openlineage-python==1.54.0",
)
JAVASCRIPT = (
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "@huggingface/inference@4.13.30",
    "@langchain/core@1.4.0",
    "@langchain/openai@1.5.8",
    "ai@6.0.326",
    "openai@6.49.0",
)
FOLDER = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a server's HTTP and gRPC: the bundled model, minilm, a reranker and a classifier."""
    folder = tmp_path_factory.mktemp("models")
    encoders = [
        str(make_encoder(folder / name, "BertForSequenceClassification", {"num_labels": num_labels}))
        for name, num_labels in (("reranker", 1), ("classifier", 2))
    ]
    with reserve_port() as grpc_port:
        arguments = ["bundled", "--additional-models", ",".join(["minilm", *encoders]), "--grpc-port", str(grpc_port)]
        with running_server(arguments) as server:
            yield f"http://127.0.0.1:{server.port}", f"127.0.0.1:{grpc_port}"


def failures(command: list[str | os.PathLike[str]]) -> dict[str, str]:
    """Run a script of calls; return what those raised that failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) > 10
    return {name: outcome for name, outcome in outcomes.items() if outcome != "ok"}


def test_clients_in_python_work(addresses: tuple[str, str]) -> None:
    try:
        python = environment_python("clients", *PYTHON)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot install the clients here: {error}")
    assert failures([python, FOLDER / "python_clients.py", *addresses]) == {}


def test_clients_in_javascript_work(addresses: tuple[str, str]) -> None:
    try:
        folder = node_folder("clients", *JAVASCRIPT)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"npm cannot install the clients here: {error}")
    script = folder / "javascript_clients.mjs"  # a module finds packages from where it lies
    script.write_text((FOLDER / script.name).read_text())
    assert failures(["node", script, addresses[0]]) == {}
