"""Folders whose weights are quantized: what is served, what is refused, and that the images are those of diffusers."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tiny_models
from noria.config import EngineConfig
from noria.errors import MissingExtra, ModelError
from noria.models.catalog import count_parameters, open_model
from noria.models.diffusion.folders import quantization
from noria.models.diffusion.folders.quantization import Torchao, read_quantization
from noria.models.families import FAMILIES
from noria.models.weights import weight_bytes
from python_environment import environment_python

INT8 = {
    "quant_method": "torchao",
    "modules_to_not_convert": None,
    "quant_type": {
        "default": {
            "_type": "Int8WeightOnlyConfig",
            "_version": 2,
            "_data": {
                "granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}},
                "group_size": None,
                "set_inductor_config": True,
            },
        }
    },
}
FOUR_BITS = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}
_INT8_TENSOR = {
    "_type": "Int8Tensor",
    "_data": {
        "act_quant_kwargs": None,
        "reduce_range": False,
        "block_size": [1, 16],
        "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
    },
    "_tensor_data_names": ["qdata", "scale"],
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries seem installed: inspecting a folder looks no further."""
    monkeypatch.setattr(quantization, "check_installed", lambda *_: None)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny FLUX.1, not to be changed."""
    return tiny_models.save_flux(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved_folder: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A tiny FLUX.1."""
    return shutil.copytree(saved_folder, tmp_path / "model")


def edit(file: pathlib.Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def pack(folder: pathlib.Path, method: str, metadata: Any = None, state: Any = None) -> None:
    """Write the transformer's first layer as a library saves it; the numbers do not matter."""
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    rows, columns = tensors.pop("x_embedder.weight").shape
    if method == "torchao":
        tensors["x_embedder._weight_qdata"] = np.zeros((rows, columns), np.int8)
        tensors["x_embedder._weight_scale"] = np.zeros((rows, 1), np.float16)
        described = {"x_embedder.weight": json.dumps(metadata or _INT8_TENSOR)}
        names = {"tensor_names": json.dumps([*described, *(name for name in tensors if "_weight_" not in name)])}
        save_file(tensors, file, {**described, **names})
    else:
        tensors["x_embedder.weight"] = np.zeros((rows * columns // 2, 1), np.uint8)
        tensors["x_embedder.weight.absmax"] = np.zeros(8, np.float32)
        tensors["x_embedder.weight.quant_map"] = np.zeros(16, np.float32)
        content = json.dumps(state or {"quant_type": "nf4", "dtype": "bfloat16", "shape": [rows, columns]}).encode()
        tensors["x_embedder.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(content, np.uint8)
        save_file(tensors, file)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("method", "config"), [("torchao", INT8), ("bitsandbytes", FOUR_BITS)])
def test_a_quantized_part_counts_as_the_one_that_it_was(folder: pathlib.Path, method: str, config: Any) -> None:
    before = open_model(str(folder))
    num_parameters = count_parameters(before)
    num_bytes = weight_bytes(folder, "transformer", "diffusion_pytorch_model", 4)
    edit(folder / "transformer" / "config.json", quantization_config=config)
    pack(folder, method)
    after = open_model(str(folder))
    assert (after.num_parameters, count_parameters(after)) == (before.num_parameters, num_parameters)
    assert after.fingerprint != before.fingerprint
    rows, columns = 32, 16
    packed = rows * columns + 4 * rows if method == "torchao" else rows * columns // 2 + 4 * 8 + 4 * 16 + 61
    assert weight_bytes(folder, "transformer", "diffusion_pytorch_model", 4) == num_bytes - 4 * rows * columns + packed


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": None}, "quant_method"),
        ({"quant_type": "int8wo"}, "quant_type"),
        ({"quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}}, "FqnToConfig"),
        ({"quant_type": {"default": {"_type": "quantize_", "_data": {}}}}, "quantize_"),
        ({"quant_type": {"default": INT8["quant_type"]["default"] | {"_data": {"layout": {}}}}}, "layout"),  # type: ignore[index]
        (
            {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"granularity": {"_type": "Any"}}}}},
            "Any",
        ),
        ({"include_input_output_embeddings": True}, "include_input_output_embeddings"),
        ({"custom": 1}, "custom"),
    ],
)
def test_other_quantizations_are_rejected_with_what_is_served(folder: pathlib.Path, changes: Any, words: str) -> None:
    edit(folder / "transformer" / "config.json", quantization_config=INT8 | changes)
    with pytest.raises(ModelError, match=rf"transformer/config\.json: quantization_config: .*{words}.*Int8WeightOnly"):
        open_model(str(folder))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "changes",
    [
        {"load_in_8bit": True},
        {"bnb_4bit_compute_dtype": "load"},
        {"bnb_4bit_quant_storage": "float16"},
        {"llm_int8_enable_fp32_cpu_offload": True},
    ],
)
def test_other_settings_of_bitsandbytes_are_rejected(folder: pathlib.Path, changes: Any) -> None:
    edit(folder / "text_encoder_2" / "config.json", quantization_config=FOUR_BITS | changes)
    with pytest.raises(ModelError, match=r"text_encoder_2/config\.json: quantization_config: .*served are"):
        open_model(str(folder))


@pytest.mark.usefixtures("installed")
def test_a_vae_and_inner_configurations_may_not_be_quantized(folder: pathlib.Path) -> None:
    edit(folder / "text_encoder_2" / "config.json", text_config={"quantization_config": INT8})
    with pytest.raises(ModelError, match=r"text_encoder_2/config\.json: quantization_config is"):
        open_model(str(folder))
    edit(folder / "text_encoder_2" / "config.json", text_config=None, quantization_config=INT8)
    edit(folder / "vae" / "config.json", quantization_config=INT8)
    with pytest.raises(ModelError, match=r"vae/config\.json: quantization_config is"):
        open_model(str(folder))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("method", "damage", "words"),
    [
        ("torchao", _INT8_TENSOR | {"_type": "NVFP4Tensor"}, "NVFP4Tensor.*Int8Tensor and Float8Tensor"),
        ("torchao", _INT8_TENSOR | {"_data": {"dtype": {"_type": "torch.dtype", "_data": "load"}}}, "load"),
        ("torchao", _INT8_TENSOR | {"_data": {"a": [{"_type": "PerRow", "_data": "x"}]}}, "PerRow"),
        ("bitsandbytes", {"dtype": "load", "shape": [2, 2]}, "describes no quantized tensor"),
        ("bitsandbytes", {"dtype": "float16"}, "describes no quantized tensor"),
        ("bitsandbytes", {"dtype": "float16", "shape": [7, 7]}, "x_embedder.weight is .7, 7."),
        ("bitsandbytes", {"dtype": "float16", "shape": [7, 7], "more": "x" * 5000}, "describes no quantized tensor"),
    ],
)
def test_damaged_or_hostile_weights_are_rejected(folder: pathlib.Path, method: str, damage: Any, words: str) -> None:
    edit(folder / "transformer" / "config.json", quantization_config=INT8 if method == "torchao" else FOUR_BITS)
    pack(folder, method, damage, damage)
    with pytest.raises(ModelError, match=words):
        open_model(str(folder))


def test_without_the_library_the_error_names_the_extra(folder: pathlib.Path) -> None:
    if importlib.util.find_spec("torchao"):
        pytest.skip("torchao is installed")
    edit(folder / "transformer" / "config.json", quantization_config=INT8)
    with pytest.raises(MissingExtra, match=r"needs torchao.*noria-serve\[quantized\]"):
        open_model(str(folder))


@pytest.mark.usefixtures("installed")
def test_bitsandbytes_needs_a_gpu(folder: pathlib.Path) -> None:
    edit(folder / "transformer" / "config.json", quantization_config=FOUR_BITS)
    pack(folder, "bitsandbytes")
    spec = open_model(str(folder))
    with pytest.raises(ModelError, match="bitsandbytes, whose loader needs a GPU"):
        FAMILIES[spec.family].load(spec, EngineConfig(dtype="float32", slots=2, threads=1), "cpu")


def test_gguf_is_rejected_by_name(folder: pathlib.Path) -> None:
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".gguf"))
    with pytest.raises(ModelError, match="format GGUF are not read"):
        open_model(str(folder))


@pytest.mark.usefixtures("installed")
def test_what_the_libraries_write_is_read(tmp_path: pathlib.Path) -> None:
    """As torchao 0.18 and bitsandbytes 0.50 write it, with the versions of transformers and diffusers in use."""
    (tmp_path / "part").mkdir()
    file = tmp_path / "part" / "config.json"
    dynamic = {
        "_type": "Int8DynamicActivationInt8WeightConfig",
        "_version": 2,
        "_data": {
            "act_mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
            "granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}},
            "reduce_range": False,
            "set_inductor_config": True,
            "weight_only_decode": False,
        },
    }
    of_text_encoder = {"include_input_output_embeddings": False, "untie_embedding_weights": False}
    for config in (INT8, INT8 | of_text_encoder, INT8 | {"quant_type": {"default": dynamic}}):
        file.write_text(json.dumps({"quantization_config": config}))
        assert isinstance(read_quantization(file), Torchao)


@pytest.mark.slow  # two minutes: pip makes an environment with torchao, whose import takes seconds
@pytest.mark.timeout(900)
def test_images_of_torchaos_models_are_those_of_the_pipelines(tmp_path: pathlib.Path) -> None:
    python = environment_python("torchao", "torchao==0.18.0")
    program = pathlib.Path(__file__).with_name("torchao_images.py")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [python, program, tmp_path],
        env=os.environ | paths | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name, found in json.loads(result.stdout.splitlines()[-1]).items():
        assert found["pipeline"] <= 2, name
        assert found["alone"] <= 1, name
        assert 0 < found["before"] <= 40, name  # another image than of the model before, but the same picture
        of_all, of_all_quantized, of_denoiser, of_denoiser_quantized = found["parameters"]
        assert (of_all, of_denoiser) == (of_all_quantized, of_denoiser_quantized), name
        assert found["estimated_bytes"] < 4 * of_all, name
        if "lora" in found:
            assert (found["lora"] > 0, found["lora alone"] <= 1, found["lora others"] <= 1) == (True,) * 3, name
