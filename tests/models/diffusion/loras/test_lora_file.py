"""Reading LoRA files of two programs, and refusing what is no adapter of the model, also hostile files."""

import copy
import json
import struct

import pytest
import safetensors.torch
import torch
from diffusers import UNet2DConditionModel
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from lora_files import layers_of, save_diffusers_lora, save_kohya_lora
from noria.errors import ModelError
from noria.models.diffusion.loras.lora_file import read_lora
from noria.models.diffusion.loras.lora_kinds import MAX_RANK

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


def read(file, parts):
    return read_lora(file, parts, torch.float32, MAX_BYTES)


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


def one_layer(down=(4, 16), up=(16, 4), name="down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", **options):
    return {f"unet.{name}.lora_A.weight": torch.ones(down, **options)} | {
        f"unet.{name}.lora_B.weight": torch.ones(up, **options)
    }


KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
LORA = {f"{KOHYA}.lora_down.weight": torch.ones(4, 16), f"{KOHYA}.lora_up.weight": torch.ones(16, 4)}
LOHA = {f"{KOHYA}.hada_w{number}_{letter}": torch.ones(16, 16) for number in (1, 2) for letter in "ab"}
RESERVED = torch.ones(4)
BAD_TENSORS = {
    "DoRA alone": ({f"{KOHYA}.dora_scale": torch.ones(16)}, "has dora_scale alone, and no matrices"),
    "DoRA of another size": (LORA | {f"{KOHYA}.dora_scale": torch.ones(17, 1)}, r"dora_scale of \[17, 1\]"),
    "a magnitude beside LoHa": (LOHA | {f"{KOHYA}.lora_magnitude_vector": torch.ones(16)}, "more than one kind"),
    "half a LoHa": ({f"{KOHYA}.hada_w1_a": torch.ones(4)}, "has no hada_w1_b beside hada_w1_a"),
    "LoHa of another family": (LOHA | {f"{KOHYA}.hada_w2_a": torch.ones(32, 16)}, r"hada_w2_a of \[32, 16\]"),
    "half a LoKr": ({f"{KOHYA}.lokr_w1": torch.ones(4, 4)}, "has no lokr_w2_b beside lokr_w1"),
    "LoKr of another family": (
        {f"{KOHYA}.lokr_w1": torch.ones(3, 4)},
        r"lokr_w1 of \[3, 4\]; .* 16 outputs and 16 inputs",
    ),
    "LoKr of nothing": ({f"{KOHYA}.lokr_w1": torch.ones(4)}, r"lokr_w1 of \[4\]"),
    "half a Tucker decomposition": ({f"{KOHYA}.lora_mid.weight": torch.ones(4)}, "has mid alone"),
    "LoRA and LoHa": (LORA | LOHA, "has more than one kind of adapters"),
    "a difference of another size": ({f"{KOHYA}.diff": torch.ones(16, 17)}, r"diff of \[16, 17\]"),
    "OFT": ({"oft_unet_x.oft_blocks": RESERVED}, "is of OFT or BOFT, of kohya, OneTrainer or LyCORIS.*Train a LoRA"),
    "GLoRA": (
        {f"{KOHYA}.a1.weight": torch.ones(4), f"{KOHYA}.b1.weight": RESERVED},
        "is of GLoRA, of LyCORIS.*merge it into a checkpoint",
    ),
    "IA3": ({f"{KOHYA}.weight": torch.ones(4), f"{KOHYA}.on_input": RESERVED}, "is of IA3, of LyCORIS"),
    "a bundle": (
        LORA | {"bundle_emb.a.string_to_param.*": RESERVED},
        "a bundle of a LoRA and an embedding, of Civitai",
    ),
    "unknown name": (one_layer() | {"unet.to_q.gate": torch.ones(4)}, "'unet.to_q.gate' is no name"),
    "unknown layer": (one_layer(name="down_blocks.7.to_q"), "has no layer 'unet.down_blocks.7.to_q'"),
    "matrices of a norm": (one_layer(name="conv_norm_out"), "is a norm, which takes differences"),
    "unknown part": (
        {"text_encoder_2.a.lora_A.weight": torch.ones(4)},
        "or is to be saved or trained without that text encoder",
    ),
    "another family": (
        one_layer(down=(4, 320), up=(320, 4)),
        r"up of \[320, 4\]; .* takes \[16, 4\]: .* another family",
    ),
    "two ranks": (one_layer(up=(16, 5)), r"down of \[4, 16\]; .* takes \[5, 16\]"),
    "a large rank": (one_layer(down=(600, 16), up=(16, 600)), f"rank 600; allowed are 1 to {MAX_RANK}"),
    "no rank": (one_layer(down=(0, 16), up=(16, 0)), "changes nothing"),
    "a scalar": (one_layer(down=(), up=()), "rank 0"),
    "integers": (one_layer(dtype=torch.int64), "type int64"),
    "one matrix": ({f"{KOHYA}.lora_down.weight": torch.ones(4, 16)}, "has no up beside down"),
    "only an alpha": ({f"{KOHYA}.alpha": torch.ones(1)}, "has alpha alone, and no matrices"),
    "many alphas": (LORA | {f"{KOHYA}.alpha": torch.ones(2)}, "has 2 numbers; an alpha is one"),
    "an infinite alpha": (LORA | {f"{KOHYA}.alpha": torch.tensor(torch.inf)}, "a number is expected"),
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
    half = {"unet": copy.deepcopy(parts["unet"]).half()}
    save_file({name: tensor * 1e6 for name, tensor in one_layer().items()}, tmp_path / "bad.safetensors")
    with pytest.raises(ModelError, match=r"too large for torch\.float16"):
        read(tmp_path / "bad.safetensors", half)


def test_a_small_file_that_would_take_much_memory_is_refused(parts, tmp_path):
    """A Kronecker product with 1 is of a whole layer's size, whatever rank its factor has in the file."""
    tensors = {}
    for name, module in layers_of(parts["unet"], "to_q", "to_v", "net.2"):
        layer, (num_outputs, num_inputs) = f"lora_unet_{name.replace('.', '_')}", module.weight.shape
        tensors[f"{layer}.lokr_w1"] = torch.ones(1, 1)
        tensors |= {f"{layer}.lokr_w2_a": torch.ones(num_outputs, 1), f"{layer}.lokr_w2_b": torch.ones(1, num_inputs)}
    save_file(tensors, tmp_path / "bad.safetensors")
    file_bytes = (tmp_path / "bad.safetensors").stat().st_size
    with pytest.raises(ModelError, match="bytes in memory, which are allowed at most"):
        read_lora(tmp_path / "bad.safetensors", parts, torch.float32, file_bytes)


def test_files_of_another_family_are_refused_both_ways(parts, xl_parts, tmp_path):
    save_kohya_lora(tmp_path / "sd.safetensors", parts, *ATTENTION)
    save_kohya_lora(tmp_path / "xl.safetensors", xl_parts, "to_q", "fc1")
    for name, others in (("sd", xl_parts), ("xl", parts)):
        with pytest.raises(ModelError, match="another family of models"):
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


def test_a_header_of_too_many_tensors_is_not_parsed(parts, tmp_path, monkeypatch):
    """Parsing 200,000 tensors took 4 s with the interpreter's lock, and 0.5 GB."""
    monkeypatch.setattr(safetensors.torch, "load", None)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"lora_unet_x{number}.alpha": empty for number in range(20_001)})
    for text in (header, header.replace('"data_offsets"', '"data\\u005foffsets"')):
        data = struct.pack("<Q", len(text)) + text.encode()
        (tmp_path / "bad.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match="has about 20001 tensors; allowed are 1 to 20000"):
            read(tmp_path / "bad.safetensors", parts)


def test_a_header_of_too_much_metadata_is_not_parsed(parts, tmp_path, monkeypatch):
    """Parsing a million entries took 3 s with the interpreter's lock."""
    monkeypatch.setattr(safetensors.torch, "load", None)
    text = json.dumps({"__metadata__": {str(number): "" for number in range(60_000)}})
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    with pytest.raises(ModelError, match="has about 120001 names and texts; at most 110000 are allowed"):
        read(tmp_path / "bad.safetensors", parts)


def test_metadata_with_many_brackets_is_read(parts, tmp_path):
    tags = json.dumps([{"tag": [number]} for number in range(15_000)])
    save_file(one_layer(), tmp_path / "good.safetensors", {"ss_tag_frequency": tags})
    assert read(tmp_path / "good.safetensors", parts).layers


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
    assert all(each.isfinite().all() for layer in found.layers["unet"].values() for each in layer.tensors.values())
