"""Denoisers that are quantized when they are loaded: which layers, and what is refused.

The images are in `test_quantized_folders.py`, whose program has the libraries.
"""

import importlib.util
import json

import pytest

import tiny_models
from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.errors import ConfigError, MissingExtra, ModelError
from noria.models.catalog import open_model
from noria.models.diffusion import block_quantization
from noria.models.diffusion.folders import quantization


def load(spec, kind, dtype="float32"):
    return load_executor(spec, EngineConfig(dtype=dtype, slots=2, threads=1, quantize=kind), "cpu")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("single_transformer_blocks.3.proj_mlp.weight", (64, 32), True),
        ("down_blocks.0.attentions.1.transformer_blocks.0.ff.net.2.weight", (64, 32), True),
        ("layers.11.attention.to_q.weight", (64, 32), True),
        ("layers.11.attention.to_q.weight", (64, 40), False),  # float8 multiplies blocks of 16 numbers
        ("transformer_blocks.0.attn.to_q.bias", (64,), False),
        ("transformer_blocks.0.norm1_context.linear.weight", (64, 32), False),
        ("transformer_blocks.0.img_mod.1.weight", (64, 32), False),
        ("layers.0.adaLN_modulation.0.weight", (64, 32), False),
        ("distilled_guidance_layer.layers.0.linear_1.weight", (64, 32), False),
        ("proj_out.weight", (64, 32), False),
        ("x_embedder.weight", (64, 32), False),
    ],
)
def test_only_linear_layers_of_repeated_blocks_are_quantized(name, shape, expected):
    assert block_quantization.is_quantizable(name, shape) is expected


def test_what_cannot_be_quantized_is_rejected(tmp_path, monkeypatch):
    for module in (quantization, block_quantization):
        monkeypatch.setattr(module, "check_installed", lambda *_: None)
    part = tiny_models.save_flux(tmp_path / "model") / "transformer"
    spec = open_model(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"'fp8', but cpu has no float8, which GPUs have from .* Use 'int8' or 'nf4'"):
        load(spec, "fp8", "bfloat16")
    config, weights = json.loads((part / "config.json").read_text()), part / "diffusion_pytorch_model.safetensors"
    quantized = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
    (part / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    with pytest.raises(ModelError, match=r"'int8', but the transformer in .* is quantized already. Set it to 'none'"):
        load(spec, "int8")
    (part / "config.json").write_text(json.dumps(config))
    weights.rename(part / "flux.gguf")
    with pytest.raises(ModelError, match=r"'nf4', but the transformer in .* is quantized already. Set it to 'none'"):
        load(spec, "nf4")


def test_without_the_library_the_error_names_the_extra(bundled_folder):
    if importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(MissingExtra, match=r"engine.quantize 'nf4' needs bitsandbytes.*noria-serve\[quantized\]"):
        load(open_model(str(bundled_folder)), "nf4")
