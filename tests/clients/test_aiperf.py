"""NVIDIA's load generator aiperf, in front of a real server with a small model."""

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from encoders import make_encoder, sentence_transformer
from noria.testing.server import running_server
from python_environment import environment_python

# A real server, which exports its model, and an environment of 100 packages: a minute, the first time several.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return make_encoder(tmp_path_factory.mktemp("small"), tokenizer_config=tokenizer, **sentence_transformer())


@pytest.fixture(scope="module")
def url(encoder: pathlib.Path) -> Iterator[str]:
    with running_server([str(encoder)]) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_aiperf_measures_embeddings(encoder: pathlib.Path, url: str, tmp_path: pathlib.Path) -> None:
    aiperf = environment_python("aiperf", "aiperf==0.13.0").with_name("aiperf")
    # With either of them it takes the folder of a tokenizer for a name on the hub, and rejects it.
    offline = "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    command = [str(aiperf), "profile", "--ui", "none", "--artifact-dir", str(tmp_path), "--url", url]
    command += ["--endpoint-type", "embeddings", "--model", "noria", "--tokenizer", str(encoder)]
    command += ["--request-count", "20", "--concurrency", "4", "--isl", "12"]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True)
    measured = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (measured["request_count"]["avg"], measured["request_error_rate"]["avg"]) == (20, 0)
    assert measured["request_latency"]["p99"] > 0
