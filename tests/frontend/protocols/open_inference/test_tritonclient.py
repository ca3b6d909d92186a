"""The unmodified tritonclient, over HTTP and over gRPC, in an environment of its own: it wants protobuf < 7."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import httpx
import numpy as np
import pytest

from frontends import serving
from noria.config import Config, FrontendConfig
from noria.testing.fake_encoder import FAKE_ENCODER, fake_vector
from noria.testing.fake_engine import FakeEngine
from noria.testing.server import reserve_port
from waiting import wait_until_ready

pytestmark = pytest.mark.slow  # installs tritonclient: a minute, once

REQUIREMENT = "tritonclient[http,grpc]==2.73.0"


@pytest.fixture(scope="module")
def python():
    """The interpreter of an environment with tritonclient, made once for each version of it and of Python."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    name = hashlib.sha256(f"{REQUIREMENT} {sys.version}".encode()).hexdigest()[:12]
    folder = cache / "noria" / "tests" / f"tritonclient-{name}"
    marker = folder / "complete"
    if not marker.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", REQUIREMENT], check=True)
        marker.touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def answers(python, folder):
    with (
        FakeEngine(f"ipc://{folder}/triton", models=(FAKE_ENCODER,)) as engine,
        reserve_port() as port,
        serving(Config(frontend=FrontendConfig(grpc_port=port)), engine) as (url, _),
    ):
        wait_until_ready(url)
        script = pathlib.Path(__file__).with_name("triton_client.py")
        arguments = [url.removeprefix("http://"), f"127.0.0.1:{port}", FAKE_ENCODER.name]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, script, *arguments], check=True, stdout=subprocess.PIPE, timeout=240, env=environment
        )
        found = json.loads(done.stdout)
        found["openai"] = httpx.post(f"{url}/v1/embeddings", json={"input": ["a red circle", "größe"]}).json()["data"]
        return found


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient_gets_what_openais_client_gets(answers, protocol):
    found, expected = answers[protocol], np.float32([each["embedding"] for each in answers["openai"]])
    for name in ("embedding", "one_output", *(["json"] if protocol == "http" else [])):
        np.testing.assert_array_equal(np.float32(found[name]), expected)
    np.testing.assert_array_equal(np.float32(found["tokens"]), [fake_vector([5, 6, 7]), fake_vector([8, 9])])
    assert found["id"] == "abc"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient_reads_health_metadata_configuration_and_statistics(answers, protocol):
    found = answers[protocol]
    assert found["health"] == [True] * 4
    assert not found["unknown"]
    assert (found["server"], found["metadata"]["name"], found["metadata"]["versions"]) == (
        "noria",
        "fake-encoder",
        ["1"],
    )
    config = found["config"].get("config", found["config"])
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (2048, "TYPE_STRING")
    index = found["index"]["models"] if protocol == "grpc" else found["index"]
    assert [(each["name"], each["state"]) for each in index] == [("fake-encoder", "READY")]
    assert int(found["statistics"]["inference_count"]) >= 6


@pytest.mark.parametrize(("protocol", "statuses"), [("http", ["404", "400", "501"]), ("grpc", ["StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT", "StatusCode.UNIMPLEMENTED"])])  # fmt: skip
def test_tritonclient_raises_its_own_error_with_our_message(answers, protocol, statuses):
    kinds, found, messages = zip(*answers[protocol]["errors"], strict=True)
    assert (set(kinds), list(found)) == ({"InferenceServerException"}, statuses)
    for message, says in zip(
        messages, ("'other' is not served", "no attention_mask", "models are loaded by noria serve"), strict=True
    ):
        assert says in message
