"""Folders whose weights are quantized: what is served, what is refused, and that the images are those of diffusers."""

import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tiny_models
from gguf_files import BLOCK_BYTES, field, gguf_bytes, string, tensor_info
from noria.config import EngineConfig
from noria.errors import MissingExtra, ModelError
from noria.models.catalog import count_parameters, open_model
from noria.models.diffusion.folders import pipeline_folder, quantization
from noria.models.diffusion.folders.quantization import Torchao, read_quantization
from noria.models.families import FAMILIES
from noria.models.files.gguf_file import read_gguf_header
from noria.models.files.weights import weight_bytes
from noria.models.needed_files import select_needed_files
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

_NF4 = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 16]}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries seem installed: inspecting a folder looks no further."""
    for module in (quantization, pipeline_folder):
        monkeypatch.setattr(module, "check_installed", lambda *_: None)


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
        content = json.dumps(state or _NF4).encode()
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
    packed = rows * columns + 4 * rows if method == "torchao" else rows * columns // 2 + 4 * 8 + 4 * 16 + 78
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
        ("bitsandbytes", _NF4 | {"dtype": "load"}, "describes no quantized tensor"),
        ("bitsandbytes", {"dtype": "float16", "blocksize": 64}, "describes no quantized tensor"),
        ("bitsandbytes", _NF4 | {"more": "x" * 5000}, "describes no quantized tensor"),
        ("bitsandbytes", _NF4 | {"shape": [16, 32]}, r"x_embedder.weight is \[16, 32\]"),
        ("bitsandbytes", _NF4 | {"shape": [32, 2**40]}, r"x_embedder.weight' has the shape \[256, 1\]; of \[32, "),
        ("bitsandbytes", _NF4 | {"blocksize": 128}, r"x_embedder.weight.absmax' has the shape \[8\]; of .* 4 numbers"),
    ],
)
def test_damaged_or_hostile_weights_are_rejected(folder: pathlib.Path, method: str, damage: Any, words: str) -> None:
    edit(folder / "transformer" / "config.json", quantization_config=INT8 if method == "torchao" else FOUR_BITS)
    pack(folder, method, damage, damage)
    with pytest.raises(ModelError, match=words):
        open_model(str(folder))


@pytest.mark.usefixtures("installed")
def test_metadata_of_torchao_is_checked_whichever_shard_names_its_tensors(folder: pathlib.Path) -> None:
    edit(folder / "transformer" / "config.json", quantization_config=INT8)
    pack(folder, "torchao")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    first = {name: tensors.pop(name) for name in sorted(tensors) if "_weight_" in name}
    hostile = {"x_embedder.weight": json.dumps(_INT8_TENSOR | {"_type": "NVFP4Tensor"})}
    save_file(first, file.with_name("first.safetensors"), hostile)
    save_file(tensors, file.with_name("second.safetensors"), {"tensor_names": "[]"})
    shards = dict.fromkeys(first, "first.safetensors") | dict.fromkeys(tensors, "second.safetensors")
    file.with_name(f"{file.name}.index.json").write_text(json.dumps({"weight_map": shards}))
    file.unlink()
    with pytest.raises(ModelError, match="NVFP4Tensor"):
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


def replace_by_gguf(folder: pathlib.Path, kind: str = "Q8_0") -> pathlib.Path:
    """Put a GGUF file of zeros in the place of the transformer's weights; matrices of whole blocks are quantized."""
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    shapes = {name: tensor.shape for name, tensor in load_file(file).items()}
    file.unlink()
    file = file.with_name("flux-tiny.gguf")
    fits = {name: len(shape) == 2 and shape[-1] % BLOCK_BYTES[kind][1] == 0 for name, shape in shapes.items()}
    file.write_bytes(gguf_bytes({name: (shape, kind if fits[name] else "F32") for name, shape in shapes.items()}))
    return file


@pytest.mark.usefixtures("installed")
def test_a_transformer_in_a_gguf_file_counts_as_the_one_that_it_was(folder: pathlib.Path) -> None:
    before = open_model(str(folder))
    num_parameters = count_parameters(before)
    shapes = [tensor.shape for tensor in load_file(next((folder / "transformer").glob("*.safetensors"))).values()]
    quantized = sum(math.prod(shape) for shape in shapes if len(shape) == 2 and shape[-1] % 32 == 0)
    replace_by_gguf(folder)
    after = open_model(str(folder))
    assert (after.num_parameters, count_parameters(after)) == (before.num_parameters, num_parameters)
    assert after.fingerprint != before.fingerprint
    expected = quantized // 32 * 34 + 4 * (before.num_parameters - quantized)
    assert weight_bytes(folder, "transformer", "diffusion_pytorch_model", 4) == expected
    file = "transformer/flux-tiny.gguf"
    listed = [*(f"{part}/model.safetensors" for part in ("text_encoder", "text_encoder_2")), file]
    assert file in select_needed_files(listed, FAMILIES["flux"], "a store")


@pytest.mark.usefixtures("installed")
def test_gguf_is_rejected_where_it_is_not_clear_or_not_read(folder: pathlib.Path) -> None:
    quantized = folder / "text_encoder_2" / "t5.gguf"
    weights = folder / "text_encoder_2" / "model.safetensors"
    weights.rename(quantized)
    with pytest.raises(ModelError, match=r"text_encoder_2/model\.safetensors: missing.*GGUF are read only of a transf"):
        open_model(str(folder))
    quantized.rename(weights)
    shutil.copy(weights, folder / "transformer" / "a.gguf")
    with pytest.raises(ModelError, match=r"a\.gguf: beside it is diffusion_pytorch_model\.safetensors"):
        open_model(str(folder))
    (folder / "transformer" / "a.gguf").unlink()
    file = replace_by_gguf(folder)
    shutil.copy(file, file.with_name("other.gguf"))
    with pytest.raises(ModelError, match=r"flux-tiny\.gguf: beside it is other\.gguf"):
        open_model(str(folder))
    file.with_name("other.gguf").unlink()
    edit(folder / "transformer" / "config.json", quantization_config=INT8)
    with pytest.raises(ModelError, match="quantization_config is not of the GGUF file"):
        open_model(str(folder))


def test_without_gguf_the_error_names_the_extra(folder: pathlib.Path) -> None:
    if importlib.util.find_spec("gguf"):
        pytest.skip("gguf is installed")
    replace_by_gguf(folder)
    with pytest.raises(MissingExtra, match=r"needs gguf.*noria-serve\[quantized\]"):
        open_model(str(folder))


def _one_tensor(name: str = "a", shape: tuple[int, ...] = (4, 32), kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + tensor_info(name, shape, kind, offset) + bytes(1024)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated or damaged"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 0), f"{2**63} tensors"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 2**40), f"{2**40} fields"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 1, 1, 2**62), "its header goes on"),
        (gguf_bytes({}), "no tensors"),
        (gguf_bytes({"a": ((4, 32), "Q8_0")})[:-25], "truncated: its tensors end at byte"),
        (gguf_bytes({"a": ((4, 32), "BF16"), "model.diffusion_model.a": ((4, 32), "F32")}), "two of one name"),
        (gguf_bytes({"a": ((32,), "BF16")}), "'a' of shape .32. is in BF16; only matrices"),
        (gguf_bytes({"a": ((4, 31), "Q8_0")}), "damaged: 'a' has the shape .4, 31. in Q8_0"),
        (gguf_bytes({"a": ((1,), "F32")}, (field("general.alignment", 4, bytes(4)),)), "alignment is 0"),
        (gguf_bytes({"a": ((1,), "F32")}, (field("x", 9, struct.pack("<IQ", 0, 2**40)),)), "items of arrays"),
        (gguf_bytes({"a": ((1,), "F32")}, (field("x", 9, struct.pack("<IQ", 9, 1)),)), "arrays of arrays"),
        (gguf_bytes({"a": ((1,), "F32")}, (field("x", 77, b""),)), "a field of type 77"),
        (gguf_bytes({"a": ((1,), "F32")}, (field("x", 8, string(b"\xff")),)), "damaged: 'utf-8' codec"),
        (_one_tensor(kind=9), "'a' has type 9 of GGML; diffusers computes with F32, F16, Q4_0"),
        (_one_tensor(shape=(2**32, 2**32)), "damaged: 'a' has the shape"),
        (_one_tensor(shape=(0, 32)), "damaged: 'a' has the shape"),
        (_one_tensor(shape=(1,) * 9), "9 axes"),
        (_one_tensor(offset=1), "'a' is at 1"),
        (_one_tensor(offset=2**60), "truncated: its tensors end at byte"),
        (
            struct.pack("<4sIQQ", b"GGUF", 3, 2, 0) + b"".join(tensor_info(n, (200,), 0, 0) for n in "ab") + bytes(900),
            "its tensors overlap",
        ),
    ],
)
def test_damaged_or_hostile_gguf_files_are_rejected(tmp_path: pathlib.Path, content: bytes, words: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=rf"a\.gguf: .*{words}"):
        read_gguf_header(file)


@pytest.mark.usefixtures("installed")
def test_a_gguf_file_of_another_model_is_rejected(folder: pathlib.Path) -> None:
    file = replace_by_gguf(folder)
    file.write_bytes(gguf_bytes({"x_embedder.proj.weight": ((8, 4, 2, 2), "F32")}))
    with pytest.raises(ModelError, match=r"flux-tiny\.gguf: x_embedder\.weight is missing, but config\.json"):
        open_model(str(folder))


@pytest.mark.usefixtures("installed")
def test_what_the_libraries_write_is_read(tmp_path: pathlib.Path) -> None:
    """The form is that of torchao 0.18 and bitsandbytes 0.50, with the transformers and diffusers in use."""
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


@pytest.mark.slow  # minutes: pip makes an environment with torchao, whose import takes seconds
@pytest.mark.timeout(900)
def test_images_of_quantized_models_are_those_of_the_pipelines(tmp_path: pathlib.Path) -> None:
    python = environment_python("quantized", "--no-deps", "torchao==0.18.0", "gguf==0.19.0", "bitsandbytes==0.50.2")
    program = pathlib.Path(__file__).with_name("quantized_images.py")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [python, program, tmp_path],
        env=os.environ | paths | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    images = json.loads(result.stdout.splitlines()[-1])
    for damage, message in images["errors"].items():
        assert re.search(rf"model-Q8_0.gguf.*architecture 'tiny'.*FluxTransformer2DModel.*{damage}", message), message
    for name, found in images["folders"].items():
        assert found["pipeline"] <= 2, name
        assert found["alone"] <= 1, name
        assert 0 < found["before"] <= 40, name  # another image than of the model before, but the same picture
        of_all, of_all_quantized, of_denoiser, of_denoiser_quantized = found["parameters"]
        assert (of_all, of_denoiser) == (of_all_quantized, of_denoiser_quantized), name
        assert found["estimated_bytes"] < 4 * of_all, name
        if "lora" in found:
            assert (found["lora"] > 0, found["lora alone"] <= 1, found["lora others"] <= 1) == (True,) * 3, name
    for name, found in images["on load"].items():
        # With int8, the last bit of an input can decide how it is rounded. All calls have as many rows, and so each
        # row is as alone to the last bit; but calls of Z-Image have the form of their sizes.
        other_code, same_code = 1 if "nf4" in name else 8, 1 if "z-image" in name else 0
        assert max(found["pipeline"], found["lora pipeline"]) <= other_code, name
        assert max(found[how] for how in ("alone", "moved", "second start", "lora alone", "lora others")) <= same_code
        assert found["lora"] > 10, name
        assert 0.9 < found["fidelity"] < 1, name
        assert f"fidelity min {found['fidelity']:.5f}, mean " in found["refusal"], name
        assert found["num_quantized"], name
        assert all(re.search("norm|_mod", layer) for layer in found["kept"]), name
        estimated, counted = found["bytes"]
        assert counted <= estimated <= 1.1 * counted, name  # files also have tables of positions
