"""The same adapter by the names of several programs: each file is read as the plain one is."""

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import save_file

import tiny_models
from noria.errors import ModelError
from noria.models.diffusion.loras.lora_file import read_lora

ATTENTION = "transformer_blocks.0.attn"
BLOCK = f"{ATTENTION}.to_q"
ADDED = "add_q_proj add_k_proj add_v_proj"
XL_LAYER = "unet.down_blocks.1.attentions.0.transformer_blocks.1.attn1.to_q"
UNET = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
KOHYA_UNET = "lora_unet_" + UNET.replace(".", "_")
FLUX_QKV = "lora_unet_double_blocks_0_img_attn_qkv"
CLIP = "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn."
SAVERS = {
    "unet": (tiny_models.save_stable_diffusion, "UNet2DConditionModel"),
    "xl": (tiny_models.save_stable_diffusion_xl, "UNet2DConditionModel"),
    "sd3": (tiny_models.save_stable_diffusion_3, "SD3Transformer2DModel"),
    "chroma": (tiny_models.save_chroma, "ChromaTransformer2DModel"),
    "lumina": (tiny_models.save_lumina2, "Lumina2Transformer2DModel"),
    "flux": (tiny_models.save_flux, "FluxTransformer2DModel"),
    "qwen": (tiny_models.save_qwen_image, "QwenImageTransformer2DModel"),
    "z-image": (tiny_models.save_z_image, "ZImageTransformer2DModel"),
    "krea": (tiny_models.save_krea2, "Krea2Transformer2DModel"),
    "klein": (tiny_models.save_flux_2_klein, "Flux2Transformer2DModel"),
}
WITH_ENCODERS = ("unet", "xl", "flux", "sd3")


@pytest.fixture(scope="module")
def parts_of(tmp_path_factory):
    made = {}

    def of(model):
        if model not in made:
            save, class_name = SAVERS[model]
            folder, part = save(tmp_path_factory.mktemp(model)), "transformer" if "Trans" in class_name else "unet"
            made[model] = {part: getattr(diffusers, class_name).from_pretrained(folder / part)}
            encoders = diffusers.DiffusionPipeline.load_config(folder) if model in WITH_ENCODERS else {}
            for name in sorted(name for name in encoders if name.startswith("text_encoder")):
                encoder_class = getattr(transformers, encoders[name][1])
                made[model][name] = encoder_class.from_pretrained(folder / name)
        return made[model]

    return of


def matrices(outputs, inputs=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, inputs, generator=generator), torch.randn(outputs, 4, generator=generator)


def peft(layer, pair, adapter=""):
    return {f"{layer}.lora_A.{adapter}weight": pair[0], f"{layer}.lora_B.{adapter}weight": pair[1]}


def kohya(layer, pair, alpha=None):
    alphas = {} if alpha is None else {f"{layer}.alpha": alpha}
    return {f"{layer}.lora_down.weight": pair[0], f"{layer}.lora_up.weight": pair[1]} | alphas


PAIR, THREE = matrices(32), matrices(96)
QKV = {}
for index, letter in enumerate("qkv"):
    QKV |= peft(
        f"transformer.transformer_blocks.0.attn.to_{letter}", (THREE[0], THREE[1][32 * index : 32 * index + 32])
    )
Z_QKV = {name.replace("transformer_blocks.0.attn", "layers.0.attention"): tensor for name, tensor in QKV.items()}
WIDE = matrices(85)
PLAIN_BLOCK = peft(f"transformer.{BLOCK}", PAIR)
SMALL = matrices(16, 16)
PLAIN_UNET = peft(f"unet.{UNET}", SMALL)
PLAIN_Z = peft("transformer.layers.0.attention.to_q", PAIR)
ZERO_CLIP = {}
for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
    ZERO_CLIP |= kohya(CLIP + name, (PAIR[0], torch.zeros(32, 4)), torch.tensor(4.0))
FOUR = torch.tensor(4.0)
CASES = {
    "an alpha of int64": ("unet", kohya(KOHYA_UNET, SMALL, torch.tensor(4)), PLAIN_UNET),
    "an alpha of int32 in a list": ("unet", kohya(KOHYA_UNET, SMALL, torch.tensor([4], dtype=torch.int32)), PLAIN_UNET),
    "an alpha of uint8": ("unet", kohya(KOHYA_UNET, SMALL, torch.tensor(4, dtype=torch.uint8)), PLAIN_UNET),
    "an alpha of float64": ("unet", kohya(KOHYA_UNET, SMALL, FOUR.double()), PLAIN_UNET),
    "matrices of float64": ("unet", kohya(KOHYA_UNET, [each.double() for each in SMALL]), PLAIN_UNET),
    "an alpha beside diffusers' names": ("unet", PLAIN_UNET | {f"unet.{UNET}.alpha": FOUR}, PLAIN_UNET),
    "a biases' zeros": ("unet", kohya(KOHYA_UNET, SMALL) | {f"{KOHYA_UNET}.diff_b": torch.zeros(16)}, PLAIN_UNET),
    "peft's wrapper around a UNet": ("unet", peft(f"base_model.model.{UNET}", SMALL), PLAIN_UNET),
    "peft's wrapper behind the part": ("unet", peft(f"unet.base_model.model.{UNET}", SMALL), PLAIN_UNET),
    "the adapter's name": ("unet", peft(f"unet.{UNET}", SMALL, "default."), PLAIN_UNET),
    "another adapter's name": ("unet", peft(f"unet.{UNET}", SMALL, "style_1."), PLAIN_UNET),
    "torch's wrappers": ("unet", peft(f"module._orig_mod.unet.{UNET}", SMALL), PLAIN_UNET),
    "OneTrainer": ("flux", kohya("lora_transformer_" + BLOCK.replace(".", "_"), PAIR, FOUR), PLAIN_BLOCK),
    "XLabs": (
        "flux",
        {f"double_blocks.0.processor.qkv_lora1.{('down', 'up')[k]}.weight": THREE[k] for k in (0, 1)},
        QKV,
    ),
    "ComfyUI with a text encoder of zeros": (
        "flux", kohya("diffusion_model.double_blocks.0.img_attn.qkv", THREE, FOUR) | ZERO_CLIP, QKV
    ),
    "zeros of biases": ("flux", kohya(FLUX_QKV, THREE, FOUR) | {f"{FLUX_QKV}.diff_b": torch.zeros(96)}, QKV),
    "Qwen without the part": ("qwen", peft(BLOCK, PAIR, "default."), PLAIN_BLOCK),
    "Qwen in ComfyUI": ("qwen", peft(f"diffusion_model.{BLOCK}", PAIR, "default."), PLAIN_BLOCK),
    "Z-Image without the part": ("z-image", peft("layers.0.attention.to_q", PAIR, "default."), PLAIN_Z),
    "Krea by its author's names": ("krea", peft("base_model.model.blocks.0.attn.wq", PAIR), PLAIN_BLOCK),
    "Krea in ComfyUI": ("krea", kohya("diffusion_model.blocks.0.attn.wq", PAIR, FOUR.double()), PLAIN_BLOCK),
    "Z-Image in ComfyUI with joined layers": (
        "z-image",
        peft("diffusion_model.layers.0.attention.qkv", THREE) | peft("diffusion_model.layers.0.feed_forward.w1", WIDE),
        Z_QKV | peft("transformer.layers.0.feed_forward.w1", WIDE),
    ),
    "the part before kohya's endings": ("flux", kohya(f"transformer.{BLOCK}", PAIR, FOUR), PLAIN_BLOCK),
    "a UNet before kohya's endings": ("unet", kohya(f"unet.{UNET}", SMALL, FOUR), PLAIN_UNET),
    "LyCORIS": ("flux", kohya("lycoris_" + BLOCK.replace(".", "_"), PAIR, FOUR), PLAIN_BLOCK),
    "kohya of diffusers' modules": ("klein", kohya("lora_unet_" + BLOCK.replace(".", "_"), PAIR, FOUR), PLAIN_BLOCK),
    "kohya of a compiled UNet": (
        "unet", kohya(KOHYA_UNET.replace("unet_", "unet__orig_mod_"), SMALL, FOUR), PLAIN_UNET
    ),
    "an adapter's name with a hyphen": ("unet", peft(f"unet.{UNET}", SMALL, "my-style."), PLAIN_UNET),
    "a pipeline's part": ("qwen", peft(f"pipe.dit.{BLOCK}", PAIR, "default."), PLAIN_BLOCK),
    "ComfyUI with a checkpoint's start": ("flux", peft(f"model.diffusion_model.{BLOCK}", PAIR), PLAIN_BLOCK),
    "diffusers' old processors without the part": (
        "unet",
        {UNET.replace("to_q", f"processor.to_q_lora.{('down', 'up')[k]}.weight"): SMALL[k] for k in (0, 1)},
        PLAIN_UNET,
    ),
    "klein in peft": ("klein", peft(f"base_model.model.{BLOCK}", PAIR), PLAIN_BLOCK),
}  # fmt: skip


def read(tensors, parts, tmp_path):
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    return read_lora(tmp_path / "a.safetensors", parts, torch.float32, 2**24).layers


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_read_as_the_plain_one(case, parts_of, tmp_path):
    model, tensors, plain = CASES[case]
    got, expected = (read(each, parts_of(model), tmp_path) for each in (tensors, plain))
    assert {part: set(layers) for part, layers in got.items()} == {part: set(each) for part, each in expected.items()}
    for part, layers in expected.items():
        for name, layer in layers.items():
            torch.testing.assert_close(got[part][name].up @ got[part][name].down, layer.up @ layer.down)


ENDINGS = {
    "kohya": ("lora_down", "lora_up"),
    "peft": ("lora_A", "lora_B"),
    "raw peft": ("lora_A.default", "lora_B.default"),
}
ENDINGS["processor"] = ("down", "up")
QKV_MLP = "attn.to_q attn.to_k attn.to_v proj_mlp"
ENCODER = "text_model.encoder.layers.0.self_attn.q_proj"
CLIP_LAYER = "text_encoders.clip_{}.transformer." + ENCODER
T5 = "encoder.block.0.layer.0.SelfAttention.q"
QWEN_MLP = "transformer_blocks.1.img_mlp.net.0.proj"
SGM = "input_blocks.3.1.transformer_blocks.1.attn1.to_q"
LAYOUTS = {
    # Stable Diffusion
    "kohya": ("unet", "kohya", KOHYA_UNET, f"unet.{UNET}"),
    "kohya's SGM names": ("xl", "kohya", "lora_unet_" + SGM.replace(".", "_"), XL_LAYER),
    "ComfyUI's SGM names": ("xl", "kohya", f"diffusion_model.{SGM}", XL_LAYER),
    "ComfyUI's CLIP": ("xl", "kohya", CLIP_LAYER.format("l"), f"text_encoder.{ENCODER}"),
    "ComfyUI's OpenCLIP": ("xl", "kohya", CLIP_LAYER.format("g"), f"text_encoder_2.{ENCODER}"),
    "kohya's OpenCLIP": ("xl", "kohya", "lora_te2_" + ENCODER.replace(".", "_"), f"text_encoder_2.{ENCODER}"),
    "kohya's projection": ("xl", "kohya", "lora_te2_text_projection", "text_encoder_2.text_projection"),
    "SimpleTuner": ("unet", "kohya", "lycoris_" + UNET.replace(".", "_"), f"unet.{UNET}"),
    "no part": ("unet", "peft", UNET, f"unet.{UNET}"),
    "diffusers' old text encoder": (
        "unet",
        "processor",
        f"text_encoder.{ENCODER.replace('q_proj', 'to_q_lora')}",
        f"text_encoder.{ENCODER}",
    ),
    "diffusers' old processors": (
        "unet",
        "processor",
        f"unet.{UNET.replace('to_q', 'processor.to_out_lora')}",
        f"unet.{UNET.replace('to_q', 'to_out.0')}",
    ),
    # FLUX.1
    "kohya's CLIP": ("flux", "kohya", "lora_te1_" + ENCODER.replace(".", "_"), f"text_encoder.{ENCODER}"),
    "kohya's modulation": (
        "flux", "kohya", "lora_unet_single_blocks_1_modulation_lin",
        "transformer.single_transformer_blocks.1.norm.linear",
    ),
    "kohya's T5": ("flux", "kohya", "lora_te3_" + T5.replace(".", "_"), f"text_encoder_2.{T5}"),
    "OneTrainer's T5": ("flux", "kohya", "lora_te2_" + T5.replace(".", "_"), f"text_encoder_2.{T5}"),
    "ComfyUI's T5": ("flux", "kohya", f"text_encoders.t5xxl.transformer.{T5}", f"text_encoder_2.{T5}"),
    "kohya's single blocks": (
        "flux", "kohya", "lora_unet_single_blocks_0_linear1", f"transformer.single_transformer_blocks.0. {QKV_MLP}"
    ),
    "OneTrainer's feed-forward": (
        "flux",
        "kohya",
        "lora_transformer_single_transformer_blocks_0_proj_mlp",
        "transformer.single_transformer_blocks.0.proj_mlp",
    ),
    "OneTrainer's original names": (
        "flux", "peft", "double_blocks.0.txt_mlp.2", "transformer.transformer_blocks.0.ff_context.net.2"
    ),
    "USO": (
        "flux",
        "processor",
        "single_blocks.0.processor.qkv_lora",
        "transformer.single_transformer_blocks.0.attn. to_q to_k to_v",
    ),
    "XLabs": ("flux", "processor", "double_blocks.0.processor.qkv_lora2", f"transformer.{ATTENTION}. {ADDED}"),
    "peft with BFL's names": (
        "flux", "peft", "base_model.model.double_blocks.0.img_attn.proj", f"transformer.{ATTENTION}.to_out.0"
    ),
    "peft's adapter name": ("flux", "raw peft", f"transformer.{BLOCK}", f"transformer.{BLOCK}"),
    "DiffSynth": ("flux", "raw peft", "blocks.0.attn.a_to_q", f"transformer.{BLOCK}"),
    "DiffSynth's single blocks": (
        "flux", "raw peft", "single_blocks.0.to_qkv_mlp", f"transformer.single_transformer_blocks.0. {QKV_MLP}"
    ),
    "ComfyUI's last layer": ("flux", "kohya", "diffusion_model.final_layer.linear", "transformer.proj_out"),
    "Chroma's guidance": (
        "chroma",
        "kohya",
        "lora_unet_distilled_guidance_layer_layers_0_in_layer",
        "transformer.distilled_guidance_layer.layers.0.linear_1",
    ),
    "Chroma's first guidance layer": (
        "chroma",
        "kohya",
        "lora_unet_distilled_guidance_layer_in_proj",
        "transformer.distilled_guidance_layer.in_proj",
    ),
    # FLUX.2
    "FLUX.2 in peft": (
        "klein", "peft", "base_model.model.double_blocks.0.img_attn.qkv", f"transformer.{ATTENTION}. to_q to_k to_v"
    ),
    "FLUX.2 bare": ("klein", "raw peft", BLOCK, f"transformer.{BLOCK}"),
    # Qwen-Image
    "Qwen in peft": ("qwen", "peft", f"base_model.model.{BLOCK}", f"transformer.{BLOCK}"),
    "Qwen of OneTrainer": ("qwen", "kohya", "lora_transformer_" + BLOCK.replace(".", "_"), f"transformer.{BLOCK}"),
    "Qwen of musubi": ("qwen", "kohya", "lora_unet_" + QWEN_MLP.replace(".", "_"), f"transformer.{QWEN_MLP}"),
    "Qwen bare": ("qwen", "kohya", QWEN_MLP, f"transformer.{QWEN_MLP}"),
    # Z-Image
    "Z-Image of kohya": (
        "z-image", "kohya", "lora_unet_layers_0_attention_qkv", "transformer.layers.0.attention. to_q to_k to_v"
    ),
    "Z-Image of ComfyUI": (
        "z-image", "kohya", "diffusion_model.layers.0.attention.out", "transformer.layers.0.attention.to_out.0"
    ),
    "Z-Image bare": ("z-image", "peft", "layers.0.attention.to_q", "transformer.layers.0.attention.to_q"),
    "Z-Image in peft": (
        "z-image", "peft", "base_model.model.layers.0.attention.to_q", "transformer.layers.0.attention.to_q"
    ),
    "Z-Image of OneTrainer": (
        "z-image", "kohya", "transformer.layers.0.attention.to_q", "transformer.layers.0.attention.to_q"
    ),
    # Stable Diffusion 3
    "SD3 of kohya": (
        "sd3", "kohya", "lora_unet_joint_blocks_0_x_block_attn_qkv", f"transformer.{ATTENTION}. to_q to_k to_v"
    ),
    "SD3 of ComfyUI": (
        "sd3", "peft", "diffusion_model.joint_blocks.0.context_block.attn.qkv", f"transformer.{ATTENTION}. {ADDED}"
    ),
    "SD3 in peft": ("sd3", "peft", f"base_model.model.{BLOCK}", f"transformer.{BLOCK}"),
    "SD3 of OneTrainer": ("sd3", "kohya", "lora_transformer_" + BLOCK.replace(".", "_"), f"transformer.{BLOCK}"),
    "SD3's T5": ("sd3", "kohya", "lora_te3_" + T5.replace(".", "_"), f"text_encoder_3.{T5}"),
    # Krea 2 and Lumina 2
    "Krea of musubi": ("krea", "kohya", "lora_unet_blocks_0_attn_wq", f"transformer.{BLOCK}"),
    "Lumina of kohya": (
        "lumina", "kohya", "lora_unet_layers_0_attention_qkv", "transformer.layers.0.attn. to_q to_k to_v"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layer_of_each_layout_is_that_of_the_model(case, parts_of, tmp_path):
    """Joined layers, `START. NAMES`, are apart in the model: the rows of the second matrix are theirs, in order."""
    model, form, layer, expected = LAYOUTS[case]
    start, *ends = expected.split()
    part_name, _, rest = start.partition(".")
    part = parts_of(model)[part_name]
    if part_name == "text_encoder" and not hasattr(part, "text_model"):
        rest = rest.removeprefix("text_model.")
    modules = {name: part.get_submodule(name) for name in ([rest + end for end in ends] or [rest])}
    sizes = [module.out_features for module in modules.values()]
    down, up = matrices(sum(sizes), next(iter(modules.values())).in_features)
    tensors = {f"{layer}.{ending}.weight": each for ending, each in zip(ENDINGS[form], (down, up), strict=True)}
    scale = 1.0
    if form == "kohya":
        tensors[f"{layer}.alpha"], scale = torch.tensor(2.0, dtype=torch.bfloat16), 0.5
    got = read(tensors, parts_of(model), tmp_path)
    assert {name: set(layers) for name, layers in got.items()} == {part_name: set(modules)}
    for name, rows in zip(modules, up.split(sizes), strict=True):
        torch.testing.assert_close(got[part_name][name].up @ got[part_name][name].down, scale * rows @ down)


@pytest.mark.parametrize(("model", "layer", "module"), [
    ("flux", "final_layer.adaLN_modulation.1", "norm_out.linear"),
    ("sd3", "joint_blocks.1.context_block.adaLN_modulation.1", "transformer_blocks.1.norm1_context.linear"),
])  # fmt: skip
def test_shift_and_scale_are_the_other_way_round_than_in_the_authors_layers(model, layer, module, parts_of, tmp_path):
    """Checkpoints have them so, too, which diffusers converts."""
    size = parts_of(model)["transformer"].get_submodule(module).out_features
    pair = matrices(size)
    got = read(peft(f"diffusion_model.{layer}", pair), parts_of(model), tmp_path)["transformer"][module]
    torch.testing.assert_close(got.up @ got.down, torch.cat([pair[1][size // 2 :], pair[1][: size // 2]]) @ pair[0])


def test_parts_of_a_joined_layer_can_have_matrices_of_their_own(parts_of, tmp_path):
    """Of other ranks, as by kohya's `split_qkv`."""
    pairs = [matrices(32, seed=number) for number in range(3)]
    tensors = {f"{FLUX_QKV}.alpha": torch.tensor(2.0)}
    for number, (down, up) in enumerate(pairs):
        tensors[f"{FLUX_QKV}.lora_down.{number}.weight"] = down[: number + 2]
        tensors[f"{FLUX_QKV}.lora_up.{number}.weight"] = up[:, : number + 2]
    got = read(tensors, parts_of("flux"), tmp_path)["transformer"]
    for number, (down, up) in enumerate(pairs):
        layer, rank = got[f"{ATTENTION}.to_{'qkv'[number]}"], number + 2
        assert layer.rank == rank
        torch.testing.assert_close(layer.up @ layer.down, up[:, :rank] @ down[:rank] * 2 / rank)


@pytest.mark.parametrize("ending", ["lora_magnitude_vector", "lora_magnitude_vector.weight", "magnitude"])
@pytest.mark.parametrize("adapter", ["", "default."])
def test_a_magnitude_has_the_names_of_several_programs(ending, adapter, parts_of, tmp_path):
    named = ending.replace("vector.", f"vector.{adapter}")
    tensors = peft(f"unet.{UNET}", SMALL, adapter) | {f"unet.{UNET}.{named}": torch.ones(16)}
    assert torch.equal(read(tensors, parts_of("unet"), tmp_path)["unet"][UNET].magnitude, torch.ones(16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_matrices_of_few_bits_are_read_as_they_are(dtype, parts_of, tmp_path):
    pair = [each.to(dtype) for each in SMALL]
    got = read(kohya(KOHYA_UNET, pair), parts_of("unet"), tmp_path)["unet"][UNET]
    assert torch.equal(got.down, pair[0].float()) and torch.equal(got.up, pair[1].float())


@pytest.mark.parametrize("layers", [["self_attn.q_proj"], ["self_attn.q_proj", "mlp.fc1"], ["mlp.fc1"]])
def test_any_layers_of_a_text_encoder_are_adapted(parts_of, tmp_path, layers):
    encoder = parts_of("unet")["text_encoder"]
    tensors = kohya(KOHYA_UNET, SMALL, FOUR)
    for layer in layers:
        module = next(each for name, each in encoder.named_modules() if name.endswith(f"layers.0.{layer}"))
        pair = matrices(module.out_features, module.in_features)
        tensors |= kohya(f"lora_te_text_model_encoder_layers_0_{layer.replace('.', '_')}", pair, FOUR)
    got = read(tensors, parts_of("unet"), tmp_path)
    assert {name.partition("layers.0.")[2] for name in got["text_encoder"]} == set(layers)


def test_a_text_encoder_beside_the_denoiser_is_adapted_as_well(parts_of, tmp_path):
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    clip = {}
    for name in names:
        clip |= kohya(CLIP + name, PAIR, FOUR)
    clip |= kohya(
        "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.k", (PAIR[0], torch.zeros(32, 4))
    )
    got = read(kohya("diffusion_model.double_blocks.0.img_attn.qkv", THREE, FOUR) | clip, parts_of("flux"), tmp_path)
    assert {name.rpartition(".")[2] for name in got["text_encoder"]} == set(names)
    assert set(got["transformer"]) == {f"transformer_blocks.0.attn.to_{letter}" for letter in "qkv"}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (peft(f"unet.{UNET}", SMALL, "a.") | peft(f"unet.{UNET}2", SMALL, "b."), "has several adapters: 'a', 'b'"),
        (peft(f"unet.{UNET}", SMALL) | peft(f"base_model.model.{UNET}", SMALL), "under two names"),
        (kohya(KOHYA_UNET, SMALL, torch.tensor(True)), "numbers of type bool"),
        (ZERO_CLIP, "changes nothing"),
        (kohya("text_encoders.qwen25_7b.transformer.a", SMALL), "trained without that text encoder"),
        (kohya("lora_te3_a", SMALL), "is of text_encoder_3, which no adapter can change here"),
    ],
)
def test_what_would_be_another_adapter_is_refused(tensors, words, parts_of, tmp_path):
    with pytest.raises(ModelError, match=words):
        read(tensors, parts_of("unet"), tmp_path)


@pytest.mark.parametrize(
    ("name", "matrix", "words"),
    [
        ("lora_unet_double_blocks_40_img_mlp_0.lora_down", torch.ones(4, 32), "no layer"),
        ("lora_te2_encoder_block_0_layer_0_SelfAttention_v.lora_down", torch.ones(4, 40), "has no up beside"),
        ("lora_te1_text_model_encoder_layers_1_mlp_fc1.lora_up", torch.ones(64, 4), "has no down beside"),
        ("lora_unet_single_blocks_0_linear2.lora_down", torch.ones(0, 160), "has no up beside"),
    ],
)
def test_half_a_layer_beside_a_whole_one_is_refused(name, matrix, words, parts_of, tmp_path):
    with pytest.raises(ModelError, match=words):
        read(kohya(FLUX_QKV, THREE) | {f"{name}.weight": matrix}, parts_of("flux"), tmp_path)
