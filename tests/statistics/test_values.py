"""Values of prompts, texts and images, compared with numpy's."""

import numpy as np
import pytest

from noria.frontend.engines.results import RawImage
from noria.frontend.services.images.image_writer import count_luma
from noria.statistics.values import luma_values, non_latin_ratio, prompt_values

NAMES = ("image_brightness", "image_contrast", "image_entropy")


def test_values_of_a_prompt():
    assert dict(prompt_values("ein  rotes Haus", ("prompt_chars", "prompt_words"))) == {
        "prompt_chars": 15,
        "prompt_words": 3,
    }
    assert prompt_values("a", ()) == []


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("red", 0), ("größer, straße", 0), ("красный круг", 1), ("赤い", 1), ("ab аб", 0.5), ("123 !?", 0), ("ﬁ Ｆ", 0)],
)
def test_the_share_of_letters_of_other_scripts(text, ratio):
    assert non_latin_ratio(text) == ratio


def test_values_of_an_image_are_those_of_its_luma():
    rgb = np.random.default_rng(5).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    values = dict(luma_values(count_luma(RawImage(0, 32, 24, memoryview(rgb.tobytes()))), NAMES))
    luma = rgb @ np.array([0.299, 0.587, 0.114])
    shares = np.bincount(np.round(luma).astype(int).ravel(), minlength=256) / luma.size
    bits = -sum(share * np.log2(share) for share in shares if share)
    assert values["image_brightness"] == pytest.approx(luma.mean() / 255, abs=0.003)
    assert values["image_contrast"] == pytest.approx(luma.std() / 255, abs=0.003)
    assert values["image_entropy"] == pytest.approx(bits, abs=0.1)


def test_an_image_of_one_colour_has_no_contrast_and_no_entropy():
    white = RawImage(0, 4, 4, memoryview(b"\xff" * 48))
    assert luma_values(count_luma(white), NAMES) == [(NAMES[0], 1.0), (NAMES[1], 0.0), (NAMES[2], 0.0)]
