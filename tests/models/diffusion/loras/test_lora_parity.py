"""LoRAs of flow models, compared with diffusers and peft: the same file gives the same image."""

import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from flow_pipelines import generate_with_pipeline, make_request, open_pipeline, remember_prompts
from generating import PARITY_TOLERANCE, difference, generate, load
from lora_files import layers_of, random_matrices, save_diffusers_lora
from noria.errors import ModelError
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.loras.lora_file import read_lora
from noria.protocol.diffusion import Lora

FAMILIES = ("z-image", "flux-2-klein", "chroma", "flux", "stable-diffusion-3")
MORE_FAMILIES = ("qwen-image", "krea-2", "lumina-2")
ORIGINAL = ("z-image", "flux-2-klein", "chroma", "flux")  # diffusers converts no names of authors of the other
MERGING = ("all_x_embedder.", "cap_embedder.")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, folder_of, tmp_path_factory):
    """Spec, executor, diffusers' pipeline, and the folder of LoRAs."""
    loras, folder = tmp_path_factory.mktemp("loras"), folder_of(request.param)
    return *load(folder, loras=(str(loras),)), remember_prompts(open_pipeline(folder)), loras


def save_lora_of_all_layers(file, transformer):
    """Write an adapter of all layers that can have one by row, with the names of diffusers and peft."""
    save_diffusers_lora(file, {"transformer": transformer}, rank=3)
    tensors = load_file(file)
    save_file({name: each for name, each in tensors.items() if not name.startswith(_prefixed(MERGING))}, file)


def _prefixed(names):
    return tuple(f"transformer.{name}" for name in names)


def assert_like_peft(executor, pipe, file: pathlib.Path, weight: float, sizes=((32, 24), (48, 24))):
    """The images of a batch are the pipeline's: with the adapter in `file`, and without, of two sizes."""
    lora = Lora(file.stem, weight, digest_of(file))
    requests = [
        make_request(k, inference_steps=2, guidance_scale=4.0, width=width, height=height, loras=(lora,) * (k == 0))
        for k, (width, height) in enumerate([sizes[0], *sizes])
    ]
    images = generate(executor, requests)
    bare = generate_with_pipeline(pipe, requests[0])
    for request in requests[1:]:
        theirs = generate_with_pipeline(pipe, request)
        assert difference(images[request.request_id, 0], theirs) <= PARITY_TOLERANCE
    pipe.load_lora_weights(file.parent, weight_name=file.name, adapter_name="own")
    pipe.set_adapters(["own"], [weight])
    try:
        theirs = generate_with_pipeline(pipe, requests[0])
    finally:
        pipe.unload_lora_weights()
    assert difference(images["r0", 0], theirs) <= PARITY_TOLERANCE
    assert difference(theirs, bare) > 5, "the adapter changes nothing"


@pytest.mark.parametrize("model", [*FAMILIES, *MORE_FAMILIES], indirect=True)
def test_an_adapter_of_all_layers_gives_the_image_of_diffusers_with_peft(model):
    spec, executor, pipe, folder = model
    save_lora_of_all_layers(folder / "all.safetensors", executor.model.lora_parts["transformer"])
    sizes = ((32, 24), (48, 24)) if spec.family in FAMILIES else ((32, 32), (64, 32))
    assert_like_peft(executor, pipe, folder / "all.safetensors", 0.7, sizes)


def save_original_lora(file, layers, named, ending=("lora_down", "lora_up"), alpha=None):
    """Write an adapter of layers with other names: `layers` are lists of the model's, several if joined."""
    generator, tensors = torch.Generator().manual_seed(7), {}
    for name, modules in layers.items():
        pairs = [random_matrices(module, 6, generator, strength=1.0) for module in modules]
        tensors[f"{named(name)}.{ending[0]}.weight"] = pairs[0][0]
        tensors[f"{named(name)}.{ending[1]}.weight"] = torch.cat([up for _, up in pairs])
        if alpha is not None:
            tensors[f"{named(name)}.alpha"] = torch.tensor(alpha)
    save_file(tensors, file)


def original_layers(spec, transformer):
    """Some layers by the names of the models' authors."""
    at = transformer.get_submodule
    if spec.family == "z-image":
        return {
            name: [at(name)]
            for name in ("layers.0.attention.to_q", "layers.1.feed_forward.w2", "noise_refiner.0.attention.to_out.0")
        }
    attention = "transformer_blocks.0.attn"
    layers = {
        "double_blocks.0.img_attn.qkv": [at(f"{attention}.to_{name}") for name in "qkv"],
        "double_blocks.0.txt_attn.proj": [at(f"{attention}.to_add_out")],
    }
    if spec.family == "flux-2-klein":
        return layers | {"single_blocks.1.linear1": [at("single_transformer_blocks.1.attn.to_qkv_mlp_proj")]}
    return layers | {"single_blocks.1.linear2": [at("single_transformer_blocks.1.proj_out")]}


@pytest.mark.parametrize("model", ORIGINAL, indirect=True)
def test_kohyas_names_give_the_image_of_diffusers_with_peft(model):
    spec, executor, pipe, folder = model
    file, layers = folder / "kohya.safetensors", original_layers(spec, executor.model.lora_parts["transformer"])
    save_original_lora(file, layers, lambda name: f"lora_unet_{name.replace('.', '_')}", alpha=3.0)
    assert_like_peft(executor, pipe, file, 1.0)


@pytest.mark.parametrize("model", ORIGINAL, indirect=True)
@pytest.mark.parametrize("ending", [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_names_of_comfyui_mean_the_layers_of_kohyas(model, ending):
    spec, executor, _, folder = model
    parts = executor.model.lora_parts
    layers = original_layers(spec, parts["transformer"])
    files = [folder / f"{name}.safetensors" for name in ("comfy", "kohya")]
    save_original_lora(files[0], layers, lambda name: f"diffusion_model.{name}", ending, alpha=3.0)
    save_original_lora(files[1], layers, lambda name: f"lora_unet_{name.replace('.', '_')}", alpha=3.0)
    comfy, kohya = (read_lora(file, parts, torch.float32, 2**20).layers["transformer"] for file in files)
    assert set(comfy) == set(kohya)
    for name, layer in comfy.items():
        torch.testing.assert_close(layer.up @ layer.down, kohya[name].up @ kohya[name].down)


@pytest.mark.parametrize(
    "name",
    [
        "lora_unet_single_blocks_0_nonsense",
        "lora_unet_joint_blocks_0_x_block_attn_nonsense",
        "lora_unet_single_blocks_99999999_linear2",
        "diffusion_model.double_blocks.99999999.img_attn.qkv",
        "diffusion_model.double_blocks.0.img_attn.nonsense",
        "diffusion_model.layers.7.attention.to_q",
    ],
)
def test_layers_that_no_model_has_are_refused(model, name):
    spec, executor, _, folder = model
    transformer, file = executor.model.lora_parts["transformer"], folder / "bad.safetensors"
    module = next(each for _, each in layers_of(transformer))
    known = original_layers(spec, transformer) if spec.family in ORIGINAL else {}
    kohya = name.startswith("lora_")
    save_original_lora(
        file, known, lambda each: f"lora_unet_{each.replace('.', '_')}" if kohya else f"diffusion_model.{each}"
    )
    down, up = random_matrices(module, 2, torch.Generator())
    more = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    save_file(load_file(file) | more, file)
    with pytest.raises(ModelError, match="no layer"):
        read_lora(file, executor.model.lora_parts, torch.float32, 2**20)


def test_layers_that_merge_rows_are_refused_by_name(model):
    spec, executor, _, folder = model
    transformer, file = executor.model.lora_parts["transformer"], folder / "merging.safetensors"
    names = [name for name, _ in layers_of(transformer) if name.startswith(MERGING)]
    assert bool(names) == (spec.family == "z-image")
    for name in names:
        down, up = random_matrices(transformer.get_submodule(name), 2, torch.Generator())
        save_file({f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}, file)
        with pytest.raises(ModelError, match=f"transformer.{name} cannot have an adapter, since its calls merge"):
            read_lora(file, executor.model.lora_parts, torch.float32, 2**20)
