"""The types of requests, models and messages: the defaults of their fields, and what follows from the fields."""

import importlib
import inspect
import pkgutil

import msgspec
import pytest
from msgspec.structs import replace

from noria import protocol
from noria.protocol.diffusion import (
    Control,
    IpAdapter,
    PixelUpscaler,
    Reference,
    SecondPass,
    Upscaling,
    min_strength,
    num_skipped_steps,
)
from noria.protocol.live_views import ShareView, sum_shares
from noria.protocol.request import ControlField, ImageRequestBody, IpAdapterField
from noria.protocol.routes import Route, Routes
from noria.protocol.tasks import EngineTask, FrontendTask
from noria.protocol.text import ImageInput, PairTemplate, Patches
from noria.testing.fake_engine import FAKE_MODEL
from noria.testing.requests import make_image_request

DEFAULTS = """
    CallTrial.speedup=1.0
    Control.end=1.0
    Control.scale=1.0
    ControlField.end=1.0
    ControlField.scale=1.0
    DenseLayer.stem='model'
    DiffusionModelSpec.default_calls=1.0
    DiffusionModelSpec.default_prompt_syntax='plain'
    DiffusionModelSpec.default_strength=0.8
    DiffusionModelSpec.prompt_syntaxes=('plain',)
    DiffusionModelSpec.reference_size='area'
    DiffusionModelSpec.safety_threshold=1.0
    DiffusionModelSpec.takes_loras=True
    DiffusionModelSpec.takes_start_images=True
    DiffusionPayload.n=1
    EncoderModelSpec.activation='identity'
    EncoderModelSpec.similarity='cosine'
    EncoderModelSpec.truncation_side='right'
    EngineRequest.priority='normal'
    EngineRequest.share_weight=1.0
    EngineState.previous_exit='none'
    EngineTask.log_level='info'
    EngineTask.previous_exit='none'
    EngineView.slots_source='set'
    FrontendTask.num_frontends=1
    FrontendTask.start_reason='initial'
    ImageRequestBody.format='png'
    ImageRequestBody.metadata=True
    ImageRequestBody.n=1
    ImageSettingsView.calls=1.0
    IpAdapter.scale=1.0
    IpAdapterField.scale=1.0
    LateInteraction.ends_texts=True
    Lora.weight=1.0
    Refinement.start=0.8
    SecondPass.upscaler='bilinear'
    ShapeCosts.slowdown=1.0
    ShareView.num_clients=1
    Splade.activation='relu'
    Splade.strategy='max'
    TextPayload.id_bytes=2
    TextPayload.normalize=True
"""


def test_a_field_that_is_left_out_is_false_zero_or_empty_but_for_these():
    found = set()
    for module in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}."):
        for name, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(each, msgspec.Struct) and each.__module__ == module.name:
                own = inspect.get_annotations(each)
                fields = [field for field in msgspec.structs.fields(each) if field.name in own]
                found |= {f"{name}.{field.name}={field.default!r}" for field in fields if field.default}
    found = {each for each in found if not each.endswith("=NODEFAULT")}
    assert found == set(DEFAULTS.split())


PAYLOAD = make_image_request(width=64, height=32, inference_steps=20, scheduler="euler").payload
TWICE = SecondPass(width=128, height=96, inference_steps=10, strength=0.25)
REFERENCES = (Reference(8, 4), Reference(6, 2, prompt_width=3, prompt_height=5))


def test_steps_and_calls_follow_from_strength_and_skipped_calls():
    def steps(**fields):
        payload = replace(PAYLOAD, **fields)
        return payload.first_step, payload.num_calls, payload.num_steps

    assert steps() == (0, None, 20)
    assert steps(strength=0.5) == (10, None, 10)
    assert steps(calls=0.55) == (0, 11, 11)
    assert steps(strength=0.75, calls=0.5) == (5, 8, 8)  # 7.5 rounded up
    assert steps(second_pass=TWICE) == (0, None, 22)
    assert replace(PAYLOAD, second_pass=TWICE).first_step_of_second_pass == 8


def test_steps_that_a_start_image_leaves_out_are_rounded_as_diffusers_rounds_them():
    assert [num_skipped_steps(name, 10, 0.75) for name in ("euler", "flow-euler")] == [3, 2]
    assert [min_strength(steps) for steps in (4, 3, 7)] == [0.25, 0.3334, 0.1429]


def test_the_sizes_of_images_are_those_of_each_pass():
    upscaling = Upscaling(256, 200, PixelUpscaler("Lanczos"))
    sizes = [replace(PAYLOAD, **each) for each in ({}, {"second_pass": TWICE}, {"upscaling": upscaling})]
    assert [each.result_px for each in sizes] == [(64, 32), (128, 96), (256, 200)]
    assert [each.sizes_of_passes for each in sizes[:2]] == [((64, 32),), ((64, 32), (128, 96))]
    controls = (Control("depth"), Control("canny"))
    assert [replace(each, controls=controls).num_control_bytes for each in sizes[:2]] == [
        2 * 3 * 64 * 32,
        2 * 3 * (64 * 32 + 128 * 96),
    ]


def test_reference_images_are_counted_as_the_model_and_its_text_encoder_see_them():
    payload = replace(PAYLOAD, reference_images=REFERENCES)
    assert payload.num_reference_pixels == 8 * 4 + 6 * 2
    assert payload.num_reference_bytes == 3 * (8 * 4 + 6 * 2 + 3 * 5)


@pytest.mark.parametrize(
    ("fields", "has_images"),
    [
        ({}, False),
        ({"strength": 0.5}, True),
        ({"controls": (Control("depth"),)}, True),
        ({"reference_images": REFERENCES}, True),
        ({"ip_adapter": IpAdapter("face")}, True),
    ],
    ids=str,
)
def test_a_payload_with_images_has_a_frame_of_data(fields, has_images):
    assert replace(PAYLOAD, **fields).has_images == has_images


def test_live_views_show_no_digest_of_an_image():
    view = replace(
        PAYLOAD,
        controls=(Control("depth", digest="d", image_digest="secret"),),
        reference_images=(Reference(8, 4, digest="secret"),),
        ip_adapter=IpAdapter("face", digest="d", image_digest="secret"),
    ).settings_view
    assert (view.controls, view.ip_adapter) == ((Control("depth", digest="d"),), IpAdapter("face", digest="d"))
    assert view.reference_images == (Reference(8, 4),)
    assert PAYLOAD.settings_view.ip_adapter is None


def test_the_images_of_a_body_are_listed_and_left_out():
    body = ImageRequestBody(
        "a", controls=(ControlField("depth", "c"),), reference_images=("r",), ip_adapter=IpAdapterField("face", "i")
    )
    parts = [replace(ImageRequestBody("a"), **each) for each in ({"image": "s"}, {"mask": "m"})]
    assert [(each.images, each.has_images) for each in (body, *parts)] == [
        (["c", "r", "i"], True),
        (["s"], True),
        (["m"], True),
    ]
    rest = body.without_images()
    assert (rest.images, rest.controls, rest.ip_adapter) == ([], (ControlField("depth"),), IpAdapterField("face"))
    assert not ImageRequestBody("a").has_images
    assert [each.without_images() for each in parts] == [ImageRequestBody("a")] * 2


def test_the_bytes_of_an_encoders_image_are_those_of_its_square_or_its_patches():
    square = ImageInput("Vision", 224, 224, 3, (1, 1, 1), (0, 0, 0), 16)
    assert square.num_bytes == 3 * 224**2
    assert replace(square, patches=Patches(16, 10)).num_bytes == 10 * 3 * 16**2 + 4


def test_a_template_is_filled_with_a_pair_and_its_own_instruction_unless_there_is_another():
    template = PairTemplate(("<", "|", "|", ">"), ("instruction", "query", "document"), "judge")
    assert template.fill("q", "d") == "<judge|q|d>"
    assert template.fill("q", "d", "rank") == "<rank|q|d>"


def test_a_model_is_found_by_its_name_and_any_or_its_own_version():
    wanted = [(FAKE_MODEL.name, ""), FAKE_MODEL.key, (FAKE_MODEL.name, "other"), ("other", FAKE_MODEL.fingerprint)]
    assert [FAKE_MODEL.matches(*each) for each in wanted] == [True, True, False, False]
    table = Routes(1, (Route("a", None), Route("b", None)))
    assert (table.find("b"), table.find("c")) == (Route("b", None), None)


def test_shares_are_summed():
    shares = [ShareView("a", 0.25, 1, 2, 3, 4), ShareView("b", 0.5, 10, 20, 30, 40)]
    assert sum_shares(shares) == ShareView("", 0.75, 11, 22, 33, 44, num_clients=2)


def test_a_task_says_its_process_name_and_the_key_in_its_file(tmp_path):
    (tmp_path / "key").write_text("k")
    task = msgspec.convert(
        {"config": {}, "models": [], "device": "cpu", "address": "", "name": "", "crash_journal": ""}, EngineTask
    )
    assert (task.secret_key, replace(task, secret_key_file=str(tmp_path / "key")).secret_key) == ("", "k")
    frontend = msgspec.convert({"config": {}, "fd": 3, "engines": [], "worker_id": "s/frontend-0"}, FrontendTask)
    assert frontend.name == "frontend-0"
