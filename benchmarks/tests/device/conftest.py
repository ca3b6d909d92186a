"""Denoisers small enough for tests."""

import pytest

from noria_bench.device.architectures import Architecture

TINY = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


@pytest.fixture(scope="session")
def tiny():
    return Architecture("tiny", TINY, default_steps=20, num_tokens=8)


@pytest.fixture(scope="session")
def tiny_flux():
    config = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    axes = {"axes_dims_rope": (4, 4, 8), "guidance_embeds": True}
    return Architecture("flux", config | axes, 28, "FluxTransformer2DModel", rows_of_image=1, num_tokens=8)


@pytest.fixture(scope="session")
def tiny_z_image():
    config = {"dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "axes_dims": [4, 6, 6]}
    return Architecture("z-image", config, 8, "ZImageTransformer2DModel", rows_of_image=1, num_tokens=8)
