"""The memory of models without their weights, against what torch's allocator counts when the real ones are called."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import tiny_models
from noria.config import EngineConfig
from noria.engine.diffusion.sizing import memory_estimate
from noria.engine.diffusion.sizing.auto_settings import Machine, resolve_auto
from noria.engine.diffusion.sizing.memory_estimate import (
    LONGEST_PROMPT,
    MemoryEstimate,
    estimate_memory,
    find_changes,
    find_quantizations,
)
from noria.engine.diffusion.sizing.weight_bytes import weights_of
from noria.models.catalog import count_parameters, open_model
from noria.models.diffusion import block_quantization
from noria.models.diffusion.conditioning import collate
from noria.models.diffusion.folders.quantization import BitsAndBytes, Torchao
from noria.models.diffusion.unet_models.controlnet import ControlRows
from noria.models.families import FAMILIES
from noria.protocol.diffusion import DiffusionModelSpec

FOLDERS = {
    "stable-diffusion-xl": tiny_models.save_stable_diffusion_xl,
    "inpainting": lambda folder: tiny_models.save_stable_diffusion(folder, unet=tiny_models.INPAINTING_UNET),
    "fill": lambda folder: tiny_models.save_flux(folder, transformer=tiny_models.FILL_TRANSFORMER),
    "stable-diffusion-3": tiny_models.save_stable_diffusion_3,
    "flux, kontext": lambda folder: tiny_models.save_flux(folder, pipeline="FluxKontextPipeline"),
    "flux-2-dev": tiny_models.save_flux_2_dev,
    "flux-2-klein, distilled": lambda folder: tiny_models.save_flux_2_klein(folder, is_distilled=True),
    "chroma": tiny_models.save_chroma,
    "z-image": tiny_models.save_z_image,
    "qwen-image": tiny_models.save_qwen_image,
    "qwen-image-2-1": tiny_models.save_qwen_image_21,
    "krea-2": tiny_models.save_krea2,
    "lumina-2": tiny_models.save_lumina2,
    "sana": tiny_models.save_sana,
    "pixart-sigma": tiny_models.save_pixart_sigma,
}


def allocated_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that the CPU's allocator had handed out during `call` and not got back."""
    with torch.inference_mode():
        call()  # what is computed once
        with torch.profiler.profile(profile_memory=True) as profile:
            call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("family", FOLDERS)
def test_activations_are_those_that_the_real_model_allocates(family: str, tmp_path: Any) -> None:
    spec = open_model(str(FOLDERS[family](tmp_path / "model")))
    side_px = min(128, spec.default_width_px)  # enough for activations, and for a fast test
    spec = msgspec.structs.replace(spec, default_width_px=side_px, default_height_px=side_px)
    config = resolve_auto(EngineConfig(), spec, "cpu", Machine(1, has_cuda=False))
    estimate = estimate_memory(spec, config)
    model = FAMILIES[spec.family].load(spec, config, "cpu")
    shape = model.latent_shape(spec.default_width_px, spec.default_height_px)
    with torch.inference_mode():
        (prompt,) = model.text_encode([LONGEST_PROMPT])
        pixels = torch.zeros(side_px, side_px, 3, dtype=torch.uint8)
        references = [model.encode_references([pixels] * spec.max_references)] * 4 if spec.max_references else None
    reference_bytes = 0 if references is None else references[0].tokens_MD.nbytes
    guidance = torch.ones(4) if model.guidance.embedded else None
    options = {} if references is None else {"references": references}
    channels = {"inpainting": 4 + 1 + 4, "fill": 4 + 4 + 4**2}
    latents = torch.zeros(4, channels.get(family, shape[0]), *shape[1:])

    def predict() -> None:
        model.predict(latents, torch.ones(4), collate([prompt] * 4), guidance, **options)

    assert estimate.row * 4 == pytest.approx(allocated_bytes(predict), rel=0.2)
    assert estimate.decoded_image * 2 == pytest.approx(
        allocated_bytes(lambda: model.decode(torch.zeros(2, *shape))), rel=0.2
    )
    assert estimate.rows_per_image == (
        1 if family in ("fill", "flux, kontext", "flux-2-dev", "flux-2-klein, distilled") else 2
    )
    kept = (9 * shape[0] + latents.shape[1] - shape[0]) * shape[1] * shape[2]  # samples, outputs, noise, mask
    # Where the input has no mask: the latents and the noise of what is kept, and a byte of a mask.
    masked = 0 if latents.shape[1] > shape[0] else 9 * shape[0] * shape[1] * shape[2]
    assert estimate.slot == 4 * kept + masked + reference_bytes + estimate.rows_per_image * prompt.nbytes
    # Counters of batches, which are no parameters, have eight bytes.
    assert sum(estimate.weights.values()) == pytest.approx(4 * count_parameters(spec), abs=8)


def test_slots_are_those_that_fit() -> None:
    estimate = MemoryEstimate(
        {"unet": 1000}, row=10, decoded_image=25, prompt=1, slot=5, rows_per_image=2, decode_batch=4, caches=7
    )
    assert [estimate.needed(slots) for slots in (1, 4, 8)] == [1007 + 5 + 25, 1007 + 20 + 100, 1007 + 40 + 160]
    assert [estimate.slots_in(num_bytes) for num_bytes in (1036, 1037, 1206, 1207)] == [0, 1, 7, 8]
    graphed = dataclasses.replace(estimate, graph_rows=6, graph_row=10)
    assert [graphed.needed(slots) - estimate.needed(slots) for slots in (1, 3, 8)] == [20, 60, 60]
    bucketed = dataclasses.replace(estimate, max_rows=8)
    assert [bucketed.needed(slots) for slots in (1, 4, 8)] == [1007 + 5 + 25, 1007 + 20 + 100, 1007 + 40 + 100]


@pytest.fixture(scope="module")
def xl(tiny_xl_folder: pathlib.Path) -> tuple[DiffusionModelSpec, EngineConfig, MemoryEstimate]:
    """A model, the settings of an engine that adds nothing to it, and its estimate."""
    spec = open_model(str(tiny_xl_folder))
    config = resolve_auto(EngineConfig(), spec, "cpu", Machine(1, has_cuda=False))
    return spec, config, estimate_memory(spec, config)


def test_controlnets_are_counted(xl: Any, tmp_path: Any) -> None:
    spec, without, bare = xl
    edges = tiny_models.save_controlnet(tmp_path / "edges", spec.path)
    config = msgspec.structs.replace(without, controlnets=(str(edges),))
    estimate = estimate_memory(spec, config)
    model = FAMILIES[spec.family].load(spec, config, "cpu")
    part = model.controlnets._parts["edges"]
    assert estimate.weights == dict(bare.weights) | {
        "ControlNet edges": sum(parameter.nbytes for parameter in part.parameters())
    }
    shape = model.latent_shape(spec.default_width_px, spec.default_height_px)
    with torch.inference_mode():
        (prompt,) = model.text_encode([LONGEST_PROMPT])
    images = torch.zeros(4, 3, spec.default_height_px, spec.default_width_px)
    controls = [ControlRows("edges", torch.arange(4), images, torch.ones(4), 4)]

    def predict() -> None:
        model.predict(torch.zeros(4, *shape), torch.ones(4), collate([prompt] * 4), None, controls)

    assert estimate.row * 4 == pytest.approx(allocated_bytes(predict), rel=0.2)
    assert estimate.row > bare.row


def test_a_refiner_counts_with_its_weights_and_its_larger_calls(xl: Any, tmp_path: Any) -> None:
    spec, without, bare = xl
    wide = {"block_out_channels": (32, 64)}  # those of the model are half as wide
    folder = tiny_models.save_xl_refiner(tmp_path / "refiner", unet=wide)
    config = msgspec.structs.replace(without, refiners=(str(folder),))
    estimate = estimate_memory(spec, config)
    refiner = FAMILIES[spec.family].load(spec, config, "cpu").refiner
    parts = {"unet": refiner._denoiser._unet, "text_encoder_2": refiner._text_encoder[1]}
    of_refiner = {f"refiner's {name}": sum(each.nbytes for each in part.parameters()) for name, part in parts.items()}
    assert {name: estimate.weights[name] for name in estimate.weights.keys() - bare.weights.keys()} == of_refiner
    assert (estimate.caches, bare.caches) == (2 * config.embedding_cache_bytes, config.embedding_cache_bytes)
    with torch.inference_mode():
        (prompt,) = refiner.text_encode([LONGEST_PROMPT])

    def predict() -> None:
        refiner.predict(torch.zeros(4, 4, 8, 8), torch.ones(4), collate([prompt] * 4), None)

    assert estimate.row * 4 == pytest.approx(allocated_bytes(predict), rel=0.2)
    assert estimate.row > bare.row
    assert estimate.graph_row == bare.row + estimate.row, "each of the two UNets has graphs of its own"
    weights = weights_of(spec, msgspec.structs.replace(config, text_encoder_device="cuda:1"))
    assert weights.elsewhere["refiner's text_encoder_2"] == of_refiner["refiner's text_encoder_2"]
    assert "refiner's text_encoder_2" not in weights.here


def open_small_flux(folder: pathlib.Path, side_px: int) -> DiffusionModelSpec:
    """A model whose images have few tiles, each of which is estimated."""
    spec = open_model(str(tiny_models.save_flux(folder, vae={"sample_size": 128})))
    return msgspec.structs.replace(spec, default_width_px=side_px, default_height_px=side_px)


def test_changes_take_less_each_alone_and_all_together(tmp_path: Any) -> None:
    spec = open_small_flux(tmp_path / "model", 256)
    gpu = Machine(1, has_cuda=True)
    config = resolve_auto(EngineConfig(dtype="float32"), spec, "cuda:0", gpu)
    now = estimate_memory(spec, config)
    changes = find_changes(spec, config, "cuda:0")
    names = [change.names for change in changes]
    tiled = ("--vae-tiling",)  # 256 px are more than the 128 that its VAE decodes as one
    apart, int8, nf4 = ("--text-encoder-device cpu",), ("--quantize int8 --compile-blocks",), ("--quantize nf4",)
    assert names == [("--dtype bfloat16",), tiled, apart, int8, nf4, ("--dtype bfloat16", *tiled, *apart, *nf4)]
    assert all(change.estimate.needed(1) < now.needed(1) for change in changes)
    assert min(change.estimate.needed(1) for change in changes) == changes[-1].estimate.needed(1)
    by_name = dict(zip(names, (change.estimate for change in changes), strict=True))
    assert sum(by_name["--dtype bfloat16",].weights.values()) == sum(now.weights.values()) // 2
    texts = {"text_encoder", "text_encoder_2"}
    assert by_name[apart].elsewhere == {name: num_bytes for name, num_bytes in now.weights.items() if name in texts}
    assert set(by_name[apart].weights) == {"transformer", "vae"}
    chosen = msgspec.structs.replace(config, quantize="nf4")
    assert weights_of(spec, chosen).here == by_name[nf4].weights
    assert find_quantizations(spec, chosen, by_name[nf4], "cuda:0") == ()
    all_settings = {"dtype": "bfloat16", "vae_tiling": True, "text_encoder_device": "cpu", "quantize": "nf4"}
    assert estimate_memory(spec, msgspec.structs.replace(config, **all_settings)) == changes[-1].estimate


def test_what_the_loader_of_a_quantized_folder_refuses_is_not_proposed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = open_small_flux(tmp_path / "model", 64)  # too small for tiles
    config = resolve_auto(EngineConfig(dtype="float32"), spec, "cuda:0", Machine(1, has_cuda=True))
    float8 = {"default": {"_type": "Float8WeightOnlyConfig"}}
    quantizations = {
        "text_encoder_2": BitsAndBytes(load_in_4bit=True),
        "transformer": msgspec.convert({"quant_method": "torchao", "quant_type": float8}, Torchao),
    }
    for module in (memory_estimate, block_quantization):
        monkeypatch.setattr(module, "read_quantization", lambda file: quantizations.get(file.parent.name))
    assert find_changes(spec, config, "cuda:0") == (), "a folder that is not quantized has more: see above"


def test_in_bfloat16_on_a_cpu_only_quantization_takes_less(tmp_path: Any) -> None:
    spec = open_small_flux(tmp_path / "model", 64)
    config = resolve_auto(EngineConfig(dtype="bfloat16"), spec, "cpu", Machine(1, has_cuda=False))
    names = [change.names for change in find_changes(spec, config, "cpu")]
    assert names == [("--quantize int8",), ("--quantize nf4",)]
