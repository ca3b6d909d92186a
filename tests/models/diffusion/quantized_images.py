"""A program for a Python with torchao, bitsandbytes and gguf: serves quantized tiny models, and compares their images.

Prints a JSON object: for each case the largest differences of 255 to the images of diffusers' pipeline, to each image
alone, to those of the model before, and of what a LoRA changes in its own image and in others.
"""

import json
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Callable

import diffusers
import msgspec
import numpy as np
import torch
import transformers
from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

import single_files
import tiny_models
from generating import difference, generate, moved_image
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.loading import load_executor
from noria.engine.diffusion.sizing.memory_estimate import estimate_memory
from noria.engine.diffusion.sizing.weight_bytes import weights_of
from noria.engine.diffusion.warmup.calibration import device_name
from noria.engine.diffusion.warmup.quantized_loading import precision_of
from noria.errors import ModelError
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import count_parameters, open_model
from noria.models.diffusion.block_quantization import denoiser_part
from noria.models.families import FAMILIES
from noria.protocol.diffusion import Lora
from noria.testing.requests import make_image_request
from pipelines import run_pipeline


def torchao(config: type, dtype: torch.dtype = torch.float32) -> Callable[[pathlib.Path], None]:
    """Quantize denoiser and text encoders of a folder in place, as diffusers and transformers do and save it."""

    def quantize(folder: pathlib.Path) -> None:
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

    return quantize


def gguf_of(kind: str, *, author: str = "") -> Callable[[pathlib.Path], None]:
    """Replace a folder's transformer by a GGUF file, with diffusers' names or those of the author of a family."""

    def quantize(folder: pathlib.Path) -> None:
        class_name = json.loads((folder / "model_index.json").read_text())["transformer"][1]
        part = getattr(diffusers, class_name).from_pretrained(folder / "transformer")
        linear = {f"{name}.weight" for name, each in part.named_modules() if isinstance(each, torch.nn.Linear)}
        tensors, prefix = part.state_dict(), "model.diffusion_model." if author else ""
        is_linear = {name: torch.tensor([name in linear]) for name in tensors}
        if author:
            tensors, is_linear = (single_files.transformer_tensors(each, author) for each in (tensors, is_linear))
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
        named = {prefix + name: (tensor.numpy(), bool(is_linear[name].all())) for name, tensor in tensors.items()}
        write_gguf(folder / "transformer" / f"model-{kind}.gguf", named, kind)

    return quantize


def write_gguf(file, tensors, kind):
    """Write a file of tensors; linear layers are quantized to `kind` if their rows are whole blocks."""
    import gguf

    wanted, writer = gguf.GGMLQuantizationType[kind], gguf.GGUFWriter(file, "tiny")
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    for name, (tensor, is_linear) in tensors.items():
        if is_linear and tensor.shape[-1] % block == 0:
            writer.add_tensor(name, gguf.quants.quantize(tensor, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CASES = {
    "flux int8": (tiny_models.save_flux, torchao(Int8WeightOnlyConfig), "float32"),
    "flux int8 of bfloat16": (tiny_models.save_flux, torchao(Int8WeightOnlyConfig, torch.bfloat16), "float32"),
    "flux int8 dynamic": (tiny_models.save_flux, torchao(Int8DynamicActivationInt8WeightConfig), "float32"),
    "flux float8": (tiny_models.save_flux, torchao(Float8WeightOnlyConfig), "float32"),
    "stable-diffusion-3 int8": (tiny_models.save_stable_diffusion_3, torchao(Int8WeightOnlyConfig), "float32"),
    "stable-diffusion int8": (tiny_models.save_stable_diffusion, torchao(Int8WeightOnlyConfig), "float32"),
    "stable-diffusion-xl int8": (tiny_models.save_stable_diffusion_xl, torchao(Int8WeightOnlyConfig), "float32"),
    "z-image int8": (tiny_models.save_z_image, torchao(Int8WeightOnlyConfig), "float32"),
    "flux gguf Q8_0": (tiny_models.save_flux, gguf_of("Q8_0"), "float32"),
    "flux gguf BF16": (tiny_models.save_flux, gguf_of("BF16"), "float32"),
    "flux-2-klein gguf Q8_0": (tiny_models.save_flux_2_klein, gguf_of("Q8_0"), "float32"),
    "chroma gguf Q8_0": (tiny_models.save_chroma, gguf_of("Q8_0"), "float32"),
    "qwen-image gguf Q8_0": (tiny_models.save_qwen_image, gguf_of("Q8_0"), "float32"),
    "lumina-2 gguf Q8_0": (tiny_models.save_lumina2, gguf_of("Q8_0"), "float32"),
    "krea-2 gguf Q8_0": (tiny_models.save_krea2, gguf_of("Q8_0"), "float32"),
    "stable-diffusion-3 gguf Q5_1": (tiny_models.save_stable_diffusion_3, gguf_of("Q5_1"), "float32"),
    "stable-diffusion-3 gguf Q8_0, original names": (
        tiny_models.save_stable_diffusion_3,
        gguf_of("Q8_0", author="sd3"),
        "float32",
    ),
    "z-image gguf Q8_0, original names": (tiny_models.save_z_image, gguf_of("Q8_0", author="z-image"), "float32"),
}


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


def piped(folder, spec, dtype, denoiser=None, lora=None):
    """The images of diffusers' own pipeline, loaded from the same folder, or with this denoiser; all with a LoRA."""
    parts = {} if denoiser is None else {denoiser_part(spec): denoiser}
    for file in (folder / "transformer").glob("*.gguf"):
        transformer_class = getattr(diffusers, json.loads((folder / "model_index.json").read_text())["transformer"][1])
        config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
        parts["transformer"] = transformer_class.from_single_file(
            str(file), config=str(folder), subfolder="transformer", quantization_config=config, dtype=dtype
        )
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=dtype, **parts)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(str(lora.parent), weight_name=lora.name, adapter_name="all")
        pipe.set_adapters("all", 0.7)
    if spec.family in ("stable-diffusion", "stable-diffusion-xl"):
        from noria.images import scheduler_names

        choice = scheduler_names.find(spec.default_scheduler)
        pipe.scheduler = getattr(diffusers, choice.diffusers_class).from_config(
            pipe.scheduler.config, **choice.overrides
        )
    return {(request.request_id, 0): run_pipeline(pipe, request) for request in make_requests(spec)}


def examine(name, folder):
    """Return what is printed of a case."""
    save, quantize, dtype = CASES[name]
    save(folder)
    _, before = load(folder, dtype)
    original = open_model(str(folder))
    quantize(folder)
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
        found |= adapted(folder, spec, executor, together)
        del found["lora image"]
    return found


def adapted(folder, spec, executor, together):
    """How images with a LoRA differ from those without, and from each alone and diffusers' with peft."""
    layers = ("to_q", "to_k", "to_v", "w1", "w2") if spec.family == "z-image" else ()  # not those that merge rows
    file = folder.parent / "all.safetensors"
    save_diffusers_lora(file, {denoiser_part(spec): executor.model.network}, *layers, rank=2)
    lora = Lora("all", 0.7, digest_of(file))
    config = msgspec.structs.replace(executor.config, loras=(str(folder.parent),))
    with_loras = DiffusionExecutor(executor.model, config)
    requests = make_requests(spec, (lora,))
    mixed, by_itself = generate(with_loras, requests), generate(with_loras, requests[1:2])
    return {
        "lora image": mixed["r1", 0],
        "lora": difference(mixed["r1", 0], together["r1", 0]),
        "lora alone": difference(mixed["r1", 0], by_itself["r1", 0]),
        "lora others": max(difference(mixed[key], together[key]) for key in mixed if key[0] != "r1"),
    }


ON_LOAD = {
    "flux": (tiny_models.save_flux, ("int8", "nf4")),
    "z-image": (tiny_models.save_z_image, ("int8", "nf4")),
    "stable-diffusion": (tiny_models.save_stable_diffusion, ("int8", "nf4")),
    "stable-diffusion-xl": (tiny_models.save_stable_diffusion_xl, ("int8",)),
    "stable-diffusion-3": (tiny_models.save_stable_diffusion_3, ("int8",)),
}


def load_quantized(folder, kind, floor=0.9):
    """Load as an engine does; all calls have as many rows. Random weights keep less than those of models."""
    spec, rows = open_model(str(folder)), 6
    settings = {"quantize": kind, "quantize_min_fidelity": floor, "cache_dir": str(folder.parent / "cache")}
    config = EngineConfig(dtype="float32", slots=8, threads=1, buckets=(rows,), **settings)
    return spec, load_executor(spec, config, "cpu")[0]


def examine_on_load(name, kind, folder):
    """Return what is printed of a model that is quantized when it is loaded."""
    ON_LOAD[name][0](folder)
    spec, executor = load_quantized(folder, kind)
    _, second = load_quantized(folder, kind)  # which quantizes in the host's memory
    requests, alone = make_requests(spec), {}
    together = generate(executor, requests, arrivals=[0, 1, 2])
    for request in requests:
        alone |= generate(executor, [request])
    moved = {request.request_id: moved_image(executor, request, 1, company=requests[:1]) for request in requests[1:]}
    network = executor.model.network
    linear = {name: each for name, each in network.named_modules() if isinstance(each, torch.nn.Linear)}
    plain = {name: each.weight.shape for name, each in linear.items() if type(each.weight) is torch.nn.Parameter}
    of_blocks = {name: shape for name, shape in plain.items() if re.search(r"transformer_blocks|^layers", name)}
    theirs = piped(folder, spec, torch.float32, network)
    found = {
        "pipeline": max(difference(together[key], theirs[key]) for key in together),
        "alone": max(difference(together[key], alone[key]) for key in together),
        "moved": max(difference(together[key, 0], image) for key, image in moved.items()),
        "second start": max(difference(image, together[key]) for key, image in generate(second, requests).items()),
        "fidelity": precision_of(spec, executor.config, device_name(executor.model.device)).fidelity,
        "num_quantized": len(linear) - len(plain),
        "kept": sorted(name for name, shape in of_blocks.items() if all(size % 16 == 0 for size in shape)),
        "refusal": refusal(folder, kind),
        "bytes": [weights_of(spec, executor.config).here[denoiser_part(spec)], num_bytes(network)],
        **adapted(folder, spec, executor, together),
    }
    with_peft = piped(folder, spec, torch.float32, network, folder.parent / "all.safetensors")
    return found | {"lora pipeline": difference(with_peft["r1", 0], found.pop("lora image"))}


def refusal(folder, kind):
    """The message of a start that allows no difference."""
    try:
        load_quantized(folder, kind, floor=1.0)
    except ModelError as error:
        return error.message


def num_bytes(module):
    """The bytes of a module's numbers, of quantized ones with their factors."""
    total = 0
    for each in module.parameters():
        if type(each).__name__ == "Int8Tensor":
            total += each.qdata.nbytes + each.scale.nbytes
        else:
            total += each.nbytes + (each.quant_state.absmax.nbytes if hasattr(each, "quant_state") else 0)
    return total


def refusals(folder):
    """The messages about GGUF files that the checks of folders accept and that fit another transformer."""
    tiny_models.save_flux(folder)
    part = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer")
    tensors = {name: (tensor.numpy(), tensor.ndim == 2) for name, tensor in part.state_dict().items()}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    name, bias = "transformer_blocks.0.attn.to_q.weight", "transformer_blocks.0.attn.to_q.bias"
    found = {}
    for damage, changed in {
        "tensors are missing": {key: value for key, value in tensors.items() if key != bias},
        "decodes to shape": tensors | {name: (np.zeros((64, 32), np.float32), True)},
        "expected shape": tensors | {bias: (np.zeros(3, np.float32), False)},
    }.items():
        write_gguf(folder / "transformer" / "model-Q8_0.gguf", changed, "Q8_0")
        try:
            load(folder, "float32")
        except ModelError as error:
            found[damage] = error.message
    return found


def main() -> None:
    """Examine all cases, or those of the other arguments, in the folder that the first argument names."""
    warnings.simplefilter("ignore")  # torchao's and diffusers' own
    torch.set_num_threads(1)
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    root, found = pathlib.Path(sys.argv[1]), {"folders": {}, "on load": {}, "errors": {}}
    on_load = {f"{name} {kind} on load": (name, kind) for name, (_, kinds) in ON_LOAD.items() for kind in kinds}
    for case in sys.argv[2:] or [*CASES, *on_load]:
        folder = root / case.replace(" ", "-") / "model"
        folder.parent.mkdir()
        if case in on_load:
            found["on load"][case] = examine_on_load(*on_load[case], folder)
        else:
            found["folders"][case] = examine(case, folder)
    found["errors"] = refusals(root / "errors" / "model")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
