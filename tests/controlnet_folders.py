"""Folders of ControlNets and of their models that are checked and not loaded: configurations, and few weights."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

UNET = {"_class_name": "UNet2DConditionModel", "block_out_channels": [16, 32], "cross_attention_dim": 32}
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [16, 16, 16]}
CONTROLNET = {
    "_class_name": "ControlNetModel",
    "block_out_channels": [16, 32],
    "cross_attention_dim": 32,
    "conditioning_embedding_out_channels": [8, 12, 16],
}


def save_model(folder: pathlib.Path, **unet: object) -> pathlib.Path:
    """Write what ControlNets are compared with; `unet` are changed settings. Return the folder."""
    for part, config in (("unet", UNET | unet), ("vae", VAE)):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(config))
    return folder


def save_controlnet(folder: pathlib.Path, **settings: object) -> pathlib.Path:
    """Write a ControlNet with changed settings. Return the folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONTROLNET | settings))
    save_file({"conv_in.weight": np.zeros((16, 4, 3, 3), np.float32)}, folder / "diffusion_pytorch_model.safetensors")
    return folder
