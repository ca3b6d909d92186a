"""A1111's routes as its clients use them."""

import base64
import io
import json
import threading
from urllib.parse import unquote

import pytest
from PIL import Image

from noria.errors.problems import Problems
from noria.frontend.protocols.a1111.bodies import check_body, check_settings
from noria.images.a1111_metadata import from_infotext
from waiting import wait_until

TITLE = "tiny [0123456789ab]"


def txt2img(client, **fields):
    return client.post("/sdapi/v1/txt2img", json={"prompt": "a red bicycle", **fields})


def opened(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_response_has_the_image_and_its_settings(client, engine):
    answer = txt2img(
        client, negative_prompt="q", seed=5, steps=20, cfg_scale=7, width=32, height=16, sampler_name="Euler"
    ).json()
    (text,) = answer["images"]
    file = opened(text)
    assert (file.format, file.size, file.getpixel((0, 0))) == ("PNG", (32, 16), engine.colour(5))
    assert answer["parameters"]["cfg_scale"] == 7
    info = json.loads(answer["info"])
    assert (info["seed"], info["all_seeds"], info["sampler_name"]) == (5, [5], "Euler")
    assert info["infotexts"] == [file.info["parameters"]]
    assert from_infotext(info["infotexts"][0]).model_version == "0123456789ab"


def test_batch_size_times_n_iter_images_are_one_request(client, engine):
    answer = txt2img(client, batch_size=2, n_iter=2, seed=7).json()
    assert [opened(text).getpixel((0, 0)) for text in answer["images"]] == [
        engine.colour(seed) for seed in range(7, 11)
    ]
    assert json.loads(answer["info"])["all_seeds"] == [7, 8, 9, 10]
    assert len(engine.submitted) == 1


def test_missing_fields_are_the_models_defaults(client, engine, spec):
    answer = client.post("/sdapi/v1/txt2img", json={}).json()
    (request,) = engine.submitted
    assert (request.payload.inference_steps, request.payload.scheduler, request.payload.width) == (
        spec.default_steps,
        spec.default_scheduler,
        64,
    )
    assert json.loads(answer["info"])["seed"] == request.payload.seed


def test_seed_of_minus_1_is_random(client, engine):
    for _ in range(2):
        txt2img(client, seed=-1)
    first, second = engine.submitted
    assert first.payload.seed != second.payload.seed


@pytest.mark.parametrize(
    ("fields", "scheduler"),
    [
        ({"sampler_name": "Euler"}, "euler"),
        ({"sampler_index": "PLMS"}, "pndm"),
        ({"sampler_name": "DDIM", "scheduler": "Karras"}, "ddim"),
        ({"sampler_name": "Euler", "scheduler": "Automatic"}, "euler"),
        ({"sampler_name": "", "scheduler": ""}, "ddim"),
        ({"scheduler": "Uniform"}, "euler"),
    ],
)
def test_samplers_are_accepted_by_a1111s_names(client, engine, fields, scheduler):
    assert txt2img(client, **fields).status_code == 200
    assert engine.submitted[0].payload.scheduler == scheduler


# What SillyTavern, Open WebUI and webuiapi send, with nothing switched on.
SILLYTAVERN = {
    "prompt": "p", "negative_prompt": "q", "sampler_name": "Euler", "scheduler": "Automatic", "steps": 20,
    "cfg_scale": 7, "width": 64, "height": 64, "restore_faces": False, "enable_hr": False, "hr_upscaler": "Latent",
    "hr_scale": 2, "hr_additional_modules": [], "denoising_strength": 0.7, "hr_second_pass_steps": 0, "seed": -1,
    "override_settings": {"CLIP_stop_at_last_layers": 1, "sd_vae": "Automatic", "forge_additional_modules": []},
    "override_settings_restore_afterwards": True, "clip_skip": 1, "save_images": True, "send_images": True,
    "do_not_save_grid": False, "do_not_save_samples": False,
}  # fmt: skip
OPEN_WEBUI = {"prompt": "p", "batch_size": 1, "width": 64, "height": 64, "steps": 20, "negative_prompt": ""}
WEBUIAPI = {
    "enable_hr": False, "denoising_strength": 0.7, "firstphase_width": 0, "firstphase_height": 0, "prompt": "p",
    "styles": [], "seed": -1, "subseed": -1, "subseed_strength": 0.0, "seed_resize_from_h": 0, "seed_resize_from_w": 0,
    "batch_size": 1, "n_iter": 1, "steps": "20", "cfg_scale": "7.0", "width": 64, "height": 64, "restore_faces": False,
    "tiling": False, "eta": 1.0, "s_churn": 0, "s_tmax": 0, "s_tmin": 0, "s_noise": 1, "override_settings": {},
    "sampler_index": "Euler", "script_name": None, "script_args": [], "alwayson_scripts": {"ControlNet": {"args": []}},
}  # fmt: skip


@pytest.mark.parametrize("body", [SILLYTAVERN, OPEN_WEBUI, WEBUIAPI], ids=["SillyTavern", "Open WebUI", "webuiapi"])
def test_bodies_of_real_clients_work(client, engine, body):
    answer = client.post("/sdapi/v1/txt2img", json=body)
    assert answer.status_code == 200, answer.text
    assert engine.submitted[0].payload.inference_steps == 20
    assert len(answer.json()["images"]) == 1


OFF = [
    {"tiling": "off", "restore_faces": "no"},
    {"alwayson_scripts": {"ADetailer": {"args": [True, False, {"ad_model": "None"}, {"ad_model": "None"}]}}},
    {"alwayson_scripts": {"ADetailer": {"args": [{"ad_model": "face_yolov8n.pt", "ad_enable": False}]}}},
    {"alwayson_scripts": {"Soft inpainting": {"args": [{"Soft inpainting": False, "Schedule bias": 1}]}}},
    {"tiling": "False", "styles": ["None", ""]}, {"enable_hr": "false", "s_noise": "1", "eta": "1.0"},
    {"sampler_name": "Euler", "sampler_index": 16}, {"sampler_index": -1, "scheduler": "None"}, {"sampler_name": None},
    {"seed": "", "steps": "None", "cfg_scale": None, "width": "", "refiner_switch_at": "", "override_settings": "None"},
    {"refiner_checkpoint": False, "subseed_strength": "0.0", "seed_resize_from_w": "-1", "script_name": "none"},
    {"alwayson_scripts": {"ADetailer": {"args": [False, False, {"ad_model": "None"}]}}}, {"alwayson_scripts": "None"},
    {"alwayson_scripts": {"ADetailer": {"args": [{"ad_model": "None", "ad_prompt": "eyes"}]}}},
    {"alwayson_scripts": {"Refiner": {"args": [False, "", 0.8]}, "Seed": {"args": [-1, False, -1, 0, 0, 0]}}},
    {"alwayson_scripts": {"reactor": {"args": ["iVBORw0KGgo=", False, "0", "inswapper.onnx"]}, "x": None, "y": []}},
    {"alwayson_scripts": {"controlnet": {"args": [None, {}, {"enabled": "False", "module": "canny"}]}, "z": 0}},
    *({"override_settings": {"sd_model_checkpoint": off}} for off in ("none", "null", "False", " ", "", None, -1, [])),
    {"override_settings": {"sd_vae": "none", "CLIP_stop_at_last_layers": "1", "samples_format": "",
                           "sd_hypernetwork": 0, "enable_pnginfo": ""}},
]  # fmt: skip


@pytest.mark.parametrize("fields", OFF)
def test_values_that_mean_off_are_accepted_in_any_form(client, engine, fields):
    answer = txt2img(client, **fields)
    assert answer.status_code == 200, answer.text
    assert "x-noria-ignored" not in answer.headers
    assert json.loads(answer.json()["info"])["ignored"] == []


IGNORED = [
    ({"prompt": "a (red:1.3) circle, [blue]", "override_settings": {"CLIP_stop_at_last_layers": 3}}, []),
    ({"prompt": "a <hypernet:x:0.5> circle <LORB:y>"}, ["<hypernet:x:0.5>", "<LORB:y>"]),
    ({"clip_skip": 2, "clip_skips": 1, "save_images": True}, ["clip_skip", "clip_skips"]),
    ({"override_settings": {"s_noise": 2, "enable_pnginfo": False}}, ["override_settings.s_noise"]),
    ({"prompt": "a <lora:none:1> dog", "disable_extra_networks": "true"}, []),
    ({"prompt": "w " * 80}, ["5 tokens at the end of the prompts: the model reads no more"]),
    ({"prompt": r"a \(red\) circle", "comments": "x", "hr_scale": 2}, []),
]


@pytest.mark.parametrize(("fields", "ignored"), IGNORED)
def test_what_has_no_effect_is_told(client, engine, fields, ignored):
    answer = txt2img(client, **fields)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["info"])["ignored"] == ignored
    assert answer.headers.get("x-noria-ignored") == ("; ".join(ignored) or None)
    prompt = engine.submitted[0].payload.prompt
    assert not engine.submitted[0].payload.loras
    assert "<" not in prompt


def test_a_header_of_what_is_ignored_is_short_and_of_ascii(client):
    answer = txt2img(client, prompt="(é)", **{f"unknown_{k}\r\n": "é" for k in range(50)})
    assert len(answer.headers["x-noria-ignored"]) <= 1000
    assert len(json.loads(answer.json()["info"])["ignored"]) == 50


def test_a_header_of_what_is_ignored_has_whole_characters(client):
    for text in ("a" * 1000, *("a" * k + "日" * 500 for k in range(4)), "b" * 990 + "😀" * 9, "😀" * 60):
        fields = {f"{k}{text[at : at + 80]}": 1 for k, at in enumerate(range(0, len(text), 80))}
        header = txt2img(client, **fields).headers["x-noria-ignored"]
        assert 500 < len(header) <= 1000
        unquote(header, errors="strict")


def test_one_refusal_says_all_that_is_wrong(client, engine):
    wrong = {
        "tiling": True, "cfg_scale": "x", "width": 33, "steps": 9999, "sampler_name": "foo", "batch_size": 0,
        "prompt": "<lora:a:b>", "override_settings": {"sd_vae": "other"}, "samples_format": 1,
    }  # fmt: skip
    answer = txt2img(client, **wrong)
    assert answer.status_code == 400
    for name in ("tiling is true", "cfg_scale is 'x'", "width is 33", "steps is 9999", "'foo'", "batch_size is 0",
                 "<lora:a:b>", "sd_vae is 'other'"):  # fmt: skip
        assert name in answer.json()["detail"]
    assert engine.submitted == []


def test_features_that_no_model_has_are_of_the_form():
    for check, sent in ((check_body, {"tiling": True}), (check_settings, {"samples_format": "gif"})):
        problems = Problems()
        check(sent, problems)
        assert problems.as_one().is_of_form


def test_every_listed_pair_of_sampler_and_schedule_type_works_or_is_not_combinable(client, engine):
    samplers = [each["name"] for each in client.get("/sdapi/v1/samplers").json()]
    types = [each["label"] for each in client.get("/sdapi/v1/schedulers").json()]
    for sampler in samplers:
        for schedule_type in types:
            answer = txt2img(client, sampler_name=sampler, scheduler=schedule_type)
            assert answer.status_code == 200 or "are not combinable; send" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"styles": ["anime"]}, "styles"),
        ({"styles": [0] * 1001}, "styles is [0, "),
        ({"styles": [[0] * 500] * 2}, "styles is [[0, "),
        ({"alwayson_scripts": {"ADetailer": {"args": [0] * 1001}}}, "scripts"),
        ({"restore_faces": True}, "face restoration"),
        ({"script_name": "x/y plot"}, "scripts"),
        ({"alwayson_scripts": {"ADetailer": {"args": [True]}}}, "scripts"),
        ({"subseed_strength": 0.5}, "variation seeds"),
        ({"s_noise": 1.01}, "noise"),
        ({"override_settings": {"CLIP_stop_at_last_layers": 13}}, "CLIP_stop_at_last_layers is 13; allowed are 1"),
        ({"prompt": " AND ".join("abcdefghi")}, "prompt: AND joins 9 prompts; at most 8 are read"),
        ({"negative_prompt": "[a:1]" * 33}, "negative_prompt: has 33 edits and alternations; at most 32"),
        ({"override_settings": {"sd_vae": "mse-840000"}}, "VAE"),
        ({"override_settings": {"samples_format": ["png"]}}, "samples_format"),
        ({"sampler_name": "DPM++ SDE"}, "Brownian tree"),
        ({"sampler_name": "Heun"}, "tiny cannot be sampled with"),
        ({"sampler_name": "Euler", "scheduler": "Exponential"}, "scheduler is 'Exponential'; allowed are Automatic"),
        ({"sampler_name": "foo"}, "sampler_name 'foo' is not known. Known are: DDIM, Euler, PLMS."),
        ({"sampler_index": 5}, "sampler_index is 5"),
        ({"alwayson_scripts": {"ADetailer": {"args": [{"ad_model": "face.pt"}]}}}, "a script besides controlnet"),
        ({"alwayson_scripts": {"ADetailer": {"args": ["x", 2, False]}}}, "a script besides controlnet"),
        ({"steps": 5000}, "steps is 5000; allowed are 1 to 100"),
        ({"cfg_scale": 99}, "cfg_scale is 99"),
        ({"batch_size": 3, "n_iter": 3}, "batch_size × n_iter is 9; allowed are 1 to 4"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -2}, "seed is -2"),
        ({"width": 33}, "multiple of 8"),
        ({"prompt": 7}, "prompt is 7"),
    ],
)
def test_unsupported_features_are_rejected(client, engine, fields, says):
    answer = txt2img(client, **fields)
    assert answer.status_code == 400
    assert says in answer.json()["detail"]
    assert answer.json()["error"]["message"] == answer.json()["detail"]
    assert answer.json()["error"]["code"] == "invalid_field"
    assert engine.submitted == []


def test_other_errors_have_a_detail_too(client, engine):
    not_json = client.post("/sdapi/v1/txt2img", content=b"{", headers={"content-type": "application/json"})
    assert "not JSON" in not_json.json()["detail"]
    assert client.post("/sdapi/v1/interrogate", json={}).json()["detail"].startswith("there is no '/sdapi/v1/i")
    assert client.get("/sdapi/v1/txt2img").json()["detail"].startswith("GET is not allowed")
    engine.failure = {"code": "queue_full", "message": "full", "retry_after_s": 3.0}
    full = txt2img(client)
    assert (full.status_code, full.headers["retry-after"], full.json()["detail"]) == (429, "3", "full")
    assert "detail" not in client.get("/v1/nothing").json()


def test_images_are_left_out_on_request(client):
    assert txt2img(client, send_images=False).json()["images"] == []


@pytest.mark.parametrize("name", [TITLE, "tiny", "tiny.safetensors", "0123456789ab", "noria"])
def test_model_is_accepted_by_title_name_file_and_hash(client, engine, name):
    assert txt2img(client, override_settings={"sd_model_checkpoint": name}).status_code == 200
    assert engine.submitted[0].model == "tiny"


def test_unknown_model_is_rejected(client):
    for answer in (
        txt2img(client, override_settings={"sd_model_checkpoint": "v1-5"}),
        client.post("/sdapi/v1/options", json={"sd_model_checkpoint": "v1-5"}),
    ):
        assert answer.status_code == 404
        assert "'tiny'" in answer.json()["detail"]


def test_open_webui_can_select_a_model(client):
    """It lists the models and posts all options with another title."""
    (model,) = client.get("/sdapi/v1/sd-models").json()
    options = client.get("/sdapi/v1/options").json()
    assert options["sd_model_checkpoint"] == model["title"] == TITLE
    assert client.post("/sdapi/v1/options", json=options | {"sd_model_checkpoint": model["title"]}).status_code == 200
    assert model["model_name"] == "tiny"


def test_options_apply_to_later_requests(client):
    try:
        assert client.post("/sdapi/v1/options", json={"samples_format": "jpg", "show_progress": True}).json() is None
        assert client.get("/sdapi/v1/options").json()["samples_format"] == "jpg"
        for own in ({}, {"samples_format": ""}, {"samples_format": "None"}, {"samples_format": None}):
            assert opened(txt2img(client, override_settings=own).json()["images"][0]).format == "JPEG"
        answer = txt2img(client, override_settings={"samples_format": "png", "enable_pnginfo": False})
        image = opened(answer.json()["images"][0])
        assert (image.format, image.info) == ("PNG", {})
    finally:
        client.post("/sdapi/v1/options", json={"samples_format": "png"})


def test_unsupported_option_is_rejected(client):
    answer = client.post("/sdapi/v1/options", json={"CLIP_stop_at_last_layers": 0.5})
    assert (answer.status_code, "CLIP_stop_at_last_layers" in answer.json()["detail"]) == (400, True)


def test_samplers_and_schedulers_are_those_of_the_model(client):
    assert [each["name"] for each in client.get("/sdapi/v1/samplers").json()] == ["DDIM", "Euler", "PLMS"]
    assert [each["label"] for each in client.get("/sdapi/v1/schedulers").json()] == ["Automatic", "Uniform"]


@pytest.mark.parametrize("name", ["upscalers", "latent-upscale-modes", "sd-vae", "loras"])
def test_lists_of_missing_features_exist(client, name):
    assert isinstance(client.get(f"/sdapi/v1/{name}").json(), list)


def test_progress_is_zero_without_requests(client):
    answer = client.get("/sdapi/v1/progress").json()
    assert (answer["progress"], answer["eta_relative"], answer["current_image"]) == (0, 0, None)
    assert (answer["state"]["job_count"], answer["state"]["sampling_steps"]) == (0, 0)


@pytest.fixture
def running(client, engine):
    """Start requests that the engine does not answer; yields the function and the list of their responses."""
    answers: list = []
    threads: list[threading.Thread] = []
    engine.never_answers = True

    def start(**fields):
        thread = threading.Thread(target=lambda: answers.append(txt2img(client, **fields)))
        thread.start()
        threads.append(thread)
        wait_until(lambda: client.get("/sdapi/v1/progress").json()["state"]["job_count"] == len(threads))
        wait_until(lambda: len(engine.submitted) == len(threads))

    yield start, answers
    client.post("/sdapi/v1/interrupt")
    for thread in threads:
        thread.join()


def test_progress_is_that_of_the_oldest_request(client, engine, running):
    start, _ = running
    start(steps=12, width=32, height=16)
    start(steps=40)
    wait_until(lambda: client.get("/sdapi/v1/progress").json()["eta_relative"] == 0.5)  # as the fake engine predicts
    state = client.get("/sdapi/v1/progress").json()["state"]
    assert (state["job_count"], state["sampling_step"], state["sampling_steps"]) == (2, 0, 12)
    assert all(request.stream_progress and request.payload.partial_images for request in engine.submitted)


def test_progress_has_the_last_preview_unless_skipped(client, engine, running):
    start, _ = running
    engine.never_answers, engine.sends_no_images = False, True
    start(steps=12, width=32, height=16, seed=5)
    wait_until(lambda: client.get("/sdapi/v1/progress").json()["current_image"])
    answer = client.get("/sdapi/v1/progress").json()
    assert (answer["progress"], answer["state"]["sampling_step"]) == (1.0, 12)
    image = opened(answer["current_image"])
    assert (image.size, image.getpixel((0, 0))) == ((32, 16), engine.colour(5))
    assert client.get("/sdapi/v1/progress?skip_current_image=true").json()["current_image"] is None


def test_engine_error_names_a1111s_field(client, engine):
    engine.failure = {
        "code": "invalid_field",
        "message": "inference_steps is 90; too many.",
        "field": "inference_steps",
    }
    answer = txt2img(client)
    assert answer.json()["detail"] == "steps is 90; too many."
    assert answer.json()["error"]["param"] == "steps"


def test_interrupt_cancels_all_requests_of_this_api_only(client, engine, running):
    start, answers = running
    others = threading.Thread(target=lambda: answers.append(client.post("/t2i", json={"prompt": "p", "seed": 3})))
    start()
    start()
    others.start()
    wait_until(lambda: len(engine.submitted) == 3)
    engine.never_answers = False
    assert client.post("/sdapi/v1/interrupt").json() == {}
    wait_until(lambda: len(answers) == 2)
    assert [answer.status_code for answer in answers] == [499, 499]
    assert "interrupted" in answers[0].json()["detail"]
    wait_until(lambda: len(engine.cancelled) == 2)
    ours = {request.attempt_id for request in engine.submitted if request.payload.seed != 3}
    assert set(engine.cancelled) == ours
    engine.set_state("dead")
    engine.set_state("ready")  # the other request is retried
    others.join()
    assert answers[-1].status_code == 200


def test_skip_cancels_the_oldest_request(client, engine, running):
    start, answers = running
    start(steps=12)
    start(steps=40)
    client.post("/sdapi/v1/skip")
    wait_until(lambda: len(answers) == 1)
    assert client.get("/sdapi/v1/progress").json()["state"]["sampling_steps"] == 40
