"""Model folders with few random weights, whose parts have the structure of published models.

The keyword arguments of each `save_…` change settings: of a part or of the scheduler, as a dict by its name, or one of
model_index.json. It returns the folder.
"""

import json
import math
import pathlib
import shutil
import string
from collections.abc import Iterable, Mapping
from typing import Any

from ip_adapter_files import ENCODER, save_ip_adapter
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

INPAINTING_UNET = {"in_channels": 9}


def save_stable_diffusion(
    folder: pathlib.Path, *, pipeline: str = "StableDiffusionPipeline", **changes: Any
) -> pathlib.Path:
    """Write a folder of the class `pipeline`."""
    parts = {
        "text_encoder": ("CLIPTextModel", _TEXT),
        "unet": ("UNet2DConditionModel", _UNET),
        "vae": ("AutoencoderKL", _VAE),
    }
    changes = {"requires_safety_checker": False} | changes
    return _save(folder, pipeline, _make(0, parts, changes, randomised=()), SCHEDULER, changes)


_XL_TEXT = _TEXT | {"hidden_size": 48, "num_hidden_layers": 3, "projection_dim": 40}
_XL_UNET = _UNET | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
}


def save_stable_diffusion_xl(
    folder: pathlib.Path, *, pipeline: str = "StableDiffusionXLPipeline", **changes: Any
) -> pathlib.Path:
    """Write a folder of the class `pipeline`."""
    sizes = {
        "transformer_layers_per_block": (1, 2),
        "cross_attention_dim": 32 + 48,
        "projection_class_embeddings_input_dim": 40 + 6 * 8,
    }
    parts = {
        "text_encoder": ("CLIPTextModel", _TEXT),
        "text_encoder_2": ("CLIPTextModelWithProjection", _XL_TEXT),
        "unet": ("UNet2DConditionModel", _XL_UNET | sizes),
        "vae": ("AutoencoderKL", _VAE),
    }
    return _save(folder, pipeline, _make(1, parts, changes, randomised=()), _XL_SCHEDULER, changes)


def save_xl_refiner(folder: pathlib.Path, *, seed: int = 6, **changes: Any) -> pathlib.Path:
    """Write a refiner, as that of Stable Diffusion XL."""
    sizes = {"cross_attention_dim": 48, "projection_class_embeddings_input_dim": 40 + 5 * 8}
    parts = {
        "text_encoder_2": ("CLIPTextModelWithProjection", _XL_TEXT),
        "unet": ("UNet2DConditionModel", _XL_UNET | sizes),
    }
    settings: dict[str, Any] = {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    absent = {name: [None, None] for name in ("text_encoder", "tokenizer")}
    changes = settings | absent | changes
    return _save(folder, "StableDiffusionXLImg2ImgPipeline", _make(seed, parts, changes), _XL_SCHEDULER, changes)


def save_controlnet(folder: pathlib.Path, model: pathlib.Path, *, seed: int = 4, **settings: Any) -> pathlib.Path:
    """Write a ControlNet for the UNet of a model folder of this module; `settings` are its own."""
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


_QWEN3: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 512,
}


def save_ip_adapters(
    folder: pathlib.Path, model: pathlib.Path, kinds: Iterable[str] = ("plain", "plus", "full")
) -> pathlib.Path:
    """Write IP-Adapters for the denoiser of a model, called as their kinds, and their image encoder.

    That of FLUX.1 is the one of a whole CLIP, as users of its adapters have it.
    """
    import diffusers
    import torch
    import transformers

    torch.manual_seed(7)
    sizes = {"intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8}
    vision = {name: value for name, value in ENCODER.items() if name != "architectures"} | sizes
    encoder: Any
    if (model / "unet").exists():
        encoder = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**vision))
    else:
        width = vision["projection_dim"]
        config = transformers.CLIPConfig(vision_config=vision, text_config=_TEXT, projection_dim=width)
        encoder = transformers.CLIPModel(config)
    randomise(encoder)
    encoder.save_pretrained(folder / "image_encoder")
    if (model / "unet").exists():
        unet = diffusers.UNet2DConditionModel.from_pretrained(model / "unet")
        layers = [
            tuple(unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape)
            for name in unet.attn_processors
            if "attn2" in name
        ]
    else:
        sizes = diffusers.FluxTransformer2DModel.load_config(model / "transformer")
        width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
        layers = [(width, sizes["joint_attention_dim"])] * sizes["num_layers"]
    for seed, kind in enumerate(kinds):
        save_ip_adapter(folder / f"{kind}.safetensors", layers, kind=kind, seed=seed)
    return folder


def save_z_image(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a ZImagePipeline."""
    transformer = {
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
    parts = {
        "text_encoder": ("Qwen3Model", _QWEN3),
        "transformer": ("ZImageTransformer2DModel", transformer),
        "vae": ("AutoencoderKL", _VAE | {"shift_factor": 0.1, "scaling_factor": 0.5}),
    }
    return _save(folder, "ZImagePipeline", _make(2, parts, changes), FLOW_SCHEDULER, changes)


_QWEN_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [0.8, 1.2, 1.0, 0.9],
}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24}
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


def save_qwen_image(folder: pathlib.Path, *, pipeline: str = "QwenImagePipeline", **changes: Any) -> pathlib.Path:
    """Write a folder of the class `pipeline`."""
    transformer = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (4, 4, 8),
    }
    text = _QWEN_TEXT | (changes.pop("text_encoder", None) or {})
    vision = _QWEN_VISION | {"fullatt_block_indexes": [0]}
    parts = {
        "text_encoder": (
            "Qwen2_5_VLForConditionalGeneration",
            {"text_config": text, "vision_config": vision, "image_token_id": 259},
        ),
        "transformer": ("QwenImageTransformer2DModel", transformer),
        "vae": ("AutoencoderKLQwenImage", _QWEN_VAE),
    }
    shifted = _DYNAMIC_SHIFT | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    if pipeline == "QwenImageEditPlusPipeline":
        changes = {"processor": ["transformers", "Qwen2VLProcessor"]} | changes
    return _save(folder, pipeline, _make(5, parts, changes), FLOW_SCHEDULER | shifted, changes)


def save_krea2(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a Krea2Pipeline."""
    transformer = {
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
    text = _QWEN_TEXT | {"head_dim": 12} | (changes.pop("text_encoder", None) or {})
    vision = _QWEN_VISION | {"deepstack_visual_indexes": [0]}
    parts = {
        "text_encoder": ("Qwen3VLModel", {"text_config": text, "vision_config": vision}),
        "transformer": ("Krea2Transformer2DModel", transformer),
        "vae": ("AutoencoderKLQwenImage", _QWEN_VAE),
    }
    changes = {"text_encoder_select_layers": [1, 2], "is_distilled": False, "patch_size": 2} | changes
    shifted = _DYNAMIC_SHIFT | {"shift": 1.0, "max_image_seq_len": 6400}
    return _save(folder, "Krea2Pipeline", _make(6, parts, changes), FLOW_SCHEDULER | shifted, changes)


def save_qwen_image_edit_plus(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a folder of Qwen-Image-Edit-Plus."""
    return save_qwen_image(folder, pipeline="QwenImageEditPlusPipeline", **changes)


def save_qwen_image_21(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a QwenImage21Pipeline."""
    transformer = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "context_in_dim": 24,
        "axes_dims_rope": (4, 4, 8),
    }
    text = _QWEN_TEXT | {"head_dim": 12} | (changes.pop("text_encoder", None) or {})
    vision = _QWEN_VISION | {"deepstack_visual_indexes": [0]}
    levels = {"dim_mult": [1, 1, 1, 2, 2], "temperal_downsample": [False, True, True, True], "decoder_base_dim": 8}
    parts = {
        "text_encoder": (
            "Qwen3VLForConditionalGeneration",
            {"text_config": text, "vision_config": vision, "image_token_id": 259},
        ),
        "transformer": ("QwenImage21Transformer2DModel", transformer),
        "vae": ("AutoencoderKLQwenImage21", _QWEN_VAE | levels),
    }
    shifted = _DYNAMIC_SHIFT | {"shift": 1.0, "shift_terminal": 0.02}
    return _save(folder, "QwenImage21Pipeline", _make(6, parts, changes), FLOW_SCHEDULER | shifted, changes)


_GEMMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": None,  # it takes a third of an encoder's time for Sana's 1,357 tokens
}


def save_lumina2(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a Lumina2Pipeline."""
    transformer = {
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
        "text_encoder": ("Gemma2Model", _GEMMA),
        "transformer": ("Lumina2Transformer2DModel", transformer),
        "vae": ("AutoencoderKL", _VAE | levels),
    }
    return _save(folder, "Lumina2Pipeline", _make(7, parts, changes), FLOW_SCHEDULER | {"shift": 6.0}, changes)


def save_sana(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a SanaPipeline."""
    transformer = {
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
        "text_encoder": ("Gemma2Model", _GEMMA),
        "transformer": ("SanaTransformer2DModel", transformer),
        "vae": ("AutoencoderDC", levels),
    }
    return _save(folder, "SanaPipeline", _make(8, parts, changes), FLOW_DPM_SCHEDULER, changes)


_T5 = {"vocab_size": 64, "d_model": 40, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def save_pixart_sigma(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a PixArtSigmaPipeline."""
    transformer = {
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
        "text_encoder": ("T5EncoderModel", _T5),
        "transformer": ("PixArtTransformer2DModel", transformer),
        "vae": ("AutoencoderKL", _VAE | {"scaling_factor": 0.5}),
    }
    return _save(folder, "PixArtSigmaPipeline", _make(9, parts, changes), DPM_SCHEDULER, changes)


_FLUX_2_TRANSFORMER: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 3 * 16,
    "timestep_guidance_channels": 16,
    "axes_dims_rope": (4, 4, 4, 4),
}
FLUX_2_TEXT = _QWEN3 | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 30, "head_dim": 8}


def save_flux_2_klein(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a Flux2KleinPipeline."""
    transformer = _FLUX_2_TRANSFORMER | {"guidance_embeds": False}
    return _save_flux_2(folder, "Flux2KleinPipeline", transformer, ("Qwen3ForCausalLM", FLUX_2_TEXT), changes)


def save_flux_2_dev(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a Flux2Pipeline."""
    text = FLUX_2_TEXT | {"num_hidden_layers": 32} | (changes.pop("text_encoder", None) or {})
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {
        "text_config": {"model_type": "mistral"} | text,
        "vision_config": {"model_type": "pixtral", "head_dim": 8} | vision,
    }
    text_encoder = ("Mistral3ForConditionalGeneration", settings)
    return _save_flux_2(folder, "Flux2Pipeline", _FLUX_2_TRANSFORMER, text_encoder, changes)


def _save_flux_2(
    folder: pathlib.Path,
    pipeline: str,
    transformer: dict[str, Any],
    text_encoder: tuple[str, dict[str, Any]],
    changes: dict[str, Any],
) -> pathlib.Path:
    parts = {
        "text_encoder": text_encoder,
        "transformer": ("Flux2Transformer2DModel", transformer),
        "vae": ("AutoencoderKLFlux2", _VAE),
    }
    made = _make(4, parts, changes)
    made["vae"].bn.running_mean.normal_(std=0.3)
    made["vae"].bn.running_var.uniform_(0.5, 2.0)
    return _save(folder, pipeline, made, FLOW_SCHEDULER | _DYNAMIC_SHIFT, changes)


FILL_TRANSFORMER = {"in_channels": 2 * 16 + 4 * 4**2, "out_channels": 16}
_FLUX_VAE = _VAE | {"scaling_factor": 0.36, "shift_factor": 0.12}
_FLUX_TRANSFORMER: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 40,
    "axes_dims_rope": (4, 4, 8),
}


def save_flux(folder: pathlib.Path, *, pipeline: str = "FluxPipeline", **changes: Any) -> pathlib.Path:
    """Write a folder of the class `pipeline`."""
    transformer = _FLUX_TRANSFORMER | {"pooled_projection_dim": 32, "guidance_embeds": True}
    parts = {
        "text_encoder": ("CLIPTextModel", _TEXT),
        "text_encoder_2": ("T5EncoderModel", _T5),
        "transformer": ("FluxTransformer2DModel", transformer),
        "vae": ("AutoencoderKL", _FLUX_VAE),
    }
    made = _make(2, parts, changes, randomised=("transformer",))
    return _save(folder, pipeline, made, FLOW_SCHEDULER | _DYNAMIC_SHIFT, changes)


def save_chroma(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a ChromaPipeline."""
    approximator = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    parts = {
        "text_encoder": ("T5EncoderModel", _T5),
        "transformer": ("ChromaTransformer2DModel", _FLUX_TRANSFORMER | approximator),
        "vae": ("AutoencoderKL", _FLUX_VAE),
    }
    made = _make(5, parts, changes, randomised=("transformer",))
    return _save(folder, "ChromaPipeline", made, FLOW_SCHEDULER | _DYNAMIC_SHIFT, changes)


def save_stable_diffusion_3(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a StableDiffusion3Pipeline."""
    transformer = {
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
    parts = {
        "text_encoder": ("CLIPTextModelWithProjection", _TEXT | {"projection_dim": 20}),
        "text_encoder_2": ("CLIPTextModelWithProjection", _XL_TEXT | {"projection_dim": 24}),
        "text_encoder_3": ("T5EncoderModel", _T5 | {"d_model": 96}),
        "transformer": ("SD3Transformer2DModel", transformer),
        "vae": ("AutoencoderKL", _VAE | {"latent_channels": 16, "scaling_factor": 1.5, "shift_factor": 0.06}),
    }
    made = _make(3, parts, changes, randomised=("transformer",))
    return _save(folder, "StableDiffusion3Pipeline", made, FLOW_SCHEDULER, changes)


def _make(
    seed: int,
    parts: Mapping[str, tuple[str, dict[str, Any]]],
    changes: dict[str, Any],
    *,
    randomised: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return parts of these classes and settings, with those of `changes`, which are removed there.

    `randomised` are the parts with random values in all parameters; by default all of them.
    """
    import torch

    torch.manual_seed(seed)
    made = {name: _part(kind, settings | (changes.pop(name, None) or {})) for name, (kind, settings) in parts.items()}
    for name in made if randomised is None else randomised:
        randomise(made[name])
    return made


def _part(name: str, settings: dict[str, Any]) -> Any:
    """Return a part of this class, of diffusers or transformers."""
    import diffusers
    import transformers

    if name in dir(diffusers):
        return getattr(diffusers, name)(**settings)
    part_class = getattr(transformers, name)
    return part_class(part_class.config_class(**settings))


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
    "QwenImageEditPlusPipeline",
    "QwenImage21Pipeline",
    "Krea2Pipeline",
    "Flux2KleinPipeline",
)  # with text encoders of Qwen


def _save_byte_tokenizer(folder: pathlib.Path, *, reads_images: bool) -> None:
    """Write a tokenizer as Qwen's, whose words are bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    special = ["<|im_start|>", "<|im_end|>", *["<|image_pad|>"] * reads_images]
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=special)
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


# What the template of Mistral Small makes of messages with texts.
_MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set text = message.content[0].text %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ text }}[/SYSTEM_PROMPT]{% else %}[INST]{{ text }}[/INST]"
    "{% endif %}{% endfor %}"
)


def _save_mistral_tokenizer(folder: pathlib.Path) -> None:
    """Write a tokenizer as Mistral's, which pads on the left and whose words are bytes."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]"]
    vocabulary = {word: number for number, word in enumerate([*words, *sorted(ByteLevel.alphabet())])}
    bytes_only = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer, bytes_only.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    bytes_only.add_special_tokens(words)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<s>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.chat_template = _MISTRAL_TEMPLATE
    tokenizer.save_pretrained(folder)


def _save_gemma_tokenizer(folder: pathlib.Path) -> None:
    from transformers import GemmaTokenizer

    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.ascii_lowercase, ".", "-", "<", ">"]
    vocabulary = {word: number for number, word in enumerate(words)}
    GemmaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True).save_pretrained(folder)


def _save_t5_tokenizer(folder: pathlib.Path) -> None:
    from transformers import T5Tokenizer

    letters = [(letter, -3.0) for letter in string.ascii_lowercase]
    words = [(f"▁{word}", -2.0) for word in ("", "a", "red", "blue", "circle", "square")]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *words, *letters]
    T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512).save_pretrained(folder)


def _save(
    folder: pathlib.Path, pipeline: str, parts: dict[str, Any], scheduler: dict[str, Any], changes: dict[str, Any]
) -> pathlib.Path:
    """Write the parts with their tokenizers, and what is left of `changes` into model_index.json. Return the folder."""
    import torch

    scheduler = scheduler | (changes.pop("scheduler", None) or {})
    assert not any(isinstance(value, dict) for value in changes.values()), f"{pipeline} has no part of {changes}"
    index = dict(changes)
    for name, part in parts.items():
        for parameter in part.parameters():  # some blocks start with zeros, whose output would be the same for all
            if not parameter.detach().any():
                torch.nn.init.normal_(parameter, std=0.02)
        part.save_pretrained(folder / name)
        index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
        if pipeline in _OF_QWEN and name == "text_encoder":
            tokenizer = "processor" if pipeline == "QwenImage21Pipeline" else "tokenizer"
            has_processor = pipeline == "QwenImageEditPlusPipeline"
            for each in (tokenizer, "processor") if has_processor else (tokenizer,):
                _save_byte_tokenizer(folder / each, reads_images=has_processor or each == "processor")
            kind = "Qwen3VLProcessor" if tokenizer == "processor" else "Qwen2Tokenizer"
            index[tokenizer] = ["transformers", kind]
        elif type(part).__name__ == "Mistral3ForConditionalGeneration":
            _save_mistral_tokenizer(folder / "tokenizer")
            index["tokenizer"] = ["transformers", "PixtralProcessor"]
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
    if pipeline not in (*_OF_QWEN, "Flux2Pipeline", "Lumina2Pipeline", "SanaPipeline", "PixArtSigmaPipeline"):
        is_first = pipeline in ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
        unused = "safety_checker" if is_first else "image_encoder"
        index |= {unused: [None, None], "feature_extractor": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def copy_with_other_weights(folder: pathlib.Path, copy: pathlib.Path) -> pathlib.Path:
    """Write another version of a model whose UNet differs in a bit. Returns the folder `copy`."""
    shutil.copytree(folder, copy)
    weights = copy / "unet" / "diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return copy
