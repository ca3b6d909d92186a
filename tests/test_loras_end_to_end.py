"""LoRAs in a whole server, with real processes: mixed in one batch, loaded on demand, refused by name."""

import httpx
import pytest
from diffusers import UNet2DConditionModel

from lora_files import save_diffusers_lora, save_kohya_lora
from noria.images.metadata_io import read_metadata
from noria.testing.server import running_server
from uploads import check_own_images


@pytest.fixture(scope="module")
def loras(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    unet = {"unet": UNet2DConditionModel.from_pretrained(tiny_folder / "unet")}
    save_diffusers_lora(folder / "one.safetensors", unet, "to_q", "to_v", seed=1)
    save_kohya_lora(folder / "two.safetensors", unet, "conv1", "proj_in", seed=2, alpha=2.0)
    save_diffusers_lora(folder / "foreign.safetensors", {"text_encoder_2": unet["unet"]}, "to_q")
    return folder


@pytest.fixture(scope="module")
def server(tiny_folder, loras):
    arguments = [str(tiny_folder), "--slots", "8", "--threads", "1", "--loras", str(loras)]
    with running_server(arguments) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=280) as opened:
        yield opened


def test_images_of_one_batch_have_their_own_loras(client, tmp_path):
    def generate(loras):
        body = {"prompt": "a red ring", "seed": 3, "inference_steps": 30, "loras": list(loras)}
        answer = client.post("/t2i", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    choices = [(), ({"name": "one"},), ({"name": "two", "weight": 0.7},), ({"name": "one"}, {"name": "two"})]
    together, _ = check_own_images(generate, choices)
    (tmp_path / "a.png").write_bytes(together[3].content)
    used = read_metadata(tmp_path / "a.png").loras
    assert [(lora.name, lora.weight, len(lora.digest)) for lora in used] == [("one", 1.0, 12), ("two", 1.0, 12)]


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
