"""Each peer, installed for real from the package registry, serves the pipeline's own images. Minutes long."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from noria.bench import peers
from noria.bench.server import running_target
from noria.bench.targets.catalog import PEERS, TARGETS
from noria.bench.targets.drawing import PipelineDrawer, T2IBody, TargetJob, group_of
from noria.config import Config
from noria.models.catalog import open_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # within diffusers
]
SPEC = open_model("bundled")
CONFIG = Config(model="bundled")
PATIENCE_S = 300
WISHES = [
    {"prompt": f"wish {k}", "seed": k, "inference_steps": (4, 6)[k % 2], "scheduler": ("ddim", "euler")[k % 2], "n": n}
    for k, n in enumerate((1, 1, 2, 1, 1, 1, 3, 1))
]


@pytest.fixture(scope="module")
def alone():
    """Each wish drawn alone by the pipeline in this process."""
    drawer = PipelineDrawer(TargetJob(SPEC, CONFIG.engine, port=0))
    bodies = [T2IBody(**wish) for wish in WISHES]
    return [[pixels(image.rgb) for image in drawer.draw(group_of(body, SPEC), [body])[0]] for body in bodies]


def pixels(rgb):
    side = (SPEC.default_height_px, SPEC.default_width_px, 3)
    return np.frombuffer(rgb, np.uint8).reshape(side).astype(int)


def images_in(answer):
    assert answer.status_code == 200, answer.text
    files = [answer.content]
    if answer.headers["content-type"] != "image/png":
        files = [base64.b64decode(entry["b64_json"]) for entry in json.loads(answer.content)["images"]]
    return [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int) for file in files]


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_draws_the_pipeline_s_images_in_batches_and_leaves_nothing_behind(peer, alone):
    target = TARGETS[peer]
    peers.install(peer, print)
    with running_target(target, SPEC, CONFIG) as server, httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
        url = f"http://127.0.0.1:{server.port}{target.path}"
        with ThreadPoolExecutor(len(WISHES)) as callers:
            answers = list(callers.map(lambda wish: client.post(url, json=wish), WISHES * 3))
        assert client.post(url, json={"prompt": 5}).status_code in (400, 422)
        family = server.process.children(recursive=True)
    for answer, expected in zip(answers, alone * 3, strict=True):
        drawn = images_in(answer)
        assert len(drawn) == len(expected)
        # kernels round differently with the size of a batch
        assert max(np.abs(a - b).max() for a, b in zip(drawn, expected, strict=True)) <= 2
    assert max(int(answer.headers["x-batch-size"]) for answer in answers) > 3  # the most images of one wish
    assert family
    assert not psutil.wait_procs(family, timeout=60)[1]
