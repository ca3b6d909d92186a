"""Prompts in A1111's syntax, and clip skip: what a UNet is shown of them, and other lengths in one call."""

import math

import pytest
import torch

from generating import difference, generate
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.models.catalog import open_model
from noria.models.diffusion.prompts.chunks import MAX_CHUNKS
from noria.models.diffusion.prompts.clip_prompt import ClipPrompt
from noria.models.families import FAMILIES
from noria.testing.requests import make_image_request

LONG = "a red circle above a blue square and a large green ring, at the top left of a small yellow star, " * 2 + "black"


@pytest.fixture(scope="module", params=["tiny_folder", "tiny_xl_folder"])
def executor(request):
    torch.set_num_threads(1)
    spec = open_model(str(request.getfixturevalue(request.param)))
    config = EngineConfig(dtype="float32", slots=8, threads=1)
    return DiffusionExecutor(FAMILIES[spec.family].load(spec, config, "cpu"), config)


def make_request(number, prompt, **fields):
    settings = {"prompt": prompt, "negative_prompt": "black", "seed": number, "width": 32, "height": 32}
    return make_image_request(f"r{number}", **settings | {"guidance_scale": 4.0} | fields)


def encode(executor, *prompts, name="encoder_hidden_states"):
    with torch.inference_mode():
        return [
            (each.tokens | each.vectors)[name] for prompt in prompts for each in executor.model.text_encode([prompt])
        ]


def encoders_of(model):
    """Return the tokenizers of a model with their text encoders."""
    return getattr(model, "_text_encoders", None) or [(model.tokenizer, model.text_encoder)]


def a1111(text, **fields):
    return ClipPrompt(text, "a1111", **fields)


@pytest.mark.parametrize("prompt", ["", "a red circle, a star", LONG[:30]])
def test_weights_of_1_give_the_plain_image_bit_by_bit(executor, prompt):
    plain = generate(executor, [make_request(1, prompt)])["r1", 0]
    for text in (prompt, f"({prompt}:1)", f"([{prompt}])" if prompt else "()"):
        image = generate(executor, [make_request(1, text, prompt_syntax="a1111")])["r1", 0]
        assert difference(image, plain) == 0, text
    other = generate(executor, [make_request(1, f"(red:1.5) {prompt}", prompt_syntax="a1111")])["r1", 0]
    assert difference(other, plain) > 0


def test_a_chunk_is_the_plain_prompt_of_its_words(executor):
    first, second, empty, both = encode(
        executor, "a red circle", "a star", "", a1111("a red circle BREAK a star BREAK BREAK")
    )
    assert both.equal(torch.cat([first, second, empty]))
    for name in executor.model.text_encode(["a red circle"])[0].vectors:
        first, both = encode(executor, "a red circle", a1111("(a red circle:1.5) BREAK a star"), name=name)
        assert both.equal(first)


def test_a_long_prompt_is_read_whole(executor):
    text = LONG.replace(",", "")  # at which it would be divided
    (plain,), (whole,) = executor.model.text_encode([text]), executor.model.text_encode([a1111(text)])
    assert (plain.num_cut > 0, whole.num_cut) == (True, 0)
    num_tokens = len(plain.tokens["encoder_hidden_states"])
    num_chunks = math.ceil((plain.num_cut + num_tokens - 2) / (num_tokens - 2))
    assert len(whole.tokens["encoder_hidden_states"]) == num_chunks * num_tokens
    (cut,) = executor.model.text_encode([a1111(f"{LONG}, " * 40)])
    assert (cut.num_cut > 0, len(cut.tokens["encoder_hidden_states"])) == (True, MAX_CHUNKS * num_tokens)


def test_weights_multiply_outputs_whose_mean_is_kept(executor):
    plain, weighted = encode(executor, "a red circle", a1111("a (red:1.5) circle"))
    encoders, expected, start = encoders_of(executor.model), [], 0
    for tokenizer, text_encoder in encoders:  # each apart
        first, last = (1 + len(tokenizer(text, add_special_tokens=False).input_ids) for text in ("a ", "a red"))
        before = plain[:, start : start + text_encoder.config.hidden_size].double()
        start += before.shape[1]
        after = before.clone()
        after[first:last] *= 1.5
        expected.append(after * before.mean() / after.mean())
    assert torch.allclose(weighted.double(), torch.cat(expected, dim=1), atol=1e-5)


def test_a_prompt_whose_weights_are_all_zero_stays_finite(executor):
    (found,) = encode(executor, a1111(f"({LONG}:0)"))
    assert found.isfinite().all()


def test_clip_skip_chooses_a_layer(executor):
    encoders = encoders_of(executor.model)
    family, layer = (1, 2) if len(encoders) == 1 else (2, 3)
    expected = []
    for tokenizer, text_encoder in encoders:
        tokens = tokenizer("a star", padding="max_length", max_length=24, return_tensors="pt")
        with torch.inference_mode():
            hidden = text_encoder(tokens.input_ids, output_hidden_states=True).hidden_states[-layer]
            expected.append(text_encoder.final_layer_norm(hidden) if len(encoders) == 1 else hidden)
    plain, of_family, ours = encode(
        executor, "a star", ClipPrompt("a star", clip_skip=family), ClipPrompt("a star", clip_skip=layer)
    )
    assert of_family.equal(plain)
    assert ours.equal(torch.cat(expected, dim=-1)[0])
    chosen = generate(executor, [make_request(1, "a star", clip_skip=layer)])["r1", 0]
    assert difference(chosen, generate(executor, [make_request(1, "a star")])["r1", 0]) > 0


def test_prompts_of_other_lengths_share_calls_and_are_as_alone(executor):
    texts = [
        "a star",
        LONG,
        f"{LONG} BREAK (a star:1.3)",
        f"{LONG}, " * 3,
        f"{LONG}, " * 7,
        "(a [red] circle)",
        "BREAK a star",
        "",
    ]
    requests = [
        make_request(k, text, prompt_syntax="a1111" if k else None, negative_prompt=texts[k - 3])
        for k, text in enumerate(texts)
    ]
    together = generate(executor, requests, arrivals=[0, 1, 0, 2, 1, 0, 0, 1])
    alone = [generate(executor, [request])[request.request_id, 0] for request in requests]
    for request, image in zip(requests, alone, strict=True):
        assert difference(together[request.request_id, 0], image) <= 1, request.payload.prompt
