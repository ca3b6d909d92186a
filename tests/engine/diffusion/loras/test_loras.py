"""LoRA adapters by row: in a mixed batch as alone, as merged into the weights, and not at all where there is none."""

import copy
import gc

import msgspec
import numpy as np
import pytest
import torch

from generating import (
    LATENTS_TOLERANCE,
    assert_latents_as_alone,
    difference,
    final_latents,
    generate,
    load,
    moved_image,
    relative,
)
from lora_files import save_diffusers_lora, save_kohya_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.loras import model_loras
from noria.engine.diffusion.loras.layer_hook import LayerHook
from noria.engine.diffusion.loras.lora_cache import NO_ADAPTERS, Adapter, Adapters
from noria.engine.diffusion.loras.lora_rows import LoraRows
from noria.engine.diffusion.loras.model_loras import ModelLoras
from noria.errors import ConfigError, InvalidField, QueueFull
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.loras.lora_file import read_lora
from noria.models.diffusion.loras.lora_layer import LoraLayer, LoraWeights
from noria.protocol.diffusion import Lora
from noria.testing.requests import make_image_request

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def save_adapters(folder, model):
    """Five adapters: of attention, of all layers, of a text encoder alone, of another rank, and with an alpha."""
    (name, denoiser), *others = model.lora_parts.items()
    unet, texts = {name: denoiser}, dict(others)
    save_diffusers_lora(folder / "attention.safetensors", unet, *ATTENTION, rank=4, seed=1)
    save_diffusers_lora(folder / "all.safetensors", model.lora_parts, rank=2, seed=2)
    save_diffusers_lora(folder / "text.safetensors", texts, "q_proj", "fc1", rank=4, seed=3)
    save_diffusers_lora(folder / "rank9.safetensors", unet, "to_v", "conv1", "downsamplers.0.conv", rank=9, seed=4)
    save = save_kohya_lora if name == "unet" else save_diffusers_lora  # kohya joins layers of other denoisers
    save(folder / "kohya.safetensors", model.lora_parts, *ATTENTION, "fc2", rank=8, seed=5)
    return ["attention", "all", "text", "rank9", "kohya"]


@pytest.fixture(scope="module", params=["tiny_folder", "tiny_xl_folder", "tiny_flux_folder"])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loras")
    spec, executor = load(request.getfixturevalue(request.param), loras=(str(folder),), slots=16)
    return spec, executor, folder, save_adapters(folder, executor.model)


def lora(folder, name, weight=1.0):
    return Lora(name, weight, digest_of(folder / f"{name}.safetensors"))


def make_request(spec, number, *loras, **fields):
    return make_image_request(
        f"r{number}",
        **{
            "prompt": ["a red circle", "a blue square", "a ring"][number % 3],
            "negative_prompt": [None, "", "a black cross"][number % 3],
            "seed": 1000 + number,
            "width": 32,
            "height": 32,
            "inference_steps": 3,
            "scheduler": (["ddim", "euler", "dpm++2m"] if "ddim" in spec.schedulers else spec.schedulers)[number % 3],
            "guidance_scale": [1.0, 4.0][number % 2],
            "loras": loras,
        }
        | fields,
    )


def mixed(spec, folder, names):
    """Images with one of five adapters, two of them, or none."""
    choices = [(lora(folder, name, weight),) for name, weight in zip(names, (1.0, 0.5, -0.7, 1.3, 0.8), strict=True)]
    choices += [(), (lora(folder, "attention"), lora(folder, "rank9", 0.4)), (lora(folder, "text"), choices[4][0])]
    return [make_request(spec, number, *each) for number, each in enumerate(choices)]


def test_images_with_five_adapters_are_in_one_batch_as_each_alone(loaded, monkeypatch):
    spec, executor, folder, names = loaded
    requests = mixed(spec, folder, names)
    together = assert_latents_as_alone(executor, requests, monkeypatch, [(7 * k) % 5 for k in range(8)])
    fresh = DiffusionExecutor(executor.model, executor.config)
    bare = final_latents(fresh, [make_request(spec, k) for k in range(8)], monkeypatch)
    for number, request in enumerate(requests):
        if request.payload.loras:
            assert relative(together[request.request_id], bare[f"r{number}"]) > 1e-3, request


def test_images_without_adapters_are_those_of_the_bare_model_bit_by_bit(loaded, monkeypatch):
    spec, executor, folder, names = loaded
    requests = mixed(spec, folder, names)
    # Padded, so that batches of prompts have one size too, however many adapters text encoders have.
    config = EngineConfig(dtype="float32", slots=16, threads=1, buckets=(16,))
    adapted = DiffusionExecutor(executor.model, msgspec.structs.replace(config, loras=executor.config.loras))
    with_adapters = final_latents(adapted, requests, monkeypatch)
    (without,) = [request for request in requests if not request.payload.loras]
    bare = final_latents(DiffusionExecutor(executor.model, config), [without], monkeypatch)
    assert torch.equal(with_adapters[without.request_id], bare[without.request_id])


def num_hooks(model):
    hooks = [each for part in model.lora_parts.values() for m in part.modules() for each in m._forward_hooks.values()]
    return sum(isinstance(hook, LayerHook) for hook in hooks)  # transformers has hooks of its own


def test_without_adapters_in_a_batch_nothing_is_added_to_the_model(loaded):
    spec, executor, folder, names = loaded
    executor.accept(executor.prepare(make_request(spec, 1, lora(folder, "all"))))
    executor.forget("r1")
    generate(executor, [make_request(spec, 2)])
    assert num_hooks(executor.model) == 0
    generate(executor, mixed(spec, folder, names))
    assert num_hooks(executor.model) == 0  # nothing is kept after the last request with adapters


def merge(part, layers, weight):
    part = copy.deepcopy(part)
    for name, layer in layers.items():
        module = part.get_submodule(name)
        change = layer.up @ layer.down.flatten(1)
        module.weight.data += weight * change.view_as(module.weight)
    return part


@torch.no_grad()
def test_nothing_stays_of_adapters_whose_stacking_ran_out_of_memory(loaded, monkeypatch):
    _, executor, folder, _ = loaded
    part = executor.model.lora_parts["text_encoder"]
    weights = read_lora(folder / "all.safetensors", executor.model.lora_parts, torch.float32, 2**24)
    adapters, rows, prompt = (
        Adapters((Adapter("x", weights, 1.0),)),
        LoraRows("text_encoder", part),
        torch.ones(1, 5).int(),
    )
    bare, stack, num_stacked = part(prompt)[0], torch.stack, []

    def stack_until_memory_ends(tensors):
        num_stacked.append(1)
        if len(num_stacked) == 5:
            raise torch.OutOfMemoryError("out of memory")
        return stack(tensors)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", stack_until_memory_ends)
        with pytest.raises(torch.OutOfMemoryError), rows.applied([adapters]):
            raise AssertionError
    assert num_hooks(executor.model) == 0
    with rows.applied([NO_ADAPTERS, NO_ADAPTERS]):
        assert torch.equal(part(prompt.expand(2, -1))[0][:1], part(prompt.expand(2, -1))[0][1:])
    with rows.applied([NO_ADAPTERS]):
        assert torch.equal(part(prompt)[0], bare)
    with rows.applied([adapters]):
        assert not torch.equal(part(prompt)[0], bare)


def test_stacks_stay_while_their_requests_do_and_are_of_like_ranks(loaded, monkeypatch):
    _, executor, folder, _ = loaded
    name, denoiser = next(iter(executor.model.lora_parts.items()))
    stacks, stack = [], torch.stack
    weights = {
        rank: read_lora(
            save_diffusers_lora(folder.parent / f"of{rank}.safetensors", {name: denoiser}, "to_q", rank=rank),
            executor.model.lora_parts,
            torch.float32,
            2**24,
        )
        for rank in (2, 16)
    }
    sets = {rank: Adapters((Adapter(str(rank), each, 1.0),)) for rank, each in weights.items()}
    rows = LoraRows(name, denoiser)
    monkeypatch.setattr(torch, "stack", lambda tensors: stacks.append(tensors[0].shape) or stack(tensors))
    with rows.applied([sets[2], NO_ADAPTERS, sets[16]]):
        assert {min(shape) for shape in stacks} == {2, 16}  # no rank is padded to the other
    stacks.clear()
    for order in ([16, 2], [2], [2, 2, 16], [16]):
        with rows.applied([sets[rank] for rank in order]):
            assert not stacks and rows.is_active
    with rows.applied([NO_ADAPTERS]):  # as a batch of another size has beside those
        assert not stacks and not rows.is_active
    del sets[2]
    with rows.applied([sets[16]]):
        assert {min(shape) for shape in stacks} == {16}
    rows.clear()


@torch.no_grad()
def test_an_adapter_changes_each_part_as_if_its_weights_were_merged(loaded):
    _, executor, folder, _ = loaded
    parts = executor.model.lora_parts
    weights = read_lora(folder / "all.safetensors", parts, torch.float32, 2**24)
    generator = torch.Generator().manual_seed(1)
    for name, part in parts.items():
        merged = merge(part, weights.layers[name], 0.6)
        if name == "unet":
            width = part.config.cross_attention_dim
            inputs = [torch.randn(3, 4, 8, 8, generator=generator), torch.tensor([900.0, 500.0, 20.0])]
            inputs.append(torch.randn(3, 5, width, generator=generator))
            more = {"text_embeds": torch.randn(3, 40, generator=generator), "time_ids": torch.ones(3, 6)}
            options = {"return_dict": False, "added_cond_kwargs": more}
        else:
            inputs, options = [torch.randint(0, 30, (3, 7), generator=generator)], {"output_hidden_states": True}
        if name == "transformer":
            inputs = [torch.randn(3, 6, 16, generator=generator), torch.randn(3, 5, 40, generator=generator)]
            inputs += [torch.randn(3, 32, generator=generator), torch.tensor([0.9, 0.5, 0.02])]
            inputs += [torch.ones(6, 3), torch.zeros(5, 3), torch.tensor([3.5, 1.0, 0.0])]
            options = {"return_dict": False}
        adapter = Adapter("x", weights, 0.6)
        once, twice = Adapters((adapter,)), Adapters((adapter, adapter))
        with LoraRows(name, part).applied([once, NO_ADAPTERS, twice]):
            ours = part(*inputs, **options)[0]
        assert relative(ours[0], merged(*inputs, **options)[0][0]) <= LATENTS_TOLERANCE
        assert torch.equal(ours[1], part(*inputs, **options)[0][1])
        doubled = merge(part, weights.layers[name], 1.2)
        assert relative(ours[2], doubled(*inputs, **options)[0][2]) <= LATENTS_TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["1", "01", "101", "1010110", "22", "12021"], ids=str)
def test_rows_without_an_adapter_are_untouched_whatever_the_others_have(pattern):
    """In one or two runs of rows or in more, and with matrices so large that what they add is not finite."""
    generator = torch.Generator().manual_seed(1)
    part = torch.nn.ModuleDict({"linear": torch.nn.Linear(6, 8), "convolution": torch.nn.Conv2d(6, 8, 3, padding=1)})
    shapes = {"linear": ((2, 6), (8, 2)), "convolution": ((2, 6, 3, 3), (8, 2))}
    sets = [NO_ADAPTERS]
    for scale in (1.0, 3e38):
        layers = {
            name: LoraLayer(*(scale * torch.randn(shape, generator=generator) for shape in of_layer))
            for name, of_layer in shapes.items()
        }
        sets.append(Adapters((Adapter(str(scale), LoraWeights({"part": layers}), 1.0),)))
    rows, lora_rows = [sets[int(k)] for k in pattern], LoraRows("part", part)
    for name, shape in (("linear", (3, 6)), ("convolution", (6, 4, 4))):
        inputs = torch.randn(len(rows), *shape, generator=generator)
        bare = part[name](inputs)
        with lora_rows.applied(rows):
            ours = part[name](inputs)
        for row, adapters in enumerate(rows):
            assert torch.equal(ours[row], bare[row]) == (adapters is NO_ADAPTERS)
            if adapters is sets[1]:
                with lora_rows.applied([adapters]):
                    torch.testing.assert_close(ours[row], part[name](inputs[row : row + 1])[0])
            assert ours[row].isfinite().all() == (adapters is not sets[2])
    lora_rows.clear()


@torch.no_grad()
def test_a_row_of_a_padded_call_does_not_depend_in_any_bit_on_which_others_have_adapters():
    generator = torch.Generator().manual_seed(1)
    part = torch.nn.ModuleDict({"linear": torch.nn.Linear(16, 32), "convolution": torch.nn.Conv2d(4, 16, 3, padding=1)})
    shapes = {"linear": ((2, 16), (32, 2)), "convolution": ((2, 4, 3, 3), (16, 2))}
    sets = [NO_ADAPTERS]
    for number in range(2):
        layers = {
            name: LoraLayer(*(torch.randn(shape, generator=generator) for shape in of_layer))
            for name, of_layer in shapes.items()
        }
        sets.append(Adapters((Adapter(str(number), LoraWeights({"part": layers}), 1.0),)))
    inputs = {
        "linear": torch.randn(8, 24, 16, generator=generator),
        "convolution": torch.randn(8, 4, 8, 12, generator=generator).contiguous(memory_format=torch.channels_last),
    }

    def outputs(rows, *, for_all_rows=True):
        lora_rows = LoraRows("part", part, for_all_rows=for_all_rows)
        with lora_rows.applied([sets[int(k)] for k in rows]):
            made = {name: part[name](each) for name, each in inputs.items()}
        lora_rows.clear()
        return made

    of_all, bare = outputs("11111111"), {name: part[name](each) for name, each in inputs.items()}
    for rows in ("10000000", "10100000", "11110000", "10101011", "12020121", "10022002"):
        for name, made in outputs(rows).items():
            for row, adapters in enumerate(rows):
                if adapters != "2":
                    expected = of_all if adapters == "1" else bare
                    assert torch.equal(made[row], expected[name][row]), (rows, name, row)


def test_prompts_are_encoded_once_for_each_adapter_of_a_text_encoder(loaded, monkeypatch):
    spec, _, folder, _ = loaded
    executor = DiffusionExecutor(loaded[1].model, loaded[1].config)
    encoded, text_encode = [], executor.model.text_encode
    monkeypatch.setattr(executor.model, "text_encode", lambda texts: encoded.extend(texts) or text_encode(texts))
    loras = [(), (lora(folder, "attention"),), (lora(folder, "text"),), (lora(folder, "text", 0.5),)]
    requests = [make_request(spec, 2 * k, *each, prompt="a") for k, each in enumerate(loras * 2)]
    generate(executor, requests)
    assert encoded == ["a", "a", "a"]


def test_padding_rows_have_the_adapters_of_the_row_that_they_repeat(loaded, monkeypatch):
    spec, executor, folder, names = loaded
    config = EngineConfig(dtype="float32", slots=16, threads=1, buckets=(16,), loras=executor.config.loras)
    padded = DiffusionExecutor(executor.model, config)
    requests = mixed(spec, folder, names)[:6]
    together = final_latents(padded, requests, monkeypatch)
    alone = final_latents(padded, requests[:1], monkeypatch)
    assert relative(together["r0"], alone["r0"]) <= LATENTS_TOLERANCE


def test_adapters_that_cannot_be_loaded_are_rejected_by_name(loaded, tmp_path):
    spec, executor, folder, _ = loaded
    for bad, message in [
        (Lora("unknown", 1.0, "0" * 12), "allowed are 'all', 'attention', 'kohya', 'rank9', 'text'"),
        (Lora("all", 1.0, "0" * 12), "'all' has digest"),
    ]:
        with pytest.raises(InvalidField, match=message):
            executor.prepare(make_request(spec, 1, bad))
    (folder / "bad.safetensors").write_bytes(b"\x04" + bytes(7) + b"{{{{")
    try:
        with pytest.raises(InvalidField, match=r"loras: bad\.safetensors: not a safetensors file"):
            executor.prepare(make_request(spec, 1, lora(folder, "bad")))
    finally:
        (folder / "bad.safetensors").unlink()


def test_a_compiled_model_and_adapters_exclude_each_other(loaded):
    config = EngineConfig(dtype="float32", slots=2, compile=True, buckets=(2,), loras=("x",))
    with pytest.raises(ConfigError, match=r"engine\.compile"):
        DiffusionExecutor(loaded[1].model, config)


@pytest.fixture
def crowded(loaded, tmp_path):
    """A model with a cache for three small adapters, and a folder with more."""
    spec, executor, _, _ = loaded
    parts = executor.model.lora_parts
    denoiser = dict([next(iter(parts.items()))])
    ending = "mid_block.attentions.0.proj_in" if "unet" in parts else "0.attn.add_q_proj"
    content = save_diffusers_lora(tmp_path / "0.safetensors", denoiser, ending).read_bytes()
    for number in range(9):
        (tmp_path / f"{number}.safetensors").write_bytes(content[:-2] + number.to_bytes(2, "little"))
    num_bytes = read_lora(tmp_path / "0.safetensors", parts, torch.float32, 2**20).nbytes
    config = EngineConfig(
        dtype="float32", slots=4, threads=1, loras=(str(tmp_path),), lora_cache_bytes=6 * num_bytes + 8
    )
    return spec, DiffusionExecutor(executor.model, config), tmp_path, num_bytes


def test_adapters_are_loaded_on_demand_and_evicted(crowded):
    spec, executor, folder, num_bytes = crowded
    requests = [make_request(spec, number, lora(folder, str(number)), inference_steps=2) for number in range(9)]
    for request in requests:
        assert not executor.is_compiled(request)
        generate(executor, [request])
        assert executor.is_compiled(request)
        assert executor._loras.cache.num_bytes <= 6 * num_bytes
    assert [executor.is_compiled(request) for request in requests] == [False] * 4 + [True] * 5


def test_adapters_of_accepted_requests_are_not_evicted(crowded):
    spec, executor, folder, num_bytes = crowded
    held = [executor.prepare(make_request(spec, number, lora(folder, str(number)))) for number in range(2)]
    for number in range(2, 7):
        executor.prepare(make_request(spec, number, lora(folder, str(number))))
        assert executor._loras.cache.num_bytes <= 6 * num_bytes
    assert executor.is_compiled(held[0].request) and executor.is_compiled(held[1].request)
    held.append(executor.prepare(make_request(spec, 7, lora(folder, "7"))))
    with pytest.raises(QueueFull, match=r"engine\.lora_cache_bytes"):
        executor.prepare(make_request(spec, 8, lora(folder, "8")))
    assert executor.prepare(make_request(spec, 9, lora(folder, "0"))).adapters is held[0].adapters
    del held
    gc.collect()
    executor.prepare(make_request(spec, 8, lora(folder, "8")))


def test_an_adapter_larger_than_the_cache_is_rejected(loaded, crowded):
    spec, executor, folder, _ = crowded
    denoiser = dict([next(iter(executor.model.lora_parts.items()))])
    save_diffusers_lora(folder / "large.safetensors", denoiser, *ATTENTION)
    with pytest.raises(InvalidField, match="bytes"):
        executor.prepare(make_request(spec, 1, lora(folder, "large")))
    assert np.isfinite(generate(executor, [make_request(spec, 2)])["r2", 0]).all()


def test_an_image_that_moves_keeps_its_adapters(loaded):
    spec, executor, folder, _ = loaded
    request = make_request(spec, 1, lora(folder, "attention"))
    undisturbed = generate(executor, [request])["r1", 0]
    assert difference(moved_image(executor, request, 2), undisturbed) <= 1


def test_a_rejected_file_is_read_again_only_when_it_has_changed(tiny_folder, tmp_path, monkeypatch):
    _, executor = load(tiny_folder, loras=(str(tmp_path),))
    loras, file, read = ModelLoras(executor.model, executor.config), tmp_path / "bad.safetensors", []

    def counted(*args):
        read.append(args[0].name)
        return read_lora(*args)

    monkeypatch.setattr(model_loras, "read_lora", counted)
    file.write_bytes((2).to_bytes(8, "little") + b"{}")
    for _ in range(3):
        with pytest.raises(InvalidField, match="has 0 tensors"):
            loras.load([Lora("bad", 1.0)], "tiny")
    assert len(read) == 1
    save_diffusers_lora(file, executor.model.lora_parts, *ATTENTION, rank=2, seed=1)
    assert loras.load([lora(tmp_path, "bad")], "tiny")
    assert len(read) == 2
