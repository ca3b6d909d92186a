"""Writes a folder in diffusers format: Stable Diffusion 1.5 at its published size, with random weights in float16.

python -m noria_bench.device.random_folder FOLDER [--tiny]

With it the served benches measure a model of that size where no weights can be downloaded. The tokenizer is the bundled
model's, so a prompt has fewer distinct tokens, and as many positions.
"""

import json
import pathlib
import shutil
from typing import Any

import torch

import noria
from noria_bench.device.architectures import SD15
from noria_bench.device.random_model import VAE
from noria_bench.encoders.random_folder import main

_BUNDLED = pathlib.Path(noria.__file__).parent / "models/bundled"
_TEXT: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
}
# The same parts with few channels, to check that the command works.
_TINY_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_TINY_CHANNELS = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}


def write_random_folder(folder: pathlib.Path, *, tiny: bool) -> None:
    """Write the folder, from a GPU if there is one."""
    from diffusers import AutoencoderKL, PNDMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    tokenizer = json.loads((_BUNDLED / "tokenizer/tokenizer_config.json").read_text("utf-8"))
    words = json.loads((_BUNDLED / "tokenizer/vocab.json").read_text("utf-8"))
    text = _TEXT | {"vocab_size": len(words)} | (_TINY_TEXT if tiny else {})
    text |= {f"{end}_token_id": words[tokenizer[f"{end}_token"]] for end in ("bos", "eos")}
    unet, vae = dict(SD15.config), dict(VAE)
    if tiny:
        unet |= _TINY_CHANNELS | {"cross_attention_dim": text["hidden_size"], "attention_head_dim": 4}
        vae |= _TINY_CHANNELS
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        parts = {
            "unet": UNet2DConditionModel(**unet),
            "vae": AutoencoderKL(**vae),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**text)),
        }
    for name, part in parts.items():
        part.half().save_pretrained(folder / name)
    scheduler = PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    scheduler.save_pretrained(folder / "scheduler")
    shutil.copytree(_BUNDLED / "tokenizer", folder / "tokenizer")
    tokenizer["model_max_length"] = text["max_position_embeddings"]
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(tokenizer), "utf-8")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "requires_safety_checker": False,
        "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index), "utf-8")


if __name__ == "__main__":
    main(write_random_folder, __doc__)
