"""Transformers in a single file, beside a folder with the other parts: served is the folder that they are of."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file

import single_files
import tiny_models
from flow_pipelines import make_request
from generating import generate, load
from gguf_files import gguf_bytes
from noria.config import Config, EngineConfig
from noria.errors import ConfigError, ModelError
from noria.models.catalog import open_model
from noria.models.diffusion.single_file.conversion import converted_folder
from noria.models.diffusion.single_file.transformer_file import read_single_file
from noria.supervisor.served_models import open_models

PREFIX = "model.diffusion_model."
SCHNELL = {"transformer": {"guidance_embeds": False}, "scheduler": {"use_dynamic_shifting": False, "shift": 1.0}}
SAVE = {
    "flux": tiny_models.save_flux,
    "schnell": functools.partial(tiny_models.save_flux, **SCHNELL),
    "chroma": tiny_models.save_chroma,
    "sd3": tiny_models.save_stable_diffusion_3,
    "z-image": tiny_models.save_z_image,
    "qwen-image": tiny_models.save_qwen_image,
}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders by family, which are made once."""
    return functools.cache(lambda name: SAVE[name](tmp_path_factory.mktemp(name) / "folder"))


def names_of(name: str) -> str:
    return "flux" if name == "schnell" else name


def write_file(file: pathlib.Path, folder: pathlib.Path, name: str, prefix: str = PREFIX, **others):
    """Write the transformer of a folder in its author's names."""
    tensors = single_files.transformer_tensors(load_file(folder / WEIGHTS), names_of(name))
    named = {prefix + each: tensor for each, tensor in tensors.items()}
    return single_files.save_checkpoint(file, named | others)


def read_json(file: pathlib.Path):
    tree = json.loads(file.read_text())
    return {key: value for key, value in tree.items() if key not in ("_diffusers_version", "_name_or_path")}


@pytest.mark.parametrize(("name", "prefix"), [*((name, PREFIX) for name in SAVE if name != "schnell"), ("schnell", "")])
def test_a_file_and_the_other_parts_are_the_folder_that_they_were(made, name, prefix, tmp_path):
    source = made(name)
    file = write_file(tmp_path / "a.safetensors", source, name, prefix)
    folder = converted_folder(file, tmp_path / "cache", parts=[str(source)])
    found, expected = load_file(folder / WEIGHTS), load_file(source / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], expected[each]) for each in expected)
    for config in source.rglob("*.json"):
        assert read_json(folder / config.relative_to(source)) == read_json(config)
    for weights in source.rglob("*.safetensors"):
        copy = folder / weights.relative_to(source)
        assert copy.is_symlink() == (weights.parent.name != "transformer")
    assert open_model(str(folder)).pipeline == open_model(str(source)).pipeline


def test_a_file_serves_the_images_of_its_folder_bit_by_bit(made, tmp_path):
    source = made("sd3")
    file = write_file(tmp_path / "My SD3.safetensors", source, "sd3")
    spec = open_model(str(file), EngineConfig(cache_dir=str(tmp_path), parts=(str(source),)))
    assert spec.name == "My-SD3"
    requests = [make_request(number) for number in (0, 1)]
    images, expected = (generate(load(folder)[1], requests) for folder in (spec.folder, source))
    assert all(np.array_equal(images[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "converter"),
    [
        ("flux", single_file_utils.convert_flux_transformer_checkpoint_to_diffusers),
        ("chroma", single_file_utils.convert_chroma_transformer_checkpoint_to_diffusers),
        ("sd3", single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers),
        ("z-image", single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers),
    ],
)
def test_names_are_those_of_diffusers_converters(made, name, converter, tmp_path):
    """Its converters of FLUX.1 and Chroma know one width only, 3072, so these tensors have as many rows."""
    source, tensors = made(name), {}
    for each, tensor in load_file(source / WEIGHTS).items():
        num_rows = len(tensor) * 3072 // 32 if name in ("flux", "chroma") else len(tensor)
        rows = torch.randn(num_rows, *[min(length, 2) for length in tensor.shape[1:]])
        tensors[each] = rows if "norm" not in each or "linear" in each else tensor
    file_tensors = single_files.transformer_tensors(tensors, name)
    plan = {"pos_embed": tensors.get("pos_embed.pos_embed")} if name == "sd3" else {}
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", file_tensors | plan)
    folder = converted_folder(file, tmp_path / "cache", parts=[str(source)])
    found, expected = load_file(folder / WEIGHTS), converter(load_file(file))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[each], expected[each]) for each in expected)


@pytest.mark.parametrize(
    ("name", "parts", "dynamic", "shift"), [("flux", "schnell", True, 3.0), ("schnell", "flux", False, 1.0)]
)
def test_the_shift_is_that_of_the_file_beside_the_other_variant(made, name, parts, dynamic, shift, tmp_path):
    file = write_file(tmp_path / "a.safetensors", made(name), name)
    folder = converted_folder(file, tmp_path / "cache", parts=[str(made("sd3")), str(made(parts))])
    scheduler = read_json(folder / "scheduler/scheduler_config.json")
    assert (scheduler["use_dynamic_shifting"], scheduler["shift"]) == (dynamic, shift)
    assert read_json(folder / "transformer/config.json") == read_json(made(name) / "transformer/config.json")


@pytest.mark.parametrize(
    ("name", "encoders"),
    [("flux", ["clip_l", "t5xxl"]), ("sd3", ["clip_l", "clip_g", "t5xxl"]), ("z-image", ["qwen3_4b"])],
)
def test_text_encoders_and_vae_of_a_file_are_its_own(made, name, encoders, tmp_path):
    source, bundle = shutil.copytree(made(name), tmp_path / "parts"), {}
    parts = single_files.load_parts(source)
    for part, encoder in zip(["text_encoder", "text_encoder_2", "text_encoder_3"], encoders, strict=False):
        for each, tensor in parts[part].items():
            inner = (
                "model." if encoder == "qwen3_4b" else "" if encoder == "t5xxl" or "text_" in each else "text_model."
            )
            bundle[f"text_encoders.{encoder}.transformer.{inner}{each}"] = tensor + 1
    bundle |= {f"vae.{each}": tensor for each, tensor in single_files.vae_tensors(parts["vae"]).items()}
    file = write_file(tmp_path / "a.safetensors", source, name, **bundle)
    for weights in source.rglob("*.safetensors"):
        weights.unlink()
    folder = converted_folder(file, tmp_path / "cache", parts=[str(source)])
    open_model(str(folder))
    for part, tensors in parts.items():
        if part != "transformer":
            (weights,) = (folder / part).glob("*.safetensors")
            found = {
                each.removeprefix("text_").removeprefix("model."): tensor for each, tensor in load_file(weights).items()
            }
            expected = {each.removeprefix("text_").removeprefix("model."): tensor for each, tensor in tensors.items()}
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[each], expected[each] + (part != "vae")) for each in found)


def test_another_vae_takes_the_place_of_the_folders(made, tmp_path):
    published = {"use_quant_conv": False, "use_post_quant_conv": False}
    source = tiny_models.save_flux(tmp_path / "parts", vae=published)
    file = write_file(tmp_path / "a.safetensors", source, "flux")
    vae = {
        each: tensor + 1
        for each, tensor in single_files.vae_tensors(load_file(next(source.glob("vae/*.safe*")))).items()
    }
    other = single_files.save_checkpoint(tmp_path / "ae.safetensors", vae)
    folder = converted_folder(file, tmp_path / "cache", str(other), [str(source)])
    found, own = (load_file(each / "vae/diffusion_pytorch_model.safetensors") for each in (folder, source))
    assert all(torch.equal(found[each], own[each] + 1) for each in own)
    qwen = write_file(tmp_path / "b.safetensors", made("qwen-image"), "qwen-image")
    with pytest.raises(
        ModelError, match=r"ae\.safetensors: has no VAE of Qwen-Image that can be read .* Leave out --vae"
    ):
        converted_folder(qwen, tmp_path / "cache", str(other), [str(made("qwen-image"))])


def test_float8_of_several_matrices_in_one_is_multiplied_by_its_scales(made, tmp_path):
    source = made("flux")
    file = write_file(tmp_path / "a.safetensors", source, "flux")
    tensors, expected = load_file(file), []
    for block in (0, 1):
        name = f"{PREFIX}single_blocks.{block}.linear1"
        weight = tensors[f"{name}.weight"]
        scale = (weight.abs().amax(1, keepdim=True) if block else weight.abs().max()) / 448
        tensors |= {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.scale_weight": scale}
        expected.append((tensors[f"{name}.weight"].float() * scale).half())
    single_files.save_checkpoint(file, tensors | {f"{PREFIX}scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)})
    assert "float32 and float8 with scales" in read_single_file(file).describe()
    found = load_file(converted_folder(file, tmp_path / "cache", parts=[str(source)]) / WEIGHTS)
    for block in (0, 1):
        layers = [f"attn.to_{each}" for each in "qkv"] + ["proj_mlp"]
        parts = [found[f"single_transformer_blocks.{block}.{layer}.weight"] for layer in layers]
        assert torch.equal(torch.cat(parts), expected[block])


def test_a_gguf_file_is_linked_into_its_folder(made, tmp_path):
    source, file = made("schnell"), tmp_path / "flux-Q8_0.gguf"
    shapes = {each: tuple(tensor.shape) for each, tensor in load_file(source / WEIGHTS).items()}
    file.write_bytes(
        gguf_bytes(
            {each: (shape, "Q8_0" if shape[-1] == 32 and len(shape) == 2 else "F32") for each, shape in shapes.items()}
        )
    )
    assert (
        read_single_file(file).describe()
        == "FLUX.1, F32 and Q8_0, takes no guidance, as schnell, the transformer alone"
    )
    folder = converted_folder(file, tmp_path / "cache", parts=[str(source)])
    assert (folder / "transformer/flux-Q8_0.gguf").readlink() == file
    assert sorted(each.name for each in (folder / "transformer").iterdir()) == ["config.json", "flux-Q8_0.gguf"]
    file.write_bytes(gguf_bytes({"double_blocks.0.img_mlp.0.weight": ((4, 32), "F32")}))
    with pytest.raises(ModelError, match="is of no model that is known"):
        converted_folder(file, tmp_path / "cache")


def test_links_follow_the_files_of_the_other_folder(made, tmp_path):
    source = shutil.copytree(made("schnell"), tmp_path / "parts")
    file = write_file(tmp_path / "a.safetensors", source, "schnell")
    folder = converted_folder(file, tmp_path / "cache", parts=[str(source)])
    (source / "vae/diffusion_pytorch_model.safetensors").rename(source / "vae/diffusion_pytorch_model.fp16.safetensors")
    assert converted_folder(file, tmp_path / "cache", parts=[str(source)]) == folder
    assert sorted(each.name for each in folder.glob("vae/*.safetensors")) == [
        "diffusion_pytorch_model.fp16.safetensors"
    ]
    assert open_model(str(folder))


MLP = f"{PREFIX}double_blocks.0.img_mlp.0"


@pytest.mark.parametrize(
    ("tensors", "parts", "words"),
    [
        ({}, [], r"has the transformer of FLUX\.1\. Name a folder .*--parts FOLDER, or a hub id such as black-forest"),
        ({}, ["sd3"], r"has the transformer of FLUX\.1\..* is of Stable Diffusion 3"),
        ({f"{MLP}.bias": None}, ["flux"], r"1 tensors of FLUX\.1 are missing, the first is .*ff\.net\.0\.proj\.bias"),
        (
            {f"{PREFIX}img_mid.weight": torch.zeros(1)},
            ["flux"],
            r"1 tensors that no FLUX\.1 has, the first is 'img_mid",
        ),
        ({f"{PREFIX}double_blocks.{n}.a": torch.zeros(1) for n in range(9999)}, ["flux"], r"\d{4} tensors of FLUX\.1"),
        ({f"{MLP}.weight": torch.zeros(4, 4, dtype=torch.uint8)}, ["flux"], "is in U8; read are"),
        ({f"{PREFIX}img_in.weight": torch.zeros(4)}, ["flux"], r"x_embedder\.weight, .* has the shape \[4\]"),
        ({f"{PREFIX}single_blocks.0.linear1.bias": torch.zeros(5)}, ["flux"], r"shape \[5\] is not several matrices"),
    ],
)
def test_a_file_that_cannot_be_served_says_why(made, tensors, parts, words, tmp_path):
    file = write_file(tmp_path / "a.safetensors", made("flux"), "flux")
    changed = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
    single_files.save_checkpoint(file, changed)
    with pytest.raises(ModelError, match=rf"^{file}: .*{words}") as raised:
        converted_folder(file, tmp_path / "cache", parts=[str(made(each)) for each in parts])
    assert "\n" not in raised.value.message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("lost", ["tokenizer_2", "text_encoder_2", "scheduler", "model_index.json"])
def test_parts_in_neither_are_named(made, lost, tmp_path):
    source = shutil.copytree(made("flux"), tmp_path / "parts")
    file = write_file(tmp_path / "a.safetensors", source, "flux")
    lost_path = source / lost
    lost_path.unlink() if lost_path.is_file() else shutil.rmtree(lost_path)
    with pytest.raises(
        ModelError, match=rf"{source}.*{'model_index' if lost == 'model_index.json' else lost}"
    ) as raised:
        converted_folder(file, tmp_path / "cache", parts=[str(source)])
    assert "\n" not in raised.value.message
    assert not (tmp_path / "cache").exists()


def test_parts_without_a_single_file_are_refused(made):
    folder = str(made("sd3"))
    with pytest.raises(ConfigError, match=r"engine\.parts is .* but no model is a single file"):
        open_models(Config(model=folder, engine=EngineConfig(parts=(folder,))))
