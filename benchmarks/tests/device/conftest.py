"""A UNet small enough for tests."""

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
