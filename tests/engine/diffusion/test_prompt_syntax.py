"""Prompts in A1111's syntax, and clip skip: what a UNet is shown of them, and other lengths in one call."""

import math

import diffusers
import msgspec
import pytest
import torch

from generating import (
    LATENTS_TOLERANCE,
    assert_as_alone,
    difference,
    evicted_image,
    final_latents,
    generate,
    load,
    moved_image,
    relative,
)
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.request import steps_of_calls
from noria.errors import InvalidField
from noria.models.diffusion.conditioning import collate
from noria.models.diffusion.prompts.chunks import MAX_CHUNKS
from noria.models.diffusion.prompts.clip_prompt import ClipPrompt
from noria.protocol.diffusion import SecondPass
from noria.sampling.tables import output_column, sample_column
from noria.testing.requests import make_image_request
from pipelines import open_pipeline, run_pipeline, set_scheduler

LONG = "a red circle above a blue square and a large green ring, at the top left of a small yellow star, " * 2 + "black"


@pytest.fixture(scope="module", params=["tiny_folder", "tiny_xl_folder"])
def executor(request):
    return load(request.getfixturevalue(request.param))[1]


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


@pytest.mark.parametrize("prompt", ["", "a red circle, a star"])
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
        f"{LONG}, " * 5,
        "(a [red] circle)",
        "BREAK a star",
    ]
    requests = [
        make_request(k, text, prompt_syntax="a1111" if k else None, negative_prompt=texts[k - 3])
        for k, text in enumerate(texts)
    ]
    assert_as_alone(executor, requests, [0, 1, 0, 2, 1, 0])


def test_with_padded_rows_prompts_of_other_lengths_change_bits_and_those_of_one_length_none(tiny_folder, monkeypatch):
    _, executor = load(tiny_folder, buckets=(8,))
    short, other, long = (make_request(k, text, prompt_syntax="a1111") for k, text in enumerate(("a", "a star", LONG)))
    alone = final_latents(executor, [short], monkeypatch)["r0"]
    assert torch.equal(final_latents(executor, [short, other], monkeypatch)["r0"], alone)
    beside_long = final_latents(executor, [short, long], monkeypatch)["r0"]
    assert 0 < relative(beside_long, alone) <= LATENTS_TOLERANCE


STRONG = 30.0
EDITED = "(a [red:green:3] circle:1.2) [above|below], [a star::1]"


def make_edited(number, prompt=EDITED, **fields):
    """A request whose guidance is so strong that a word changes the image of a tiny model."""
    defaults = {
        "guidance_scale": STRONG,
        "inference_steps": 6,
        "prompt_syntax": "a1111",
        "negative_prompt": "[black:white:2]",
    }
    return make_request(number, prompt, **defaults | fields)


@pytest.mark.parametrize("scheduler", ["euler", "heun"])
def test_an_edit_is_the_embedding_switched_by_hand(executor, request, scheduler, monkeypatch):
    is_xl = len(encoders_of(executor.model)) > 1
    pipeline = diffusers.StableDiffusionXLPipeline if is_xl else diffusers.StableDiffusionPipeline
    folder = request.getfixturevalue("tiny_xl_folder" if is_xl else "tiny_folder")
    pipe = open_pipeline(pipeline, folder)
    ours = make_edited(1, scheduler=scheduler)
    set_scheduler(pipe, ours, folder, clip_sample=False, steps_offset=1)
    calls_per_step = 2 if scheduler == "heun" else 1

    def at(call):
        """The embeddings of the negative prompt and of the prompt, as a pipeline holds them."""
        step = call // calls_per_step + 1
        text = f"(a {'red' if step <= 3 else 'green'} circle:1.2) {['below', 'above'][step % 2]}, "
        texts = "black" if step <= 2 else "white", text + ("a star" if step == 1 else "")
        names = {"prompt_embeds": "encoder_hidden_states"} | ({"add_text_embeds": "text_embeds"} if is_xl else {})
        found = (encode(executor, *map(a1111, texts), name=each) for each in names.values())
        return dict(zip(names, found, strict=True))

    def switch(_pipe, call, _timestep, _tensors):
        return {name: torch.stack(pair) for name, pair in at(call + 1).items()}

    first = at(0)
    embeddings = {"negative_prompt_embeds": first["prompt_embeds"][0], "prompt_embeds": first["prompt_embeds"][1]}
    if is_xl:
        negative, prompt = first["add_text_embeds"]
        embeddings |= {"negative_pooled_prompt_embeds": negative, "pooled_prompt_embeds": prompt}
    theirs = run_pipeline(
        pipe,
        ours,
        prompt=None,
        negative_prompt=None,
        output_type="latent",
        callback_on_step_end=switch,
        callback_on_step_end_tensor_inputs=list(first),
        **{name: each[None] for name, each in embeddings.items()},
    )
    error = relative(final_latents(executor, [ours], monkeypatch)["r1"], theirs[0])
    assert error <= 2e-4  # float32, with a guidance that multiplies its rounding
    later = make_edited(1, EDITED.replace(":3]", ":4]"), scheduler=scheduler)
    assert relative(final_latents(executor, [later], monkeypatch)["r1"], theirs[0]) > 10 * error


@pytest.mark.parametrize(
    ("joined", "single", "scale"),
    [
        ("a red circle AND a red circle:0.5", "a red circle", 1.5 * STRONG),
        ("a red circle AND a star:0", "a red circle", STRONG),
        ("a red circle:0.5", "a red circle:0.5", STRONG),  # joins none
    ],
)
def test_joined_prompts_add_up(executor, joined, single, scale):
    strong = {"guidance_scale": STRONG, "prompt_syntax": "a1111"}
    image = generate(executor, [make_request(1, joined, **strong)])["r1", 0]
    assert difference(image, generate(executor, [make_request(1, single, guidance_scale=scale)])["r1", 0]) <= 1
    assert difference(image, generate(executor, [make_request(1, "a star", **strong)])["r1", 0]) > 2


def test_joined_prompts_are_a_weighted_sum_of_outputs(executor):
    model, weights, guidance = executor.model, (30.0, 20.0, -10.0), 1.0  # what a scale below 1 counts as
    request = make_request(
        1, "a red circle:30 AND a star : 20. AND [black|white]:-10.0", prompt_syntax="a1111",
        guidance_scale=0.5, inference_steps=3, scheduler="euler",
    )  # fmt: skip
    prepared = executor.prepare(request)
    assert (prepared.num_rows, prepared.schedulable(None, None).rows) == (4, 4)
    table, latents = prepared.table, []
    noise = torch.randn(1, *prepared.latent_shape, generator=torch.Generator("cpu").manual_seed(1))
    latents = noise * table.init_noise_sigma
    with torch.inference_mode():
        for call in range(3):
            rows = model.text_encode(["black", "a red circle", "a star", ("black", "white")[call % 2]])
            inputs = (latents * float(table.input_scale[call])).expand(4, -1, -1, -1)
            times = torch.full((4,), float(table.timesteps[call]))
            uncond, *conds = model.predict(inputs, times, collate(rows), None).double()
            output = uncond + guidance * sum(
                weight * (cond - uncond) for weight, cond in zip(weights, conds, strict=True)
            )
            row = table.coefficients[call]
            latents = float(row[sample_column(call)]) * latents + float(row[output_column(call)]) * output
        expected = model.decode(latents.float()).numpy()[0]
    image = generate(executor, [request])["r1", 0]
    assert difference(image, expected) <= 1
    other = make_request(1, "a red circle", guidance_scale=50 * guidance, inference_steps=3, scheduler="euler")
    assert difference(image, generate(executor, [other])["r1", 0]) > 2


def test_changing_and_joined_prompts_are_as_alone_also_moved_and_evicted(executor):
    requests = [
        make_edited(0),
        make_edited(1, "a star AND [a red circle|a blue square]:0.7 AND black:-0.2", scheduler="euler-a"),
        make_request(2, "a star"),
        make_edited(3, "[a|b] circle", guidance_scale=1.0, scheduler="dpm++2m", inference_steps=10, calls=0.5),
        make_edited(4, f"[a star:{LONG}:0.5]", second_pass=SecondPass(48, 32, 5, 0.6)),
        make_edited(5, "a star AND a circle", guidance_scale=1.0),
    ]
    images = assert_as_alone(executor, requests, [0, 1, 0, 2, 1, 0])
    assert difference(moved_image(executor, requests[0], 4), images["r0", 0]) <= 1
    assert difference(evicted_image(executor, requests[1], 3), images["r1", 0]) <= 1
    changed = [
        make_edited(0, EDITED.replace(":3]", ":5]")),
        make_edited(1, "a star AND [a blue square|a red circle]:0.7 AND black:-0.2", scheduler="euler-a"),
        make_edited(4, "a star", second_pass=SecondPass(48, 32, 5, 0.6)),
    ]
    for image, pixels in generate(executor, changed).items():
        assert difference(pixels, images[image]) > 2


def test_more_joined_prompts_than_a_call_has_rows_for_are_refused(executor):
    small = DiffusionExecutor(executor.model, msgspec.structs.replace(executor.config, slots=1))
    with pytest.raises(InvalidField, match="AND joins 2 prompts, which take 3 rows of a call"):
        small.prepare(make_request(1, "a AND b", prompt_syntax="a1111"))
    assert executor.prepare(make_request(1, "a AND b", prompt_syntax="a1111")).num_rows == 3


@pytest.mark.parametrize(
    ("num_calls", "num_steps", "expected"),
    [
        (4, 4, [1, 2, 3, 4]),
        (7, 4, [1, 1, 2, 2, 3, 3, 4]),  # Heun
        (5, 4, [1, 1, 2, 3, 4]),  # PNDM
        (6, 11, [1, 3, 5, 7, 9, 11]),  # skipped calls
        (1, 3, [1]),
        (0, 0, []),
    ],
)
def test_a_call_has_a_step(num_calls, num_steps, expected):
    assert steps_of_calls(num_calls, num_steps) == expected
