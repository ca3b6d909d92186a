"""ControlNets in a whole server, with real processes: mixed in one batch, in a job, and one that fits no model."""

import functools

import httpx
import numpy as np
import pytest

import tiny_models
from noria.cli.main import main
from noria.images.metadata_io import read_metadata
from noria.testing.server import running_server
from uploads import b64, check_own_images, file_of, photo, pixels_of
from waiting import wait_until


@pytest.fixture(scope="module")
def controlnets(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("controlnets")
    return [
        tiny_models.save_controlnet(folder / name, tiny_folder, seed=k) for k, name in enumerate(["edges", "depth"])
    ]


@pytest.fixture(scope="module")
def server(tiny_folder, controlnets):
    folders = ",".join(map(str, controlnets))
    arguments = [str(tiny_folder), "--slots", "8", "--threads", "1", "--controlnets", folders]
    with running_server(arguments) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as opened:
        yield opened


def control(name, seed, **fields):
    return {"name": name, "image": b64(file_of(photo((32, 32), seed))), **fields}


def body(controls):
    return {"prompt": "a red ring", "seed": 3, "inference_steps": 30, "controls": list(controls)}


def generate(client, controls):
    answer = client.post("/t2i", json=body(controls))
    assert answer.status_code == 200, answer.text
    return answer


CHOICES = [
    (),
    (control("edges", 1),),
    (control("depth", 2, scale=1.5, end=0.5),),
    (control("edges", 1), control("depth", 3)),
]


def test_images_of_one_batch_have_their_own_controlnets(client, tmp_path):
    together, _ = check_own_images(functools.partial(generate, client), CHOICES)
    (tmp_path / "a.png").write_bytes(together[3].content)
    used = read_metadata(tmp_path / "a.png").controls
    assert [(each.name, each.scale, len(each.digest), len(each.image_digest)) for each in used] == [
        ("edges", 1.0, 12, 12),
        ("depth", 1.0, 12, 12),
    ]


def test_a_job_has_the_pixels_of_its_controls(client):
    job = client.post("/v1/jobs", json={"input": body(CHOICES[3])}).json()
    wait_until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "succeeded")
    image = client.get(f"/v1/jobs/{job['id']}/images/0").content
    assert np.abs(pixels_of(image) - pixels_of(generate(client, CHOICES[3]).content)).max() <= 1


def test_a_controlnet_that_fits_no_model_ends_the_start(tiny_xl_folder, controlnets, capsys):
    assert main(["serve", str(tiny_xl_folder), "--controlnets", str(controlnets[0])]) != 0
    error = capsys.readouterr().err
    assert "fits no model of this server: it has " in error
    assert "cross_attention_dim 32 where " in error
