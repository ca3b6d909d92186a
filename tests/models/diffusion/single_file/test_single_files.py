"""Checkpoints in a single file: what one is, and that its folder is the one that it was made of."""

import json
import os
import pathlib
import re

import diffusers
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import single_files
from generating import difference, generate, load_model
from noria.config import Config, EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.errors import ModelError
from noria.models.adapters.hub_adapters import download_hub_adapters
from noria.models.catalog import open_model
from noria.models.diffusion.folders.unet_models.refiner_folder import check_refiner
from noria.models.diffusion.single_file.checkpoint import read_checkpoint
from noria.models.diffusion.single_file.checkpoint_header import StoredTensor
from noria.models.diffusion.single_file.clip_tokenizer import write_clip_tokenizer
from noria.models.diffusion.single_file.conversion import converted_folder
from noria.models.diffusion.single_file.part_configs import clip_config
from noria.models.diffusion.single_file.part_names import find_open_clip_tensors
from noria.models.families import FAMILIES
from noria.testing.requests import make_image_request
from pipelines import run_pipeline, set_scheduler

SIDE = {"modelspec.resolution": "64x64"}  # side of the tiny folders' images
UNET = "model.diffusion_model."
TEXT = "cond_stage_model.transformer.text_model."
QUERY = f"{UNET}middle_block.1.transformer_blocks.0.attn1.to_q"


class Made:
    """A folder, and its tensors in the names of a single file."""

    def __init__(self, folder: pathlib.Path, family: str, **options: object) -> None:
        self.family = family
        self.folder = single_files.save_folder(folder, family, **options)
        self.parts = single_files.load_parts(self.folder)
        self.tensors = single_files.checkpoint_tensors(self.parts, family)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders by family, which are made once."""
    found = {}

    def make(family):
        if family not in found:
            name = family.removesuffix("-inpainting")
            folder = tmp_path_factory.mktemp(family) / "folder"
            found[family] = Made(folder, name, for_inpainting=name != family)
        return found[family]

    return make


@pytest.fixture
def sd1(made):
    return made("sd1")


def settings_of(folder: pathlib.Path, part: str) -> dict[str, object]:
    """The whole configuration of a part, with the library's defaults, without what is not of the model."""
    if part.startswith("text_encoder"):
        config = transformers.CLIPTextConfig.from_pretrained(folder / part).to_dict()
        pooled = () if part == "text_encoder_2" else ("projection_dim",)  # without a projection it has no effect
        ignored = ("dtype", "transformers_version", *pooled)
    else:
        model = diffusers.UNet2DConditionModel if part == "unet" else diffusers.AutoencoderKL
        config = dict(model.from_config(model.load_config(folder / part)).config)
        ignored = ("_name_or_path", "_use_default_values", "_diffusers_version")
        config["sample_size"] = 0  # a VAE's is not used, and a UNet's is in the metadata
        if config.get("transformer_layers_per_block") == 1:
            config["transformer_layers_per_block"] = [1, 1]
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in config.items()
        if name not in ignored
    }


@pytest.mark.parametrize(
    "family", ["sd1", "sd2", "sdxl", "sd1-inpainting", "sd2-inpainting", "sdxl-inpainting", "refiner"]
)
def test_a_file_becomes_the_folder_that_it_was_made_of(made, family, tmp_path):
    source = made(family)
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", source.tensors)
    folder = converted_folder(file, tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    for weights in folder.rglob("*.safetensors"):
        part = weights.parent.name
        found, expected = load_file(weights), source.parts[part]
        if part.startswith("text_encoder"):  # transformers has removed this prefix
            expected = {f"text_model.{name}" if name[:5] != "text_" else name: each for name, each in expected.items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert settings_of(folder, part) == settings_of(source.folder, part)
    folders = (folder, source.folder)
    index, expected = (json.loads((each / "model_index.json").read_text()) for each in folders)
    assert {name: index.get(name, [None, None]) for name in expected} == expected
    scheduler, own = (json.loads((each / "scheduler/scheduler_config.json").read_text()) for each in folders)
    assert scheduler == own | {"_diffusers_version": "0.42.1", "clip_sample": False, "prediction_type": "epsilon"}
    assert not (index.keys() - expected.keys() - {"vae", "force_zeros_for_empty_prompt", "image_encoder"})


def load(model, **settings):
    torch.set_num_threads(1)
    config = EngineConfig(**{"dtype": "float32", "slots": 4, "threads": 1} | settings)
    spec = open_model(str(model), config)
    return spec, DiffusionExecutor(load_model(spec, config), config)


def make_request(number, **fields):
    settings = {"prompt": "a red circle", "negative_prompt": ["", "a cross"][number], "seed": number, "width": 32}
    settings |= {"height": 32, "inference_steps": 3, "guidance_scale": 4.0, "scheduler": "euler"}
    return make_image_request(f"r{number}", **settings | fields)


def test_a_file_serves_the_images_of_its_folder_bit_by_bit(sd1, tmp_path):
    file = single_files.save_checkpoint(tmp_path / "My model (v2).safetensors", sd1.tensors, SIDE)
    spec, executor = load(file, cache_dir=str(tmp_path))
    assert (spec.name, spec.default_width_px) == ("My-model--v2-", 64)
    requests = [make_request(number) for number in (0, 1)]
    images, expected = generate(executor, requests), generate(load(sd1.folder)[1], requests)
    assert all(np.array_equal(images[key], expected[key]) for key in expected)


V_PRED, ZTSNR = {"v_pred": torch.zeros(0)}, {"ztsnr": torch.zeros(0)}


@pytest.mark.parametrize(
    ("family", "tensors", "metadata", "yaml", "expected"),
    [
        ("sd1", {}, {}, "", "predicts the noise, trained at 64 px"),
        ("sd1", V_PRED, {}, "", "predicts v, trained"),
        ("sd1", {}, {"modelspec.prediction_type": "v"}, "", "predicts v, trained"),
        ("sd1", {}, {"modelspec.prediction_type": "epsilon"}, 'parameterization: "v"', "predicts the noise, trained"),
        ("sd1", {}, {}, 'model:\n  params:\n    parameterization: "v"\n', "predicts v, trained"),
        ("sd2", {}, {"modelspec.architecture": "stable-diffusion-v2-768-v"}, "", "predicts v, trained"),
        ("sd1", {}, {"modelspec.resolution": "3x3"}, "", "trained at 512 px"),
        ("sd1", {}, {"modelspec.encoder_layer": "2"}, "", "made for clip skip 2$"),
        ("sd1", {}, {"modelspec.encoder_layer": "1"}, "", "trained at 64 px$"),
        ("sd1", {}, {"modelspec.encoder_layer": "99"}, "", "trained at 64 px$"),
        ("sd1", {}, {"modelspec.encoder_layer": "x"}, "", "trained at 64 px$"),
        ("sd1-inpainting", {}, {}, "", "^Stable Diffusion 1 for inpainting, float32, "),
        (
            "sdxl",
            V_PRED | ZTSNR,
            {"modelspec.encoder_layer": "2"},
            "",
            "predicts v, zero terminal SNR, trained at 64 px$",
        ),
        ("refiner", {}, {}, "", "^the refiner of Stable Diffusion XL, float32, predicts the noise, trained at 64 px$"),
    ],
)
def test_what_a_file_says_of_itself_is_read(made, family, tensors, metadata, yaml, expected, tmp_path):
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", made(family).tensors | tensors, SIDE | metadata)
    if yaml:
        file.with_suffix(".yaml").write_text(yaml)
    assert re.search(expected, read_checkpoint(file).describe())


@pytest.mark.parametrize(
    ("num_layers", "width", "num_read"), [(24, 1024, 23), (23, 1024, 23), (2, 16, 2), (22, 1024, 0)]
)
def test_stable_diffusion_2_reads_23_layers_of_those_in_a_file(num_layers, width, num_read):
    shapes = {"token_embedding.weight": (9, width), "positional_embedding": (77, width)}
    shapes |= {f"transformer.resblocks.{k}.ln_1.weight": (width,) for k in range(num_layers)}
    shapes["transformer.resblocks.0.mlp.c_fc.weight"] = (4 * width, width)
    tensors = {name: StoredTensor("F32", shape, 0, 0) for name, shape in shapes.items()}
    found = find_open_clip_tensors(tensors, has_projection=False)
    if num_read:
        assert clip_config(tensors, found)["num_hidden_layers"] == num_read
    else:
        with pytest.raises(ModelError, match="has 22 layers; Stable Diffusion 2 reads 23"):
            clip_config(tensors, found)


def test_the_weights_of_stable_diffusion_2_say_that_it_predicts_v(made, tmp_path):
    """The spread of one vector tells models with and without v apart."""
    names = [f"{UNET}output_blocks.11.1.transformer_blocks.0.norm1.bias"]
    for spread, expected in ((0.05, False), (0.12, True)):
        vector = torch.linspace(-1, 1, 320)
        tensors = made("sd2").tensors | {names[0]: vector / vector.std() * spread}
        checkpoint = read_checkpoint(single_files.save_checkpoint(tmp_path / "a.safetensors", tensors))
        assert (checkpoint.predicts_v, checkpoint.side_px) == (expected, 768 if expected else 512)


def test_a_flagged_file_gives_the_image_of_the_pipeline_with_the_flags_set(made, tmp_path):
    source = made("sdxl")
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", source.tensors | V_PRED | ZTSNR, SIDE)
    (tmp_path / "a.noria.json").write_text('{"default_steps": 7}')
    spec, executor = load(file, cache_dir=str(tmp_path))
    assert spec.default_steps == 7
    pipe = diffusers.StableDiffusionXLPipeline.from_pretrained(source.folder)
    pipe.set_progress_bar_config(disable=True)
    flags = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    request = make_request(1, inference_steps=4)
    set_scheduler(pipe, request, source.folder, **flags)
    (image,) = generate(executor, [request]).values()
    assert difference(image, run_pipeline(pipe, request)) <= 2
    set_scheduler(pipe, request, source.folder)
    assert difference(image, run_pipeline(pipe, request)) > 5


def quantize(weight: torch.Tensor, dtype: torch.dtype, axis: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 numbers and their scale: of all, or of each row."""
    largest = weight.abs().max() if axis is None else weight.abs().amax(1, keepdim=True)
    scale = largest / torch.finfo(dtype).max
    return (weight / scale).to(dtype), scale


MIDDLE = "mid_block.attentions.0.transformer_blocks.0.attn1"


def converted_layers(file: pathlib.Path, cache: pathlib.Path, *layers: str) -> list[torch.Tensor]:
    """The weights of layers of the middle attention, of the folder that a file becomes."""
    unet = load_file(converted_folder(file, cache) / "unet/diffusion_pytorch_model.safetensors")
    return [unet[f"{MIDDLE}.{layer}.weight"] for layer in layers]


def test_float8_is_multiplied_by_its_scale(sd1, tmp_path):
    tensors, expected = dict(sd1.tensors), {}
    for layer, end, dtype, axis in (
        ("to_q", "scale_weight", torch.float8_e4m3fn, None),
        ("to_k", "weight_scale", torch.float8_e5m2, None),
        ("to_v", "weight_scale", torch.float8_e4m3fn, 0),
    ):
        name = QUERY.replace("to_q", layer)
        weight, scale = quantize(tensors[f"{name}.weight"], dtype, axis)
        tensors |= {f"{name}.weight": weight, f"{name}.{end}": scale}
        expected[layer] = (weight.float() * scale).half()
    tensors |= {
        f"{UNET}scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        f"{QUERY}.comfy_quant": torch.zeros(30, dtype=torch.uint8),
    }
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", tensors)
    assert "float32 and float8 with scales, " in read_checkpoint(file).describe()
    found = converted_layers(file, tmp_path / "cache", *expected)
    assert all(map(torch.equal, found, expected.values()))


def test_all_numbers_of_float8_are_read(sd1, tmp_path):
    tensors, expected = dict(sd1.tensors), {}
    for layer, dtype in (("to_q", torch.float8_e4m3fn), ("to_k", torch.float8_e5m2)):
        every = torch.arange(256, dtype=torch.uint8)
        every = every[every.view(dtype).float().isfinite()]
        weight = every.repeat(64 * 64 // len(every) + 1)[: 64 * 64].view(dtype).reshape(64, 64)
        tensors[f"{QUERY.replace('to_q', layer)}.weight"], expected[layer] = weight, weight.half()
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", tensors)
    assert "float32 and float8, " in read_checkpoint(file).describe()
    found = converted_layers(file, tmp_path / "cache", *expected)
    assert all(map(torch.equal, found, expected.values()))


def without(tensors, *starts):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(starts)}


@pytest.mark.parametrize("form", ["of checkpoints", "of CompVis", "of diffusers"])
def test_a_vae_can_come_from_another_file(sd1, form, tmp_path):
    checkpoint = without(sd1.tensors, "first_stage_model.")
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", checkpoint)
    with pytest.raises(ModelError, match=r"a\.safetensors: has no VAE\. Name a file .*--vae FILE"):
        converted_folder(file, tmp_path / "cache")
    own = sd1.parts["vae"]
    vae = own if form == "of diffusers" else single_files.vae_tensors(own)
    prefix = "first_stage_model." if form == "of checkpoints" else ""
    of_vae = {f"{prefix}{name}": tensor.contiguous() for name, tensor in vae.items()}
    vae_file = single_files.save_checkpoint(tmp_path / "vae.safetensors", of_vae)
    folder = converted_folder(file, tmp_path / "cache", str(vae_file))
    found = load_file(folder / "vae/diffusion_pytorch_model.safetensors")
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)
    assert settings_of(folder, "vae") == settings_of(sd1.folder, "vae")


def test_other_names_and_foreign_tensors_of_a_file_are_read_over(sd1, tmp_path):
    inner = "cond_stage_model.transformer."
    tensors = {name.replace(f"{inner}text_model.", inner): tensor for name, tensor in sd1.tensors.items()}  # NovelAI's
    foreign = {"alphas_cumprod": torch.zeros(1000), "model_ema.decay": torch.zeros(())}
    foreign |= {
        f"{inner}embeddings.position_ids": torch.arange(77)[None],
        "cond_stage_model.logit_scale": torch.ones(()),
    }
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", tensors | foreign)
    plain = single_files.save_checkpoint(tmp_path / "b.safetensors", sd1.tensors)
    first, second = (converted_folder(each, tmp_path / "cache") for each in (file, plain))
    assert first != second
    for weights in first.rglob("*.safetensors"):
        assert weights.read_bytes() == (second / weights.relative_to(first)).read_bytes()


def test_a_file_is_converted_once_and_a_conversion_that_fails_leaves_nothing(sd1, tmp_path):
    cache = tmp_path / "cache"
    weight, _ = quantize(sd1.tensors[f"{QUERY}.weight"], torch.float8_e4m3fn)
    large = {f"{QUERY}.weight": weight, f"{QUERY}.scale_weight": torch.tensor(1e6)}
    with pytest.raises(ModelError, match=r"has numbers above 65504 with its scale"):
        converted_folder(single_files.save_checkpoint(tmp_path / "a.safetensors", sd1.tensors | large), cache)
    assert list(cache.iterdir()) == []
    (cache / ".0123.partial").mkdir()  # left by a process that was killed
    folder = converted_folder(single_files.save_checkpoint(tmp_path / "a.safetensors", sd1.tensors), cache)
    assert list(cache.iterdir()) == [folder]
    os.utime(folder, (1, 1))
    again = single_files.save_checkpoint(tmp_path / "copy.safetensors", sd1.tensors)
    assert converted_folder(again, cache) == folder
    assert folder.stat().st_mtime == 1
    changed = sd1.tensors | {f"{UNET}out.2.bias": torch.zeros(4)}
    assert converted_folder(single_files.save_checkpoint(again, changed), cache) != folder


def test_the_clip_skip_of_the_metadata_is_the_default(sd1, tmp_path):
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", sd1.tensors, {"modelspec.encoder_layer": "2"})
    for text, expected in (("", 2), ('{"default_clip_skip": 1}', 1), ('{"default_steps": 7}', 2)):
        if text:
            file.with_suffix(".noria.json").write_text(text)
        spec = open_model(str(file), EngineConfig(cache_dir=str(tmp_path)))
        assert (spec.default_clip_skip, spec.default_steps == 7) == (expected, "steps" in text)


def test_an_edit_of_noria_json_is_read_without_another_conversion(sd1, tmp_path):
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", sd1.tensors)
    beside, engine = file.with_suffix(".noria.json"), EngineConfig(cache_dir=str(tmp_path / "cache"))
    beside.write_text('{"default_step": 7}')
    with pytest.raises(ModelError, match=rf"^{beside}: .*default_step"):
        open_model(str(file), engine)
    assert not (tmp_path / "cache").exists()
    beside.write_text('{"default_steps": 7}')
    assert open_model(str(file), engine).default_steps == 7
    (folder,) = (tmp_path / "cache/checkpoints").iterdir()
    os.utime(folder / "unet", (1, 1))
    beside.write_text('{"default_steps": 8}')
    assert open_model(str(file), engine).default_steps == 8
    beside.unlink()
    assert open_model(str(file), engine).default_steps not in (7, 8)
    assert list((tmp_path / "cache/checkpoints").iterdir()) == [folder]
    assert (folder / "unet").stat().st_mtime == 1


def test_a_refiner_in_a_file_is_named_in_the_settings(made, tmp_path, monkeypatch):
    file = single_files.save_checkpoint(tmp_path / "xl-refiner.safetensors", made("refiner").tensors)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, revision: str(file) if revision == "v1" else "")
    for source in (file, "hf://org/name/xl-refiner.safetensors@v1"):
        engine = EngineConfig(
            refiners=(f"tiny={source}",), vae="missing.safetensors", cache_dir=str(tmp_path / "cache")
        )
        config = download_hub_adapters(Config(data_dir=str(tmp_path / "data"), engine=engine), {})
        model, _, folder = config.engine.refiners[0].partition("=")
        assert (model, pathlib.Path(folder).name) == ("tiny", "xl-refiner")
        check_refiner(pathlib.Path(folder), FAMILIES["stable-diffusion-xl-refiner"])


def test_clips_tokenizer_is_the_published_one(tmp_path):
    write_clip_tokenizer(tmp_path / "tokenizer", "!")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    ids = tokenizer("a photo of a cat", padding="max_length").input_ids
    assert ids == [49406, 320, 1125, 539, 320, 2368, 49407, *([0] * 70)]
    assert len(tokenizer) == 49408


def names(*tensors, shape=(4, 4)):
    return {name: torch.zeros(shape) for name in tensors}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (names("lora_unet_a.lora_down.weight", "lora_unet_a.alpha"), r"is a LoRA .*--loras FOLDER"),
        (names("transformer.a.lora_A.weight"), r"is a LoRA"),
        (names("emb_params"), r"is an embedding .*--embeddings FOLDER"),
        (names("clip_l", "clip_g"), r"is an embedding"),
        (names("control_model.time_embed.0.weight"), r"is a ControlNet.*--controlnets FOLDER"),
        (names("ip_adapter.1.to_k_ip.weight", "image_proj.norm.weight"), r"is an IP-Adapter"),
        (names("ip_adapter_proj_model.norm.weight"), r"is an IP-Adapter"),
        (names("model.diffusion_model.double_blocks.0.img_attn.qkv.weight"), r"is a file with .*FLUX\.1, but not all"),
        (
            names("distilled_guidance_layer.in_proj.bias"),
            r"is a file with .*Chroma, but not all.* Take a complete file",
        ),
        (
            names("model.diffusion_model.joint_blocks.0.x_block.mlp.fc1.weight"),
            r"is a file with .* Stable Diffusion 3, but not all",
        ),
        (names("transformer_blocks.0.img_mod.1.weight"), r"is a file with .* Qwen-Image, but not all"),
        (names("layers.0.adaLN_modulation.0.weight"), r"is a file with .* Z-Image, but not all"),
        (names("layers.0.adaLN_modulation.1.weight"), r"is the transformer of Lumina 2, whose .* Take the folder"),
        (
            names("double_blocks.0.img_attn.qkv.weight", "double_stream_modulation_img.lin.weight"),
            r"is the transformer of FLUX\.2, whose single files are not converted\. Take the folder",
        ),
        (names("decoder.conv_in.weight", "encoder.conv_in.weight"), r"is a VAE\. Serve a checkpoint with it"),
        (names("down_blocks.0.resnets.0.conv1.weight"), r"is a UNet alone, in diffusers' names"),
        (names("input_blocks.0.0.weight"), r"is a UNet alone\. Take a checkpoint"),
        (names("text_model.encoder.layers.0.mlp.fc1.weight"), r"is a text encoder alone"),
        (names("model.layers.0.self_attn.q_proj.weight"), r"is a language model"),
        (names("a", "b"), r"is of no model that is known; its first tensor is 'a'"),
    ],
)
def test_a_file_that_is_no_checkpoint_says_what_it_is(tensors, words, tmp_path):
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ModelError, match=f"^{file} {words}"):
        converted_folder(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: without(tensors, "cond_stage_model."), "has a UNet, but not the text encoders"),
        (lambda tensors: without(tensors, f"{UNET}out.2.bias"), r"1 tensors are missing, the first is .*out\.2\.bias"),
        (lambda tensors: without(tensors, f"{UNET}middle_block.1."), "a distilled UNet, as SSD-1B's or Vega's"),
        (lambda tensors: without(tensors, f"{UNET}output_blocks.3."), "a distilled UNet.*or an incomplete file"),
        (lambda tensors: tensors | names(f"{UNET}input_blocks.1.2.motion.weight"), "1 tensors that no UNet of"),
        (lambda tensors: tensors | names(f"{UNET}label_emb.0.0.weight", f"{UNET}label_emb.0.2.weight"), "missing"),
        (lambda tensors: tensors | names("edm_mean"), "the noise schedule EDM, as Playground 2.5"),
        (lambda tensors: tensors | names("embedder.model.visual.proj"), "unCLIP"),
        (
            lambda tensors: tensors | {f"{UNET}input_blocks.0.0.weight": torch.zeros(32, 8, 3, 3)},
            "8 channels: a model for editing",
        ),
        (
            lambda tensors: tensors | {f"{QUERY}.weight": torch.zeros(64, 64, dtype=torch.int8)},
            "is quantized to I8; read are",
        ),
        (
            lambda tensors: (
                tensors
                | {
                    f"{QUERY}.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn),
                    f"{QUERY}.scale_weight": torch.zeros(4, 4),
                }
            ),
            r"scales of shape \[4, 4\]",
        ),
        (
            lambda tensors: (
                tensors | {"cond_stage_model.transformer.text_model.embeddings.token_embedding.weight": torch.zeros(9)}
            ),
            r"has the shape \[9\]",
        ),
        (
            lambda tensors: tensors | {"first_stage_model.decoder.conv_in.weight": torch.zeros(32, 16, 3, 3)},
            "16 channels of latents",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_converted_says_why(sd1, change, words, tmp_path):
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", change(sd1.tensors))
    with pytest.raises(ModelError, match=rf"^{file}: .*{words}") as raised:
        converted_folder(file, tmp_path / "cache")
    assert "\n" not in raised.value.message
    assert not (tmp_path / "cache").exists()


def raw(header: object, data_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(start: int, end: int, shape: object = (1,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated: its header would have 0 bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), r"(truncated|not a safetensors file)"),
        (raw(b"{}"), "has 0 tensors"),
        (raw(b"{" * 1000), "damaged"),
        (raw(b"[" * 100_000), "damaged"),
        (raw({"a": 1}), "damaged"),
        (raw({"a": entry(0, 4, shape=(-1,))}, 4), "damaged"),
        (raw({"a": entry(0, 4, shape=(2**40, 2**40))}, 4), "has the shape"),
        (raw({"a": entry(0, 4, dtype="F4")}, 4), "numbers of type 'F4'"),
        (raw({"a": entry(0, 4)}), "truncated: expected"),
        (raw({"a": entry(0, 4)}, 5), "too long: expected"),
        (raw({"a": entry(0, 4), "b": entry(0, 4)}, 8), "overlap"),
        (raw({"a": entry(4, 8)}, 8), "bytes between them"),
        (raw({str(number): entry(0, 0, (0,)) for number in range(20_001)}), "20001 tensors; allowed"),
        (raw(b"{" + b",".join(b'"%d":"a"' % number for number in range(60_000)) + b"}"), "names and texts"),
    ],
)
def test_a_damaged_or_hostile_header_is_one_sentence(content, words, tmp_path):
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^{file}: .*{words}") as raised:
        converted_folder(file, tmp_path / "cache")
    assert "\n" not in raised.value.message


def test_nothing_is_read_behind_the_header_of_a_file_that_is_refused(tmp_path):
    file, size_bytes = tmp_path / "a.safetensors", 2**40
    file.write_bytes(raw({"a": entry(0, size_bytes, (size_bytes // 4,))}))
    os.truncate(file, file.stat().st_size + size_bytes)  # with no blocks on the disk
    with pytest.raises(ModelError, match="is of no model that is known"):
        converted_folder(file, tmp_path / "cache")
    os.mkfifo(tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match="not a file"):
        converted_folder(tmp_path / "b.safetensors", tmp_path / "cache")
