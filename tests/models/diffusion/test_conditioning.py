"""Prompts of different lengths share a model call: padded and masked, or repeated, a row is what it is alone."""

import pytest
import torch
from diffusers import UNet2DConditionModel

from noria.models.diffusion.conditioning import Conditioning, collate

WIDTH = 32


def prompts(*lengths, is_repeatable=False):
    generator = torch.Generator().manual_seed(0)
    return [
        Conditioning(
            {"encoder_hidden_states": torch.randn(length, WIDTH, generator=generator)},
            {"pooled": torch.full((3,), float(length))},
            is_repeatable=is_repeatable,
        )
        for length in lengths
    ]


def test_prompts_of_one_length_need_no_mask():
    rows = collate(prompts(5, 5))
    assert rows.mask_RT is None
    assert rows.tokens["encoder_hidden_states"].shape == (2, 5, WIDTH)
    assert rows.vectors["pooled"][:, 0].tolist() == [5, 5]


def test_shorter_prompts_are_padded_and_masked():
    short, long = prompts(2, 4)
    rows = collate([short, long])
    assert rows.mask_RT.tolist() == [[True, True, False, False], [True] * 4]
    assert rows.lengths == (2, 4)
    assert rows.tokens["encoder_hidden_states"][0, 2:].eq(0).all()
    assert rows.tokens["encoder_hidden_states"][0, :2].equal(short.tokens["encoder_hidden_states"])


def test_prompts_that_can_be_are_repeated_up_to_a_small_common_multiple():
    short, long = prompts(4, 6, is_repeatable=True)
    rows = collate([short, long])
    assert (rows.mask_RT, rows.lengths) == (None, (12, 12))
    assert rows.tokens["encoder_hidden_states"][0].equal(short.tokens["encoder_hidden_states"].repeat(3, 1))
    assert collate(prompts(77, 4 * 77, 2 * 77, is_repeatable=True)).lengths == (4 * 77,) * 3
    assert collate(prompts(77, 2 * 77, 3 * 77, is_repeatable=True)).lengths == (6 * 77,) * 3
    assert collate(prompts(3 * 77, 4 * 77, is_repeatable=True)).mask_RT.shape == (2, 4 * 77)


@pytest.mark.parametrize("is_repeatable", [False, True])
def test_a_row_of_a_unet_beside_others_is_that_of_the_prompt_alone(is_repeatable):
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    latents, times = torch.randn(3, 4, 8, 8), torch.tensor([900.0, 500.0, 20.0])
    texts = prompts(3, 7, 5, is_repeatable=is_repeatable)

    def predict(chosen):
        rows = collate([texts[k] for k in chosen])
        with torch.inference_mode():
            return unet(latents[chosen], times[chosen], **rows.tokens, encoder_attention_mask=rows.mask_RT).sample

    together = predict([0, 1, 2])
    for k in range(3):
        alone = predict([k])[0]
        assert (together[k] - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_a_copy_keeps_nothing_else_in_memory():
    batch = torch.zeros(8, 2, WIDTH)
    row = Conditioning({"text": batch[3]}, {"pooled": batch[4, 0]})
    copied = row.clone()
    assert copied.nbytes == row.nbytes == 3 * WIDTH * 4
    assert copied.tokens["text"].untyped_storage().nbytes() == 2 * WIDTH * 4
