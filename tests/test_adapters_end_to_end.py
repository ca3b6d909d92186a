"""LoRAs and ControlNets from a client to its pixels: mixed in one batch, in a job, and refused.

The front end and the engine run in threads of this process: to start another one takes ten seconds. The scheduler
measures no costs, so that it batches on a busy machine, too.
"""

import contextlib
import functools

import numpy as np
import pytest
from diffusers import UNet2DConditionModel

import tiny_models
from frontends import folder, served_client  # noqa: F401 - a fixture
from generating import load
from lora_files import save_diffusers_lora, save_kohya_lora
from noria.cli.main import main
from noria.config import Config, EngineConfig
from noria.engine.runtime import StepRuntime
from noria.images.metadata_io import read_metadata
from noria.scheduling.step.scheduler import StepScheduler
from running_engine import RunningEngine
from uploads import b64, check_own_images, file_of, photo, pixels_of
from waiting import wait_until


@pytest.fixture(scope="module")
def loras(tiny_folder, tmp_path_factory):
    parent = tmp_path_factory.mktemp("loras")
    unet = {"unet": UNet2DConditionModel.from_pretrained(tiny_folder / "unet")}
    save_diffusers_lora(parent / "one.safetensors", unet, "to_q", "to_v", seed=1)
    save_kohya_lora(parent / "two.safetensors", unet, "conv1", "proj_in", seed=2, alpha=2.0)
    save_diffusers_lora(parent / "foreign.safetensors", {"text_encoder_2": unet["unet"]}, "to_q")
    return parent


@pytest.fixture(scope="module")
def controlnets(tiny_folder, tmp_path_factory):
    parent = tmp_path_factory.mktemp("controlnets")
    return [
        tiny_models.save_controlnet(parent / name, tiny_folder, seed=k) for k, name in enumerate(["edges", "depth"])
    ]


@pytest.fixture(scope="module")
def client(tiny_folder, loras, controlnets, folder):  # noqa: F811 - a fixture
    settings = {"loras": (str(loras),), "controlnets": tuple(map(str, controlnets))}
    spec, executor = load(tiny_folder, **settings)
    engine = RunningEngine(folder, [spec], name="adapters")
    with contextlib.closing(engine):
        engine.start(StepRuntime(executor, StepScheduler(8)))
        with served_client(Config(engine=EngineConfig(**settings)), engine) as opened:
            yield opened


def control(name, seed, **fields):
    return {"name": name, "image": b64(file_of(photo((32, 32), seed))), **fields}


def body(field, adapters):
    return {"prompt": "a red ring", "seed": 3, "inference_steps": 20, field: list(adapters)}


def generate(client, field, adapters):
    answer = client.post("/t2i", json=body(field, adapters))
    assert answer.status_code == 200, answer.text
    return answer


LORAS = [(), ({"name": "one"},), ({"name": "two", "weight": 0.7},), ({"name": "one"}, {"name": "two"})]
CONTROLS = [
    (),
    (control("edges", 1),),
    (control("depth", 2, scale=1.5, end=0.5),),
    (control("edges", 1), control("depth", 3)),
]


@pytest.mark.parametrize(("field", "choices"), [("loras", LORAS), ("controls", CONTROLS)], ids=["LoRAs", "ControlNets"])
def test_images_of_one_batch_have_their_own_adapters(client, field, choices, tmp_path):
    together, _ = check_own_images(functools.partial(generate, client, field), choices)
    (tmp_path / "a.png").write_bytes(together[3].content)
    metadata = read_metadata(tmp_path / "a.png")
    if field == "loras":
        assert [(each.name, each.weight) for each in metadata.loras] == [("one", 1.0), ("two", 1.0)]
    else:
        assert [(each.name, each.scale) for each in metadata.controls] == [("edges", 1.0), ("depth", 1.0)]
        assert [len(each.image_digest) for each in metadata.controls] == [12, 12]
    assert [len(each.digest) for each in getattr(metadata, field)] == [12, 12]


def test_files_that_do_not_fit_and_unknown_names_are_rejected(client, loras):
    for name, status, message in [
        ("foreign", 400, "is of text_encoder_2, which no adapter can change here; the parts"),
        ("none", 404, "has no LoRA 'none'; allowed are 'foreign', 'one', 'two'."),
    ]:
        answer = client.post("/t2i", json={"prompt": "p", "loras": [{"name": name}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "loras")
        assert message in answer.json()["error"]["message"]
        assert str(loras) not in answer.text
    assert [each["name"] for each in client.get("/sdapi/v1/loras").json()] == ["foreign", "one", "two"]


def test_a_job_has_the_pixels_of_its_controls(client):
    job = client.post("/v1/jobs", json={"input": body("controls", CONTROLS[3])}).json()
    wait_until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "succeeded")
    image = client.get(f"/v1/jobs/{job['id']}/images/0").content
    assert np.abs(pixels_of(image) - pixels_of(generate(client, "controls", CONTROLS[3]).content)).max() <= 1


def test_a_controlnet_that_fits_no_model_ends_the_start(tiny_xl_folder, controlnets, capsys):
    assert main(["serve", str(tiny_xl_folder), "--controlnets", str(controlnets[0])]) != 0
    error = capsys.readouterr().err
    assert "fits no model of this server: it has " in error
    assert "cross_attention_dim 32 where " in error
