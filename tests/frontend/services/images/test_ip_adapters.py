"""IP-Adapters in requests of every API that takes them, and in the files of images."""

import hashlib
import json

import msgspec
import pytest

from frontends import served_models
from ip_adapter_files import save_encoder, save_ip_adapter, save_unet
from noria.config import Config, EngineConfig, FrontendConfig
from noria.images.metadata_io import read_metadata
from noria.images.start_image import ImageFiles, RequestImages
from noria.models.adapters.ip_adapter_files import IpAdapterFiles
from noria.protocol.diffusion import IpAdapter
from noria.testing.fake_engine import FAKE_MODEL
from uploads import b64, file_of, photo
from waiting import wait_until

LAYERS = [(16, 32), (32, 32)]
NAME = "ip-adapter_tiny"
PHOTO = file_of(photo())
ASKED = {"name": NAME, "image": b64(PHOTO), "scale": 0.6}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ip_adapters")
    save_encoder(folder / "image_encoder")
    file = save_ip_adapter(folder / f"{NAME}.safetensors", LAYERS)
    return Config(
        engine=EngineConfig(loras=(), ip_adapters=(str(file),)),
        frontend=FrontendConfig(max_body_bytes=4096, max_image_bytes=60_000),
    )


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = save_unet(tmp_path_factory.mktemp("model") / "tiny", LAYERS)
    return msgspec.structs.replace(FAKE_MODEL, folder=str(folder))


@pytest.fixture(scope="module")
def server(folder, config, spec):
    with served_models(folder, spec, config=config) as client:
        yield client


@pytest.fixture
def prompted(server):
    """A client of a server with an IP-Adapter."""
    server.engine.reset()
    return server


@pytest.fixture
def engine(prompted):
    return prompted.engine


@pytest.fixture
def adapter(config, spec):
    digest = IpAdapterFiles.of(config.engine).for_model(spec)[NAME].digest
    return IpAdapter(NAME, 0.6, digest, hashlib.sha256(PHOTO).hexdigest()[:12], 32)


PIXELS = RequestImages(ImageFiles(ip_adapter=PHOTO)).pixels(64, 64, FAKE_MODEL, ip_adapter_px=32)


def unit(**changes):
    return {"module": "ip-adapter-auto", "model": f"{NAME} [0123abcd]", "image": b64(PHOTO), "weight": 0.6} | changes


@pytest.mark.parametrize(
    ("way", "path"),
    [
        *((way, path) for way in ("json", "form", "job") for path in ("/t2i", "/v1/images/generations")),
        ("edit", "/v1/images/edits"),
        ("a1111", "/sdapi/v1/txt2img"),
        ("hires", "/sdapi/v1/txt2img"),
    ],
)
def test_an_engine_gets_the_adapter_and_the_middle_of_its_image(prompted, engine, adapter, way, path):
    body = {"prompt": "p", "ip_adapter": ASKED}
    if way in ("form", "edit"):
        form = {"prompt": "p", "ip_adapter": json.dumps({"name": NAME, "scale": 0.6})}
        files = {"ip_adapter_image[]": PHOTO} | ({"image": PHOTO} if way == "edit" else {})
        answer = prompted.post(path, data=form, files=files)
    elif way == "job":
        answer = prompted.post("/v1/jobs", json={"input": body | {"endpoint": path}})
        stored = prompted.get(f"/v1/jobs/{answer.json()['id']}").json()["input"]
        assert stored["ip_adapter"] == ASKED | {"image": f"sha256:{adapter.image_digest}"}
    elif way in ("a1111", "hires"):
        a1111 = {"prompt": "p", "alwayson_scripts": {"controlnet": {"args": [unit()]}}, "enable_hr": way == "hires"}
        answer = prompted.post(path, json=a1111)
    else:
        answer = prompted.post(path, json=body)
    assert answer.is_success, answer.text
    wait_until(lambda: engine.data)
    assert engine.submitted[0].payload.ip_adapter == adapter
    if way != "edit":
        assert engine.submitted[0].payload.width == FAKE_MODEL.default_width_px
    assert engine.data == [photo().tobytes() * (way == "edit") + PIXELS]
    assert (engine.submitted[0].payload.second_pass is not None) == (way == "hires")


def test_it_follows_the_other_images_and_is_in_the_file(prompted, engine, adapter, tmp_path):
    body = {"prompt": "p", "image": b64(PHOTO), "strength": 0.5, "ip_adapter": ASKED}
    answer = prompted.post("/t2i", json=body)
    assert answer.is_success, answer.text
    assert engine.data == [photo().tobytes() + PIXELS]
    (tmp_path / "a.png").write_bytes(answer.content)
    assert read_metadata(tmp_path / "a.png").ip_adapter == adapter
    rejected = prompted.post("/v1/images/metadata", content=answer.content).json()["rejected"]
    assert (rejected[0]["field"], rejected[0]["value"]["image_digest"]) == ("ip_adapter", adapter.image_digest)
    assert f"the IP-Adapter '{NAME}', whose image it does not contain: send it in ip_adapter." in rejected[0]["reason"]


def test_they_are_listed(prompted, client, adapter):
    assert prompted.get("/v1/models/tiny").json()["noria"]["ip_adapters"] == [NAME]
    assert client.get("/v1/models/tiny").json()["noria"]["ip_adapters"] == []
    assert prompted.get("/controlnet/model_list").json()["model_list"] == [f"{NAME} [{adapter.digest}]"]


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        (ASKED | {"name": "no"}, 404, f"ip_adapter: tiny has no IP-Adapter 'no'; allowed are '{NAME}'."),
        ({"name": NAME}, 400, "ip_adapter.image is missing; send a PNG, WebP or JPEG file."),
        (ASKED | {"image": "%"}, 422, "ip_adapter.image is '%', which is not base64"),
        (ASKED | {"image": b64(PHOTO[:-40])}, 422, "ip_adapter.image is damaged"),
        (ASKED | {"scale": 2.5}, 400, "ip_adapter.scale is 2.5; allowed are 0.0 to 2.0."),
        (ASKED | {"scale": -0.1}, 400, "ip_adapter.scale is -0.1"),
        (ASKED | {"image": b64(PHOTO + bytes(60_001 - len(PHOTO)))}, 413, "at most 60000 are allowed"),
        (ASKED | {"start": 0.5}, 400, "start"),
    ],
)
@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations"])
def test_others_are_rejected(prompted, engine, path, asked, status, message):
    answer = prompted.post(path, json={"prompt": "p", "ip_adapter": asked})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"].startswith("ip_adapter")
    assert engine.submitted == []


def test_a_form_with_its_image_alone_is_rejected(prompted):
    answer = prompted.post("/t2i", data={"prompt": "p"}, files={"ip_adapter_image": PHOTO})
    assert answer.status_code == 400
    assert "ip_adapter_image is there without ip_adapter" in answer.json()["error"]["message"]
    answer = prompted.post("/t2i", files={"prompt": (None, "p"), "ip_adapter": (None, json.dumps({"name": NAME}))})
    assert "send it, in a form as the file `ip_adapter_image`." in answer.json()["error"]["message"]


def test_a_unit_whose_adapter_is_not_there_says_which_are(prompted):
    body = {"prompt": "p", "alwayson_scripts": {"controlnet": {"args": [unit(model="other")]}}}
    answer = prompted.post("/sdapi/v1/txt2img", json=body)
    assert answer.status_code == 404
    message = f"args: ip_adapter: tiny has no IP-Adapter 'other'; allowed are '{NAME}'."
    assert f"alwayson_scripts.controlnet.{message}" in answer.text
