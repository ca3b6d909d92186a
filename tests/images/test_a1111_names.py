"""A1111's names for our schedulers, there and back."""

import pytest

from noria.errors import InvalidField
from noria.images.a1111_names import AUTOMATIC, KARRAS, SAMPLERS, UNIFORM, a1111_name, samplers_and_types, scheduler_for
from noria.images.schedulers import choices_of_family


def test_every_scheduler_of_stable_diffusion_has_a_name_of_its_own():
    assert list(SAMPLERS) == [choice.name for choice in choices_of_family("diffusion")]
    assert len(set(SAMPLERS.values())) == len(SAMPLERS) == 28


@pytest.mark.parametrize("scheduler", SAMPLERS)
def test_what_we_write_is_read_as_the_same_scheduler(scheduler):
    assert scheduler_for(*a1111_name(scheduler)) == scheduler


@pytest.mark.parametrize("scheduler", SAMPLERS)
def test_a_client_that_names_sampler_and_schedule_type_apart_gets_the_same(scheduler):
    sampler = SAMPLERS[scheduler]
    schedule_type = KARRAS if sampler.endswith(KARRAS) else UNIFORM
    assert scheduler_for(sampler.removesuffix(" Karras"), schedule_type) == scheduler


@pytest.mark.parametrize(
    ("sampler", "schedule_type", "scheduler"),
    [
        ("DPM++ 2M", AUTOMATIC, "dpm++2m-karras"),  # A1111 ≥ 1.9
        ("DPM++ 2M", None, "dpm++2m"),  # before
        ("DPM++ 2M Karras", AUTOMATIC, "dpm++2m-karras"),
        ("DPM++ 2M SDE", AUTOMATIC, "dpm++2m-sde"),
        ("Euler", "automatic", "euler"),
        ("Euler", "karras", "euler-karras"),
        ("Euler a", AUTOMATIC, "euler-a"),
        ("DDIM", KARRAS, "ddim"),  # A1111 has no schedule types for it, and does not read them
        ("k_euler_a", AUTOMATIC, "euler-a"),
        ("PLMS", "", "pndm"),
    ],
)
def test_schedule_types_mean_what_they_mean_to_a1111(sampler, schedule_type, scheduler):
    assert scheduler_for(sampler, schedule_type) == scheduler


@pytest.mark.parametrize(
    ("sampler", "schedule_type", "says"),
    [
        ("DPM++ SDE", AUTOMATIC, "Brownian tree"),
        ("DPM++ SDE Karras", None, "not known"),
        ("Euler a", KARRAS, "'Euler a Karras'"),
        ("DPM++ 2M SDE", "Exponential", "2M SDE Exponential'"),
        ("nonsense", None, "not known"),
    ],
)
def test_what_is_not_served_is_refused_by_name(sampler, schedule_type, says):
    with pytest.raises(InvalidField, match=says):
        scheduler_for(sampler, schedule_type)


def test_a_scheduler_without_a_name_there_keeps_its_own():
    assert a1111_name("flow-euler") == ("flow-euler", None)
    assert scheduler_for("flow-euler", AUTOMATIC) == "flow-euler"


def test_samplers_are_listed_without_their_schedule_types():
    assert samplers_and_types(("ddim", "euler", "euler-karras")) == (["DDIM", "Euler"], [AUTOMATIC, UNIFORM, KARRAS])
    assert samplers_and_types(("ddim",)) == (["DDIM"], [AUTOMATIC, UNIFORM])
