"""Folders of Qwen-Image, Krea 2 and Lumina 2 that are damaged, or whose parts do not fit together."""

import json
import shutil

import pytest

import tiny_models
from noria.errors import ModelError
from noria.models.catalog import open_model


@pytest.fixture(scope="module")
def krea2_folder(tmp_path_factory):
    """A folder like Krea 2."""
    return tiny_models.save_krea2(tmp_path_factory.mktemp("krea2"))


@pytest.fixture(scope="module")
def lumina2_folder(tmp_path_factory):
    """A folder like Lumina 2."""
    return tiny_models.save_lumina2(tmp_path_factory.mktemp("lumina2"))


def assert_rejected(folder, copy, file, change, words):
    """Open a copy of a folder with changed settings in one file."""
    shutil.copytree(folder, copy)
    tree = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    (copy / file).write_text(json.dumps(tree | change))
    with pytest.raises(ModelError, match=words):
        open_model(str(copy))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer/config.json", {"out_channels": 8}, "out_channels is 8; supported is 4"),
        ("transformer/config.json", {"patch_size": 1}, "patch_size is 1; supported is 2"),
        ("transformer/config.json", {"joint_attention_dim": 32}, "joint_attention_dim is 32; supported is 24"),
        ("transformer/config.json", {"axes_dims_rope": [4, 4, 4]}, "axes_dims_rope is 12; supported is 16"),
        (
            "transformer/config.json",
            {"num_attention_heads": 4},
            r"txt_in.weight is \[32, 24\], but config.json has num",
        ),
        ("transformer/config.json", {"zero_cond_t": True}, "zero_cond_t is true: Qwen-Image-Edit"),
        ("transformer/config.json", {"use_layer3d_rope": True}, "use_layer3d_rope is true: Qwen-Image-Layered"),
        ("transformer/config.json", {"guidance_embeds": True}, "guidance_embeds is true"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "QwenImageTransformer2DModel"),
        ("transformer/config.json", {"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ("text_encoder/config.json", {"model_type": "qwen3"}, "model_type is 'qwen3'; supported: qwen2_5_vl"),
        ("text_encoder/config.json", {"text_config": {"hidden_size": 24, "vocab_size": 9}}, "num_hidden_layers"),
        ("vae/config.json", {"dim_mult": [1, 2]}, "temperal_downsample has 2 entries; expected are 1"),
        ("vae/config.json", {"latents_std": [1.0]}, "latents_std has 1 entries; expected are 4"),
        ("vae/config.json", {"latents_std": [1.0, 1.0, 0.0, 1.0]}, "latents_std has a zero"),
        ("vae/config.json", {"base_dim": 16}, r"decoder.conv_in.weight is \[16, 4, 3, 3, 3\], but config.json has"),
        ("vae/config.json", {"input_channels": 4}, "input_channels"),
        ("scheduler/scheduler_config.json", {"stochastic_sampling": True}, "stochastic_sampling"),
        ("scheduler/scheduler_config.json", {"_class_name": "UniPCMultistepScheduler"}, "UniPCMultistepScheduler"),
        ("model_index.json", {"vae": ["diffusers", "AutoencoderKL"]}, "supported: AutoencoderKLQwenImage"),
        (
            "model_index.json",
            {"_class_name": "QwenImageEditPipeline"},
            "'QwenImageEditPipeline', which no model family",
        ),
        ("noria.json", {"default_scheduler": "flow-heun"}, "default_scheduler is flow-heun; supported are flow-euler"),
    ],
)
def test_a_folder_of_qwen_image_that_is_not_supported_is_rejected(
    tiny_qwen_image_folder, tmp_path, file, change, words
):
    assert_rejected(tiny_qwen_image_folder, tmp_path / "m", file, change, words)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"in_channels": 24}, "in_channels is 24; supported is 16"),
        ("transformer/config.json", {"text_hidden_dim": 32}, "text_hidden_dim is 32; supported is 24"),
        ("transformer/config.json", {"num_text_layers": 3}, "num_text_layers is 3; supported is 2"),
        ("transformer/config.json", {"axes_dims_rope": [4, 4, 4]}, "axes_dims_rope is 12; supported is 16"),
        ("transformer/config.json", {"num_attention_heads": 4}, r"txt_in.linear_1.weight is \[32, 24\], but config"),
        ("text_encoder/config.json", {"model_type": "qwen3"}, "model_type is 'qwen3'; supported: qwen3_vl"),
        ("model_index.json", {"text_encoder_select_layers": [1, 3]}, "has 3; allowed are 0 to 2"),
        ("model_index.json", {"text_encoder_select_layers": [-1, 2]}, "text_encoder_select_layers"),
        ("model_index.json", {"patch_size": 1}, "patch_size"),
    ],
)
def test_a_folder_of_krea_2_that_is_not_supported_is_rejected(krea2_folder, tmp_path, file, change, words):
    assert_rejected(krea2_folder, tmp_path / "m", file, change, words)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("transformer/config.json", {"patch_size": 1}, "patch_size is 1; supported is 2"),
        ("transformer/config.json", {"in_channels": 8}, "in_channels is 8; supported is 4"),
        ("transformer/config.json", {"out_channels": 8}, "out_channels is 8; supported is 4"),
        ("transformer/config.json", {"cap_feat_dim": 32}, "cap_feat_dim is 32; supported is 24"),
        ("transformer/config.json", {"axes_dim_rope": [4, 4, 4]}, "axes_dim_rope is 12; supported is 16"),
        ("transformer/config.json", {"axes_lens": [256, 4, 4]}, "the first must be above 256"),
        ("transformer/config.json", {"hidden_size": 33}, r"caption_embedder.1.weight is \[32, 24\], but config.json"),
        ("text_encoder/config.json", {"model_type": "gemma"}, "model_type"),
        ("text_encoder/config.json", {"vocab_size": 9}, "token ids up to 35, but the text encoder has 9 tokens"),
        ("vae/config.json", {"block_out_channels": [8, 8, 16]}, "its downscaling is 4; supported is 8"),
        ("scheduler/scheduler_config.json", {"stochastic_sampling": True}, "stochastic_sampling"),
        ("model_index.json", {"text_encoder": ["transformers", "LlamaModel"]}, "supported: Gemma2Model"),
    ],
)
def test_a_folder_of_lumina_2_that_is_not_supported_is_rejected(lumina2_folder, tmp_path, file, change, words):
    assert_rejected(lumina2_folder, tmp_path / "m", file, change, words)


def test_a_vocabulary_beyond_the_text_encoder_is_rejected(tmp_path):
    folder = tiny_models.save_qwen_image(tmp_path, text_encoder={"vocab_size": 258})
    with pytest.raises(ModelError, match="token ids up to 258, but the text encoder has 258"):
        open_model(str(folder))
