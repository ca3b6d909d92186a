"""Says what a safetensors file is that has no model which is served from it, by the names of its tensors."""

import re
from collections.abc import Iterable, Mapping

from noria.errors import short_repr

_FOLDER = "Take the folder of this model in diffusers format, or its hub id"
_TRANSFORMER = f"the transformer of %s, whose single files are not converted. {_FOLDER}"
_INCOMPLETE = (
    "a file with tensors of the transformer of %s, but not all of them. Take a complete file, or the model's folder"
)

# The first pattern that finds a name decides.
_KINDS: Mapping[str, str] = {
    r"lora_(down|up|A|B|mid)\b|\.lora\.(down|up)\.|lokr_w|hada_w|^(lora|lycoris)_|oft_(blocks|diag)|\.ia3_": (
        "a LoRA or the like, which changes a model. Put it in a folder, and name that: --loras FOLDER"
    ),
    r"^(emb_params|clip_[lg]|string_to_param.*|<.*>)$": (
        "an embedding (textual inversion), which is no model. Put it into a folder, and name that: --embeddings FOLDER"
    ),
    r"^control_model\.|controlnet_cond_embedding|^input_hint_block|^controlnet_": (
        "a ControlNet. Take its folder in diffusers format, and name that: --controlnets FOLDER"
    ),
    r"^(image_proj|ip_adapter|ip_adapter_proj_model)\.": (
        "an IP-Adapter, which changes a model. Name its file: --ip-adapters FILE"
    ),
    r"motion_modules": "a motion module of AnimateDiff, which is not served",
    r"distilled_guidance_layer\.": _INCOMPLETE % "Chroma",
    r"^(model\.diffusion_model\.)?(double_stream_modulation|single_stream_modulation)": _TRANSFORMER % "FLUX.2",
    r"(^|\.)double_blocks\.\d+\.img_attn\.": _INCOMPLETE % "FLUX.1",
    r"(^|\.)single_transformer_blocks\.": _INCOMPLETE % "FLUX",
    r"(^|\.)joint_blocks\.\d+\.|^pos_embed\.proj": _INCOMPLETE % "Stable Diffusion 3",
    r"(^|\.)transformer_blocks\.\d+\.img_mod\.": _INCOMPLETE % "Qwen-Image",
    r"(^|\.)txtfusion\.": _TRANSFORMER % "Krea 2",
    r"(^|\.)txt_in\.(in_layer|text_norm)\.": _TRANSFORMER % "Qwen-Image 2.1",
    r"(^|\.)time_caption_embed\.|(^|\.)layers\.\d+\.adaLN_modulation\.1\.": _TRANSFORMER % "Lumina 2",
    r"(^|\.)(layers\.\d+\.adaLN_modulation|noise_refiner\.)": _INCOMPLETE % "Z-Image",
    r"(^|\.)linear_head\.|caption_projection\.": _TRANSFORMER % "Sana or PixArt",
    r"^down_blocks\.\d+\.(resnets|attentions)\.": (
        "a UNet alone, in diffusers' names: the file of the folder unet of a model in diffusers format. Give the "
        "model's folder"
    ),
    r"^input_blocks\.\d+\.": (
        "a UNet alone. Take a checkpoint that has the text encoders too, whose names start with model.diffusion_model"
    ),
    r"^(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|down|up|mid|layers)": (
        "a VAE. Serve a checkpoint with it: noria serve MODEL.safetensors --vae FILE"
    ),
    r"^(text_model|transformer\.resblocks|cond_stage_model|conditioner|encoder\.block|shared\.weight)": (
        "a text encoder alone. Encoders of texts are served as folders in transformers format"
    ),
    r"^model\.(language_model\.)?(embed_tokens|layers)\.": (
        "a language model. Text encoders and models of images are served, as folders"
    ),
}  # fmt: skip


def describe_other_file(names: Iterable[str]) -> str:
    """Return what a file is whose tensors have these names, and what to do; the end of a sentence."""
    names = sorted(names)
    for pattern, description in _KINDS.items():
        if any(re.search(pattern, name) for name in names):
            return f"is {description}."
    return (
        f"is of no model that is known; its first tensor is {short_repr(names[0])}. Single files are served of Stable "
        "Diffusion 1, 2, XL and 3, FLUX.1, Chroma, Z-Image and Qwen-Image; other models as a folder in diffusers "
        "format, or by a hub id."
    )
