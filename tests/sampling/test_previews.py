"""Previews from the model's outputs."""

import numpy as np
import pytest
import torch

from noria.sampling.previews import clean_latents, clean_weights, downscale, fit_colours, preview_pixels

ALPHA_BARS = np.linspace(0.999, 0.004, 1000)


def model_inputs_and_outputs(clean_BCHW, noise_BCHW, alpha_B, prediction_type):
    """Return the inputs and the outputs of a perfect model."""
    alpha_B111 = torch.tensor(alpha_B, dtype=torch.float32)[:, None, None, None]
    inputs = alpha_B111.sqrt() * clean_BCHW + (1 - alpha_B111).sqrt() * noise_BCHW
    velocity = alpha_B111.sqrt() * noise_BCHW - (1 - alpha_B111).sqrt() * clean_BCHW
    return inputs, {"epsilon": noise_BCHW, "v_prediction": velocity, "sample": clean_BCHW}[prediction_type]


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_the_estimate_from_a_perfect_model_is_the_image(prediction_type):
    generator = torch.Generator().manual_seed(1)
    clean, noise = torch.randn(2, 4, 4, 6, 5, generator=generator)
    timesteps = np.array([0.0, 333.0, 500.25, 999.0], np.float32)
    alpha_B = np.interp(timesteps, np.arange(1000), ALPHA_BARS)
    weights = torch.from_numpy(clean_weights(timesteps, ALPHA_BARS, prediction_type))
    inputs, outputs = model_inputs_and_outputs(clean, noise, alpha_B, prediction_type)
    torch.testing.assert_close(clean_latents(inputs, outputs, weights), clean, rtol=0, atol=2e-4)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_weights_are_finite_at_zero_terminal_snr(prediction_type):
    zero_terminal_snr = np.linspace(1.0, 0.0, 1000)
    weights = clean_weights(np.array([999.0, 1e6, -1.0], np.float32), zero_terminal_snr, prediction_type)
    assert np.isfinite(weights).all()
    assert weights.dtype == np.float32


def test_the_estimate_does_not_modify_its_inputs():
    inputs, outputs = torch.ones(1, 4, 2, 2), torch.full((1, 4, 2, 2), 3.0)
    assert clean_latents(inputs, outputs, torch.tensor([[2.0], [10.0]])).unique().tolist() == [32.0]
    assert (inputs == 1).all()
    assert (outputs == 3).all()


def test_the_colour_map_inverts_a_linear_encoder():
    """Latents that are mixed and shifted means of blocks: then the map is exact up to rounding."""
    mix = torch.tensor([[0.5, 0.2, 0.0, 1.0], [0.1, -0.7, 0.3, 0.0], [0.0, 0.4, 0.9, -0.2]])

    def encode(pixels_N3HW):
        means = torch.nn.functional.avg_pool2d(pixels_N3HW, 8)
        return torch.einsum("nchw,ck->nkhw", means, mix) + 0.25

    colours = fit_colours(encode, 8)
    expected = torch.tensor([[250, 10, 128], [0, 255, 64], [77, 78, 79]], dtype=torch.uint8)
    pixels = (expected.float() / 127.5 - 1)[:, :, None, None].expand(-1, -1, 16, 24)
    preview = preview_pixels(encode(pixels), colours)
    assert preview.shape == (3, 2, 3, 3)
    assert preview.dtype == torch.uint8
    assert (preview.int() - expected[:, None, None, :].int()).abs().max() <= 1


def test_colours_are_clamped():
    colours = torch.cat([torch.eye(3), torch.zeros(1, 3)])
    latents = torch.tensor([-5.0, 300.0, 12.4])[None, :, None, None]
    assert preview_pixels(latents, colours).flatten().tolist() == [0, 255, 12]


@pytest.mark.parametrize(
    ("size", "max_side", "expected"), [((8, 8), 8, (8, 8)), ((96, 64), 64, (48, 32)), ((65, 3), 64, (33, 2))]
)
def test_downscaled_sides_do_not_exceed_the_maximum(size, max_side, expected):
    latents = torch.full((2, 4, *size), 0.5)
    assert downscale(latents, max_side).shape == (2, 4, *expected)
    assert (downscale(latents, max_side) == 0.5).all()
