"""A1111's names of Noria's schedulers, in both directions."""

import re
from contextlib import nullcontext

import pytest

from noria.errors import InvalidField
from noria.images.a1111_names import (
    AUTOMATIC,
    KARRAS,
    SAMPLERS,
    UNIFORM,
    a1111_name,
    samplers_and_types,
    scheduler_for,
    select_scheduler,
)
from noria.images.scheduler_names import choices_of_family


def test_every_diffusion_scheduler_has_a_distinct_name():
    assert list(SAMPLERS) == [choice.name for choice in choices_of_family("diffusion")]
    assert len(set(SAMPLERS.values())) == len(SAMPLERS) == 28


def test_names_are_read_back_as_the_same_scheduler_also_with_a_separate_schedule_type():
    for scheduler, sampler in SAMPLERS.items():
        assert scheduler_for(*a1111_name(scheduler)) == scheduler
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
        ("DDIM", KARRAS, "ddim"),  # A1111 ignores the schedule type of this one
        ("k_euler_a", AUTOMATIC, "euler-a"),
        ("PLMS", "", "pndm"),
    ],
)
def test_schedule_types_mean_the_same_as_in_a1111(sampler, schedule_type, scheduler):
    assert scheduler_for(sampler, schedule_type) == scheduler


@pytest.mark.parametrize(
    ("sampler", "schedule_type", "message"),
    [
        ("DPM++ SDE", AUTOMATIC, "Brownian tree"),
        ("DPM++ SDE Karras", None, "not known"),
        ("Euler a", KARRAS, "'Euler a Karras'"),
        ("DPM++ 2M SDE", "Exponential", "2M SDE Exponential'"),
        ("nonsense", None, "not known"),
    ],
)
def test_an_unsupported_sampler_is_rejected_by_name(sampler, schedule_type, message):
    with pytest.raises(InvalidField, match=message):
        scheduler_for(sampler, schedule_type)


def test_samplers_of_flow_models_have_the_names_of_the_others():
    assert a1111_name("flow-euler") == ("Euler", None)
    assert a1111_name("flow-dpm++2m") == ("DPM++ 2M", None)


def test_a_scheduler_without_an_a1111_name_keeps_its_own():
    assert a1111_name("edm-euler") == ("edm-euler", None)
    assert scheduler_for("flow-euler", AUTOMATIC) == "flow-euler"


def test_samplers_are_listed_without_schedule_types():
    assert samplers_and_types(("ddim", "euler", "euler-karras")) == (["DDIM", "Euler"], [AUTOMATIC, UNIFORM, KARRAS])
    assert samplers_and_types(("ddim",)) == (["DDIM"], [AUTOMATIC, UNIFORM])


FAMILIES = {family: tuple(each.name for each in choices_of_family(family)) for family in ("diffusion", "flow", "edm")}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_listed_pair_is_a_scheduler_of_the_model_or_not_combinable(family):
    schedulers = FAMILIES[family]
    samplers, types = samplers_and_types(schedulers)
    found = set()
    for sampler in samplers:
        for schedule_type in types:
            says = f"sampler_name {sampler!r} and scheduler {schedule_type!r} are not combinable"
            may_fail = pytest.raises(InvalidField, match=re.escape(says)) if schedule_type == KARRAS else nullcontext()
            with may_fail:
                found.add(select_scheduler(sampler, schedule_type, schedulers, "m"))
                if schedule_type == KARRAS:
                    raise InvalidField(says)
    assert found == set(schedulers)


@pytest.mark.parametrize(
    ("sampler", "schedule_type", "says"),
    [
        ("DEIS", "Karras", "send DEIS with Automatic or Uniform, or Karras with DDIM"),
        ("Euler", "Simple", "scheduler is 'Simple'; allowed are Automatic, Uniform, Karras."),
        ("Eular", "Karras", "'Eular' is not known. Did you mean 'Euler'? Known are: DDIM, DDPM, PLMS"),
        ("flow-heun", "Automatic", "sampler_name is 'flow-heun', which m cannot be sampled with. Allowed are: DDIM"),
    ],
)
def test_a_refusal_speaks_in_a1111s_names(sampler, schedule_type, says):
    with pytest.raises(InvalidField) as caught:
        select_scheduler(sampler, schedule_type, FAMILIES["diffusion"], "m")
    assert says in caught.value.message
    assert "dpm++2m" not in caught.value.message
