import subprocess
import sys

import diffusers
import diffusers.schedulers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.images.scheduler_names import SCHEDULERS, UNSUPPORTED, find

NAMES = [choice.name for choice in SCHEDULERS]
EXPORTED = sorted(
    name
    for name in {*dir(diffusers.schedulers), *dir(diffusers)}
    if name.endswith("Scheduler") and name[0].isupper() and "KarrasDiffusionSchedulers" not in name
)


def test_find_accepts_names_aliases_and_classes():
    for choice in SCHEDULERS:
        for name in (choice.name, choice.name.upper(), *choice.aliases):
            assert find(name) is choice, name
        assert find(choice.diffusers_class).diffusers_class == choice.diffusers_class


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("DPM++ 2M Karras", "dpm++2m-karras"),
        ("dpmpp_2m_sde_karras", "dpm++2m-sde-karras"),
        ("k_euler_a", "euler-a"),
        ("euler_ancestral", "euler-a"),
        ("Euler a", "euler-a"),
        ("EulerDiscreteScheduler", "euler"),
        ("DPMSolverMultistepScheduler", "dpm++2m"),
        ("UniPCMultistepScheduler", "unipc"),
        ("DPM2 a Karras", None),
        ("PLMS", "pndm"),
    ],
)
def test_find_accepts_other_tools_names(given_name, expected):
    if expected is None:
        with pytest.raises(InvalidField):
            find(given_name)
    else:
        assert find(given_name).name == expected


@given(st.sampled_from(NAMES), st.lists(st.sampled_from([" ", "_", "-", ""]), min_size=20, max_size=20), st.booleans())
def test_case_and_separators_do_not_matter(name, separators, uppercase):
    spelt = "".join(letter + separator for letter, separator in zip(name.replace("-", ""), separators, strict=False))
    assert find(spelt.upper() if uppercase else spelt).name == name


def test_every_spelling_belongs_to_one_choice():
    spellings = [scheduler_names._normalized(name) for choice in SCHEDULERS for name in (choice.name, *choice.aliases)]
    assert len(spellings) == len(set(spellings))


def test_the_error_for_an_unknown_name_has_the_nearest_and_all_names():
    with pytest.raises(InvalidField) as caught:
        find("eular-a")
    assert caught.value.field == "scheduler"
    assert "'eular-a'" in caught.value.message
    assert "Did you mean 'euler-a'?" in caught.value.message
    assert all(name in caught.value.message for name in NAMES)


def test_every_scheduler_of_diffusers_is_supported_or_rejected_with_a_reason():
    for name, reason in UNSUPPORTED.items():
        with pytest.raises(InvalidField) as caught:
            find(name)
        assert (caught.value.field, reason in caught.value.message) == ("scheduler", True), name
    for name in set(EXPORTED) - {*UNSUPPORTED, "SchedulerMixin", "FlaxSchedulerMixin"}:
        assert name in {find(name).diffusers_class, *find(name).aliases}


def test_diffusers_exports_all_classes_of_the_table():
    assert {choice.diffusers_class for choice in SCHEDULERS} <= set(EXPORTED)
    assert {name for name in UNSUPPORTED if name.endswith("Scheduler")} <= set(EXPORTED)


@pytest.mark.parametrize(
    ("config", "family", "name"),
    [
        ({"_class_name": "PNDMScheduler", "skip_prk_steps": True}, "diffusion", "pndm"),
        ({"_class_name": "DDIMParallelScheduler"}, "diffusion", "ddim"),
        ({"_class_name": "DPMSolverMultistepScheduler", "use_karras_sigmas": True}, "diffusion", "dpm++2m-karras"),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"},
            "diffusion",
            "dpm++2m-sde",
        ),
        ({"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction"}, "flow", "flow-unipc"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}, "flow", "flow-euler"),
        ({"_class_name": "EDMDPMSolverMultistepScheduler"}, "edm", "edm-dpm++2m"),
        ({"_class_name": "EDMEulerScheduler"}, "edm", "edm-euler"),
    ],
)
def test_a_models_configuration_determines_its_family_and_its_choice(config, family, name):
    assert scheduler_names.family_of(config) == family
    assert scheduler_names.choice_for_config(config).name == name


def test_a_configuration_with_an_unsupported_class_is_rejected():
    with pytest.raises(InvalidField, match="tokens"):
        scheduler_names.choice_for_config({"_class_name": "AmusedScheduler"})


def test_the_table_imports_neither_torch_nor_diffusers():
    code = (
        "import sys, noria.images.scheduler_names; sys.exit(bool({'torch', 'diffusers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_scheduler_that_cannot_begin_with_an_image_is_rejected_with_those_of_the_model_that_can():
    scheduler_names.check_start_image("DDIM", ["ddim", "ipndm"])
    with pytest.raises(InvalidField, match=r"'ipndm' cannot begin with an image.*use one of ddim, lcm\.") as caught:
        scheduler_names.check_start_image("ipndm", ["ddim", "ipndm", "lcm"])
    assert caught.value.field == "scheduler"
