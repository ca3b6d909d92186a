"""Models whose blocks stream from the host's memory, which on a CPU are copied between two places of it."""

import functools
import weakref

import msgspec
import pytest
import torch

from flow_pipelines import make_request
from generating import generate, load
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.loading import load_executor
from noria.engine.diffusion.sizing.weight_bytes import weights_of
from noria.errors import ModelError
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.models.diffusion import block_quantization, part_loading
from noria.models.diffusion.block_quantization import denoiser_part
from noria.models.diffusion.conditioning import collate
from noria.models.diffusion.weight_blocks import blocks_of, choose_streamed
from noria.models.diffusion.weight_streaming import HostCopies, WeightStreamer, stored_value
from noria.models.families import FAMILIES
from noria.protocol.diffusion import Lora

REFINER = "stable-diffusion-xl-refiner"  # which is loaded with a model only
FAMILY_NAMES = [name for name, family in FAMILIES.items() if family.extra == "diffusion" and name != REFINER]
WITH_ENCODERS_ALONE = ("stable-diffusion-xl", "flux", "krea-2")  # the others' stream by the same code
SIDE_PX = 64  # a side that all families take; the published sizes take a hundred times as long
PROMPTS = ["a red circle", ""]


class LateCopies:
    """Copies when they are waited for, as late as a device may."""

    def start(self, target, source):
        return lambda: target.copy_(source)

    def wait(self, copy):
        copy()


class CountedCopies(HostCopies):
    """Copies at once; notes what was copied, and where the parts of the model were called."""

    def __init__(self):
        self.num_bytes = self.num_copies = 0

    def start(self, target, source):
        self.num_copies, self.num_bytes = self.num_copies + 1, self.num_bytes + len(source)
        super().start(target, source)


@pytest.fixture
def copied_by(monkeypatch):
    """A function that lets the models that are loaded from now on copy so."""

    def use(copies):
        make = functools.partial(WeightStreamer, copies=copies)
        monkeypatch.setattr(part_loading, "WeightStreamer", make)
        return copies

    return use


def parts_of(model):
    """The modules of all parts that a model holds."""
    found, pending = {}, list(vars(model).values())
    while pending:
        value = pending.pop()
        if isinstance(value, torch.nn.Module):
            found[id(value)] = value
        elif isinstance(value, list | tuple):
            pending += value
        elif type(value).__module__.startswith("noria.models.diffusion.vae"):
            pending += vars(value).values()
    return list(found.values())


def load_aligned(folder, **settings):
    """A model whose weights begin where torch would place them: where a file has them, a CPU may round otherwise."""
    spec, executor = load(folder, **settings)
    for part in parts_of(executor.model):
        for each in part.parameters():
            if not hasattr(each, "_stored_value"):
                each.data = each.data.clone()
    return spec, executor


def outputs_of(model):
    """Outputs of all parts, twice, for calls of several rows."""
    found, generator = [], torch.Generator().manual_seed(0)
    shape = model.latent_shape(SIDE_PX, SIDE_PX)
    with torch.inference_mode():
        for num_rows in (1, 2):
            texts = model.text_encode(PROMPTS[:num_rows])
            latents, times = torch.randn(num_rows, *shape, generator=generator), torch.linspace(900, 100, num_rows)
            guidance = times if model.guidance.embedded else None
            found.append(model.predict(latents, times, collate(texts), guidance))
            found.append(model.decode(latents))
            pixels = (torch.rand(1, SIDE_PX, SIDE_PX, 3, generator=generator) * 255).byte()
            found.append(model.encode(pixels).mean_BCHW)
            found += [tensor for text in texts for tensor in (*text.tokens.values(), *text.vectors.values())]
    return found


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # Krea 2's norms, which say so
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_parts_that_stream_compute_the_same_bits_within_less_memory(family, folder_of):
    spec, plain = load_aligned(folder_of(family))
    expected = outputs_of(plain.model)
    all_bytes = sum(weights_of(spec, plain.config).here.values())
    before = all_bytes
    encoders = ({"offload": "encoders"},) if family in WITH_ENCODERS_ALONE else ()
    for settings in (*encoders, {"offload": "blocks", "offload_resident_bytes": 0}):
        _, executor = load_aligned(folder_of(family), **settings)
        assert all(map(torch.equal, outputs_of(executor.model), expected))
        weights = weights_of(spec, executor.config)
        resident, buffers = 0, {}
        for part in parts_of(executor.model):
            for each in part.parameters():
                if hasattr(each, "_stored_value"):
                    buffers[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
                else:
                    resident += each.nbytes
        assert resident + sum(buffers.values()) < before
        # Some text encoders have layers in their files that are dropped.
        assert resident + sum(buffers.values()) <= sum(weights.here.values()) + 256 * 64 * len(buffers)
        assert (
            sum(weights.here.values()) - weights.here["offload buffers"] + sum(weights.streamed.values()) == all_bytes
        )
        before = resident + sum(buffers.values())


@pytest.mark.parametrize("family", ["flux", "stable-diffusion"])
def test_no_copy_is_used_before_it_is_waited_for(family, folder_of, copied_by):
    _, plain = load_aligned(folder_of(family))
    copied_by(LateCopies())
    _, executor = load_aligned(folder_of(family), offload="blocks", offload_resident_bytes=0)
    assert all(map(torch.equal, outputs_of(executor.model), outputs_of(plain.model)))


def test_a_step_copies_each_block_once_for_all_rows_and_ahead_of_its_call(folder_of, copied_by):
    copies = copied_by(CountedCopies())
    _, executor = load_aligned(folder_of("flux"), offload="blocks", offload_resident_bytes=0)
    model, blocks = executor.model, executor.model.network.transformer_blocks
    chosen = [*blocks, *executor.model.network.single_transformer_blocks]
    counts = []
    for block in chosen:
        block.register_forward_hook(lambda *_: counts.append(copies.num_copies))
    with torch.inference_mode():
        texts = model.text_encode(PROMPTS[:1])

        def step(num_rows):
            times = torch.full((num_rows,), 500.0)
            latents = torch.zeros(num_rows, *model.latent_shape(64, 64))
            before = copies.num_copies, copies.num_bytes
            model.predict(latents, times, collate(texts * num_rows), times)
            return copies.num_copies - before[0], copies.num_bytes - before[1]

        step(1)
        counts.clear()
        (num_copies, num_bytes), eight = step(1), step(8)
    assert (num_copies, num_bytes) == eight
    assert len(chosen) - 1 <= num_copies <= len(chosen)  # the second is still in its buffer
    assert num_bytes > 0
    assert counts[0] < counts[1] == counts[2]  # the third was copied before the second was called


def test_a_call_that_fails_leaves_no_wrong_weights(folder_of):
    _, plain = load_aligned(folder_of("z-image"))
    _, executor = load_aligned(folder_of("z-image"), offload="blocks", offload_resident_bytes=0)

    def fail(*_):
        raise torch.OutOfMemoryError

    layers = executor.model.network.layers
    for layer in (layers[0], layers[1]):
        handle = layer.register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            outputs_of(executor.model)
        handle.remove()
    assert all(map(torch.equal, outputs_of(executor.model), outputs_of(plain.model)))


def test_a_released_model_leaves_no_memory_behind(folder_of):
    _, executor = load_aligned(folder_of("flux"), offload="blocks", offload_resident_bytes=0)
    first = executor.model.network.transformer_blocks[0]
    stored = weakref.ref(next(first.parameters())._stored_value.untyped_storage())
    generate(executor, [make_request(0)])
    del executor, first
    assert stored() is None  # at once, without a collection


@pytest.mark.parametrize("family", ["flux", "stable-diffusion"])
def test_images_of_a_batch_with_adapters_are_as_without_streaming(family, folder_of, tmp_path):
    spec, bare = load_aligned(folder_of(family))
    save_diffusers_lora(tmp_path / "all.safetensors", bare.model.lora_parts, rank=2)
    lora = Lora("all", 0.7, digest_of(tmp_path / "all.safetensors"))
    _, streaming = load_aligned(folder_of(family), offload="blocks", offload_resident_bytes=20_000)
    images = []
    for executor in (bare, streaming):
        config = msgspec.structs.replace(executor.config, loras=(str(tmp_path),))
        scheduler = spec.default_scheduler
        requests = [make_request(k, height=32, scheduler=scheduler, loras=(lora,) * (k % 2)) for k in range(3)]
        images.append(generate(DiffusionExecutor(executor.model, config), requests, arrivals=[0, 2, 1]))
    assert all((images[0][key] == images[1][key]).all() for key in images[0])
    for name, part in bare.model.lora_parts.items():
        others = dict(streaming.model.lora_parts[name].named_parameters())
        assert all(torch.equal(stored_value(others[key]), each) for key, each in part.named_parameters())
        assert any(hasattr(each, "_stored_value") for each in others.values())


@pytest.mark.slow  # 15 s, in which torch traces
@pytest.mark.timeout(300)
def test_streamed_blocks_can_be_compiled(folder_of, monkeypatch):
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(compiled, backend="eager"))
    _, plain = load_aligned(folder_of("krea-2"))
    _, executor = load_aligned(folder_of("krea-2"), offload="blocks", offload_resident_bytes=0, compile_blocks=True)
    try:
        found = outputs_of(executor.model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    finally:
        torch._dynamo.reset()
    for ours, theirs in zip(found, outputs_of(plain.model), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_blocks_stay_as_long_as_there_is_room_for_them(folder_of):
    spec = open_model(str(folder_of("flux")))
    config = EngineConfig(dtype="float32", slots=2, threads=1, offload="blocks")
    executor, _ = load_executor(spec, config, "cpu")
    assert weights_of(spec, executor.config).streamed.keys().isdisjoint({denoiser_part(spec)})
    assert isinstance(executor.config.offload_resident_bytes, int)


def test_quantized_weights_are_rejected(folder_of, monkeypatch):
    monkeypatch.setattr(block_quantization, "is_quantized", lambda spec, part: part == "transformer")
    with pytest.raises(ModelError, match=r"offload does not work with the transformer in .* quantized"):
        load(folder_of("flux"), offload="blocks", offload_resident_bytes=0)
    spec = open_model(str(folder_of("flux")))
    with pytest.raises(ModelError, match="offload does not work with the transformer"):
        weights_of(spec, EngineConfig(dtype="float32", slots=2, threads=1, offload="blocks"))
    load(folder_of("flux"), offload="encoders")


@pytest.mark.parametrize(
    ("part", "names", "expected"),
    [
        ("text_encoder", ("encoder.block.0.layer.1.a", "encoder.block.10.b", "shared.a"),
         ["encoder.block.0", "encoder.block.10"]),
        ("text_encoder_2", ("model.layers.2.mlp.a", "model.norm.a"), ["model.layers.2"]),
        ("vae", ("encoder.down.0.a", "decoder.b", "quant_conv.a"), ["encoder", "decoder"]),
        ("transformer", ("transformer_blocks.0.a", "single_transformer_blocks.1.a", "proj_out.a"),
         ["transformer_blocks.0", "single_transformer_blocks.1"]),
        ("transformer", ("layers.0.attention.a", "noise_refiner.1.a", "cap_embedder.a"),
         ["layers.0", "noise_refiner.1"]),
        ("unet", ("down_blocks.1.attentions.0.transformer_blocks.0.a", "down_blocks.1.resnets.0.a", "conv_in.a"),
         ["down_blocks.1.attentions.0.transformer_blocks.0"]),
    ],
)  # fmt: skip
def test_the_blocks_of_a_part_are_found_by_names(part, names, expected):
    assert list(blocks_of(part, names)) == expected


def test_streamed_blocks_are_few_and_evenly_spread():
    assert choose_streamed([10] * 6, 60) == [False] * 6
    assert choose_streamed([10] * 6, 40) == [False, False, True, False, False, True]
    assert choose_streamed([10] * 6, 9) == [True] * 6
    assert choose_streamed([], 0) == []
    assert choose_streamed([30, 10, 10], 0) == [True] * 3
