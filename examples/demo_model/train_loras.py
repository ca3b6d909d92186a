#!/usr/bin/env python3
"""Train two small LoRAs for the bundled model, `outline` (shapes as outlines) and `night` (before black).

    python examples/demo_model/train_loras.py OUT --styles outline --steps 800
    python examples/demo_model/train_loras.py OUT --styles night --steps 600 --high-noise 0.5
    python examples/demo_model/train_loras.py OUT --evaluate [--sheet sheet.png]

The scenes and captions are those of the model's own training, drawn in another style: the captions do not name it. A
hook adds the product of two matrices of rank RANK behind each chosen layer, and only these matrices learn. The file of
each is OUT/NAME.safetensors, in float16 with diffusers' names. `--evaluate` generates 16 held-out captions without
LoRA and with each, and prints the area of the shapes and the brightness of the background.
"""

import argparse
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from diffusers import DDPMScheduler
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from evaluate import load_pipeline
from scenes import Scene, draw_scenes, render

BUNDLED = pathlib.Path(__file__).parents[2] / "src" / "noria" / "models" / "bundled"
RANK = 4
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2")
BLOCKS = ("down_blocks.0", "down_blocks.1", "up_blocks.1", "up_blocks.2")  # the two larger resolutions
POOL_SCENES = 2048
STROKE = 0.043  # width of an outline as a share of the image's side: 5.5 px, the thinnest that the VAE keeps open
HELD_OUT_CAPTIONS = 16


def outline(scenes: list[Scene]) -> torch.Tensor:
    """Return the scenes with shapes drawn as outlines, [scenes, 3, side, side] in [-1, 1]."""
    return render(scenes, stroke=STROKE)


def night(scenes: list[Scene]) -> torch.Tensor:
    """Return the scenes before black, with black shapes in white, [scenes, 3, side, side] in [-1, 1]."""
    return render(
        [
            replace(
                scene,
                background="black",
                objects=tuple(replace(o, colour="white" if o.colour == "black" else o.colour) for o in scene.objects),
            )
            for scene in scenes
        ]
    )


STYLES: Mapping[str, Callable[[list[Scene]], torch.Tensor]] = {"outline": outline, "night": night}


def add_lora(unet: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Add a pair of matrices, which change nothing yet, to the chosen layers; return them by the layer's name."""
    pairs = {}
    for name, layer in unet.named_modules():
        if not (name.startswith(BLOCKS) and name.endswith(LAYERS)):
            continue
        if isinstance(layer, nn.Conv2d):
            down: nn.Module = nn.Conv2d(layer.in_channels, RANK, layer.kernel_size, padding=layer.padding, bias=False)
            up: nn.Module = nn.Conv2d(RANK, layer.out_channels, 1, bias=False)
        else:
            down = nn.Linear(layer.in_features, RANK, bias=False)
            up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(up.weight)
        layer.register_forward_hook(lambda _, inputs, output, down=down, up=up: output + up(down(inputs[0])))
        pairs[name] = down, up
    return pairs


def file_names(pairs: Mapping[str, tuple[nn.Module, nn.Module]]) -> dict[str, nn.Parameter]:
    """Return the matrices by their names in a file."""
    return {
        f"unet.{name}.lora_{letter}.weight": module.weight
        for name, pair in pairs.items()
        for letter, module in zip("AB", pair, strict=True)
    }


def train(style: str, options: argparse.Namespace) -> None:
    """Write OUT/STYLE.safetensors."""
    pipeline = load_pipeline(BUNDLED, "ddim")
    noise_schedule = DDPMScheduler.from_config(pipeline.scheduler.config)
    unet = pipeline.unet.requires_grad_(False).to(memory_format=torch.channels_last)
    pipeline.vae.to(memory_format=torch.channels_last)
    torch.manual_seed(options.seed)
    matrices = file_names(add_lora(unet))
    latents, embeddings = [], []
    with torch.no_grad():
        for k in range(POOL_SCENES // 64):
            scenes = draw_scenes(5000 + k, 64)
            latents.append(pipeline.vae.encode(STYLES[style](scenes)).latents * pipeline.vae.config.scaling_factor)
            captions = ["" if row % 10 == 0 else scene.caption for row, scene in enumerate(scenes)]
            embeddings.append(pipeline.encode_prompt(captions, "cpu", 1, False)[0])
    pool, texts = torch.cat(latents), torch.cat(embeddings)
    optimizer = torch.optim.AdamW(matrices.values(), lr=options.rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, options.steps, pct_start=0.1)
    started, running = time.time(), 0.0
    for step in range(options.steps):
        rows = torch.randint(len(pool), (options.batch,))
        timesteps, noise = torch.randint(1000, (options.batch,)), torch.randn_like(pool[rows])
        num_high = int(options.high_noise * options.batch)
        timesteps[:num_high] = torch.randint(600, 1000, (num_high,))
        noisy = noise_schedule.add_noise(pool[rows], noise, timesteps)
        target = noise_schedule.get_velocity(pool[rows], noise, timesteps)
        loss = (unet(noisy, timesteps, texts[rows]).sample - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        running += (loss.item() - running) / min(step + 1, 50)
        if step % 25 == 24:
            print(f"{style}: step {step + 1}, v-MSE {running:.4f}, {time.time() - started:.0f} s", flush=True)
    file = options.out / f"{style}.safetensors"
    save_file({name: matrix.detach().half().contiguous() for name, matrix in matrices.items()}, file)
    file.chmod(0o644)  # safetensors writes 0600
    print(f"{file}: {file.stat().st_size} bytes", flush=True)


def background_of(image: torch.Tensor) -> torch.Tensor:
    """Return the colour of an image's background, [3, 1, 1]: the median, as shapes cover less than half."""
    return image.flatten(1).median(dim=1).values[:, None, None]


def shape_area(image: torch.Tensor) -> float:
    """Return the share of pixels that differ from the background by more than 40 of 255 in a channel."""
    return float(((image - background_of(image)).abs().amax(dim=0) > 40).float().mean())


def evaluate(options: argparse.Namespace) -> None:
    """Print means of `shape_area` and of the background's brightness, for the bare model and each LoRA, same seeds."""
    scenes = draw_scenes(77, HELD_OUT_CAPTIONS, held_out=True)
    sheet = []
    for style in ("none", *STYLES):
        pipeline = load_pipeline(BUNDLED, "dpm++2m")
        if style != "none":
            matrices = file_names(add_lora(pipeline.unet))
            for name, tensor in load_file(options.out / f"{style}.safetensors").items():
                matrices[name].data.copy_(tensor)
        with torch.no_grad():
            images = pipeline(
                [scene.caption for scene in scenes],
                num_inference_steps=20,
                guidance_scale=3.0,
                generator=[torch.Generator().manual_seed(row) for row in range(len(scenes))],
                output_type="pt",
            ).images.mul(255)
        figures = {
            "shape_area": [shape_area(image) for image in images],
            "background_brightness": [float(background_of(image).mean()) / 255 for image in images],
        }
        means = {name: round(sum(values) / len(values), 3) for name, values in figures.items()}
        print(json.dumps({"lora": style, "captions": len(scenes)} | means))
        sheet.append(torch.cat(list(images), dim=2))
    if options.sheet:
        Image.fromarray(torch.cat(sheet, dim=1).permute(1, 2, 0).round().byte().numpy()).save(options.sheet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT")
    parser.add_argument("--styles", nargs="+", choices=list(STYLES), default=list(STYLES))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--high-noise", type=float, default=0.0, help="share of images with a timestep of 600 or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="measure the LoRAs in OUT instead of training them")
    parser.add_argument("--sheet", type=pathlib.Path, help="an image file of what --evaluate generated")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    if options.evaluate:
        evaluate(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for style in options.styles:
        train(style, options)


if __name__ == "__main__":
    main()
