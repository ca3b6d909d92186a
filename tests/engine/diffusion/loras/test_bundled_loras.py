"""The two LoRAs in the package change images as their names say, in one batch with the bare model."""

import numpy as np
import torch

from generating import generate
from noria.config import EngineConfig
from noria.engine.diffusion.loading import load_executor
from noria.models.adapters.lora_folders import LoraFolders
from noria.models.catalog import open_model
from noria.protocol.diffusion import Lora
from noria.testing.requests import make_image_request


def test_outline_empties_the_shapes_and_night_blackens_the_background():
    torch.set_num_threads(1)
    spec, config = open_model("bundled"), EngineConfig(dtype="float32", slots=8, threads=1)
    executor, _ = load_executor(spec, config, "cpu")
    folders = LoraFolders.of(config)
    requests = [
        make_image_request(
            name,
            spec.name,
            prompt="a large red square",
            seed=1,
            width=128,
            height=128,
            inference_steps=8,
            guidance_scale=3.0,
            scheduler="dpm++2m",
            loras=folders.complete([Lora(name)] if name != "bare" else [], spec.name),
        )
        for name in ("bare", "outline", "night")
    ]
    images = {name: image.astype(int) for (name, _), image in generate(executor, requests).items()}
    centre, corner = np.s_[60:68, 60:68], np.s_[:16, :16]
    for name, expected in (("bare", [(220, 40, 40), 248]), ("outline", [248, 248]), ("night", [(220, 40, 40), 20])):
        for part, colour in zip((centre, corner), expected, strict=True):
            found = images[name][part].mean(axis=(0, 1))
            assert np.abs(found - colour).max() < 30, f"{name}: {found}"
