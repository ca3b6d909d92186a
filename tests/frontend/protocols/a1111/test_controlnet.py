"""Units of A1111's ControlNet script, as fields of a request; `services/images/` has their effect."""

import re

import pytest

from noria.errors import InvalidField
from noria.frontend.protocols.a1111.controlnet import (
    FIELD,
    UnitSettings,
    error_of_units,
    fields_of,
    images_in,
    settings_of,
)
from noria.protocol.request import ControlField, IpAdapterField

IMAGE = "aW1hZ2U="


def unit(**fields):
    return {"model": "edges [0123abcd]", "image": IMAGE, "guidance_start": 0.0, "guidance_end": 1.0} | fields


def body(*units):
    return {"alwayson_scripts": {"ControlNet": {"args": list(units)}}}


def test_units_that_are_enabled_are_controls_or_the_ip_adapter():
    adapter = unit(model="ip-adapter_sd15", module="ip-adapter-auto", weight=0.5)
    sent = body(unit(weight=0.8, guidance_end=0.5), unit(enabled=False), adapter, unit(resize_mode="Just Resize"))
    assert fields_of(sent) == (
        (ControlField("edges", IMAGE, 0.8, 0.0, 0.5), ControlField("edges", IMAGE)),
        IpAdapterField("ip-adapter_sd15", IMAGE, 0.5),
    )
    assert settings_of(sent) == [(0, 1), (3, "Just Resize")]  # 1 crops
    assert images_in(sent).count(IMAGE) == 4  # those of all, which clients send as well


@pytest.mark.parametrize(
    ("fields", "control"),
    [
        ({}, ControlField("edges", IMAGE, 1.0, 0.0, 1.0)),
        ({"enabled": ""}, ControlField("edges", IMAGE)),
        ({"enabled": 1, "weight": ""}, ControlField("edges", IMAGE)),
        ({"weight": "0.8", "guidance_start": 0}, ControlField("edges", IMAGE, 0.8)),
        ({"guidance_end": None, "guidance": 0.7}, ControlField("edges", IMAGE, 1.0, 0.0, 0.7)),
        ({"guidance_end": 0.5, "guidance": 0.7}, ControlField("edges", IMAGE, 1.0, 0.0, 0.5)),
        ({"image": None, "input_image": "b3RoZXI="}, ControlField("edges", "b3RoZXI=")),
        ({"image": {"image": IMAGE, "mask": None}}, ControlField("edges", IMAGE)),
        ({"module": "none", "control_mode": "Balanced", "unknown": None}, ControlField("edges", IMAGE)),
        ({"model": "edges [0123abcd] [xyz]"}, ControlField("edges [0123abcd] [xyz]", IMAGE)),
    ],
)
def test_a_units_fields_are_those_of_a_control(fields, control):
    assert fields_of(body(unit(**fields))) == ((control,), None)


@pytest.mark.parametrize("enabled", [False, 0, "False"])
def test_a_unit_that_is_off_is_no_control(enabled):
    assert fields_of(body(unit(enabled=enabled), None)) == ((), None)


@pytest.mark.parametrize(
    ("scripts", "images"),
    [
        (None, []),
        ({"other": {"args": [unit()]}}, []),
        ({"controlnet": {"args": None}}, []),
        ({"controlnet": [unit()], "ControlNet": {"args": [unit(input_image="x")]}}, [IMAGE, None, IMAGE, "x"]),
        ({"controlnet": [{"image": {"image": "a", "mask": "b"}}]}, ["a", "b", None]),
    ],
)
def test_units_are_those_of_all_spellings_of_the_script(scripts, images):
    assert images_in({"alwayson_scripts": scripts}) == images


def test_a_body_has_at_most_twenty_units():
    sent = {"alwayson_scripts": {"controlnet": [unit(enabled=False)] * 10, "ControlNet": [unit(enabled=False)] * 10}}
    assert fields_of(sent) == ((), None)
    sent["alwayson_scripts"]["controlnet"].append(unit())
    with pytest.raises(InvalidField, match="has 21 units; at most 20 are allowed"):
        fields_of(sent)


@pytest.mark.parametrize(
    ("message", "field", "expected"),
    [
        ("controls[0].scale is 9.", "controls", f"{FIELD}[2].weight is 9."),
        ("controls[1].start is 9.", "controls", f"{FIELD}[5].guidance_start is 9."),
        ("controls[1].name is 9.", "controls", f"{FIELD}[5].name is 9."),
        ("controls[1] is 9.", "controls", f"{FIELD}[5] is 9."),
        ("ip_adapter.name is 9.", "ip_adapter", f"{FIELD}: ip_adapter.name is 9."),
        ("controls[1] is 9.", "prompt", None),
        ("controls are too many.", "controls", None),
    ],
)
def test_errors_name_units_in_place_of_controls(message, field, expected):
    error = error_of_units(InvalidField(message, field=field), [UnitSettings(2, 1), UnitSettings(5, 1)])
    assert (error.message, error.field) == ((message, field) if expected is None else (expected, FIELD))


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([unit(module="ip-adapter", guidance_start=0.1)], "[0]: its guidance is from 0.1 to 1.0; an IP-Adapter"),
        ([unit(module="ip-adapter", guidance_end=0.9)], "[0]: its guidance is from 0.0 to 0.9; an IP-Adapter"),
        ([unit(), *[unit(module="ip-adapter")] * 2], "[2] is a second IP-Adapter; one is allowed."),
        ([unit(weight=None, guidance_start=True)], "[0].guidance_start is true; a number is expected."),
        ([unit(model=7)], "[0].model is 7; a text is expected."),
        ([unit(weight=[1])], "[0].weight is [1]; a number is expected."),
        ([unit(weight="x")], "[0].weight is 'x'; a number is expected."),
        ([unit(enabled=2)], "[0].enabled is 2; allowed are true, which is the default, and false."),
        ([unit(enabled=False), unit(module="canny")], "[1].module is 'canny'; no preprocessor is run here"),
        ([unit(image={"image": IMAGE, "mask": IMAGE})], "[0].image has a mask, which is not supported: leave it out."),
        ([unit(image=None)], "[0].image is null; send a file in base64."),
        ([7], " is [7]; a list of objects is expected, one for each unit."),
        ([unit(x=1)], "[0]: 'x' is not supported: leave it out."),
        ([unit(x=1, y=2)], "[0]: 'x', 'y' are not supported: leave them out."),
        ([unit(**dict.fromkeys("abcdefgh", 1))], "'g', 'h' are not supported"),
        ([unit(**dict.fromkeys("abcdefghi", 1))], "'g', 'h' and others are not supported"),
        (
            [unit(control_mode=1)],
            "[0].control_mode is 1, which is not supported: leave it out, or send 0 or 'Balanced' or null.",
        ),
    ],
)
def test_an_option_that_has_no_effect_here_is_named(units, message):
    with pytest.raises(InvalidField, match=re.escape(message)):
        fields_of(body(*units))


@pytest.mark.parametrize("has_second_pass", [False, True])
def test_the_passes_of_a_unit_matter_only_if_there_are_two(has_second_pass):
    sent = body(unit(hr_option="Low res only")) | {"enable_hr": has_second_pass}
    if has_second_pass:
        with pytest.raises(InvalidField, match="hr_option is"):
            fields_of(sent)
    else:
        assert fields_of(sent).controls == (ControlField("edges", IMAGE),)
