"""The catalog: the spec of a valid folder, and an error message that names the file for each kind of damage."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from noria.errors import ModelError
from noria.models.catalog import count_parameters, fingerprint_of, have_same_architecture, open_model
from noria.models.families import FAMILIES
from noria.models.files.weights import read_header, read_weights, shell_command, variant, weight_files
from noria.models.location import BUNDLED
from noria.models.needed_files import select_needed_files
from noria.testing.fake_encoder import FAKE_ENCODER

UNET, VAE, TEXT = (
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
)


def write_safetensors(file: pathlib.Path, shapes: dict[str, tuple[int, ...]], filler: bytes = b"\0") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + filler * end)


def write_header(file: pathlib.Path, **data_offsets: list[int]) -> None:
    """Write tensors of 32 bytes at any offsets, and as much data as they need."""
    header = {name: {"dtype": "F16", "shape": [4, 4], "data_offsets": at} for name, at in data_offsets.items()}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(max(at[1] for at in data_offsets.values())))


def edit(file: pathlib.Path, **changes: Any) -> None:
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in (tree | changes).items() if value != "DELETE"}))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the bundled model with weights of a few tensors."""
    folder = tmp_path / "tiny-model"
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("*.safetensors", "noria.json"))
    write_safetensors(folder / UNET, {"conv_in.weight": (48, 4, 3, 3), "conv_in.bias": (48,)})
    write_safetensors(folder / VAE, {"decoder.layers.0.weight": (4, 4)})
    write_safetensors(folder / TEXT, {"embeddings.token_embedding.weight": (176, 128)})
    return folder


def test_the_bundled_model_has_the_defaults_of_its_noria_json() -> None:
    spec = open_model("bundled")
    assert (spec.name, spec.default_scheduler, spec.default_steps, spec.default_guidance) == (
        "noria-shapes",
        "dpm++2m",
        20,
        3.0,
    )
    assert (spec.default_width_px, spec.default_height_px, spec.min_side_px, spec.max_side_px, spec.multiple_px) == (
        128,
        128,
        64,
        256,
        32,
    )
    assert spec.default_scheduler in spec.schedulers
    assert 1e6 < spec.num_parameters < 1e8
    assert spec.path == BUNDLED


def test_shapes_are_those_of_the_headers_json() -> None:
    for file in (BUNDLED / UNET, BUNDLED / VAE, BUNDLED / TEXT):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__", None)
        assert read_header(file) == {name: tuple(tensor["shape"]) for name, tensor in header.items()}


def test_a_folder_without_noria_json_has_its_own_name_and_the_default_settings(folder: pathlib.Path) -> None:
    spec = open_model(str(folder))
    assert (spec.name, spec.default_scheduler, spec.default_steps, spec.default_guidance) == (
        "tiny-model",
        "ddim",
        25,
        7.5,
    )
    assert spec.num_parameters == 48 * 4 * 9 + 48
    assert count_parameters(spec) == spec.num_parameters + 4 * 4 + 176 * 128


@pytest.mark.parametrize(
    ("called", "name"), [("modèle n° 1", "mod-le-n--1"), ("模型", "model"), ("a" * 200, "a" * 128)]
)
def test_a_folders_name_is_made_valid_in_a_header(folder: pathlib.Path, called: str, name: str) -> None:
    assert open_model(str(folder.rename(folder.with_name(called)))).name == name


def test_sizes_of_stable_diffusion_1_5(folder: pathlib.Path) -> None:
    edit(folder / "unet/config.json", sample_size=64, down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"])
    edit(folder / "vae/config.json", _class_name="AutoencoderKL", block_out_channels=[128, 256, 512, 512])
    write_safetensors(folder / VAE, {"decoder.conv_in.weight": (512, 4, 3, 3)})
    spec = open_model(str(folder))
    assert (spec.default_width_px, spec.min_side_px, spec.max_side_px, spec.multiple_px) == (512, 128, 1024, 64)


def test_sizes_of_a_model_that_is_not_square(folder: pathlib.Path) -> None:
    edit(folder / "unet/config.json", sample_size=[16, 24])
    edit(folder / "vae/config.json", block_out_channels="DELETE")  # as an older diffusers saved AutoencoderTiny
    spec = open_model(str(folder))
    assert (spec.default_height_px, spec.default_width_px, spec.max_side_px) == (128, 192, 384)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"_class_name": "PNDMScheduler"}, "pndm"),
        ({"_class_name": "DPMSolverMultistepScheduler", "use_karras_sigmas": True}, "dpm++2m-karras"),
        ({"_class_name": "DPMSolverSDEScheduler"}, "dpm++2m"),  # not supported: the default
        ({"_class_name": "SchedulerOfTomorrow"}, "dpm++2m"),
    ],
)
def test_the_default_scheduler_is_the_models_own(folder: pathlib.Path, changes: dict[str, Any], name: str) -> None:
    edit(folder / "scheduler/scheduler_config.json", **changes)
    assert open_model(str(folder)).default_scheduler == name


def test_noria_json_overrides_defaults_and_accepts_scheduler_aliases(folder: pathlib.Path) -> None:
    (folder / "noria.json").write_text('{"name": "mine", "default_scheduler": "DPM++ 2M Karras", "default_steps": 8}')
    spec = open_model(str(folder))
    assert (spec.name, spec.default_scheduler, spec.default_steps, spec.default_guidance) == (
        "mine",
        "dpm++2m-karras",
        8,
        7.5,
    )


def test_the_fingerprint_depends_on_the_model_and_not_on_the_folder(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    before = open_model(str(folder)).fingerprint
    shutil.copytree(folder, tmp_path / "copy")
    assert open_model(str(tmp_path / "copy")).fingerprint == before
    edit(folder / "scheduler/scheduler_config.json", beta_end=0.02)
    changed = open_model(str(folder)).fingerprint
    assert changed != before
    shapes = {"conv_in.weight": (48, 4, 3, 3), "conv_in.bias": (48,)}
    write_safetensors(folder / UNET, shapes, filler=b"\1")  # trained further
    assert open_model(str(folder)).fingerprint not in (before, changed)


@pytest.mark.parametrize("files", [["1_Pooling/config.json"], ["1_Pooling/config.json", "2_Normalize/config.json"]])
def test_versions_of_noria_agree_on_the_fingerprint_of_an_encoder(tmp_path: pathlib.Path, files: list[str]) -> None:
    """A registered model is found by it; current sentence-transformers writes 2_Normalize/config.json, too."""
    for file in ("config.json", "modules.json", *files):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", {"embeddings.word_embeddings.weight": (4, 4)})
    assert fingerprint_of(tmp_path, FAMILIES["text-encoder"]) == "69c22dd792d0"


def test_the_fp16_variant_is_used_if_there_is_no_other(folder: pathlib.Path) -> None:
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model.fp16.safetensors")
    stem = "diffusion_pytorch_model"
    assert [file.name for file in weight_files(folder, "unet", stem)] == [f"{stem}.fp16.safetensors"]
    assert [variant(folder / part, stem) for part in ("unet", "vae")] == ["fp16", None]
    assert open_model(str(folder)).num_parameters == 48 * 4 * 9 + 48


@pytest.fixture
def sharded(folder: pathlib.Path) -> pathlib.Path:
    (folder / UNET).unlink()
    write_safetensors(
        folder / "unet/diffusion_pytorch_model-00001-of-00002.safetensors", {"conv_in.weight": (48, 4, 3, 3)}
    )
    write_safetensors(folder / "unet/diffusion_pytorch_model-00002-of-00002.safetensors", {"conv_in.bias": (48,)})
    shards = {
        name: f"diffusion_pytorch_model-0000{k}-of-00002.safetensors"
        for k, name in [(1, "conv_in.weight"), (2, "conv_in.bias")]
    }
    (folder / "unet/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


def test_full_precision_shards_are_preferred_to_a_single_fp16_file(sharded: pathlib.Path) -> None:
    write_safetensors(sharded / "unet/diffusion_pytorch_model.fp16.safetensors", {"conv_in.weight": (48, 4, 3, 3)})
    assert variant(sharded / "unet", "diffusion_pytorch_model") is None
    assert len(weight_files(sharded, "unet", "diffusion_pytorch_model")) == 2


@pytest.mark.parametrize(
    ("shard", "index"),
    [
        ("{stem}.fp16-0000{k}-of-00002", "{stem}.safetensors.index.fp16"),
        ("{stem}-0000{k}-of-00002.fp16", "{stem}.safetensors.fp16.index"),  # naming of diffusers 0.29 and 0.30
    ],
)
def test_shards_of_fp16_are_read_in_the_naming_of_any_version(sharded: pathlib.Path, shard: str, index: str) -> None:
    stem = "diffusion_pytorch_model"
    names = [f"{shard.format(stem=stem, k=k)}.safetensors" for k in (1, 2)]
    for k, name in enumerate(names, 1):
        (sharded / f"unet/{stem}-0000{k}-of-00002.safetensors").rename(sharded / "unet" / name)
    (sharded / f"unet/{stem}.safetensors.index.json").unlink()
    shards = dict(zip(("conv_in.weight", "conv_in.bias"), names, strict=True))
    file = sharded / f"unet/{index.format(stem=stem)}.json"
    file.write_text(json.dumps({"weight_map": shards}))
    assert open_model(str(sharded)).num_parameters == 48 * 4 * 9 + 48
    assert variant(sharded / "unet", stem) == "fp16"
    listed = [str(each.relative_to(sharded)) for each in sharded.rglob("*") if each.is_file()]
    needed = select_needed_files(listed, FAMILIES["stable-diffusion"], "hf://org/shapes")
    assert {f"unet/{name}" for name in (*names, file.name)} <= set(needed)
    file.write_text(json.dumps({"weight_map": shards | {"conv_out.bias": names[0]}}))
    with pytest.raises(ModelError, match=r"lists 'conv_out.bias', which no shard contains"):
        open_model(str(sharded))


def test_shards_are_read_as_one_part(sharded: pathlib.Path) -> None:
    assert open_model(str(sharded)).num_parameters == 48 * 4 * 9 + 48


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda unet: (unet / "diffusion_pytorch_model-00002-of-00002.safetensors").unlink(),
            "00002-of-00002.safetensors: missing",
        ),
        (
            lambda unet: edit(unet / "diffusion_pytorch_model.safetensors.index.json", weight_map={"a": "../b"}),
            "index.json: has no weight_map",
        ),
        (
            lambda unet: edit(
                unet / "diffusion_pytorch_model.safetensors.index.json", weight_map={"a": "b\0.safetensors"}
            ),
            "index.json: has no weight_map",
        ),
        (
            lambda unet: edit(unet / "diffusion_pytorch_model.safetensors.index.json", weight_map={"a": ".."}),
            "index.json: has no weight_map",
        ),
        (
            lambda unet: write_safetensors(
                unet / "diffusion_pytorch_model-00002-of-00002.safetensors", {"other": (48,)}
            ),
            "index.json: lists 'conv_in.bias'",
        ),
        (
            lambda unet: write_safetensors(
                unet / "diffusion_pytorch_model.safetensors", {"conv_in.weight": (48, 4, 3, 3)}
            ),
            "beside it is diffusion_pytorch_model.safetensors.index.json",
        ),
    ],
)
def test_a_damaged_set_of_shards_is_rejected(
    sharded: pathlib.Path, damage: Callable[[pathlib.Path], None], message: str
) -> None:
    damage(sharded / "unet")
    with pytest.raises(ModelError, match=message):
        open_model(str(sharded))


DAMAGES: dict[str, tuple[str, Callable[[pathlib.Path], Any], str]] = {
    # the damaged file, which the message names; the damage; words of the message
    "no index": ("model_index.json", pathlib.Path.unlink, "missing"),
    "index is no JSON": ("model_index.json", lambda file: file.write_text("{"), "not JSON"),
    "index is a list": ("model_index.json", lambda file: file.write_text("[]"), "object"),
    "index is binary": ("model_index.json", lambda file: file.write_bytes(b"\xff\xfe"), "not JSON"),
    "Kandinsky 5": ("model_index.json", lambda file: edit(file, _class_name="Kandinsky5T2IPipeline"), "Kandinsky5T2IPipeline.*Known are: StableDiffusionPipeline.*StableDiffusionXLPipeline"),
    "the refiner of SDXL": ("model_index.json", lambda file: edit(file, _class_name="StableDiffusionXLImg2ImgPipeline"), "XLImg2ImgPipeline is the refiner.*engine.refiners"),
    "SDXL without its parts": ("model_index.json", lambda file: edit(file, _class_name="StableDiffusionXLPipeline"), "tokenizer_2 is a null"),
    "no class": ("model_index.json", lambda file: edit(file, _class_name="DELETE"), "_class_name"),
    "no unet in the index": ("model_index.json", lambda file: edit(file, unet="DELETE"), "unet"),
    "another tokenizer": ("model_index.json", lambda file: edit(file, tokenizer=["transformers", "T5Tokenizer"]), "T5Tokenizer.*CLIPTokenizer"),
    "no vae": ("model_index.json", lambda file: edit(file, vae=[None, None]), "null.*AutoencoderKL"),
    "no unet config": ("unet/config.json", pathlib.Path.unlink, "missing"),
    "unet config cut": ("unet/config.json", lambda file: file.write_text(file.read_text()[:100]), "not JSON"),
    "wrong unet class": ("unet/config.json", lambda file: edit(file, _class_name="UNet2DModel"), "UNet2DModel"),
    "wrong type": ("unet/config.json", lambda file: edit(file, in_channels="four"), "in_channels is 'four'; allowed is an integer"),
    "no blocks": ("unet/config.json", lambda file: edit(file, down_block_types=[]), "down_block_types"),
    "SDXL's unet": ("unet/config.json", lambda file: edit(file, addition_embed_type="text_time"), "addition_embed_type"),
    "class-conditional": ("unet/config.json", lambda file: edit(file, class_embed_type="timestep"), "class_embed_type"),
    "Kandinsky": ("unet/config.json", lambda file: edit(file, encoder_hid_dim_type="image_proj"), "encoder_hid_dim_type"),
    "guidance of no width": ("unet/config.json", lambda file: edit(file, time_cond_proj_dim=0), "time_cond_proj_dim"),
    "upscaling": ("unet/config.json", lambda file: edit(file, in_channels=7), "in_channels 7.*upscaling.*inpainting, with 9"),
    "another text width": ("unet/config.json", lambda file: edit(file, cross_attention_dim=768), "cross_attention_dim 768.*128"),
    "no vae config": ("vae/config.json", pathlib.Path.unlink, "missing"),
    "wrong vae class": ("vae/config.json", lambda file: edit(file, _class_name="VQModel"), "VQModel.*AutoencoderTiny"),
    "no text encoder config": ("text_encoder/config.json", pathlib.Path.unlink, "missing"),
    "wrong text encoder": ("text_encoder/config.json", lambda file: edit(file, architectures=["T5EncoderModel"]), "T5EncoderModel"),
    "no scheduler": ("scheduler/scheduler_config.json", pathlib.Path.unlink, "missing"),
    "flow": ("scheduler/scheduler_config.json", lambda file: edit(file, _class_name="FlowMatchEulerDiscreteScheduler"), "flow"),
    "unknown prediction": ("scheduler/scheduler_config.json", lambda file: edit(file, prediction_type="noise"), "prediction_type"),
    "tokenizer.json cut": ("tokenizer/tokenizer.json", lambda file: file.write_text(file.read_text()[:500]), "not JSON"),
    "tokenizer.json empty": ("tokenizer/tokenizer.json", lambda file: file.write_text("{}"), "no vocabulary"),
    "tokenizer_config cut": ("tokenizer/tokenizer_config.json", lambda file: file.write_text("{"), "not JSON"),
    "another tokenizer's words": ("tokenizer/tokenizer.json", lambda file: file.write_text('{"model": {"vocab": {"a": 999}}}'), "999.*176"),
    "no unet weights": (UNET, pathlib.Path.unlink, "missing.*unet has no weights"),
    "no vae weights": (VAE, pathlib.Path.unlink, "missing.*vae has no weights"),
    "no text encoder weights": (TEXT, pathlib.Path.unlink, "missing.*text_encoder has no weights"),
    "truncated": (UNET, lambda file: file.write_bytes(file.read_bytes()[:-7]), "truncated: expected 3760 bytes, the file has 3753"),
    "too long": (UNET, lambda file: file.write_bytes(file.read_bytes() + b"more"), "too long: expected 3760 bytes, the file has 3764"),
    "cut in the header": (TEXT, lambda file: file.write_bytes(file.read_bytes()[:50]), "truncated: its header alone"),
    "empty": (TEXT, lambda file: file.write_bytes(b""), "truncated"),
    "not safetensors": (VAE, lambda file: file.write_bytes(b"\xff" * 5000), "not a safetensors file"),
    "Git LFS pointer": (VAE, lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "header of garbage": (VAE, lambda file: file.write_bytes((4).to_bytes(8, "little") + b"[1 ]"), "damaged"),
    "a shape of words": (VAE, lambda file: file.write_bytes(file.read_bytes().replace(b"[4, 4]", b'["40"]')), "damaged.*expected usize"),
    "unknown dtype": (VAE, lambda file: file.write_bytes(file.read_bytes().replace(b"F16", b"F99")), "damaged.*F99"),
    "weights of another model": (UNET, lambda file: write_safetensors(file, {"conv_in.weight": (320, 9, 3, 3)}), "conv_in.weight.*two models"),
    "a VAE for the text encoder": (TEXT, lambda file: write_safetensors(file, {"decoder.layers.0.weight": (4, 4)}), "token_embedding.weight is missing"),
    "another vocabulary": (TEXT, lambda file: write_safetensors(file, {"embeddings.token_embedding.weight": (49408, 128)}), "vocab_size and hidden_size 176, 128"),
    "a text encoder for the VAE": (VAE, lambda file: write_safetensors(file, {"embeddings.token_embedding.weight": (176, 128)}), "layers.0.weight is missing"),
    "a VAE of more channels": (VAE, lambda file: write_safetensors(file, {"decoder.layers.0.weight": (64, 16, 3, 3)}), "latent_channels 4"),
    "nested too deep": ("unet/config.json", lambda file: file.write_text('{"a":' + "[" * 100_000), "not JSON"),
    "overlapping tensors": (VAE, lambda file: write_header(file, a=[0, 32], b=[0, 32]), "damaged: .*invalid offset"),
    "a gap before a tensor": (VAE, lambda file: write_header(file, a=[8, 40]), "damaged: .*invalid offset"),
    "a tensor name of two lines": (VAE, lambda file: write_header(file, **{"a\n\x1b[2J": [8, 40]}), "damaged: .*invalid offset"),
    "a header nested too deep": (VAE, lambda file: file.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000), "damaged"),
    "an endless config": ("vae/config.json", lambda file: (file.unlink(), file.symlink_to("/dev/zero")), "a device, not a file"),
    "a pipe for a config": ("vae/config.json", lambda file: (file.unlink(), os.mkfifo(file)), "not a file"),
    "a pipe for weights": (UNET, lambda file: (file.unlink(), os.mkfifo(file)), "not a file"),
    "a huge config": ("vae/config.json", lambda file: os.truncate(file, 2**26 + 1), "67108865 bytes"),
    "huge images": ("unet/config.json", lambda file: edit(file, sample_size=513), "≤ 512"),
    "a hundred blocks": ("vae/config.json", lambda file: edit(file, block_out_channels=[4] * 100), "block_out_channels"),
    "no tokenizer config": ("tokenizer/tokenizer_config.json", pathlib.Path.unlink, "missing"),
    "no length of prompts": ("tokenizer/tokenizer_config.json", lambda file: edit(file, model_max_length="DELETE"), "model_max_length is null"),
    "endless prompts": ("tokenizer/tokenizer_config.json", lambda file: edit(file, model_max_length=10**30), "takes 2 to 24"),
    "an added token without a row": ("tokenizer/tokenizer.json", lambda file: edit(file, added_tokens=[{"id": 176}]), "up to 176"),
    "added tokens of words": ("tokenizer/tokenizer.json", lambda file: edit(file, added_tokens=["a"]), "no vocabulary"),
    "a folder for weights": (UNET, lambda file: (file.unlink(), file.mkdir()), "cannot be read"),
    "unknown key": ("noria.json", lambda file: file.write_text('{"steps": 3}'), "steps"),
    "steps out of bounds": ("noria.json", lambda file: file.write_text('{"default_steps": 0}'), "default_steps"),
    "guidance out of bounds": ("noria.json", lambda file: file.write_text('{"default_guidance": 51}'), "≤ 50"),
    "a name that no header carries": ("noria.json", lambda file: file.write_text('{"name": "mod\u00e8le"}'), "name"),
    "a name of two lines": ("noria.json", lambda file: file.write_text('{"name": "a\\n"}'), "name"),
    "unknown scheduler": ("noria.json", lambda file: file.write_text('{"default_scheduler": "dmp++2m"}'), "dpm\\+\\+2m"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_is_rejected_with_the_name_of_the_file(folder: pathlib.Path, what: str) -> None:
    name, damage, words = DAMAGES[what]
    damage(folder / name)
    with pytest.raises(ModelError, match=f"(?s){name}: .*{words}") as caught:
        open_model(str(folder))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("unet", {"layers_per_block": 1_000_000}),
        ("unet", {"transformer_layers_per_block": [1, [1, 1_000_000]]}),
        ("text_encoder", {"num_hidden_layers": 101}),
        ("text_encoder", {"vision_config": {"depth": 1e300}}),
        ("vae", {"num_decoder_blocks": [1, 1_000_000]}),
    ],
)
def test_more_layers_than_tensors_are_rejected(folder: pathlib.Path, part: str, change: dict[str, Any]) -> None:
    edit(folder / part / "config.json", **change)
    with pytest.raises(ModelError, match=r"config.json: \w+ is 1\S+, but the weights have only [12] tensors"):
        open_model(str(folder))


def test_a_tokenizer_in_two_files_needs_both(folder: pathlib.Path) -> None:
    (folder / "tokenizer/tokenizer.json").unlink()
    assert open_model(str(folder)).name == "tiny-model"
    (folder / "tokenizer/merges.txt").unlink()
    with pytest.raises(ModelError, match=r"merges\.txt: missing"):
        open_model(str(folder))
    (folder / "tokenizer/vocab.json").unlink()
    with pytest.raises(ModelError, match=r"vocab\.json: missing"):
        open_model(str(folder))


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_other_pickles_are_rejected(folder: pathlib.Path, part: str) -> None:
    file = next((folder / part).glob("*.safetensors"))
    file.rename(file.with_suffix(".ckpt"))
    with pytest.raises(ModelError, match=rf"{part}/.*\.ckpt: .*only safetensors.* Convert it to .*\.safetensors"):
        open_model(str(folder))


def test_the_command_for_pickles_makes_the_same_model(folder: pathlib.Path) -> None:
    """A single run of it converts all parts, shards of one into one file, and changes no other file."""
    import torch
    from safetensors.torch import load_file

    expected, weights = open_model(str(folder)), dict[str, dict[str, torch.Tensor]]()
    for file in list(folder.glob("*/*.safetensors")):
        tensors = weights[file.parent.name] = load_file(file)
        name = "diffusion_pytorch_model" if file.parent.name in ("unet", "vae") else "pytorch_model"
        halves = list(tensors)[::2], list(tensors)[1::2]
        for index, names in enumerate(halves if file.parent.name == "unet" else [list(tensors)]):
            shard = f"-0000{index + 1}-of-00002" if file.parent.name == "unet" else ""
            torch.save({key: tensors[key] for key in names}, file.with_name(f"{name}{shard}.bin"))
        file.unlink()
    (folder / "unet/more.pt").write_bytes(b"not of the model")
    with pytest.raises(ModelError, match=r"_model.*\.bin: the weights are a pickle") as rejected:
        open_model(str(folder))
    command = rejected.value.message[rejected.value.message.index("python -c") :]
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    assert {
        part: set(read_weights(folder, part, FAMILIES[expected.family].weight_stems[part])) for part in weights
    } == {part: set(tensors) for part, tensors in weights.items()}
    assert msgspec.structs.replace(open_model(str(folder)), fingerprint=expected.fingerprint) == expected


def test_a_command_holds_for_any_name_of_a_folder(tmp_path: pathlib.Path) -> None:
    name = str(tmp_path / """a "b" $HOME `id` 'c' !! \\! d""")
    code = f"import sys; sys.stdout.write({name!r})"
    assert subprocess.run(shell_command(code), shell=True, check=True, capture_output=True, text=True).stdout == name


def test_versions_have_the_same_architecture_whatever_their_weights_and_origin(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    first = open_model(str(folder))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = copy / "unet" / "config.json"
    edit(config, _name_or_path="elsewhere")
    second = open_model(str(copy))
    assert first.fingerprint != second.fingerprint
    assert have_same_architecture(first, second)
    edit(config, layers_per_block=7)
    assert not have_same_architecture(first, second)
    assert not have_same_architecture(first, FAKE_ENCODER)
    shutil.rmtree(copy)
    assert not have_same_architecture(first, second)
