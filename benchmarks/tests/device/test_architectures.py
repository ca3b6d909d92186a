"""The denoisers have the published parameters and work."""

import subprocess
import sys

import pytest
import torch

from noria.models.catalog import open_model
from noria_bench.device.architectures import (
    FLUX,
    SD15,
    SDXL,
    Z_IMAGE,
    build_denoiser,
    bundled_architecture,
    flops_of_row,
    make_inputs,
)


@pytest.mark.parametrize(
    ("architecture", "parameters"),
    [(SD15, 859_520_964), (SDXL, 2_567_463_684), (FLUX, 11_901_408_320), (Z_IMAGE, 6_154_908_736)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_denoisers_have_the_published_numbers_of_parameters(architecture, parameters):
    assert (
        sum(weights.numel() for weights in build_denoiser(architecture, "meta", torch.float32).parameters())
        == parameters
    )


@pytest.mark.parametrize(
    ("architecture", "side_px", "tflops"), [(SD15, 512, 0.803), (SDXL, 1024, 6.76)], ids=["sd15", "sdxl"]
)
def test_a_row_has_the_published_work(architecture, side_px, tflops):
    assert flops_of_row(architecture, side_px) == pytest.approx(tflops * 1e12, rel=0.02)


def test_the_bundled_architecture_is_that_of_the_bundled_model():
    spec = open_model("bundled")
    assert (
        sum(weights.numel() for weights in build_denoiser(bundled_architecture(), "meta", torch.float32).parameters())
        == spec.num_parameters
    )
    assert bundled_architecture().config["sample_size"] * bundled_architecture().latent_scale == spec.default_width_px
    assert bundled_architecture().default_steps == spec.default_steps


def test_inputs_are_on_their_device_even_after_a_model_was_loaded():
    """Transformers replaces `torch.linspace` while it loads a model; needs a fresh process."""
    script = """
import torch
from transformers.initialization import meta_device_safe_creation_ops
with torch.device("meta"), meta_device_safe_creation_ops():
    torch.empty(1)
from noria_bench.device.architectures import bundled_architecture, flops_of_row
assert flops_of_row(bundled_architecture(), 128) > 1e8
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unet_and_its_inputs_have_the_dtype_and_are_reproducible(tiny, dtype):
    outputs = []
    for _ in range(2):
        unet, inputs = build_denoiser(tiny, "cpu", dtype), make_inputs(tiny, 64, 3, "cpu", dtype)
        assert {weights.dtype for weights in unet.parameters()} == {dtype}
        with torch.no_grad():
            outputs.append(inputs.predict(unet))
    assert outputs[0].shape == (3, 4, 8, 8) and outputs[0].dtype == dtype and outputs[0].isfinite().all()
    assert torch.equal(*outputs)
    assert torch.get_default_dtype() == torch.float32
