"""Reading LoRA files of both formats, and refusing all others, also hostile ones."""

import json
import struct

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, UNet2DConditionModel
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from lora_files import layers_of, random_matrices, save_diffusers_lora, save_kohya_lora
from noria.errors import ModelError
from noria.models.diffusion.lora_file import MAX_RANK, read_lora

MAX_BYTES = 2**24
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@pytest.fixture(scope="module")
def parts(tiny_folder):
    return {
        "unet": UNet2DConditionModel.from_pretrained(tiny_folder / "unet"),
        "text_encoder": CLIPTextModel.from_pretrained(tiny_folder / "text_encoder"),
    }


@pytest.fixture(scope="module")
def xl_parts(tiny_xl_folder):
    return {
        "unet": UNet2DConditionModel.from_pretrained(tiny_xl_folder / "unet"),
        "text_encoder": CLIPTextModel.from_pretrained(tiny_xl_folder / "text_encoder"),
        "text_encoder_2": CLIPTextModelWithProjection.from_pretrained(tiny_xl_folder / "text_encoder_2"),
    }


def read(file, parts, dtype=torch.float32):
    return read_lora(file, parts, dtype, MAX_BYTES)


def assert_same(left, right):
    assert {part: set(layers) for part, layers in left.layers.items()} == {
        part: set(layers) for part, layers in right.layers.items()
    }
    for part, layers in left.layers.items():
        for name, layer in layers.items():
            other = right.layers[part][name]
            torch.testing.assert_close(layer.down, other.down)
            torch.testing.assert_close(layer.up, other.up)


def test_every_linear_and_convolutional_layer_can_be_adapted(parts, tmp_path):
    found = read(save_diffusers_lora(tmp_path / "a.safetensors", parts), parts)
    for part_name, part in parts.items():
        assert set(found.layers[part_name]) == {name for name, _ in layers_of(part)}
    assert found.nbytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "a.safetensors").values())


@pytest.mark.parametrize("which", ["parts", "xl_parts"])
def test_kohyas_names_mean_the_same_layers_as_diffusers(which, tmp_path, request):
    parts = request.getfixturevalue(which)
    endings = (*ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "q_proj", "out_proj", "fc1", "fc2")
    endings = (*endings, "conv1", "time_emb_proj", "conv_shortcut", "conv_in")
    ours = read(save_diffusers_lora(tmp_path / "d.safetensors", parts, *endings), parts)
    assert set(ours.layers) == set(parts)
    assert_same(read(save_kohya_lora(tmp_path / "k.safetensors", parts, *endings), parts), ours)


@pytest.mark.parametrize(
    ("sgm", "ours"),
    [
        (
            "input_blocks_3_1_transformer_blocks_1_attn1_to_q",
            "down_blocks.1.attentions.0.transformer_blocks.1.attn1.to_q",
        ),
        ("middle_block_1_proj_in", "mid_block.attentions.0.proj_in"),
        ("output_blocks_0_1_transformer_blocks_0_ff_net_2", "up_blocks.0.attentions.0.transformer_blocks.0.ff.net.2"),
        ("input_blocks_3_0_in_layers_2", "down_blocks.1.resnets.0.conv1"),
    ],
)
def test_the_names_of_kohyas_own_unet_of_sdxl_are_read(sgm, ours, xl_parts, tmp_path):
    weight = xl_parts["unet"].get_submodule(ours).weight
    down, up = torch.randn(4, *weight.shape[1:]), torch.randn(weight.shape[0], 4, *(1 for _ in weight.shape[2:]))
    names = [f"lora_unet_{sgm}.lora_down.weight", f"lora_unet_{sgm}.lora_up.weight"]
    save_file(dict(zip(names, (down, up), strict=True)), tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors", xl_parts)
    assert list(found.layers["unet"]) == [ours]
    assert torch.equal(found.layers["unet"][ours].down, down)


def test_kohyas_alpha_scales_the_adapter(parts, tmp_path):
    plain = read(save_kohya_lora(tmp_path / "a.safetensors", parts, "to_q", rank=4), parts)
    scaled = read(save_kohya_lora(tmp_path / "b.safetensors", parts, "to_q", rank=4, alpha=2.0), parts)
    for name, layer in plain.layers["unet"].items():
        torch.testing.assert_close(scaled.layers["unet"][name].up, layer.up / 2)


@pytest.mark.parametrize(
    ("described", "factor"),
    [
        ({"unet.lora_alpha": 8, "unet.r": 4}, 2.0),
        ({"unet.lora_alpha": 8, "unet.r": 4, "unet.use_rslora": True}, 4.0),
        ({"unet.lora_alpha": 4, "unet.alpha_pattern": {"attn1.to_q": 1}}, 0.25),
    ],
)
def test_diffusers_own_description_scales_the_adapter(described, factor, parts, tmp_path):
    only_unet = {"unet": parts["unet"]}
    metadata = {"lora_adapter_metadata": json.dumps(described)}
    plain = read(save_diffusers_lora(tmp_path / "a.safetensors", only_unet, "attn1.to_q"), parts)
    scaled = read(save_diffusers_lora(tmp_path / "b.safetensors", only_unet, "attn1.to_q", metadata=metadata), parts)
    for name, layer in plain.layers["unet"].items():
        torch.testing.assert_close(scaled.layers["unet"][name].up, layer.up * factor)


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), 10**400, "4", None, [4]])
def test_descriptions_with_other_alphas_are_refused(alpha, parts, tmp_path):
    metadata = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": alpha})}
    save_diffusers_lora(tmp_path / "a.safetensors", {"unet": parts["unet"]}, "attn1.to_q", metadata=metadata)
    with pytest.raises(ModelError, match="a number is expected"):
        read(tmp_path / "a.safetensors", parts)


def test_a_header_without_metadata_is_read(parts, tmp_path):
    file = save_diffusers_lora(tmp_path / "a.safetensors", {"unet": parts["unet"]}, "attn1.to_q")
    data = file.read_bytes()
    num_bytes = int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": None} | json.loads(data[8 : 8 + num_bytes])).encode()
    nulled = tmp_path / "b.safetensors"
    nulled.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + num_bytes :])
    assert_same(read(nulled, parts), read(file, parts))


def test_old_names_of_diffusers_are_read(parts, tmp_path):
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
    down, up = torch.randn(4, 16), torch.randn(16, 4)
    names = [f"unet.{layer}.processor.to_out_lora.down.weight", f"unet.{layer}.processor.to_out_lora.up.weight"]
    save_file(dict(zip(names, (down, up), strict=True)), tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors", parts).layers["unet"][f"{layer}.to_out.0"]
    assert torch.equal(found.down, down) and torch.equal(found.up, up)


def one_layer(down=(4, 16), up=(16, 4), name="down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", **options):
    return {f"unet.{name}.lora_A.weight": torch.ones(down, **options)} | {
        f"unet.{name}.lora_B.weight": torch.ones(up, **options)
    }


KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
BAD_TENSORS = {
    "DoRA": (one_layer() | {"unet.x.lora_magnitude_vector": torch.ones(4)}, "is of DoRA"),
    "kohya's DoRA": ({f"{KOHYA}.dora_scale": torch.ones(4)}, "is of DoRA"),
    "LoHa": ({f"{KOHYA}.hada_w1_a": torch.ones(4)}, "is of LoHa"),
    "LoKr": ({f"{KOHYA}.lokr_w1": torch.ones(4)}, "is of LoKr"),
    "CP decomposition": ({f"{KOHYA}.lora_mid.weight": torch.ones(4)}, "CP decomposition"),
    "unknown name": (one_layer() | {"unet.to_q.gate": torch.ones(4)}, "'unet.to_q.gate' is no name"),
    "both formats": ({f"{KOHYA}.alpha": torch.ones(1)} | one_layer(), "is no name"),
    "unknown layer": (one_layer(name="down_blocks.7.to_q"), "has no layer 'unet.down_blocks.7.to_q'"),
    "a norm": (one_layer(name="conv_norm_out"), "has no layer"),
    "unknown part": ({"text_encoder_2.a.lora_A.weight": torch.ones(4)}, "is not one of two matrices"),
    "another family": (one_layer(down=(4, 320), up=(320, 4)), r"\[4, 320\] and \[320, 4\]; .* \[4, 16\] and \[16, 4\]"),
    "two ranks": (one_layer(up=(16, 5)), r"\[16, 5\]"),
    "a large rank": (one_layer(down=(600, 16), up=(16, 600)), f"rank 600; allowed are 1 to {MAX_RANK}"),
    "no rank": (one_layer(down=(0, 16), up=(16, 0)), "rank 0"),
    "a scalar": (one_layer(down=(), up=()), "rank 0"),
    "float64": (one_layer(dtype=torch.float64), "type float64"),
    "integers": (one_layer(dtype=torch.int64), "type int64"),
    "float8": (one_layer(dtype=torch.float8_e4m3fn), "type float8_e4m3fn"),
    "one matrix": ({f"{KOHYA}.lora_down.weight": torch.ones(4, 16)}, "cannot be converted"),
    "only an alpha": ({f"{KOHYA}.alpha": torch.ones(1)}, "belongs to two matrices"),
    "many alphas": (
        {f"{KOHYA}.alpha": torch.ones(2), f"{KOHYA}.lora_down.weight": torch.ones(4, 16)}
        | {f"{KOHYA}.lora_up.weight": torch.ones(16, 4)},
        "is not one number",
    ),
    "nothing": ({}, "has 0 tensors"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_other_tensors_are_refused_by_name(case, parts, tmp_path):
    tensors, message = BAD_TENSORS[case]
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path / "bad.safetensors", parts)
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value, parts, tmp_path):
    tensors = one_layer()
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(ModelError, match="not finite"):
        read(tmp_path / "bad.safetensors", parts)


def test_numbers_that_overflow_the_models_precision_are_refused(parts, tmp_path):
    save_file({name: tensor * 1e6 for name, tensor in one_layer().items()}, tmp_path / "bad.safetensors")
    with pytest.raises(ModelError, match=r"too large for torch\.float16"):
        read(tmp_path / "bad.safetensors", parts, torch.float16)


def test_files_of_another_family_are_refused_both_ways(parts, xl_parts, tmp_path):
    save_kohya_lora(tmp_path / "sd.safetensors", parts, *ATTENTION)
    save_kohya_lora(tmp_path / "xl.safetensors", xl_parts, "to_q", "fc1")
    for name, others in (("sd", xl_parts), ("xl", parts)):
        with pytest.raises(ModelError, match="another family"):
            read(tmp_path / f"{name}.safetensors", others)


HOSTILE_BYTES = {
    "empty": b"",
    "short": b"\x01\x02",
    "a pickle": b"\x80\x04\x95" + b"\0" * 100,
    "a huge header": struct.pack("<Q", 2**63) + b"{}",
    "a header beyond the limit": struct.pack("<Q", 2**24 + 1) + b" " * (2**24 - 8),
    "no JSON": struct.pack("<Q", 4) + b"{{{{",
    "a list": struct.pack("<Q", 2) + b"[]",
    "nested": struct.pack("<Q", 20_000) + b"[" * 20_000,
}


@pytest.mark.parametrize("case", HOSTILE_BYTES)
def test_files_that_are_not_safetensors_are_refused(case, parts, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(HOSTILE_BYTES[case])
    with pytest.raises(ModelError, match=r"safetensors|bytes|tensors"):
        read(tmp_path / "bad.safetensors", parts)


def test_a_file_that_is_too_large_is_not_read(parts, tmp_path):
    with (tmp_path / "bad.safetensors").open("wb") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(ModelError, match=f"at most {MAX_BYTES} are allowed"):
        read(tmp_path / "bad.safetensors", parts)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(data, parts, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    good = folder / "good.safetensors"
    if not good.exists():
        metadata = {"lora_adapter_metadata": json.dumps({"unet.lora_alpha": 4, "unet.alpha_pattern": {"to_q": 2}})}
        save_diffusers_lora(good, {"unet": parts["unet"]}, "attn1.to_q", metadata=metadata)
    content = bytearray(good.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_bytes + 64))] = data.draw(st.integers(0, 255))
    (folder / "bad.safetensors").write_bytes(content[: data.draw(st.integers(header_bytes, len(content)))])
    try:
        found = read(folder / "bad.safetensors", parts)
    except ModelError:
        return
    assert all(layer.up.isfinite().all() for layer in found.layers["unet"].values())


def test_loras_of_qwen_image_are_read_with_the_names_of_other_programs(tiny_qwen_image_folder, tmp_path):
    transformer = QwenImageTransformer2DModel.from_pretrained(tiny_qwen_image_folder, subfolder="transformer")
    parts, generator = {"transformer": transformer}, torch.Generator().manual_seed(0)
    modules = (
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.1.img_mlp.net.0.proj",
        "transformer_blocks.1.txt_mod.1",
    )
    matrices = {name: random_matrices(transformer.get_submodule(name), 4, generator, strength=1.0) for name in modules}

    def read(name_of, first="lora_down", second="lora_up", alpha=None):
        tensors = {}
        for module, (down, up) in matrices.items():
            tensors |= {f"{name_of(module)}.{first}.weight": down, f"{name_of(module)}.{second}.weight": up}
            if alpha is not None:
                tensors[f"{name_of(module)}.alpha"] = torch.tensor(alpha)
        save_file(tensors, tmp_path / "a.safetensors")
        return read_lora(tmp_path / "a.safetensors", parts, torch.float32, 2**20).layers["transformer"]

    for scale, layers in [
        (1.0, read("transformer.{}".format, "lora_A", "lora_B")),
        (1.0, read("diffusion_model.{}".format, "lora_A", "lora_B")),
        (0.5, read(str, alpha=2.0)),
        (0.5, read(lambda module: "lora_unet_" + module.replace(".", "_"), alpha=2.0)),
    ]:
        assert set(layers) == set(modules)
        for name, (down, up) in matrices.items():
            torch.testing.assert_close(layers[name].up @ layers[name].down, scale * up @ down)
    twice = {f"{prefix}{modules[0]}.lora_A.weight": torch.zeros(1, 32) for prefix in ("", "diffusion_model.")}
    save_file(twice, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="under two names"):
        read_lora(tmp_path / "a.safetensors", parts, torch.float32, 2**20)
