"""Model folders with few random weights, whose parts have the structure of published models."""

import json
import math
import pathlib
import shutil
import string
from typing import Any

from noria.models.location import BUNDLED

_TEXT: dict[str, Any] = {
    "vocab_size": 176,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_VAE: dict[str, Any] = {
    "block_out_channels": (16, 16, 16),
    "norm_num_groups": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "latent_channels": 4,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "set_alpha_to_one": False,
}
_XL_SCHEDULER: dict[str, Any] = {
    **{key: value for key, value in SCHEDULER.items() if not key.startswith(("skip", "set"))},
    "_class_name": "EulerDiscreteScheduler",
    "timestep_spacing": "leading",
}
_DYNAMIC_SHIFT: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}


INPAINTING_UNET = {"in_channels": 9}


def save_stable_diffusion(
    folder: pathlib.Path, *, unet: dict[str, Any] | None = None, pipeline: str = "StableDiffusionPipeline"
) -> pathlib.Path:
    """Write a folder of the class `pipeline`; `unet` are settings of its UNet. Return the folder."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    parts = {
        "text_encoder": CLIPTextModel(CLIPTextConfig(**_TEXT)),
        "unet": UNet2DConditionModel(**_UNET | (unet or {})),
        "vae": AutoencoderKL(**_VAE),
    }
    _save(folder, pipeline, parts, SCHEDULER, requires_safety_checker=False)
    return folder


_XL_TEXT: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "projection_dim": 40}


def save_stable_diffusion_xl(
    folder: pathlib.Path,
    *,
    unet: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    pipeline: str = "StableDiffusionXLPipeline",
    **index: object,
) -> pathlib.Path:
    """Write a folder of the class `pipeline` with changed settings of parts and of model_index.json. Return it."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(1)
    second = CLIPTextConfig(**_TEXT | _XL_TEXT)
    xl: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
        "cross_attention_dim": 32 + 48,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 40 + 6 * 8,
    }
    parts = {
        "text_encoder": CLIPTextModel(CLIPTextConfig(**_TEXT)),
        "text_encoder_2": CLIPTextModelWithProjection(second),
        "unet": UNet2DConditionModel(**_UNET | xl | (unet or {})),
        "vae": AutoencoderKL(**_VAE | (vae or {})),
    }
    _save(folder, pipeline, parts, _XL_SCHEDULER | (scheduler or {}), **index)
    return folder


def save_xl_refiner(
    folder: pathlib.Path,
    *,
    unet: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    seed: int = 6,
    **index: object,
) -> pathlib.Path:
    """Write a refiner, as that of Stable Diffusion XL, with changed settings. Return the folder."""
    import torch
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    of_refiner: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "use_linear_projection": True,
        "cross_attention_dim": 48,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 40 + 5 * 8,
    }
    parts = {
        "text_encoder_2": CLIPTextModelWithProjection(CLIPTextConfig(**_TEXT | _XL_TEXT)),
        "unet": UNet2DConditionModel(**_UNET | of_refiner | (unet or {})),
    }
    for part in parts.values():
        randomise(part)
    settings: dict[str, Any] = {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    absent = {name: [None, None] for name in ("text_encoder", "tokenizer")}
    index = settings | absent | index
    _save(folder, "StableDiffusionXLImg2ImgPipeline", parts, _XL_SCHEDULER | (scheduler or {}), **index)
    return folder


def save_controlnet(folder: pathlib.Path, model: pathlib.Path, *, seed: int = 4, **settings: Any) -> pathlib.Path:
    """Write a ControlNet for the UNet of a model folder of this module, with changed settings. Return `folder`."""
    import torch
    from diffusers import ControlNetModel, UNet2DConditionModel

    torch.manual_seed(seed)
    of_model = ControlNetModel.from_unet(
        UNet2DConditionModel.from_pretrained(model / "unet"),
        conditioning_embedding_out_channels=(8, 12, 16),
        load_weights_from_unet=False,
    )
    part = ControlNetModel.from_config({**of_model.config, **settings})
    randomise(part)
    part.save_pretrained(folder)
    return folder


Z_IMAGE_TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 512,
}
Z_IMAGE_TRANSFORMER: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 24,
    "axes_dims": [4, 4, 8],
    "axes_lens": [544, 8, 8],  # images of up to 64 px
}
FLOW_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}

DPM_SCHEDULER: dict[str, Any] = {
    "_class_name": "DPMSolverMultistepScheduler",
    "algorithm_type": "dpmsolver++",
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "lambda_min_clipped": -math.inf,
    "num_train_timesteps": 1000,
}
FLOW_DPM_SCHEDULER = DPM_SCHEDULER | {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}


def save_z_image(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    **index: object,
) -> pathlib.Path:
    """Write a ZImagePipeline with changed settings of parts and of model_index.json. Return the folder."""
    import torch
    from diffusers import AutoencoderKL, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(2)
    parts = {
        "text_encoder": Qwen3Model(Qwen3Config(**Z_IMAGE_TEXT | (text_encoder or {}))),
        "transformer": ZImageTransformer2DModel(**Z_IMAGE_TRANSFORMER | (transformer or {})),
        "vae": AutoencoderKL(**_VAE, shift_factor=0.1, scaling_factor=0.5),
    }
    for part in parts.values():
        randomise(part)
    _save(folder, "ZImagePipeline", parts, FLOW_SCHEDULER | (scheduler or {}), **index)
    return folder


_QWEN_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [0.8, 1.2, 1.0, 0.9],
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 24,
    "fullatt_block_indexes": [0],
}
_QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1100,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
}


def save_qwen_image(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Write a QwenImagePipeline with changed settings of parts. Return the folder."""
    import torch
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (4, 4, 8),
    }
    text = Qwen2_5_VLConfig(text_config=_QWEN_TEXT | (text_encoder or {}), vision_config=_QWEN_VISION)
    parts = {
        "text_encoder": Qwen2_5_VLForConditionalGeneration(text),
        "transformer": QwenImageTransformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKLQwenImage(**_QWEN_VAE | (vae or {})),
    }
    for part in parts.values():
        randomise(part)
    shifted = _DYNAMIC_SHIFT | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    _save(folder, "QwenImagePipeline", parts, FLOW_SCHEDULER | shifted | (scheduler or {}))
    return folder


def save_krea2(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    **index: object,
) -> pathlib.Path:
    """Write a Krea2Pipeline with changed settings of parts and of model_index.json. Return the folder."""
    import torch
    from diffusers import AutoencoderKLQwenImage, Krea2Transformer2DModel
    from transformers import Qwen3VLConfig, Qwen3VLModel

    torch.manual_seed(6)
    sizes: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "timestep_embed_dim": 16,
        "text_hidden_dim": 24,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 32,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 4, 8),
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24}
    text = Qwen3VLConfig(
        text_config=_QWEN_TEXT | {"head_dim": 12} | (text_encoder or {}),
        vision_config=vision | {"deepstack_visual_indexes": [0]},
    )
    parts = {
        "text_encoder": Qwen3VLModel(text),
        "transformer": Krea2Transformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKLQwenImage(**_QWEN_VAE),
    }
    for part in parts.values():
        randomise(part)
    index = {"text_encoder_select_layers": [1, 2], "is_distilled": False, "patch_size": 2} | index
    shifted = _DYNAMIC_SHIFT | {"shift": 1.0, "max_image_seq_len": 6400}
    _save(folder, "Krea2Pipeline", parts, FLOW_SCHEDULER | shifted | (scheduler or {}), **index)
    return folder


_GEMMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
}


def save_lumina2(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Write a Lumina2Pipeline with changed settings of parts. Return the folder."""
    import torch
    from diffusers import AutoencoderKL, Lumina2Transformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "hidden_size": 32,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 16,
        "axes_dim_rope": (4, 4, 8),
        "axes_lens": (300, 4, 4),  # images of up to 64 px
        "cap_feat_dim": 24,
    }
    levels = {
        "block_out_channels": (8, 8, 8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "scaling_factor": 0.5,
        "shift_factor": 0.1,
    }
    parts = {
        "text_encoder": Gemma2Model(Gemma2Config(**_GEMMA | (text_encoder or {}))),
        "transformer": Lumina2Transformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKL(**_VAE | levels | (vae or {})),
    }
    for part in parts.values():
        randomise(part)
    _save(folder, "Lumina2Pipeline", parts, FLOW_SCHEDULER | {"shift": 6.0} | (scheduler or {}))
    return folder


def save_sana(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Write a SanaPipeline with changed settings of parts. Return the folder."""
    import torch
    from diffusers import AutoencoderDC, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(8)
    sizes: dict[str, Any] = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 24,
    }
    levels: dict[str, Any] = {
        "latent_channels": 4,
        "attention_head_dim": 4,
        "scaling_factor": 0.41,
        **{f"{coder}_block_out_channels": (8, 8, 16) for coder in ("encoder", "decoder")},
        **{f"{coder}_layers_per_block": (1, 1, 1) for coder in ("encoder", "decoder")},
        **{f"{coder}_qkv_multiscales": ((), (), (5,)) for coder in ("encoder", "decoder")},
        **{f"{coder}_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock") for coder in ("encoder", "decoder")},
    }
    parts = {
        "text_encoder": Gemma2Model(Gemma2Config(**_GEMMA | (text_encoder or {}))),
        "transformer": SanaTransformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderDC(**levels),
    }
    for part in parts.values():
        randomise(part)
    _save(folder, "SanaPipeline", parts, FLOW_DPM_SCHEDULER | (scheduler or {}))
    return folder


def save_pixart_sigma(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Write a PixArtSigmaPipeline with changed settings of parts. Return the folder."""
    import torch
    from diffusers import AutoencoderKL, PixArtTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(9)
    sizes: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 40,
        "interpolation_scale": 2,
        "use_additional_conditions": False,
    }
    parts = {
        "text_encoder": T5EncoderModel(T5Config(vocab_size=64, d_model=40, d_kv=8, d_ff=64, num_layers=2, num_heads=4)),
        "transformer": PixArtTransformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKL(**_VAE | {"scaling_factor": 0.5} | (vae or {})),
    }
    for part in parts.values():
        randomise(part)
    _save(folder, "PixArtSigmaPipeline", parts, DPM_SCHEDULER | (scheduler or {}))
    return folder


def _save_gemma_tokenizer(folder: pathlib.Path) -> None:
    from transformers import GemmaTokenizer

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.ascii_lowercase, ".", "-", "<", ">"]
    vocabulary = {word: number for number, word in enumerate(words)}
    GemmaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True).save_pretrained(folder)


def save_flux_2_klein(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    text_encoder: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    **index: object,
) -> pathlib.Path:
    """Write a Flux2KleinPipeline with changed settings of parts and of model_index.json. Return the folder."""
    import torch
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(4)
    sizes: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 3 * 16,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
        "guidance_embeds": False,
    }
    text = Z_IMAGE_TEXT | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 30, "head_dim": 8}
    parts = {
        "text_encoder": Qwen3ForCausalLM(Qwen3Config(**text | (text_encoder or {}))),
        "transformer": Flux2Transformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKLFlux2(**_VAE | (vae or {})),
    }
    for part in parts.values():
        randomise(part)
    parts["vae"].bn.running_mean.normal_(std=0.3)
    parts["vae"].bn.running_var.uniform_(0.5, 2.0)
    _save(folder, "Flux2KleinPipeline", parts, FLOW_SCHEDULER | _DYNAMIC_SHIFT | (scheduler or {}), **index)
    return folder


def randomise(part: Any) -> None:
    """Give every parameter random values, so that no block is the identity or zero, as some are at first."""
    import torch

    with torch.no_grad():
        for name, parameter in part.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            else:
                torch.nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=0.1)


# What Qwen3's own template makes of one message.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


_OF_QWEN = (
    "ZImagePipeline",
    "QwenImagePipeline",
    "Krea2Pipeline",
    "Flux2KleinPipeline",
)  # with text encoders of Qwen


def _save_byte_tokenizer(folder: pathlib.Path) -> None:
    """Write a tokenizer as Qwen's, whose words are bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


FILL_TRANSFORMER = {"in_channels": 2 * 16 + 4 * 4**2, "out_channels": 16}


def save_flux(
    folder: pathlib.Path,
    *,
    transformer: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    pipeline: str = "FluxPipeline",
) -> pathlib.Path:
    """Write a folder of the class `pipeline` with changed settings of parts. Return the folder."""
    import torch
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 40,
        "pooled_projection_dim": 32,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    }
    t5 = T5Config(vocab_size=64, d_model=40, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    parts = {
        "text_encoder": CLIPTextModel(CLIPTextConfig(**_TEXT)),
        "text_encoder_2": T5EncoderModel(t5),
        "transformer": FluxTransformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKL(**_VAE | {"scaling_factor": 0.36, "shift_factor": 0.12}),
    }
    randomise(parts["transformer"])
    _save(folder, pipeline, parts, FLOW_SCHEDULER | _DYNAMIC_SHIFT | (scheduler or {}))
    return folder


def save_chroma(
    folder: pathlib.Path, *, transformer: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None
) -> pathlib.Path:
    """Write a ChromaPipeline with changed settings of parts. Return the folder."""
    import torch
    from diffusers import AutoencoderKL, ChromaTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 40,
        "axes_dims_rope": (4, 4, 8),
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    }
    parts = {
        "text_encoder": T5EncoderModel(T5Config(vocab_size=64, d_model=40, d_kv=8, d_ff=64, num_layers=2, num_heads=4)),
        "transformer": ChromaTransformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKL(**_VAE | {"scaling_factor": 0.36, "shift_factor": 0.12}),
    }
    randomise(parts["transformer"])
    _save(folder, "ChromaPipeline", parts, FLOW_SCHEDULER | _DYNAMIC_SHIFT | (scheduler or {}))
    return folder


def save_stable_diffusion_3(
    folder: pathlib.Path, *, transformer: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None
) -> pathlib.Path:
    """Write a StableDiffusion3Pipeline with changed settings of parts. Return the folder."""
    import torch
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(3)
    second = CLIPTextConfig(**_TEXT | {"hidden_size": 48, "num_hidden_layers": 3, "projection_dim": 24})
    sizes: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 96,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 20 + 24,
        "pos_embed_max_size": 12,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    t5 = T5Config(vocab_size=64, d_model=96, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    parts = {
        "text_encoder": CLIPTextModelWithProjection(CLIPTextConfig(**_TEXT | {"projection_dim": 20})),
        "text_encoder_2": CLIPTextModelWithProjection(second),
        "text_encoder_3": T5EncoderModel(t5),
        "transformer": SD3Transformer2DModel(**sizes | (transformer or {})),
        "vae": AutoencoderKL(**_VAE | {"latent_channels": 16, "scaling_factor": 1.5, "shift_factor": 0.06}),
    }
    randomise(parts["transformer"])
    _save(folder, "StableDiffusion3Pipeline", parts, FLOW_SCHEDULER | (scheduler or {}))
    return folder


def _save_t5_tokenizer(folder: pathlib.Path) -> None:
    from transformers import T5Tokenizer

    letters = [(letter, -3.0) for letter in string.ascii_lowercase]
    words = [(f"▁{word}", -2.0) for word in ("", "a", "red", "blue", "circle", "square")]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *words, *letters]
    T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512).save_pretrained(folder)


def _save(
    folder: pathlib.Path, pipeline: str, parts: dict[str, Any], scheduler: dict[str, Any], **index: object
) -> None:
    import torch

    for name, part in parts.items():
        for parameter in part.parameters():  # some blocks start with zeros, whose output would be the same for all
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.02)
        part.save_pretrained(folder / name)
        index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
        if pipeline in _OF_QWEN and name == "text_encoder":
            _save_byte_tokenizer(folder / "tokenizer")
            index["tokenizer"] = ["transformers", "Qwen2Tokenizer"]
        elif type(part).__name__ == "Gemma2Model":
            _save_gemma_tokenizer(folder / "tokenizer")
            index["tokenizer"] = ["transformers", "GemmaTokenizer"]
        elif name.startswith("text_encoder"):
            tokenizer = name.replace("text_encoder", "tokenizer")
            is_t5 = type(part).__name__ == "T5EncoderModel"
            if is_t5:
                _save_t5_tokenizer(folder / tokenizer)
            else:
                shutil.copytree(BUNDLED / "tokenizer", folder / tokenizer)
            index[tokenizer] = ["transformers", "T5TokenizerFast" if is_t5 else "CLIPTokenizer"]
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index |= {"scheduler": ["diffusers", scheduler["_class_name"]]}
    index |= {"_class_name": pipeline, "_diffusers_version": "0.42.1"}
    if pipeline not in (*_OF_QWEN, "Lumina2Pipeline", "SanaPipeline", "PixArtSigmaPipeline"):
        is_first = pipeline in ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
        unused = "safety_checker" if is_first else "image_encoder"
        index |= {unused: [None, None], "feature_extractor": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
