"""Reference images in a whole server, with real processes: in one batch, in edits, in a job that is killed."""

import base64
import concurrent.futures
import io

import httpx
import numpy as np
import pytest
from PIL import Image

import tiny_models
from noria.testing.server import running_server
from waiting import wait_until

pytestmark = (
    pytest.mark.slow
)  # a server that starts for 30 s, and again; tests/models and tests/frontend hold the parts


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_models.save_flux_2_klein(tmp_path_factory.mktemp("klein") / "klein")
    # With one bucket a call of one image takes as long as one of four, so that images share calls on any machine.
    arguments = [str(folder), "--slots", "4", "--buckets", "4", "--threads", "1", "--queue-limit-s", "600"]
    arguments += ["--loras", ""]
    with running_server([*arguments, "--data-dir", str(tmp_path_factory.mktemp("data"))]) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as opened:
        wait_until(lambda: opened.get("/readyz").is_success)
        yield opened


def photo(seed, size=(72, 64)):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)).save(file, "png")
    return file.getvalue()


def body(*photos, **fields):
    images = [base64.b64encode(each).decode() for each in photos]
    settings = {"prompt": "a hat", "seed": 3, "inference_steps": 12, "width": 72, "height": 64}
    return settings | {"reference_images": images} | fields


def generate(client, *photos):
    answer = client.post("/t2i", json=body(*photos))
    assert answer.status_code == 200, answer.text
    return answer


def pixels(content):
    return np.asarray(Image.open(io.BytesIO(content))).astype(int)


CHOICES = [(), (photo(1),), (photo(2),), (photo(1), photo(3, (96, 64)))]


def test_images_of_one_server_have_their_own_references(client):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda chosen: generate(client, *chosen), CHOICES * 2))
    assert max(float(answer.headers["X-Noria-Mean-Batch"]) for answer in together) > 1.5
    alone = [pixels(generate(client, *chosen).content) for chosen in CHOICES]
    for number, answer in enumerate(together):
        assert np.abs(pixels(answer.content) - alone[number % 4]).max() <= 1
    for first in range(4):
        for second in range(first):
            assert np.abs(alone[first] - alone[second]).max() > 2
    form = {name: str(value) for name, value in body(size="72x64").items() if name in ("prompt", "seed", "size")}
    files = [("image[]", ("a.png", each)) for each in CHOICES[3]]
    edit = client.post("/v1/images/edits", data=form | {"inference_steps": "12"}, files=files).json()
    assert np.abs(pixels(base64.b64decode(edit["data"][0]["b64_json"])) - alone[3]).max() <= 1


def test_a_job_whose_engine_and_front_end_are_killed_has_its_references(server, client):
    asked = body(*CHOICES[3], inference_steps=200)
    job = client.post("/v1/jobs", json={"input": asked}).json()
    wait_until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "processing")
    for role in ("engine", "frontend"):
        for child in server.children(role):
            child.kill()
    wait_until(lambda: succeeded(client, job["id"]))
    image = client.get(f"/v1/jobs/{job['id']}/images/0").content
    again = client.post("/t2i", json=asked)
    assert np.abs(pixels(image) - pixels(again.content)).max() <= 1


def succeeded(client, job_id):
    try:
        return client.get(f"/v1/jobs/{job_id}").json()["status"] == "succeeded"
    except (httpx.TransportError, ValueError):  # the front end is not back yet
        return False
