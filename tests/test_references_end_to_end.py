"""Reference images in a whole server, with real processes: in one batch, and in edits."""

import base64

import httpx
import numpy as np
import pytest

import tiny_models
from noria.testing.server import running_server
from uploads import b64, check_own_images, file_of, photo, pixels_of
from waiting import wait_until

pytestmark = pytest.mark.slow  # a server that starts for 30 s; tests/models and tests/frontend hold the parts


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


def body(*photos, **fields):
    settings = {"prompt": "a hat", "seed": 3, "inference_steps": 12, "width": 72, "height": 64}
    return settings | {"reference_images": [b64(each) for each in photos]} | fields


FIRST, SECOND, LARGER = (file_of(photo(size, seed)) for seed, size in ((1, (72, 64)), (2, (72, 64)), (3, (96, 64))))
CHOICES = [(), (FIRST,), (SECOND,), (FIRST, LARGER)]


def test_images_of_one_server_have_their_own_references(client):
    def generate(photos):
        answer = client.post("/t2i", json=body(*photos))
        assert answer.status_code == 200, answer.text
        return answer

    _, alone = check_own_images(generate, CHOICES, min_mean_batch=1.5, min_change=2)
    form = {name: str(value) for name, value in body(size="72x64").items() if name in ("prompt", "seed", "size")}
    files = [("image[]", ("a.png", each)) for each in CHOICES[3]]
    edit = client.post("/v1/images/edits", data=form | {"inference_steps": "12"}, files=files).json()
    assert np.abs(pixels_of(base64.b64decode(edit["data"][0]["b64_json"])) - alone[3]).max() <= 1
