"""Units of A1111's ControlNet script, as fields of a request; `services/images/` has their effect."""

import re

import pytest

from noria.errors import InvalidField
from noria.frontend.protocols.a1111.controlnet import fields_of, images_in, settings_of
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
    ("units", "message"),
    [
        ([unit(module="ip-adapter", guidance_start=0.1)], "[0]: its guidance is from 0.1 to 1.0; an IP-Adapter"),
        ([unit(module="ip-adapter", guidance_end=0.9)], "[0]: its guidance is from 0.0 to 0.9; an IP-Adapter"),
        ([unit(), *[unit(module="ip-adapter")] * 2], "[2] is a second IP-Adapter; one is allowed."),
        ([unit(weight=None, guidance_start=True)], "[0].guidance_start is true; a number is expected."),
        ([unit(model=7)], "[0].model is 7; a text is expected."),
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
