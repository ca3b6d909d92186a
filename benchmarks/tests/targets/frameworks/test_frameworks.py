"""Each framework, installed from the package registry, serves the pipeline's own images. Takes minutes."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from noria.config import Config
from noria.models.catalog import open_model
from noria_bench.load.protocols import decode_reply, encode_request
from noria_bench.targets import environments
from noria_bench.targets.catalog import TARGETS
from noria_bench.targets.pipeline_generator import PipelineGenerator, T2IBody, TargetJob, batch_key_of
from noria_bench.targets.server import running_target

pytestmark = [
    pytest.mark.slow,  # installs the frameworks, and starts their servers: minutes
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # within diffusers
]
SPEC = open_model("bundled")
CONFIG = Config(model="bundled")
TIMEOUT_S = 300
HEADERS = {"content-type": "application/json"}
BODIES = [
    {
        "prompt": f"request {k}",
        "seed": k,
        "inference_steps": (4, 6)[k % 2],
        "scheduler": ("ddim", "euler")[k % 2],
        "n": n,
    }
    for k, n in enumerate((1, 1, 2, 1, 1, 1, 3, 1))
]


@pytest.fixture(scope="module")
def solo_images():
    """The images of each body, generated alone by the pipeline in this process."""
    generator = PipelineGenerator(TargetJob(SPEC, CONFIG.engine, port=0))
    bodies = [T2IBody(**fields) for fields in BODIES]
    return [[pixels(image.rgb) for image in generator.generate(batch_key_of(body, SPEC), [body])[0]] for body in bodies]


def pixels(rgb):
    side = (SPEC.default_height_px, SPEC.default_width_px, 3)
    return np.frombuffer(rgb, np.uint8).reshape(side).astype(int)


def images_in(headers, content):
    files = [content]
    if headers["content-type"] != "image/png":
        files = [base64.b64decode(entry["b64_json"]) for entry in json.loads(content)["images"]]
    return [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int) for file in files]


@pytest.mark.parametrize("name", ["litserve", "bentoml", "ray", "triton-500ms"])
def test_a_framework_gives_the_pipeline_s_images_in_batches_and_leaves_no_process(name, solo_images):
    target = TARGETS[name]
    environments.install(target.framework, print)
    with running_target(target, SPEC, CONFIG) as server, httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        url = f"http://127.0.0.1:{server.port}{target.path}"

        def send(body):
            return client.post(url, content=encode_request(target.protocol, body), headers=HEADERS)

        with ThreadPoolExecutor(len(BODIES)) as callers:
            answers = list(callers.map(send, BODIES * 3))
        assert send({"prompt": 5}).status_code in (400, 422)
        family = server.process.children(recursive=True)
    batch_sizes = []
    for answer, expected in zip(answers, solo_images * 3, strict=True):
        assert answer.status_code == 200, answer.text
        headers, content = decode_reply(target.protocol, answer.headers, answer.content)
        batch_sizes.append(int(headers["x-batch-size"]))
        images = images_in(headers, content)
        assert len(images) == len(expected)
        # kernels round differently with the size of a batch
        assert max(np.abs(a - b).max() for a, b in zip(images, expected, strict=True)) <= 2
    assert max(batch_sizes) > 3  # the largest n of one request
    assert family
    assert not psutil.wait_procs(family, timeout=60)[1]
