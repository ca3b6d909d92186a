"""Folders of families with a transformer: their bounds and defaults, and what makes one that is rejected."""

import json
import shutil

import pytest

import tiny_models
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.models.families import FAMILIES

SAVE = {
    "flux-dev": tiny_models.save_flux,
    "chroma": tiny_models.save_chroma,
    "sd3": tiny_models.save_stable_diffusion_3,
    "flux-2-klein": tiny_models.save_flux_2_klein,
    "flux-2-dev": tiny_models.save_flux_2_dev,
    "z-image": tiny_models.save_z_image,
    "qwen-image": tiny_models.save_qwen_image,
    "krea-2": tiny_models.save_krea2,
    "lumina-2": tiny_models.save_lumina2,
    "qwen-image-2.1": tiny_models.save_qwen_image_21,
    "sana": tiny_models.save_sana,
    "pixart-sigma": tiny_models.save_pixart_sigma,
}
SCHEDULER = "scheduler/scheduler_config.json"
# By family: the part of which config.json, or the file which, has other settings; and what the error says.
REJECTED = {
    "flux-dev": [
        ("transformer", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer", {"joint_attention_dim": 24}, "joint_attention_dim is 24; supported is 40"),
        ("transformer", {"pooled_projection_dim": 24}, "pooled_projection_dim is 24; supported is 32"),
        ("transformer", {"_class_name": "ZImageTransformer2DModel"}, "FluxTransformer2DModel"),
        ("text_encoder_2", {"vocab_size": 20}, "has 35 token ids, but the text encoder has 20 tokens"),
        ("tokenizer_2/tokenizer.json", {"model": {"vocab": {"a": 1}}}, "contains no vocabulary of T5"),
        (SCHEDULER, {"_class_name": "DDIMScheduler"}, "one of the flow family"),
        ("vae", {"latent_channels": 8}, "in_channels is 16; supported is 32"),
        ("model_index.json", {"text_encoder_2": ["x", "Y"]}, "T5EncoderModel"),
    ],
    "chroma": [
        ("transformer", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer", {"joint_attention_dim": 24}, "joint_attention_dim is 24; supported is 40"),
        ("transformer", {"attention_head_dim": 8}, "attention_head_dim is 8; supported is 16"),
        ("transformer", {"num_attention_heads": 4}, "x_embedder.weight is .32, 16., but config.json has"),
        ("transformer", {"approximator_num_channels": 16}, "in_proj.weight is .16, 8., but config.json"),
        ("transformer", {"_class_name": "FluxTransformer2DModel"}, "ChromaTransformer2DModel"),
        ("text_encoder", {"vocab_size": 20}, "has 35 token ids, but the text encoder has 20 tokens"),
        ("text_encoder", {"vocab_size": 99}, "shared.weight is .64, 40., but config.json has vocab_size"),
        ("tokenizer/tokenizer.json", {"model": {"vocab": {"a": 1}}}, "contains no vocabulary of T5"),
        (SCHEDULER, {"_class_name": "DDIMScheduler"}, "one of the flow family"),
        ("vae", {"latent_channels": 8}, "in_channels is 16; supported is 32"),
        ("model_index.json", {"text_encoder": ["transformers", "CLIPTextModel"]}, "supported: T5EncoderModel"),
        ("noria.json", {"default_scheduler": "flow-unipc"}, "flow-unipc; supported are flow-euler"),
    ],
    "flux-2-klein": [
        ("transformer", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer", {"joint_attention_dim": 24}, "joint_attention_dim is 24; supported is 48"),
        ("transformer", {"attention_head_dim": 8}, "attention_head_dim is 8; supported is 16"),
        ("transformer", {"num_attention_heads": 4}, "x_embedder.weight is .32, 16., but config.json has"),
        ("transformer", {"_class_name": "FluxTransformer2DModel"}, "Flux2Transformer2DModel"),
        ("text_encoder", {"num_hidden_layers": 20}, "num_hidden_layers is 20; at least 27 are needed"),
        ("text_encoder", {"model_type": "mistral3"}, "model_type"),
        ("text_encoder", {"vocab_size": 20}, "token ids up to 258, but the text encoder has 20"),
        (SCHEDULER, {"_class_name": "DDIMScheduler"}, "one of the flow family"),
        ("vae", {"latent_channels": 8}, "in_channels is 16; supported is 32"),
        ("vae", {"patch_size": [2, 3]}, "patch_size is 3; supported is 2"),
        ("model_index.json", {"is_distilled": "yes"}, "is_distilled"),
        ("model_index.json", {"_class_name": "Flux2Pipeline"}, "supported: PixtralProcessor"),
        ("model_index.json", {"_class_name": "Flux2KleinKVPipeline"}, "which no model family has"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "'AutoencoderKL'; supported: AutoencoderKLFlux2"),
    ],
    "flux-2-dev": [
        ("transformer", {"guidance_embeds": False}, "guidance_embeds is false"),
        ("text_encoder", {"model_type": "qwen3"}, "model_type is 'qwen3'; supported: mistral3"),
        ("text_encoder", {"text_config": {"hidden_size": 16, "vocab_size": 264}}, "num_hidden_layers"),
        (
            "text_encoder",
            {"text_config": tiny_models.FLUX_2_TEXT | {"num_hidden_layers": 20}},
            "num_hidden_layers is 20; at least 30 are needed",
        ),
    ],
    "z-image": [
        ("transformer", {"siglip_feat_dim": 16}, "siglip_feat_dim is 16: Z-Image-Omni"),
        ("transformer", {"cap_feat_dim": 16}, "cap_feat_dim is 16; supported is 24, hidden_size of"),
        ("transformer", {"in_channels": 16}, "in_channels is 16; supported is 4, latent_channels of"),
        ("transformer", {"axes_lens": [512, 8, 8]}, r"axes_lens is .*; the first must be at least 514"),
        ("transformer", {"all_patch_size": [2, 4], "all_f_patch_size": [1, 1]}, r"all_patch_size \(2, 4\).*supported"),
        ("text_encoder", {"vocab_size": 258}, "token ids up to 258, but the text encoder has 258"),
        ("text_encoder", {"max_position_embeddings": 256}, "max_position_embeddings is 256; allowed is ≥ 512"),
        (SCHEDULER, {"stochastic_sampling": True}, "stochastic_sampling"),
        (SCHEDULER, {"_class_name": "EulerDiscreteScheduler"}, "EulerDiscreteScheduler"),
        ("model_index.json", {"text_encoder": ["transformers", "T5Model"]}, "'T5Model'; supported: Qwen3Model"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderTiny"]}, "'AutoencoderTiny'; supported: AutoencoderKL"),
        ("text_encoder", {"auto_map": {"AutoModel": "x.Y"}}, "chooses code"),
        ("text_encoder", {"model_type": "llama"}, "model_type"),
        ("text_encoder", {"vocab_size": 300}, "embed_tokens.weight is .264, 24., but config.json has vocab"),
        ("tokenizer/tokenizer_config.json", {"auto_map": {"AutoTokenizer": "x.Y"}}, "chooses code"),
        ("transformer", {"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ("noria.json", {"guidance_rescale": 0.7}, "guidance_rescale"),
        ("noria.json", {"default_scheduler": "flow-heun"}, "default_scheduler is flow-heun; supported are flow-euler"),
    ],
    "qwen-image": [
        ("transformer", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer", {"out_channels": 8}, "out_channels is 8; supported is 4"),
        ("transformer", {"patch_size": 1}, "patch_size is 1; supported is 2"),
        ("transformer", {"joint_attention_dim": 32}, "joint_attention_dim is 32; supported is 24"),
        ("transformer", {"axes_dims_rope": [4, 4, 4]}, "axes_dims_rope is 12; supported is 16"),
        ("transformer", {"num_attention_heads": 4}, r"txt_in.weight is \[32, 24\], but config.json has num"),
        ("transformer", {"zero_cond_t": True}, "zero_cond_t is true: Qwen-Image-Edit"),
        ("transformer", {"use_layer3d_rope": True}, "use_layer3d_rope is true: Qwen-Image-Layered"),
        ("transformer", {"guidance_embeds": True}, "guidance_embeds is true"),
        ("transformer", {"_class_name": "FluxTransformer2DModel"}, "QwenImageTransformer2DModel"),
        ("transformer", {"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ("text_encoder", {"model_type": "qwen3"}, "model_type is 'qwen3'; supported: qwen2_5_vl"),
        ("text_encoder", {"text_config": {"hidden_size": 24, "vocab_size": 9}}, "num_hidden_layers"),
        ("vae", {"dim_mult": [1, 2]}, "temperal_downsample has 2 entries; expected are 1"),
        ("vae", {"latents_std": [1.0]}, "latents_std has 1 entries; expected are 4"),
        ("vae", {"latents_std": [1.0, 1.0, 0.0, 1.0]}, "latents_std has a zero"),
        ("vae", {"base_dim": 16}, r"decoder.conv_in.weight is \[16, 4, 3, 3, 3\], but config.json has"),
        ("vae", {"input_channels": 4}, "input_channels"),
        (SCHEDULER, {"stochastic_sampling": True}, "stochastic_sampling"),
        (SCHEDULER, {"_class_name": "UniPCMultistepScheduler"}, "UniPCMultistepScheduler"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "supported: AutoencoderKLQwenImage"),
        (
            "model_index.json",
            {"_class_name": "QwenImageEditPipeline"},
            "'QwenImageEditPipeline', which no model family",
        ),
        ("noria.json", {"default_scheduler": "flow-heun"}, "default_scheduler is flow-heun; supported are flow-euler"),
    ],
    "krea-2": [
        ("transformer", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer", {"text_hidden_dim": 32}, "text_hidden_dim is 32; supported is 24"),
        ("transformer", {"num_text_layers": 3}, "num_text_layers is 3; supported is 2"),
        ("transformer", {"axes_dims_rope": [4, 4, 4]}, "axes_dims_rope is 12; supported is 16"),
        ("transformer", {"num_attention_heads": 4}, r"txt_in.linear_1.weight is \[32, 24\], but config"),
        ("text_encoder", {"model_type": "qwen3"}, "model_type is 'qwen3'; supported: qwen3_vl"),
        ("model_index.json", {"text_encoder_select_layers": [1, 3]}, "has 3; allowed are 0 to 2"),
        ("model_index.json", {"text_encoder_select_layers": [-1, 2]}, "text_encoder_select_layers"),
        ("model_index.json", {"patch_size": 1}, "patch_size"),
    ],
    "lumina-2": [
        ("transformer", {"patch_size": 1}, "patch_size is 1; supported is 2"),
        ("transformer", {"in_channels": 8}, "in_channels is 8; supported is 4"),
        ("transformer", {"out_channels": 8}, "out_channels is 8; supported is 4"),
        ("transformer", {"cap_feat_dim": 32}, "cap_feat_dim is 32; supported is 24"),
        ("transformer", {"axes_dim_rope": [4, 4, 4]}, "axes_dim_rope is 12; supported is 16"),
        ("transformer", {"axes_lens": [256, 4, 4]}, "the first must be above 256"),
        ("transformer", {"hidden_size": 33}, r"caption_embedder.1.weight is \[32, 24\], but config.json"),
        ("text_encoder", {"model_type": "gemma"}, "model_type"),
        ("text_encoder", {"vocab_size": 9}, "token ids up to 35, but the text encoder has 9 tokens"),
        ("vae", {"block_out_channels": [8, 8, 16]}, "its downscaling is 4; supported is 8"),
        (SCHEDULER, {"stochastic_sampling": True}, "stochastic_sampling"),
        ("model_index.json", {"text_encoder": ["transformers", "LlamaModel"]}, "supported: Gemma2Model"),
    ],
    "qwen-image-2.1": [
        ("transformer", {"in_channels": 24}, "in_channels is 24; supported is 4"),
        ("transformer", {"out_channels": 8}, "out_channels is 8; supported is 4"),
        ("transformer", {"patch_size": 2}, "patch_size is 2; supported is 1"),
        ("transformer", {"context_in_dim": 32}, "context_in_dim is 32; supported is 24"),
        ("transformer", {"num_attention_heads": 4}, r"txt_in.in_layer.weight is \[32, 24\], but"),
        ("transformer", {"causal_condition": False}, "causal_condition"),
        ("text_encoder", {"model_type": "qwen2_5_vl"}, "supported: qwen3_vl"),
        ("vae", {"in_channels": 3}, "in_channels"),
        ("vae", {"patch_size": 2}, "patch_size"),
        ("vae", {"decoder_base_dim": None, "base_dim": 16}, "decoder.conv_in.weight is"),
        (
            "vae",
            {"dim_mult": [1, 1, 2, 2], "temperal_downsample": [False, True, True]},
            "pixels per latent is 8; supported is 16",
        ),
        ("model_index.json", {"sample_sigmas": []}, "sample_sigmas"),
        ("model_index.json", {"sample_sigmas": [2.0]}, "sample_sigmas"),
        ("model_index.json", {"processor": ["transformers", "Qwen2VLProcessor"]}, "supported: Qwen3VLProcessor"),
        ("processor/tokenizer_config.json", {"auto_map": {"AutoTokenizer": "a.B"}}, "auto_map"),
    ],
    "sana": [
        ("transformer", {"in_channels": 8}, "in_channels is 8; supported is 4"),
        ("transformer", {"out_channels": 6}, "out_channels is 6; supported is 4"),
        ("transformer", {"caption_channels": 32}, "caption_channels is 32; supported is 24"),
        ("transformer", {"cross_attention_dim": 24}, "cross_attention_dim is 24; supported is 32"),
        ("transformer", {"guidance_embeds": True}, "guidance_embeds"),
        ("text_encoder", {"vocab_size": 9}, "token ids up to 35, but the text encoder has 9 tokens"),
        ("vae", {"latent_channels": 8}, "in_channels is 4; supported is 8"),
        (SCHEDULER, {"use_dynamic_shifting": True}, "use_dynamic_shifting is true"),
        (SCHEDULER, {"prediction_type": "epsilon"}, "one of the flow family"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "supported: AutoencoderDC"),
        ("model_index.json", {"_class_name": "SanaSprintPipeline"}, "'SanaSprintPipeline', which no model"),
    ],
    "pixart-sigma": [
        ("transformer", {"in_channels": 8}, "in_channels is 8; supported is 4"),
        ("transformer", {"out_channels": 6}, "out_channels is 6; supported is 4"),
        ("transformer", {"caption_channels": None}, "caption_channels is 0; supported is 40"),
        ("transformer", {"use_additional_conditions": True}, "as PixArt-α's does"),
        ("transformer", {"use_additional_conditions": None, "sample_size": 128}, "as PixArt-α's does"),
        (
            "transformer",
            {"attention_head_dim": 8, "cross_attention_dim": 16},
            r"pos_embed.proj.weight is \[32, 4, 2, 2\], but config.json has num_attention_heads",
        ),
        (SCHEDULER, {"clip_sample": True}, "clip_sample is true"),
        (SCHEDULER, tiny_models.FLOW_SCHEDULER, "a scheduler of the flow family"),
        ("model_index.json", {"_class_name": "PixArtAlphaPipeline"}, "'PixArtAlphaPipeline', which no"),
    ],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, by its name; made when first asked for."""

    class Folders(dict):
        def __missing__(self, name):
            return self.setdefault(name, SAVE[name](tmp_path_factory.mktemp("folders") / name))

    return Folders()


def changed(folder, copy, file, change):
    """A copy of a folder with other settings in one file."""
    shutil.copytree(folder, copy)
    path = copy / (file if file.endswith(".json") else f"{file}/config.json")
    tree = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(tree | change))
    return copy


@pytest.mark.parametrize(
    ("name", "file", "change", "words"), [(name, *row) for name, rows in REJECTED.items() for row in rows]
)
def test_a_folder_that_is_not_supported_is_rejected(folders, tmp_path, name, file, change, words):
    copy = changed(folders[name], tmp_path / "m", file, change)
    with pytest.raises(ModelError, match=words):
        open_model(str(copy))


def test_a_vocabulary_beyond_the_text_encoder_that_reads_images_is_rejected(tmp_path):
    folder = tiny_models.save_qwen_image(tmp_path, text_encoder={"vocab_size": 258})
    with pytest.raises(ModelError, match="token ids up to 258, but the text encoder has 258"):
        open_model(str(folder))


@pytest.mark.parametrize(("name", "found"), [("euler", "flow-euler"), ("flow-unipc", "flow-unipc"), ("flow-lcm", None)])
def test_the_default_scheduler_is_one_of_those_supported(folders, tmp_path, name, found):
    folder = changed(folders["flux-dev"], tmp_path / "m", "noria.json", {"default_scheduler": name})
    if found is None:
        with pytest.raises(ModelError, match="default_scheduler is flow-lcm; supported are flow-euler, flow-unipc"):
            open_model(str(folder))
    else:
        assert open_model(str(folder)).default_scheduler == found


EULER, PACKED = ("flow-euler",), ("flow-euler", "flow-unipc", "flow-dpm++2m")
UNIPC, SD3 = PACKED[:2], ("flow-euler", "flow-heun", "flow-unipc", "flow-dpm++2m")


@pytest.mark.parametrize(
    ("name", "changes", "family", "pipeline", "sides", "schedulers", "steps", "guidance"),
    [
        ("flux-dev", {}, "flux", "FluxPipeline", (512, 16, 1024, 8), PACKED, 28, 3.5),
        (
            "flux-dev",
            {"transformer": {"guidance_embeds": False}, "scheduler": {"use_dynamic_shifting": False}},
            "flux",
            "FluxPipeline",
            (512, 16, 1024, 8),
            UNIPC,
            4,
            0.0,
        ),
        ("sd3", {}, "stable-diffusion-3", "StableDiffusion3Pipeline", (32, 16, 64, 8), SD3, 28, 7.0),
        (
            "sd3",
            {"scheduler": {"use_dynamic_shifting": True}},
            "stable-diffusion-3",
            "StableDiffusion3Pipeline",
            (32, 16, 64, 8),
            PACKED,
            28,
            7.0,
        ),
        ("chroma", {}, "chroma", "ChromaPipeline", (512, 16, 1024, 8), EULER, 35, 5.0),
        ("flux-2-klein", {}, "flux-2-klein", "Flux2KleinPipeline", (512, 16, 1024, 8), PACKED, 50, 4.0),
        ("flux-2-dev", {}, "flux-2-dev", "Flux2Pipeline", (512, 16, 1024, 8), PACKED, 50, 4.0),
        ("z-image", {}, "z-image", "ZImagePipeline", (64, 32, 64, 8), EULER, 9, 0.0),
        ("z-image", {"scheduler": {"shift": 6.0}}, "z-image", "ZImagePipeline", (64, 32, 64, 8), EULER, 50, 5.0),
        ("qwen-image", {}, "qwen-image", "QwenImagePipeline", (512, 32, 1024, 8), UNIPC, 50, 4.0),
        ("krea-2", {}, "krea-2", "Krea2Pipeline", (512, 32, 1024, 8), UNIPC, 28, 4.5),
        ("lumina-2", {}, "lumina-2", "Lumina2Pipeline", (64, 64, 64, 16), UNIPC, 30, 4.0),
        ("qwen-image-2.1", {}, "qwen-image-2-1", "QwenImage21Pipeline", (1024, 64, 2048, 32), UNIPC, 40, 1.0),
    ],
)
def test_bounds_and_defaults(folders, tmp_path, name, changes, family, pipeline, sides, schedulers, steps, guidance):
    spec = open_model(str(SAVE[name](tmp_path, **changes) if changes else folders[name]))
    assert (spec.family, spec.pipeline) == (family, pipeline)
    found = spec.default_width_px, spec.default_height_px, spec.min_side_px, spec.max_side_px, spec.multiple_px
    assert found == (sides[0], *sides)
    assert (spec.schedulers, spec.default_scheduler) == (schedulers, "flow-euler")
    assert (spec.default_steps, spec.default_guidance) == (steps, guidance)


@pytest.mark.parametrize("name", ["z-image", "qwen-image", "krea-2", "lumina-2"])
def test_families_whose_numbers_are_too_large_for_float16_have_bfloat16_on_gpus(folders, name):
    assert FAMILIES[open_model(str(folders[name])).family].gpu_dtype == "bfloat16"
