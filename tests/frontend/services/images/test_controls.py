"""ControlNets in requests of every API, and in the files of images."""

import hashlib
import json

import msgspec
import pytest
from PIL import Image

from controlnet_folders import save_controlnet, save_model
from frontends import served_models
from noria.config import Config, EngineConfig, FrontendConfig
from noria.images.metadata_io import read_metadata
from noria.images.start_image import RequestImages
from noria.models.adapters.controlnet_folders import ControlNetFolders
from noria.protocol.diffusion import Control
from noria.testing.fake_engine import FAKE_MODEL
from uploads import b64, file_of, photo
from waiting import wait_until


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("controlnets")
    entries = tuple(str(save_controlnet(folder / name)) for name in ("edges", "depth"))
    return Config(
        engine=EngineConfig(loras=(), controlnets=entries),
        frontend=FrontendConfig(max_body_bytes=4096, max_image_bytes=60_000),
    )


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model") / "tiny")
    return msgspec.structs.replace(FAKE_MODEL, folder=str(folder))


@pytest.fixture(scope="module")
def server(folder, config, spec):
    with served_models(folder, spec, config=config) as client:
        yield client


@pytest.fixture
def steered(server):
    """A client of a server with two ControlNets."""
    server.engine.reset()
    return server


@pytest.fixture
def controlled(steered):
    return steered.engine


PHOTO, OTHER = file_of(photo()), file_of(photo(seed=1))
ASKED = {"name": "edges", "image": b64(PHOTO), "scale": 0.8, "end": 0.5}


@pytest.fixture
def edges(config, spec):
    digest = ControlNetFolders.of(config.engine).for_model(spec)["edges"].digest
    return Control("edges", 0.8, 0.0, 0.5, digest, hashlib.sha256(PHOTO).hexdigest()[:12])


def test_an_engine_and_the_file_get_the_controls_and_the_pixels(steered, controlled, edges, tmp_path):
    answer = steered.post("/t2i", json={"prompt": "p", "controls": [ASKED, {"name": "depth", "image": b64(OTHER)}]})
    assert answer.status_code == 200, answer.text
    (request,), (data,) = controlled.submitted, controlled.data
    first, second = request.payload.controls
    assert first == edges
    assert (second.name, second.scale, second.start, second.end) == ("depth", 1.0, 0.0, 1.0)
    assert request.payload.strength is None
    assert data == photo().tobytes() + photo(seed=1).tobytes()
    (tmp_path / "a.png").write_bytes(answer.content)
    assert read_metadata(tmp_path / "a.png").controls == (first, second)
    text = Image.open(tmp_path / "a.png").text["parameters"]
    assert f'ControlNet 0: "Module: none, Model: edges [{edges.digest}], Weight: 0.8, Guidance Start: 0, ' in text
    again = steered.post("/v1/images/metadata", content=answer.content).json()
    assert [(each["field"], each["value"]["image_digest"]) for each in again["rejected"]] == [
        ("controls", first.image_digest),
        ("controls", second.image_digest),
    ]
    assert "the ControlNet 'edges', whose image it does not contain" in again["rejected"][0]["reason"]


def test_they_follow_a_start_image_and_its_mask(steered, controlled):
    mask = file_of(Image.new("L", (64, 48), 255))
    body = {"prompt": "p", "image": b64(OTHER), "mask": b64(mask), "controls": [ASKED], "width": 32, "height": 24}
    assert steered.post("/t2i", json=body).status_code == 200
    small = [photo(seed=k).resize((32, 24), Image.Resampling.LANCZOS).tobytes() for k in (1, 0)]
    assert controlled.data[0] == small[0] + b"\xff" * (32 * 24) + small[1]


def test_without_a_start_image_the_default_size_is_the_first_controls(steered, controlled):
    images = [{"name": "edges", "image": b64(file_of(photo(size)))} for size in ((47, 34), (64, 48))]
    assert steered.post("/t2i", json={"prompt": "p", "controls": images}).status_code == 200
    payload = controlled.submitted[0].payload
    assert (payload.width, payload.height) == (40, 32)
    assert len(controlled.data[0]) == 2 * 40 * 32 * 3


def test_models_list_them(steered, client):
    assert steered.get("/v1/models/tiny").json()["noria"]["controlnets"] == ["depth", "edges"]
    assert client.get("/v1/models/tiny").json()["noria"]["controlnets"] == []


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ([ASKED, ASKED | {"name": "no"}], 404, "controls[1]: tiny has no ControlNet 'no'; allowed are 'depth'"),
        ([{"name": "edges"}], 400, "controls[0].image is missing; send a PNG, WebP or JPEG file."),
        ([ASKED, ASKED | {"image": "%"}], 422, "controls[1].image is '%', which is not base64"),
        ([ASKED | {"image": b64(b"GIF89a")}], 422, "controls[0].image is no PNG, WebP or JPEG: it is GIF."),
        ([ASKED | {"image": b64(PHOTO[:-40])}], 422, "controls[0].image is damaged"),
        ([ASKED | {"scale": 2.5}], 400, "controls[0].scale is 2.5; allowed are 0.0 to 2.0."),
        ([ASKED | {"start": 1.5}], 400, "controls[0].start is 1.5; allowed are 0.0 to 1.0"),
        ([ASKED, ASKED | {"start": 0.5}], 400, "controls[1].start is 0.5, which is not before its end, 0.5."),
        ([ASKED] * 5, 400, "controls has 5 entries; at most 4 are allowed."),
        ([ASKED | {"module": "canny"}], 400, "module"),
        ([{"image": b64(PHOTO)}], 400, "name"),
        ("edges", 400, "allowed is a list of objects"),
        (
            [ASKED | {"image": b64(PHOTO + bytes(60_001 - len(PHOTO)))}],
            413,
            "at most 60000 are allowed (frontend.max_image_bytes)",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations", "/v1/jobs"])
def test_others_are_rejected(steered, controlled, path, asked, status, message):
    body = {"prompt": "p", "controls": asked}
    if path == "/v1/jobs":
        body = {"input": body}
    answer = steered.post(path, json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    if status == 404:
        assert answer.json()["error"]["code"] == "controlnet_not_found"
    assert controlled.submitted == []


def test_a_server_without_any_says_so(client):
    answer = client.post("/t2i", json={"prompt": "p", "controls": [ASKED]})
    assert answer.status_code == 404
    assert (
        "tiny has no ControlNet 'edges'; it has none; the operator sets folders of them: engine.controlnets."
        in answer.text
    )


def test_openais_routes_have_them(steered, controlled, edges):
    answer = steered.post("/v1/images/generations", json={"prompt": "p", "controls": [ASKED]})
    assert answer.status_code == 200, answer.text
    assert controlled.submitted[0].payload.controls == (edges,)
    assert controlled.data[0] == photo().tobytes()
    form = {"prompt": "p", "controls": json.dumps([{"name": "edges", "scale": 0.8, "end": 0.5}])}
    files = {"image": ("a.png", OTHER), "control": ("b.png", PHOTO)}
    answer = steered.post("/v1/images/edits", data=form, files=files)
    assert answer.status_code == 200, answer.text
    assert controlled.submitted[1].payload.controls == (edges,)
    assert controlled.data[1] == photo(seed=1).tobytes() + photo().tobytes()
    answer = steered.post("/v1/images/generations", data=form, files={"control": files["control"]})
    assert answer.status_code == 200, answer.text
    assert (controlled.submitted[2].payload.controls, controlled.data[2]) == ((edges,), photo().tobytes())
    answer = steered.post("/v1/images/generations", data=form, files=files)
    assert (
        answer.status_code,
        "unknown file 'image'. Known are: control, reference_image, ip_adapter_image." in answer.text,
    ) == (
        400,
        True,
    )
    for sent, message in (
        ({"image": files["image"]}, "controls has 1 entry and 0 images; send a file `control` for each entry."),
        ({**files, "extra": ("c.png", PHOTO)}, "Known are: image, mask, control, ip_adapter_image."),
    ):
        answer = steered.post("/v1/images/edits", data=form, files=sent)
        assert (answer.status_code, message in answer.text) == (400, True), answer.text
    answer = steered.post("/v1/images/generations", files={name: (None, value) for name, value in form.items()})
    assert "send a file `control` for each entry." in answer.text  # a form without files
    answer = steered.post("/v1/images/edits", data=form | {"controls": json.dumps([ASKED])}, files=files)
    assert "send images of controls as files `control` of the form" in answer.text


def test_a_form_of_t2i_has_files(steered, controlled, edges):
    form = {"prompt": "p", "n": "2", "metadata": "false", "controls": '[{"name": "edges", "scale": 0.8, "end": 0.5}]'}
    files = {"control": ("b.png", PHOTO)}
    answer = steered.post("/t2i", data=form, files=files)
    assert (answer.status_code, len(answer.json()["images"])) == (200, 2), answer.text
    assert (controlled.submitted[0].payload.controls, controlled.data[0]) == ((edges,), photo().tobytes())
    mask = Image.new("L", photo().size, "white")
    files |= {"image": ("a.png", OTHER), "mask": ("m.png", file_of(mask))}
    assert steered.post("/t2i", data=form | {"strength": "0.5"}, files=files).status_code == 200
    assert controlled.data[1] == photo(seed=1).tobytes() + mask.tobytes() + photo().tobytes()
    assert controlled.submitted[1].payload.strength == 0.5
    for fields, sent, message in (
        ({"controls": json.dumps([ASKED])}, {}, "send images of controls as files `control` of the form"),
        ({"controls": "[{}"}, {}, "controls is no JSON"),
        ({}, {"image": None}, "mask is there without image; send both."),
        ({}, {"control": None}, "controls has 1 entry and 0 images"),
        ({"image": "x"}, {}, "image is a text, since it has no filename; send a file."),
        ({"n": "x"}, {}, "n is"),
        ({"reference_images": "x"}, {}, "reference_images is a text; send files `reference_image` in a form."),
    ):
        kept = {name: file for name, file in (files | sent).items() if file is not None}
        answer = steered.post("/t2i", data=form | fields, files=kept)
        assert (answer.status_code, message in answer.text) == (400, True), answer.text
    answer = steered.post("/t2i", content=b"x", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert "send application/json or multipart/form-data" in answer.text


@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations", "/v1/images/edits"])
def test_files_without_the_field_are_rejected_before_their_pixels_are_decoded(steered, controlled, path, monkeypatch):
    decoded = []
    monkeypatch.setattr(RequestImages, "pixels", lambda *_: decoded.append(1) or b"")
    files = [("control", ("c.png", PHOTO))] * 5 + [("image", ("a.png", OTHER))] * (path == "/v1/images/edits")
    answer = steered.post(path, data={"prompt": "p"}, files=files)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], decoded) == (400, "controls", [])
    assert error["message"] == "controls has 0 entries and 5 images; send a file `control` for each entry."
    assert controlled.submitted == []


@pytest.mark.parametrize("endpoint", ["/t2i", "/v1/images/generations"])
def test_a_job_has_them_and_keeps_digests_of_their_images(steered, controlled, edges, endpoint):
    asked = {"prompt": "p", "controls": [ASKED], "endpoint": endpoint}
    answer = steered.post("/v1/jobs", json={"input": asked})
    assert answer.status_code == 202, answer.text
    wait_until(lambda: controlled.submitted)
    assert controlled.submitted[0].payload.controls == (edges,)
    assert controlled.data[0] == photo().tobytes()
    stored = steered.get(f"/v1/jobs/{answer.json()['id']}").json()["input"]["controls"]
    assert stored == [ASKED | {"image": f"sha256:{edges.image_digest}"}]


def unit(**fields):
    return {
        "model": "edges [0123abcd]",
        "image": b64(PHOTO),
        "weight": 0.8,
        "guidance_end": 0.5,
        "module": "none",
    } | fields


def scripts(*units, **others):
    return {"prompt": "p", "alwayson_scripts": {"ControlNet": {"args": list(units)}, **others}}


def test_a1111s_units_are_controls(steered, controlled, edges):
    off = {"enabled": 0, "model": "no", "image": b64(bytes(5000))}  # longer than a body may be without images
    same = {"control_mode": "Balanced", "resize_mode": 0, "pixel_perfect": True, "processor_res": 512, "lowvram": False}
    same |= {"input_mode": "simple", "batch_images": "", "output_dir": "", "loopback": False, "hr_option": "Both"}
    nested = unit(image={"image": b64(PHOTO), "mask": None}, weight="1", resize_mode="Crop and Resize", enabled=1)
    body = scripts(unit(**same), off)
    body["alwayson_scripts"]["controlnet"] = {"args": [nested]}  # another spelling
    answer = steered.post("/sdapi/v1/txt2img", json=body)
    assert answer.status_code == 200, answer.text
    assert controlled.submitted[0].payload.controls == (edges, msgspec.structs.replace(edges, scale=1.0))
    assert controlled.data[0] == photo().tobytes() * 2
    assert "ControlNet 1: " in json.loads(answer.json()["info"])["infotexts"][0]
    answer = steered.post("/sdapi/v1/img2img", json=scripts(unit()) | {"init_images": [b64(OTHER)]})
    assert answer.status_code == 200, answer.text
    assert controlled.submitted[1].payload.controls == (edges,)
    assert controlled.data[1] == photo(seed=1).tobytes() + photo().tobytes()
    assert b64(PHOTO) not in answer.text


@pytest.mark.parametrize(
    ("second_px", "kept"),
    [((128, 96), (0, 0, 64, 48)), ((48, 72), (16, 0, 48, 48)), ((128, 72), (0, 6, 64, 42))],
)
def test_a_second_pass_has_them_in_its_own_size_cut_as_latents_are(steered, controlled, edges, second_px, kept):
    size = {"width": 32, "height": 24, "hr_resize_x": second_px[0], "hr_resize_y": second_px[1]}
    answer = steered.post(
        "/sdapi/v1/txt2img", json=scripts(unit(hr_option="HiResFixOption.BOTH")) | {"enable_hr": True} | size
    )
    assert answer.status_code == 200, answer.text
    assert controlled.submitted[0].payload.controls == (edges,)
    small, large = (
        photo().crop(box).resize(px, Image.Resampling.LANCZOS)
        for box, px in (((0, 0, 64, 48), (32, 24)), (kept, second_px))
    )
    assert controlled.data[0] == small.tobytes() + large.tobytes()


def test_a1111s_clients_find_them(steered, controlled, edges):
    def get(path):
        answer = steered.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    other, title = get("/controlnet/model_list?update=true")["model_list"]
    assert other.startswith("depth [")
    assert title == f"edges [{edges.digest}]"
    assert steered.post("/sdapi/v1/txt2img", json=scripts(unit(model=title))).status_code == 200
    assert get("/controlnet/module_list?alias_names=false")["module_list"] == ["none", "ip-adapter-auto"]
    assert get("/controlnet/control_types")["control_types"]["All"]["model_list"] == ["None", other, title]
    assert get("/controlnet/settings") == {"control_net_unit_count": 4}
    assert get("/controlnet/version") == {"version": 3}
    assert get("/sdapi/v1/scripts") == {"txt2img": ["controlnet"], "img2img": ["controlnet"]}
    answer = steered.post("/controlnet/detect", json={})
    assert (answer.status_code, "no preprocessors" in answer.json()["detail"]) == (501, True)


def test_other_proportions_are_rejected_before_pixels_are_decoded_and_counted(steered, monkeypatch):
    monkeypatch.setattr(RequestImages, "pixels", lambda *_: pytest.fail("pixels were decoded"))
    rejected = 'noria_rejected_total{model="tiny",reason="invalid_field"}'

    def count():
        return sum(float(line.split()[-1]) for line in steered.get("/metrics").text.splitlines() if rejected in line)

    before = count()
    assert steered.post("/sdapi/v1/txt2img", json=scripts(unit()) | {"width": 48}).status_code == 400
    assert count() == before + 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (scripts(unit(model="no")), 404, "alwayson_scripts.controlnet.args[0]: tiny has no ControlNet 'no'"),
        (
            scripts(unit(module="canny")),
            400,
            "args[0].module is 'canny'; no preprocessor is run here: send an image as the ControlNet takes it",
        ),
        (scripts(unit(control_mode=2)), 400, "args[0].control_mode is 2"),
        (scripts(unit(resize_mode=3)), 400, "args[0].resize_mode is 3"),
        *(
            (scripts(unit(**mode)) | {"width": 48}, 400, "64 × 48 pixels and the result 48 × 48: cropping and filling")
            for mode in ({"resize_mode": 1}, {"resize_mode": None}, {"resize_mode": ""}, {})
        ),
        (scripts(unit(hr_option="Low res only")) | {"enable_hr": True}, 400, "args[0].hr_option is 'Low res only'"),
        (scripts(unit(guessmode=True)), 400, "args[0].guessmode is true"),
        (scripts(unit(strange=1)), 400, "args[0]: 'strange' is not supported"),
        (scripts(unit(strange=1, odd=2, none=None)), 400, "args[0]: 'strange', 'odd' are not supported: leave them"),
        (scripts(*[{"model": 1}] * 90), 400, "controlnet.args has 90 units; at most 20 are allowed."),
        (scripts(*[{"model": 1}] * 15, CONTROLNET=[{"model": 1}] * 6), 400, "controlnet.args has 21 units"),
        (scripts(unit(), unit(image=None)), 400, "args[1].image is null; send a file in base64"),
        (scripts(unit(image={"image": b64(PHOTO), "mask": b64(PHOTO)})), 400, "args[0].image has a mask"),
        (scripts(unit(weight="x")), 400, "args[0].weight is 'x'; a number is expected"),
        (scripts(unit(model=3)), 400, "args[0].model is 3; a text is expected"),
        (scripts(unit(weight=9)), 400, "controlnet.args[0].weight is 9.0; allowed are 0.0 to 2.0."),
        (scripts({"enabled": False}, unit(guidance_start=-1)), 400, "controlnet.args[1].guidance_start is -1.0"),
        (scripts(unit(image=b64(b"GIF89a"))), 422, "alwayson_scripts.controlnet.args[0].image is no PNG"),
        (scripts("unit"), 400, "a list of objects is expected"),
        (scripts(unit(enabled="no")), 400, "args[0].enabled is 'no'; allowed are true, which is the default,"),
        ({"prompt": "p", "alwayson_scripts": {"controlnet": 3}}, 400, "controlnet.args is 3; a list of objects is exp"),
        ({"prompt": "p", "alwayson_scripts": [1]}, 400, "alwayson_scripts is [1]; an object is expected: {"),
        (scripts(unit(), adetailer={"args": [True]}), 400, "a script besides controlnet is not supported"),
    ],
)
def test_a1111s_other_units_are_rejected(steered, controlled, body, status, message):
    answer = steered.post("/sdapi/v1/txt2img", json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]
    assert controlled.submitted == []
