"""FLUX.1 with images of several sizes in one call: each as alone, and as by diffusers' own pipeline."""

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

import tiny_models
from flow_pipelines import PROMPTS, make_request
from generating import assert_as_alone, load
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.errors import ConfigError
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.conditioning import collate
from noria.models.diffusion.transformer_models.patches import from_tokens, positions, to_tokens
from noria.models.diffusion.transformer_models.token_rows import length_class
from noria.protocol.diffusion import Lora

SIZES = [(48, 48), (40, 56), (96, 24), (56, 40)]  # 36, 35, 36 and 35 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_flux(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def executor(folder):
    return load(folder)[1]


def test_a_call_of_one_size_is_that_of_diffusers_in_every_bit(executor):
    model, rows = executor.model, torch.randn(2, *executor.model.latent_shape(40, 56))
    times, scales = torch.tensor([900.0, 12.0]), torch.tensor([3.5, 1.0])
    with torch.inference_mode():
        texts = collate(model.text_encode(PROMPTS[:2]))
        ours = model.predict(rows, times, texts, scales)
        transformer = model.lora_parts["transformer"]
        own, transformer.pos_embed = transformer.pos_embed, transformer.pos_embed._inner
        (theirs,) = transformer(
            hidden_states=to_tokens(rows),
            timestep=times / 1000,
            guidance=scales,
            **texts.tokens,
            **texts.vectors,
            txt_ids=torch.zeros(512, 3),
            img_ids=positions(7, 5, torch.device("cpu"), torch.float32),
            return_dict=False,
        )
        transformer.pos_embed = own
    assert torch.equal(ours, from_tokens(theirs, 14, 10))


def test_adapters_are_those_of_their_rows_in_a_call_of_several_sizes(executor, tmp_path):
    save_diffusers_lora(tmp_path / "all.safetensors", executor.model.lora_parts, rank=2)
    config = EngineConfig(dtype="float32", slots=8, threads=1, loras=(str(tmp_path),))
    adapted = DiffusionExecutor(executor.model, config)
    lora = Lora("all", 0.7, digest_of(tmp_path / "all.safetensors"))
    requests = [
        make_request(k, inference_steps=2, width=width, height=height, loras=(lora,) * (k % 2))
        for k, (width, height) in enumerate(SIZES)
    ]
    assert_as_alone(adapted, requests)


def test_a_row_has_little_padding():
    lengths = {}
    for num_tokens in range(4, 128 * 128 + 1):
        lengths.setdefault(length_class(num_tokens), []).append(num_tokens)
    assert all(1 - of_class[0] / of_class[-1] <= 0.089 for of_class in lengths.values())
    assert all(lengths[length_class(n * n)][-1] == n * n for n in (16, 32, 64, 128)), "square images are the longest"
    of_a_megapixel = [(1024, 1024), (1216, 832), (832, 1216), (1344, 768), (1536, 640), (896, 1152)]
    assert len({length_class(width * height // 256) for width, height in of_a_megapixel}) == 1


def test_sizes_share_calls_by_their_tokens_where_a_batch_may_change_bits_and_attention_takes_masks(folder, executor):
    model = executor.model
    assert len({model.call_size(width * height) for width, height in SIZES}) == 1
    assert model.call_size(48 * 48) != model.call_size(32 * 32)
    for settings in ({"buckets": (4,)}, {"attention": "_native_flash"}):
        assert load(folder, **settings)[1].model.call_size(48 * 48) is None
    with pytest.raises(ConfigError, match=r"engine\.attention is 'flash', .* install .flash-attn.*Or use 'auto'"):
        load(folder, attention="flash")


def test_the_attention_of_one_model_is_not_that_of_others(folder):
    """diffusers makes the backend that a model chooses the default of the process."""
    query = torch.ones(1, 4, 2, 8)
    load(folder, attention="_native_flash")
    masked = dispatch_attention_fn(query, query, query, attn_mask=torch.ones(1, 1, 1, 4, dtype=torch.bool))
    assert torch.equal(masked, query)
