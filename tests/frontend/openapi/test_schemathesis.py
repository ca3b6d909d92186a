"""schemathesis sends what /openapi.json allows and what it forbids, and finds nothing.

It runs as its own program with its default checks: no 5xx; statuses, media types and bodies are declared; what the
document allows is accepted, what it forbids is rejected.
"""

import json
import pathlib
import subprocess
import sys

import httpx
import msgspec
import pytest

import frontends
from noria.config import Config, FrontendConfig
from noria.testing.fake_encoder import FAKE_ENCODER, LATE, SPARSE, FakeTokenizer
from noria.testing.fake_engine import FAKE_MODEL
from waiting import wait_until

SETTINGS = pathlib.Path(__file__).with_name("schemathesis.toml")


def labelled(task, *labels):
    return msgspec.structs.replace(FAKE_ENCODER, name=task, task=task, labels=labels, dimensions=len(labels))


# A model of each task that a route needs; POST / serves the first one.
MODELS = (
    FAKE_MODEL,
    msgspec.structs.replace(FAKE_ENCODER, prompts=(("query", "query: "),)),
    SPARSE,
    LATE,
    labelled("classification", "bad", "good"),
    labelled("reranking", "LABEL_0"),
)


def run_schemathesis(url: str, document: pathlib.Path, *arguments: str) -> None:
    """Run schemathesis; fail with its report if it finds something."""
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        str(SETTINGS),
        "run",
        str(document),
        "--url",
        url,
    ]
    # The stream of /v1/live has no end; tests/frontend/live/test_routes.py has its parameter.
    command += ["--exclude-path", "/v1/live", "--no-color", *arguments]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, cwd=document.parent)
    if finished.returncode:
        pytest.fail(finished.stdout + finished.stderr, pytrace=False)


class Tokenizer(FakeTokenizer):
    """Takes any text, as real ones do."""

    def encode(self, inputs, side="right"):
        pairs = [(each,) if isinstance(each, str) else each for each in inputs]
        return super().encode([" ".join(each).replace("\0", " ") for each in pairs], side)


@pytest.fixture
def server(serve, new_engine, tmp_path, monkeypatch):
    """The address of a server, and its document as a file."""
    monkeypatch.setattr(frontends, "FakeTokenizer", Tokenizer)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # nor may the process that reads the sources of versions ask the hub
    # What the document allows fits into a body.
    frontend = FrontendConfig(
        max_body_bytes=262_144, max_images=4, max_steps=100, max_prompt_chars=200, max_texts=4, max_text_chars=100
    )
    with serve(Config(frontend=frontend), new_engine(models=MODELS)) as (url, _):
        with httpx.Client(base_url=url, verify=False) as client:
            wait_until(lambda: client.get("/readyz").status_code == 200)
            document = client.get("/openapi.json").json()
        for path in ("/t2i", "/v1/images/generations"):  # in a form, "1" is also a number
            del document["paths"][path]["post"]["requestBody"]["content"]["multipart/form-data"]
        # A webhook's host is looked up, and no test may ask a name server.
        document["components"]["schemas"]["JobRequestBody"]["properties"]["webhook"] = {"type": "null"}
        text_jobs = document["paths"]["/v1/jobs/texts"]["post"]
        text_jobs["parameters"] = [each for each in text_jobs["parameters"] if each.get("name") != "webhook"]
        for path, item in document["paths"].items():
            if path.startswith("/v2/models/{model}") and "version" not in path:  # else no request would name a model
                for operation in item.values():
                    operation["parameters"][0]["example"] = FAKE_ENCODER.name
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        yield url, tmp_path / "openapi.json"


@pytest.mark.slow  # 3,000 requests: 25 s of CPU time
def test_server_does_what_its_document_says(server):
    run_schemathesis(*server, "--phases", "examples,coverage,fuzzing", "--max-examples", "3")


@pytest.mark.slow  # 200 random requests of each route: minutes
def test_server_does_what_its_document_says_with_random_requests(server):
    run_schemathesis(
        *server, "--phases", "fuzzing,stateful", "--max-examples", "200", "--exclude-checks", "use_after_free"
    )
