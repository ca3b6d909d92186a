"""Admission: a body becomes a valid request, or a rejection that names the field."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.config import FrontendConfig
from noria.errors import InvalidField
from noria.frontend.services.images import request_validation
from noria.frontend.services.images.request_validation import NO_IMAGES, Limits, check_range, limits, validate
from noria.images.start_image import RequestImageFacts, StartImageFacts
from noria.protocol.diffusion import Lora
from noria.protocol.request import ImageRequestBody
from noria.sampling import noise


def test_front_end_and_engine_agree_on_the_largest_seed():
    assert request_validation._MAX_SEED == noise.MAX_SEED


def unused_seed() -> int:
    raise AssertionError("no seed is drawn if one is given")


def test_default_steps_are_limited_by_the_operator(spec):
    assert (
        validate(ImageRequestBody("p"), spec, FrontendConfig(max_steps=5), "id", lambda: 0).payload.inference_steps == 5
    )


def test_a_flow_model_is_sampled_by_names_of_stable_diffusion(spec):
    flow = msgspec.structs.replace(spec, schedulers=("flow-euler",), default_scheduler="flow-euler")
    for name in (None, "Euler", "flow-euler", "k_euler", "FlowMatchEulerDiscreteScheduler"):
        request = validate(ImageRequestBody("p", scheduler=name), flow, FrontendConfig(), "id", lambda: 0)
        assert request.payload.scheduler == "flow-euler"
    with pytest.raises(InvalidField, match="Allowed are: flow-euler"):
        validate(ImageRequestBody("p", scheduler="heun"), flow, FrontendConfig(), "id", lambda: 0)


def test_a_seed_is_drawn_only_if_none_is_given(spec):
    assert validate(ImageRequestBody("p"), spec, FrontendConfig(), "id", lambda: 42).payload.seed == 42
    assert validate(ImageRequestBody("p", seed=0), spec, FrontendConfig(), "id", unused_seed).payload.seed == 0


_numbers = st.none() | st.integers(-(2**70), 2**70) | st.integers(0, 300)


@given(
    body=st.builds(
        ImageRequestBody,
        prompt=st.text(max_size=30),
        seed=_numbers,
        width=_numbers,
        height=_numbers,
        inference_steps=_numbers,
        guidance_scale=st.none() | st.floats(),
        n=st.integers(-3, 30),
        scheduler=st.none() | st.text(max_size=8) | st.sampled_from(["euler", "ddim", "DDIMScheduler"]),
    )
)
def test_an_admitted_request_is_within_every_limit(spec, body):
    config = FrontendConfig(max_prompt_chars=20)
    try:
        request = validate(body, spec, config, "id", lambda: 1)
    except InvalidField as error:
        rejected = error.field
    else:
        rejected = None
    if rejected is not None:
        assert rejected in ImageRequestBody.__struct_fields__
        return
    allowed = limits(spec, config)
    got = {
        "n": request.payload.n,
        "seed": request.payload.seed,
        "width": request.payload.width,
        "height": request.payload.height,
        "inference_steps": request.payload.inference_steps,
        "guidance_scale": request.payload.guidance_scale,
    }
    for name, value in got.items():
        assert allowed[name].min <= value <= allowed[name].max
        assert value % allowed[name].multiple == 0 or allowed[name].multiple == 1
    assert request.payload.seed + request.payload.n < 2**63
    assert request.payload.scheduler in spec.schedulers
    assert len(request.payload.prompt) <= 20


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X-Noria-Priority": "urgent"}, "allowed are low, normal, high"),
        ({"X-Noria-Deadline-Ms": "1e3"}, "whole number of milliseconds"),
        ({"X-Noria-Deadline-Ms": "0"}, "allowed are 1 to"),
    ],
)
def test_invalid_headers_are_rejected(client, headers, expected):
    response = client.post("/t2i", json={"prompt": "p"}, headers=headers)
    assert response.status_code == 400
    assert expected in response.json()["error"]["message"]


def test_priority_and_deadline_come_from_the_body_or_else_the_headers(client, engine):
    headers = {"X-Noria-Priority": "low", "X-Noria-Deadline-Ms": "1500"}
    client.post("/t2i", json={"prompt": "p"}, headers=headers)
    client.post("/t2i", json={"prompt": "p", "priority": "high", "deadline_ms": 2000}, headers=headers)
    client.post("/t2i", json={"prompt": "p"})
    assert [request.priority for request in engine.submitted] == ["low", "high", "normal"]
    by_header, by_body, none = (request.deadline_s for request in engine.submitted)
    # A little less than requested: the front end reserves time to write the file.
    assert 0.5 < by_header <= 1.5 < by_body <= 2.0
    assert none is None


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (15, "width is 15; allowed are 16 to 100 in multiples of 8."),
        (101, "width is 101; allowed are 16 to 100 in multiples of 8."),
        (math.nan, "width is nan; allowed are 16 to 100 in multiples of 8."),
        (65, "width is 65; it must be a multiple of 8, such as 64 or 72."),
        (100, "width is 100; it must be a multiple of 8, such as 96."),
    ],
)
def test_a_number_outside_its_limits_is_told_which_are_allowed(got, says):
    with pytest.raises(InvalidField) as caught:
        check_range("width", got, Limits(16, 100, None, multiple=8))
    assert (caught.value.message, caught.value.field) == (says, "width")
    assert [check_range("width", side, Limits(16, 96, None, multiple=8)) for side in (16, 96)] == [16, 96]
    assert check_range("scale", 2.5, Limits(0, 2.5, None)) == 2.5


def start_image(width_px, height_px):
    return RequestImageFacts(StartImageFacts(width_px, height_px, "0123456789ab", None))


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
def test_the_size_of_any_image_can_be_generated(spec, width, height):
    body = ImageRequestBody("p", seed=0)
    payload = validate(body, spec, FrontendConfig(), "id", unused_seed, images=start_image(width, height)).payload
    for side in (payload.width, payload.height):
        assert spec.min_side_px <= side <= spec.max_side_px
        assert side % spec.multiple_px == 0
    assert (payload.width - payload.height) * (width - height) >= 0


@given(strength=st.floats(0.01, 1), num_steps=st.integers(1, 100))
def test_of_a_start_image_at_least_one_step_is_made(spec, strength, num_steps):
    body = ImageRequestBody("p", seed=0, strength=strength, inference_steps=num_steps)
    if int(strength * num_steps) == 0:
        with pytest.raises(InvalidField, match="leaves none of"):
            validate(body, spec, FrontendConfig(), "id", unused_seed, images=start_image(64, 64))
        return
    payload = validate(body, spec, FrontendConfig(), "id", unused_seed, images=start_image(64, 64)).payload
    assert payload.num_steps == int(strength * num_steps)


def test_flow_models_make_a_step_of_every_strength(spec):
    flow = msgspec.structs.replace(spec, schedulers=("flow-euler",), default_scheduler="flow-euler")
    body = ImageRequestBody("p", strength=0.2, inference_steps=4)
    payload = validate(body, flow, FrontendConfig(), "id", lambda: 0, images=start_image(64, 64)).payload
    assert payload.num_steps == 1


def test_a_scheduler_that_cannot_begin_with_an_image_is_rejected(spec):
    spec = msgspec.structs.replace(spec, schedulers=(*spec.schedulers, "ipndm"))
    body = ImageRequestBody("p", scheduler="ipndm")
    assert validate(body, spec, FrontendConfig(), "id", lambda: 0).payload.scheduler == "ipndm"
    with pytest.raises(InvalidField, match=r"'ipndm' cannot begin with an image.*use one of ddim") as caught:
        validate(body, spec, FrontendConfig(), "id", lambda: 0, images=start_image(64, 64))
    assert caught.value.field == "scheduler"


def test_what_a_model_does_not_take_is_rejected_by_the_name_of_its_family(spec):
    other = msgspec.structs.replace(spec, family="pixart-sigma", takes_start_images=False, takes_loras=False)
    for body, images, field, words in (
        (ImageRequestBody("p"), start_image(64, 64), "image", "cannot begin with an image or repaint one"),
        (ImageRequestBody("p", loras=(Lora("ink"),)), NO_IMAGES, "loras", "takes none"),
    ):
        with pytest.raises(InvalidField, match=rf"{words}: .* its family, pixart-sigma\. Leave") as caught:
            validate(body, other, FrontendConfig(), "id", lambda: 0, images=images)
        assert caught.value.field == field


@pytest.mark.parametrize("weight", [math.nan, -math.inf, request_validation.MAX_LORA_WEIGHT + 0.1])
def test_invalid_weights_of_loras_are_rejected(spec, weight):
    takes = msgspec.structs.replace(spec, takes_loras=True)
    with pytest.raises(InvalidField, match=r"the weight of 'ink' is .*; allowed are -") as caught:
        validate(ImageRequestBody("p", loras=(Lora("ink", weight),)), takes, FrontendConfig(), "id", lambda: 0)
    assert caught.value.field == "loras"


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0, 1.001])
def test_invalid_strengths_are_rejected(spec, value):
    body = ImageRequestBody("p", strength=value)
    with pytest.raises(InvalidField, match=r"strength .* 1\.0") as caught:
        validate(body, spec, FrontendConfig(), "id", lambda: 0, images=start_image(64, 64))
    assert caught.value.field == "strength"
