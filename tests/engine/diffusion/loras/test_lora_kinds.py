"""Adapters of all kinds by row: as merged into the weights, and as LyCORIS and peft compute them."""

import copy
import itertools

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file

from lycoris_files import kinds_of, merged_weight, random_adapter
from noria.engine.diffusion.loras.lora_cache import NO_ADAPTERS, Adapter, Adapters
from noria.engine.diffusion.loras.lora_rows import LoraRows
from noria.models.diffusion.loras.lora_file import read_lora

STRENGTHS = (0.5, 1.0, 1.5)
TOLERANCE = 1e-5  # relative to the largest value: the rounding of float32
LAYERS = {
    "linear": torch.nn.Linear(24, 40),
    "linear without bias": torch.nn.Linear(24, 40, bias=False),
    "conv": torch.nn.Conv2d(12, 20, 3, stride=2, padding=1),
}
CASES = [(name, kind) for name, module in LAYERS.items() for kind in kinds_of(module)]


def read(tensors, part, tmp_path, layer="lora_unet_x"):
    """Return the adapters of a request for a file with these matrices of a layer, by strength."""
    save_file({f"{layer}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    weights = read_lora(tmp_path / "a.safetensors", {"unet": part}, torch.float32, 2**24)
    digest = str(tmp_path / "-".join(sorted(tensors)))
    return {strength: Adapters((Adapter(digest, weights, strength),)) for strength in STRENGTHS}


def inputs_for(module, num_rows):
    generator = torch.Generator().manual_seed(7)
    if isinstance(module, torch.nn.Conv2d):
        return torch.randn(num_rows, module.in_channels, 9, 7, generator=generator)
    return torch.randn(num_rows, 3, module.in_features, generator=generator)


def apply(module, weight, inputs):
    """Return the layer's output with another weight, in float64."""
    given = copy.deepcopy(module).double()
    given.weight.data = weight
    return given(inputs.double())


def assert_close(ours, theirs, tolerance=TOLERANCE):
    assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_each_row_is_as_with_merged_weights_beside_other_adapters_and_none(name, kind, tmp_path):
    module = copy.deepcopy(LAYERS[name])  # which keeps the hooks
    part, generator = torch.nn.ModuleDict({"x": module}), torch.Generator().manual_seed(1)
    tensors, plain = (random_adapter(each, module, generator) for each in (kind, "LoRA"))
    own, other = (
        read(each, part, tmp_path / str(n))
        for n, each in enumerate((tensors, plain))
        if not ((tmp_path / str(n)).mkdir())
    )
    rows = [own[0.5], NO_ADAPTERS, own[1.0], other[1.0], own[1.5], NO_ADAPTERS, own[0.5]]
    inputs = inputs_for(module, len(rows))
    bare = module(inputs)
    with LoraRows("unet", part).applied(rows):
        ours = module(inputs)
    for row, strength in ((0, 0.5), (2, 1.0), (4, 1.5), (6, 0.5)):
        merged = merged_weight(kind, tensors, module.weight, strength)
        assert_close(ours[row], apply(LAYERS[name], merged, inputs[row]))
    assert_close(ours[3], apply(LAYERS[name], merged_weight("LoRA", plain, module.weight, 1.0), inputs[3]))
    for row in (1, 5):
        assert torch.equal(ours[row], bare[row])


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_kinds_are_applied_in_the_precision_of_the_model(name, kind, tmp_path):
    module = copy.deepcopy(LAYERS[name])
    tensors = random_adapter(kind, module, torch.Generator().manual_seed(1))
    own = read(tensors, torch.nn.ModuleDict({"x": module.bfloat16()}), tmp_path)
    inputs = inputs_for(module, 2).bfloat16()
    with LoraRows("unet", torch.nn.ModuleDict({"x": module})).applied([own[0.5]] * 2):
        ours = module(inputs)
    assert ours.dtype == torch.bfloat16
    merged = merged_weight(kind, tensors, module.weight, 0.5)
    assert_close(ours, apply(LAYERS[name], merged, inputs), 0.03)  # a few roundings to 8 bits


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (name, kinds)
        for name in ("linear", "conv")
        for kinds in itertools.combinations(
            ("LoRA", "DoRA", "DoRA along the inputs", "LoKr", "DoRA of LoKr along the inputs"), 2
        )
    ],
)
def test_what_two_adapters_of_a_row_change_is_added(name, kinds, tmp_path):
    module = copy.deepcopy(LAYERS[name])  # which keeps the hooks
    part, generator = torch.nn.ModuleDict({"x": module}), torch.Generator().manual_seed(2)
    expected, adapters = module.weight.double(), []
    for number, (kind, strength) in enumerate(zip(kinds, (0.5, 1.5), strict=True)):
        tensors = random_adapter(kind, module, generator)
        (tmp_path / str(number)).mkdir()
        adapters += read(tensors, part, tmp_path / str(number))[strength]
        expected = expected + merged_weight(kind, tensors, module.weight, strength) - module.weight
    inputs = inputs_for(module, 1)
    with LoraRows("unet", part).applied([Adapters(tuple(adapters))]):
        ours = module(inputs)
    assert_close(ours, apply(LAYERS[name], expected, inputs))


@torch.no_grad()
@pytest.mark.parametrize("strength", STRENGTHS)
def test_biases_and_norms_are_those_that_a_file_has(strength, tmp_path):
    part = torch.nn.ModuleDict(
        {
            "x": torch.nn.Linear(8, 6),
            "n": torch.nn.LayerNorm(8),
            "g": torch.nn.GroupNorm(2, 8),
            "r": torch.nn.RMSNorm(8),
        }
    )
    for parameter in part.parameters():
        parameter.copy_(torch.randn_like(parameter))
    tensors = {
        "x.lora_A.weight": torch.randn(2, 8), "x.lora_B.weight": torch.randn(6, 2), "x.lora_B.bias": torch.randn(6),
        "x.alpha": torch.tensor(4.0), "x.diff_b": torch.randn(6),
        "n.w_norm": torch.randn(8), "n.b_norm": torch.randn(8), "g.diff": torch.randn(8), "g.diff_b": torch.randn(8),
        "r.scale.diff": torch.randn(8),
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    weights = read_lora(tmp_path / "a.safetensors", {"unet": part}, torch.float32, 2**20)
    merged = copy.deepcopy(part).double()
    change = 2.0 * tensors["x.lora_B.weight"] @ tensors["x.lora_A.weight"]
    merged["x"].weight += strength * change
    merged["x"].bias += strength * (2.0 * tensors["x.lora_B.bias"] + tensors["x.diff_b"])
    for name, (weight, bias) in {"n": ("w_norm", "b_norm"), "g": ("diff", "diff_b")}.items():
        merged[name].weight += strength * tensors[f"{name}.{weight}"]
        merged[name].bias += strength * tensors[f"{name}.{bias}"]
    merged["r"].weight += strength * tensors["r.scale.diff"]
    rows = [NO_ADAPTERS, Adapters((Adapter("a", weights, strength),)), NO_ADAPTERS]
    for name, module in part.items():
        inputs = torch.randn(3, 8, 5) if name == "g" else torch.randn(3, 5, 8)
        bare = module(inputs)
        with LoraRows("unet", part).applied(rows):
            ours = module(inputs)
        assert_close(ours[1], merged[name](inputs.double())[1])
        assert torch.equal(ours[0], bare[0]) and torch.equal(ours[2], bare[2])


@torch.no_grad()
@pytest.mark.parametrize("kind", [kind for kind in kinds_of(torch.nn.Linear(16, 48)) if kind != "LoHa of a large rank"])
def test_joined_layers_of_a_file_are_cut_exactly(kind, tmp_path):
    """Also where a block of a Kronecker product crosses from one layer to the next: of 12 outputs in layers of 16."""
    parts = {
        "transformer": FluxTransformer2DModel(
            num_layers=1, num_single_layers=0, attention_head_dim=4, num_attention_heads=4, in_channels=4,
            joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2),
        )
    }  # fmt: skip
    attention = parts["transformer"].transformer_blocks[0].attn
    modules = [attention.to_q, attention.to_k, attention.to_v]
    joined = torch.nn.Linear(16, 48)
    joined.weight.data = torch.cat([module.weight for module in modules])
    tensors = random_adapter(kind, joined, torch.Generator().manual_seed(4))
    if kind == "LoKr":
        tensors |= {"lokr_w1": torch.randn(4, 4), "lokr_w2": torch.randn(12, 4)}
    named = {f"lora_unet_double_blocks_0_img_attn_qkv.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, tmp_path / "a.safetensors")
    weights = read_lora(tmp_path / "a.safetensors", parts, torch.float32, 2**24)
    inputs = torch.randn(2, 3, 16)
    with LoraRows("transformer", parts["transformer"]).applied([Adapters((Adapter("a", weights, 0.5),))] * 2):
        ours = torch.cat([module(inputs) for module in modules], dim=-1)
    merged = merged_weight(kind, tensors, joined.weight, 0.5)
    joined.bias.data = torch.cat([module.bias for module in modules])
    assert_close(ours, apply(joined, merged, inputs))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["DoRA", "DoRA along the inputs", "DoRA of peft"])
def test_dora_of_a_quantized_layer_has_the_norms_of_its_weights(kind, tmp_path):
    """In blocks of 32 of 8 bits, each with a scale: GGUF's Q8_0."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: the extra 'quantized' has it.")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    values = torch.randint(-127, 128, (8, 32), dtype=torch.int8)
    scales = torch.tensor([2.0**-power for power in range(5, 13)]).half()[:, None]  # exact products in float16
    dense = torch.nn.Linear(32, 8)
    dense.weight.data = scales.float() * values.float()
    packed = torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], dim=1)
    quantized = GGUFLinear(32, 8, bias=True, compute_dtype=torch.float32)
    quantized.weight = GGUFParameter(packed, quant_type=gguf.GGMLQuantizationType.Q8_0)
    quantized.bias = torch.nn.Parameter(dense.bias.clone())
    tensors = random_adapter(kind, dense, torch.Generator().manual_seed(6))
    own = read(tensors, torch.nn.ModuleDict({"x": quantized.requires_grad_(requires_grad=False)}), tmp_path)
    inputs = inputs_for(dense, 2)
    with LoraRows("unet", torch.nn.ModuleDict({"x": quantized})).applied([own[0.5]] * 2):
        ours = quantized(inputs)
    assert_close(ours, apply(dense, merged_weight(kind, tensors, dense.weight, 0.5), inputs))


@torch.no_grad()
@pytest.mark.parametrize("layer", ["linear", "conv"])
@pytest.mark.parametrize("strength", STRENGTHS)
def test_pefts_dora_is_as_in_peft(layer, strength, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed; the formulas above are tested without it.")
    module = copy.deepcopy(LAYERS[layer])
    part = torch.nn.ModuleDict({"x": module})
    config = peft.LoraConfig(r=4, lora_alpha=2, use_dora=True, target_modules=["x"], init_lora_weights=False)
    theirs = peft.inject_adapter_in_model(config, copy.deepcopy(part)).eval()["x"]
    (magnitude,) = theirs.lora_magnitude_vector.parameters()
    magnitude.mul_(1.3)
    tensors = {
        "lora_A.weight": theirs.lora_A["default"].weight,
        "lora_B.weight": theirs.lora_B["default"].weight,
        "alpha": torch.tensor(2.0),
        "lora_magnitude_vector": magnitude,
    }
    own = read({name: each.detach() for name, each in tensors.items()}, part, tmp_path, "unet.x")
    theirs.set_scale("default", strength)
    inputs = inputs_for(module, 2)
    with LoraRows("unet", part).applied([own[strength]] * 2):
        assert_close(module(inputs), theirs(inputs).double())


LYCORIS = {
    "LoCon": ("locon", "LoConModule", {}),
    "LoCon in Tucker form": ("locon", "LoConModule", {"use_tucker": True}),
    "DoRA": ("locon", "LoConModule", {"weight_decompose": True, "wd_on_out": True}),
    "DoRA along the inputs": ("locon", "LoConModule", {"weight_decompose": True, "wd_on_out": False}),
    "LoHa": ("loha", "LohaModule", {}),
    "LoHa in Tucker form": ("loha", "LohaModule", {"use_tucker": True}),
    "DoRA of LoHa": ("loha", "LohaModule", {"weight_decompose": True, "wd_on_out": True}),
    "LoKr": ("lokr", "LokrModule", {"factor": 4}),
    "LoKr of its own factor": ("lokr", "LokrModule", {"factor": -1}),
    "LoKr in Tucker form": ("lokr", "LokrModule", {"factor": 2, "use_tucker": True}),
    "LoKr of low ranks": ("lokr", "LokrModule", {"factor": 4, "decompose_both": True}),
    "LoKr of whole factors": ("lokr", "LokrModule", {"factor": 4, "full_matrix": True}),
    "DoRA of LoKr": ("lokr", "LokrModule", {"factor": 4, "weight_decompose": True, "wd_on_out": True}),
}


@torch.no_grad()
@pytest.mark.parametrize("layer", ["linear", "conv"])
@pytest.mark.parametrize("kind", LYCORIS)
def test_lycoris_kinds_are_as_its_own_forward(kind, layer, tmp_path):
    """At strength 1 with DoRA, of which LyCORIS, ComfyUI and peft mean other things at others."""
    pytest.importorskip("lycoris", reason="lycoris-lora is not installed; the formulas above are tested without it.")
    name, class_name, options = LYCORIS[kind]
    lycoris_class = getattr(__import__(f"lycoris.modules.{name}", fromlist=[class_name]), class_name)
    module = copy.deepcopy(LAYERS[layer])
    theirs = lycoris_class("x", module, 1.0, 2, 1, **options)
    theirs.org_forward = module.forward
    generator = torch.Generator().manual_seed(3)
    for parameter_name, parameter in theirs.named_parameters():
        if "org" not in parameter_name and "dora" not in parameter_name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if "weight_decompose" in options:
        theirs.dora_scale.mul_(1.3)
    part = torch.nn.ModuleDict({"x": module})
    own = read({name: tensor.detach() for name, tensor in theirs.custom_state_dict().items()}, part, tmp_path)
    inputs = inputs_for(module, 2)
    for strength in (1.0,) if "weight_decompose" in options else STRENGTHS:
        theirs.multiplier = strength
        with LoraRows("unet", part).applied([own[strength]] * 2):
            ours = module(inputs)
        assert_close(ours, theirs.forward(inputs).double())
