"""A1111's text: written exactly in its form, and read from any text."""

import re
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.images.a1111_metadata import from_infotext, to_infotext
from noria.images.metadata import GenerationMetadata
from noria.protocol.diffusion import Control, IpAdapter, Lora, Refinement

WHOLE = GenerationMetadata(
    "a red circle", "blurry", 7, 512, 768, 20, 7.5, "dpm++2m-karras", "tiny", "0123456789ab", "0.1.0"
)  # fmt: skip


def test_the_text_is_in_a1111s_form():
    assert to_infotext(WHOLE) == (
        "a red circle\n"
        "Negative prompt: blurry\n"
        "Steps: 20, Sampler: DPM++ 2M Karras, CFG scale: 7.5, Seed: 7, Size: 512x768, "
        "Model hash: 0123456789ab, Model: tiny, Version: noria 0.1.0"
    )


def test_the_schedule_type_is_written_where_automatic_would_be_wrong():
    text = to_infotext(msgspec.structs.replace(WHOLE, scheduler="dpm++2m"))
    assert "Sampler: DPM++ 2M, Schedule type: Uniform, " in text


def test_an_ip_adapter_is_the_unit_after_those_of_controls():
    adapted = msgspec.structs.replace(WHOLE, controls=(Control("edges"),), ip_adapter=IpAdapter("plain", 0.5, "0" * 12))
    unit = f"Module: ip-adapter-auto, Model: plain [{'0' * 12}], Weight: 0.5"
    assert f', ControlNet 1: "{unit}", Version' in to_infotext(adapted)


def test_values_with_commas_and_colons_are_quoted():
    assert 'Model: "org/a:b, \\"c\\""' in to_infotext(msgspec.structs.replace(WHOLE, model='org/a:b, "c"'))


def fits_infotext(text):
    """Whether A1111's form can represent `text`: lines are stripped, and one can start the negative prompt."""
    lines = text.split("\n")
    return text == text.strip() and all(
        line == line.strip() and not line.startswith("Negative prompt:") for line in lines
    )


PROMPTS = st.lists(
    st.text() | st.sampled_from(["Steps: 5, Seed: 3, Size: 8x8", "a, b", 'say "x: y", z', "🎨 (red:1.2)", ""])
).map("\n".join)


@given(PROMPTS, PROMPTS, st.floats(0, 50), st.sampled_from(["tiny", "org/a:b", 'x, "y', ""]))
def test_what_the_form_can_represent_is_read_back(prompt, negative_prompt, guidance, model):
    written = msgspec.structs.replace(
        WHOLE, prompt=prompt, negative_prompt=negative_prompt, guidance_scale=guidance, model=model or "m"
    )
    read = from_infotext(to_infotext(written))
    for field in ("seed", "width", "height", "inference_steps", "scheduler", "model", "model_version", "noria"):
        assert getattr(read, field) == getattr(written, field)
    assert read.guidance_scale == guidance
    if fits_infotext(prompt) and fits_infotext(negative_prompt):
        assert (read.prompt, read.negative_prompt) == (prompt, negative_prompt or None)


def test_a_refiner_is_read_back_and_another_programs_without_its_hash():
    whole = msgspec.structs.replace(WHOLE, refiner=Refinement(0.8, "xl-refiner", "0" * 12))
    text = to_infotext(whole)
    assert f", Refiner: xl-refiner [{'0' * 12}], Refiner switch at: 0.8, " in text
    assert from_infotext(text).refiner == whole.refiner
    theirs = from_infotext("p\nSteps: 2, Seed: 1, Refiner: xl [7440042bbd], Refiner switch at: 0.75, Version: v1.9.4")
    assert theirs.refiner == Refinement(0.75, "xl")
    odd = from_infotext("p\nSteps: 2, Seed: 1, Refiner: xl [7440042bbd], Refiner switch at: 1")
    assert (odd.refiner, odd.other) == (None, {"Refiner": "xl [7440042bbd]", "Refiner switch at": "1"})


def test_loras_are_read_back_with_digests_and_exact_weights():
    loras = (Lora("ink", 1 / 3, "0" * 12), Lora("soft: light", -1.0), Lora("a.b", 1e-9, "1" * 12))
    read = from_infotext(to_infotext(msgspec.structs.replace(WHOLE, loras=loras[::2])))
    assert (read.prompt, read.loras) == (WHOLE.prompt, loras[::2])
    unreadable = from_infotext(to_infotext(msgspec.structs.replace(WHOLE, loras=loras)))
    assert (unreadable.prompt.endswith("<lora:soft: light:-1> <lora:a.b:1e-09>"), unreadable.loras) == (True, ())


def test_a_text_written_by_a1111_is_read():
    text = """masterpiece, (red circle:1.2)
second line <lora:add_detail:0.5>
Negative prompt: bad hands,
(worst quality:2)
Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 965400086, Size: 512x512, \
Model hash: 6ce0161689, Model: v1-5-pruned-emaonly, Clip skip: 2, \
Lora hashes: "add_detail: 7c6bad76eb54, more: 1", Version: v1.9.4"""
    read = from_infotext(text)
    assert read == GenerationMetadata(
        "masterpiece, (red circle:1.2)\nsecond line", "bad hands,\n(worst quality:2)", 965400086, 512, 512, 20, 7.0,
        "dpm++2m-karras", "v1-5-pruned-emaonly", "6ce0161689", loras=(Lora("add_detail", 0.5),),
        prompt_syntax="a1111", clip_skip=2,
        other={"Lora hashes": "add_detail: 7c6bad76eb54, more: 1", "Version": "v1.9.4"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "scheduler"),
    [
        ("Sampler: DPM++ 2M", "dpm++2m"),
        ("Sampler: DPM++ 2M, Schedule type: Automatic", "dpm++2m-karras"),
        ("Sampler: DPM++ SDE Karras", "DPM++ SDE Karras"),
        ("Sampler: DPM++ SDE, Schedule type: Karras", "DPM++ SDE Karras"),
    ],
)
def test_an_unknown_sampler_keeps_its_name(line, scheduler):
    assert from_infotext(f"p\nSteps: 1, {line}, Seed: 2").scheduler == scheduler


OF_OTHER_PROGRAMS = {
    "SD.Next": (
        "Steps: 20| Sampler: Euler a| CFG scale: 6| Seed: 77| Size: 128x128| App: SD.Next| Note: a, b: c",
        {"App": "SD.Next", "Note": "a, b: c"},
    ),
    "SD.Next, with a value in quotes": (
        'Steps: 20 | Sampler: Euler a | CFG scale: 6 | Seed: 77 | Size: 128x128 | Note: "a | b"', {"Note": "a | b"}
    ),
    "Civitai": (
        "Steps: 20, Sampler: Euler a, CFG scale: 6, Seed: 77, Size: 128x128, "
        'Civitai resources: [{"type":"checkpoint","modelName":"x, Seed: 5","weight":1}], Civitai metadata: {}',
        {"Civitai resources": '[{"type":"checkpoint","modelName":"x, Seed: 5","weight":1}]', "Civitai metadata": "{}"},
    ),
    "A1111 with bars in values": (
        "Steps: 20, Sampler: Euler a, CFG scale: 6, Seed: 77, Size: 128x128, Note: a| b: c| d: e",
        {"Note": "a| b: c| d: e"},
    ),
    "Forge": (
        "Steps: 20, Sampler: Euler a, CFG scale: 1, Distilled CFG Scale: 6, Seed: 77, Size: 128x128, Module 1: ae",
        {"Module 1": "ae"},
    ),
    "Dynamic Prompts": (
        "Steps: 20, Sampler: Euler a, CFG scale: 6, Seed: 77, Size: 128x128\nTemplate: a {castle|keep}: x\n"
        "Negative Template: blurry",
        {"Template": "a {castle|keep}: x", "Negative Template": "blurry"},
    ),
    "JSON that is damaged": (
        "Steps: 20, Sampler: Euler a, CFG scale: 6, Seed: 77, Size: 128x128, Note: [{, More: 1",
        {"Note": "[{", "More": "1"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", OF_OTHER_PROGRAMS)
def test_settings_in_the_form_of_other_programs_are_read(program):
    line, other = OF_OTHER_PROGRAMS[program]
    read = from_infotext(f"a castle\nNegative prompt: blurry\n{line}")
    got = msgspec.structs.replace(read, other={})
    assert got == GenerationMetadata("a castle", "blurry", 77, 128, 128, 20, 6.0, "euler-a")
    assert read.other == other


def test_the_guidance_that_forge_names_twice_is_not_guessed():
    read = from_infotext("p\nSteps: 2, CFG scale: 3.5, Distilled CFG Scale: 6, Seed: 1")
    assert (read.guidance_scale, read.other) == (3.5, {"Distilled CFG Scale": "6"})


@pytest.mark.parametrize("text", ["a: b, c: d\ne", "a\nSteps: 1, b: 2\nC: d", "a\nSteps: 1, b: 2, c: 3\nd, e"])
def test_a_text_without_settings_is_all_prompt(text):
    assert from_infotext(text) == GenerationMetadata(text)


def test_invalid_settings_are_kept_in_other():
    read = from_infotext("p\nSteps: many, Seed: -1, Size: big, CFG scale: nan, Seed resize from: 1x1")
    assert read == GenerationMetadata(
        "p", other={"Steps": "many", "Seed": "-1", "Size": "big", "CFG scale": "nan", "Seed resize from": "1x1"}
    )


@given(st.text(alphabet='ab:, "\\\n\ud7ff{}0x1u', max_size=200))
def test_reading_never_raises(text):
    read = from_infotext(f"{text}\nSteps: 1, Seed: 2, Sampler: {text}")
    assert read.other.keys() | {"Steps"}


def test_an_escaped_unpaired_surrogate_is_replaced():
    read = from_infotext('p\nSteps: 1, Seed: 2, Model: "\\ud83d"')
    assert read.model == "?"


@pytest.mark.parametrize(
    "piece",
    ['a:"', ":", '"', ",", 'a: "\\', "a" * 10 + ":", " ", "a:[", 'a: {"b":', "a:b|", '"a":{"b":1,', "Steps: 1, a: b\n"],
)
def test_reading_takes_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    from_infotext(text)
    assert time.process_time() - started < 10, re.escape(piece)
