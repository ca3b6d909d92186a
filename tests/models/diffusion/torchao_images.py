"""A program for a Python with torchao: quantizes tiny models, serves them, and prints how far off the images are.

Prints a JSON object: for each case the largest differences of 255 to the images of diffusers' pipeline, to each image
alone, to those of the model before, and of what a LoRA changes in its own image and in others.
"""

import json
import pathlib
import shutil
import sys
import warnings

import diffusers
import torch
import transformers
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
)

import tiny_models
from generating import difference, generate
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.memory_estimate import estimate_memory
from noria.models.catalog import count_parameters, open_model
from noria.models.families import FAMILIES
from noria.models.lora_folders import digest_of
from noria.protocol.diffusion import Lora
from noria.testing.requests import make_image_request

CASES = {
    "flux int8": (tiny_models.save_flux, Int8WeightOnlyConfig, torch.float32, "float32"),
    "flux int8 of bfloat16": (tiny_models.save_flux, Int8WeightOnlyConfig, torch.bfloat16, "float32"),
    "flux int8 dynamic": (tiny_models.save_flux, Int8DynamicActivationInt8WeightConfig, torch.float32, "float32"),
    "flux float8": (tiny_models.save_flux, Float8WeightOnlyConfig, torch.float32, "float32"),
    "stable-diffusion-3 int8": (tiny_models.save_stable_diffusion_3, Int8WeightOnlyConfig, torch.float32, "float32"),
    "stable-diffusion int8": (tiny_models.save_stable_diffusion, Int8WeightOnlyConfig, torch.float32, "float32"),
    "stable-diffusion-xl int8": (tiny_models.save_stable_diffusion_xl, Int8WeightOnlyConfig, torch.float32, "float32"),
    "z-image int8": (tiny_models.save_z_image, Int8WeightOnlyConfig, torch.float32, "float32"),
}


def quantize(folder: pathlib.Path, config: type, dtype: torch.dtype) -> None:
    """Quantize denoiser and text encoders in place, as diffusers and transformers do and save it."""
    index = json.loads((folder / "model_index.json").read_text())
    for part, entry in index.items():
        if part not in ("unet", "transformer") and not part.startswith("text_encoder"):
            continue
        library = {"diffusers": diffusers, "transformers": transformers}[entry[0]]
        quantized = getattr(library, entry[1]).from_pretrained(
            folder / part, quantization_config=library.TorchAoConfig(config()), dtype=dtype
        )
        shutil.rmtree(folder / part)
        quantized.save_pretrained(folder / part)


def make_requests(spec, loras=()):
    return [
        make_image_request(
            f"r{k}",
            prompt=["a red circle", "a blue square"][k % 2],
            negative_prompt=None,
            seed=900 + k,
            width=32,
            height=32,
            inference_steps=2 + k,
            guidance_scale=[0.0, 3.5][k % 2],
            scheduler=spec.default_scheduler,
            loras=loras if k == 1 else (),
        )
        for k in range(3)
    ]


def load(folder, dtype, **settings):
    spec = open_model(str(folder))
    config = EngineConfig(dtype=dtype, slots=8, threads=1, **settings)
    return spec, DiffusionExecutor(FAMILIES[spec.family].load(spec, config, "cpu"), config)


def piped(folder, spec, dtype):
    """The images of diffusers' own pipeline, loaded from the same folder."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    if spec.family in ("stable-diffusion", "stable-diffusion-xl"):
        from noria.images import scheduler_names

        choice = scheduler_names.find(spec.default_scheduler)
        pipe.scheduler = getattr(diffusers, choice.diffusers_class).from_config(
            pipe.scheduler.config, **choice.overrides
        )
    images = {}
    for request in make_requests(spec):
        payload = request.payload
        (image,) = pipe(
            payload.prompt,
            width=payload.width,
            height=payload.height,
            num_inference_steps=payload.inference_steps,
            guidance_scale=payload.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(payload.seed),
            output_type="np",
        ).images
        images[request.request_id, 0] = (image * 255).round().astype("uint8")
    return images


def examine(name, folder):
    """What is printed of a case."""
    save, config, quantized_as, dtype = CASES[name]
    save(folder)
    _, before = load(folder, dtype)
    original = open_model(str(folder))
    quantize(folder, config, quantized_as)
    spec, executor = load(folder, dtype)
    requests = make_requests(spec)
    together = generate(executor, requests, arrivals=[0, 1, 2])
    unquantized = generate(before, requests)
    theirs = piped(folder, spec, getattr(torch, dtype))
    alone = {}
    for request in requests:
        alone |= generate(executor, [request])
    found = {
        "pipeline": max(difference(together[key], theirs[key]) for key in together),
        "alone": max(difference(together[key], alone[key]) for key in together),
        "before": max(difference(together[key], unquantized[key]) for key in together),
        "parameters": [
            count_parameters(original),
            count_parameters(spec),
            original.num_parameters,
            spec.num_parameters,
        ],
        "estimated_bytes": sum(estimate_memory(spec, executor.config).weights.values()),
    }
    if executor.model.lora_parts:
        layers = ("to_q", "to_k", "to_v", "w1", "w2") if spec.family == "z-image" else ()  # not those that merge rows
        save_diffusers_lora(folder.parent / "all.safetensors", executor.model.lora_parts, *layers, rank=2)
        lora = Lora("all", 0.7, digest_of(folder.parent / "all.safetensors"))
        adapted = DiffusionExecutor(
            executor.model, EngineConfig(dtype=dtype, slots=8, threads=1, loras=(str(folder.parent),))
        )
        mixed, by_itself = generate(adapted, make_requests(spec, (lora,))), {}
        by_itself = generate(adapted, make_requests(spec, (lora,))[1:2])
        found["lora"] = difference(mixed["r1", 0], together["r1", 0])
        found["lora alone"] = difference(mixed["r1", 0], by_itself["r1", 0])
        found["lora others"] = max(difference(mixed[key], together[key]) for key in mixed if key[0] != "r1")
    return found


def main() -> None:
    """Examine all cases in the folder that the first argument names."""
    warnings.simplefilter("ignore")  # torchao's and diffusers' own
    torch.set_num_threads(1)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    found = {}
    for name in CASES:
        folder = pathlib.Path(sys.argv[1]) / name.replace(" ", "-") / "model"
        folder.parent.mkdir()
        found[name] = examine(name, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
