"""Guidance as data: which images are guided, by what, and how outputs are combined."""

import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from noria.sampling.guidance import CLASSIFIER_FREE, Guidance

SHAPE_CHW = (4, 8, 8)
FORMS = [
    CLASSIFIER_FREE,
    Guidance("cond", 0.0),
    Guidance(rescale=0.7),
    Guidance("cond", 0.0, norm_limit=0.5),
    Guidance(equal_norms="patches"),
    Guidance(equal_norms="lines"),
]


def outputs(dtype=torch.float32):
    return torch.randn((2, 2, *SHAPE_CHW), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("guidance", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unguided_output_is_returned_exactly_beside_a_guided_one(guidance, dtype):
    cond, uncond = outputs(dtype)
    uncond[1] = cond[1]
    combined = guidance.combine(cond, uncond, torch.tensor([7.5, guidance.active_above]))
    assert combined.dtype == torch.float32
    assert torch.equal(combined[1], cond[1].float())
    assert not torch.equal(combined[0], cond[0].float())


def test_both_forms_follow_their_formula():
    cond, uncond = outputs()
    scale_B = torch.tensor([7.5, 2.0])
    by_form = {form: Guidance(form).combine(cond, uncond, scale_B) for form in ("uncond", "cond")}
    for b, scale in enumerate(scale_B):
        assert torch.equal(by_form["uncond"][b], uncond[b] + scale * (cond[b] - uncond[b]))
        assert torch.equal(by_form["cond"][b], cond[b] + scale * (cond[b] - uncond[b]))


def test_the_deviation_is_rescaled_as_by_diffusers():
    cond, uncond = outputs()
    guided = CLASSIFIER_FREE.combine(cond, uncond, torch.tensor([7.5, 2.0]))
    rescaled = Guidance(rescale=0.7).combine(cond, uncond, torch.tensor([7.5, 2.0]))
    torch.testing.assert_close(rescaled, rescale_noise_cfg(guided, cond, guidance_rescale=0.7))


def test_the_norm_is_limited_where_it_is_larger():
    cond, uncond = outputs()
    uncond[1] = 0.9 * cond[1]  # the guided output is 1.2 times this one
    scale_B = torch.tensor([7.5, 2.0])
    guided = Guidance("cond", 0.0).combine(cond, uncond, scale_B)
    limited = Guidance("cond", 0.0, norm_limit=1.5).combine(cond, uncond, scale_B)
    torch.testing.assert_close(limited[0], guided[0] * 1.5 * cond[0].norm() / guided[0].norm())
    assert torch.equal(limited[1], guided[1])


def test_an_image_is_guided_above_the_bound_of_its_family():
    assert [CLASSIFIER_FREE.is_active(scale, None) for scale in (0.0, 1.0, 1.1)] == [False, False, True]
    assert [Guidance("cond", 0.0).is_active(scale, None) for scale in (0.0, 0.5)] == [False, True]
    assert not Guidance(embedded=True).is_active(8.0, "x")


def test_without_a_negative_prompt_some_families_are_not_guided():
    guidance = Guidance(negative_absent="unguided")
    assert [guidance.is_active(4.0, text) for text in (None, "", "x")] == [False, True, True]
    assert not guidance.is_active(1.0, "x")
    assert [guidance.negative(text) for text in ("", "x")] == ["", "x"]


@pytest.mark.parametrize(
    ("parts", "at"),
    [
        ("patches", (0, slice(None), slice(0, 2), slice(0, 2))),
        ("patches", (1, slice(None), slice(6, 8), slice(2, 4))),
        ("lines", (1, 3, 5)),
    ],
)
def test_the_norm_of_each_part_is_that_of_the_prompts_output(parts, at):
    cond, uncond = outputs()
    guided = Guidance(equal_norms=parts).combine(cond, uncond, torch.tensor([7.5, 2.0]))
    plain = CLASSIFIER_FREE.combine(cond, uncond, torch.tensor([7.5, 2.0]))
    torch.testing.assert_close(guided[at], plain[at] * cond[at].norm() / plain[at].norm())


def test_an_absent_negative_prompt_is_not_an_empty_one():
    assert [CLASSIFIER_FREE.negative(text) for text in (None, "", "x")] == ["", "", "x"]
    assert [Guidance(negative_absent="zeros").negative(text) for text in (None, "", "x")] == [None, "", "x"]
