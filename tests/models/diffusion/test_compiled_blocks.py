"""Denoisers whose blocks are compiled: what is computed, and that nothing is compiled after the warm-up."""

import functools
import pkgutil
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters

import tiny_models
from flow_pipelines import make_request
from generating import difference, final_latents, generate, load, relative
from lora_files import save_diffusers_lora
from noria.config import EngineConfig
from noria.engine.diffusion.executor import DiffusionExecutor
from noria.engine.diffusion.warmup.block_warmup import warm_up_blocks
from noria.errors import ConfigError
from noria.images import reference_size
from noria.models.adapters.lora_folders import digest_of
from noria.models.catalog import open_model
from noria.models.diffusion.block_compilation import compile_blocks, is_hooked
from noria.models.diffusion.conditioning import collate
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel
from noria.models.families import FAMILIES
from noria.protocol.diffusion import Lora, Refinement
from noria.protocol.model_spec import CallChoice
from qwen_pipelines import request_with_references

SAVE = {
    "stable-diffusion": tiny_models.save_stable_diffusion,
    "stable-diffusion-xl": tiny_models.save_stable_diffusion_xl,
    "stable-diffusion-3": tiny_models.save_stable_diffusion_3,  # diffusers names no blocks of it
    "flux": tiny_models.save_flux,
    "flux-2-klein": tiny_models.save_flux_2_klein,
    "chroma": tiny_models.save_chroma,
    "qwen-image": tiny_models.save_qwen_image,
    "qwen-image-2-1": tiny_models.save_qwen_image_21,
    "z-image": tiny_models.save_z_image,
    "krea-2": tiny_models.save_krea2,
    "lumina-2": tiny_models.save_lumina2,
}
PROMPTS = ["a red circle", "a", "a blue square red red", "red " * 9]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Blocks are traced, and their graphs are run by torch as it is, which takes a tenth of compiling them."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(compiled, backend="eager"))


def num_graphs():
    return counters["stats"]["unique_graphs"]


def warm_up(executor, spec, *, with_loras=False):
    large = min(64, spec.max_side_px)
    small = msgspec.structs.replace(spec, default_width_px=large, default_height_px=min(48, large), min_side_px=32)
    warm_up_blocks(executor.model, small, executor.config, with_loras=with_loras)


def make_requests(spec, num, *, size=None, same_prompt=False, guidance=3.5, first=0, loras=()):
    large = min(64, spec.max_side_px)
    sizes = [(32, 32), (large, large), (32, large)]
    return [
        make_request(
            first + k,
            prompt=PROMPTS[0 if same_prompt else k % 4],
            negative_prompt=None if spec.family == "flux" else "a red",
            width=(size or sizes[k % 3])[0],
            height=(size or sizes[k % 3])[1],
            inference_steps=2,
            scheduler=spec.default_scheduler,
            guidance_scale=guidance,
            loras=loras[k % len(loras)] if loras else (),
        )
        for k in range(num)
    ]


def with_loras(folder, executor, eager):
    """Two LoRAs in a folder, of all linear layers of the blocks and of some others; and executors that serve them."""
    folder.mkdir()
    (name, part), *_ = executor.model.lora_parts.items()
    hooked = [path for path, module in part.named_modules() if is_hooked(module)]
    settings = {"dtype": "float32", "slots": 8, "threads": 1, "loras": (str(folder),)}
    executors = [
        DiffusionExecutor(each.model, EngineConfig(**settings, compile_blocks=each is executor))
        for each in (executor, eager)
    ]
    loras = [
        Lora(file.stem, 1.0, digest_of(save_diffusers_lora(file, {name: part}, *endings, rank=rank)))
        for file, endings, rank in ((folder / "all.safetensors", hooked, 4), (folder / "ink.safetensors", ("to_q",), 3))
    ]
    return loras, *executors


@pytest.mark.slow  # 6 to 30 s for each family, in which torch traces
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", SAVE)
def test_after_the_warm_up_nothing_is_compiled(family, tmp_path, traced, monkeypatch):
    folder = SAVE[family](tmp_path / "model")
    (spec, executor), (_, eager) = load(folder, compile_blocks=True), load(folder)
    (wide, narrow), executor, eager = with_loras(tmp_path / "loras", executor, eager)
    warm_up(executor, spec)
    before = num_graphs()
    assert 2 <= before <= 9
    warm_up(executor, spec, with_loras=True)
    assert before <= num_graphs() <= 2 * before
    before = num_graphs()
    traffic = [
        make_requests(spec, 1, size=(32, 32), guidance=0.0),
        make_requests(spec, 1, size=(32, 32)),
        make_requests(spec, 3, size=(32, 32)),
        make_requests(spec, 3, same_prompt=True),
        make_requests(spec, 8),
        make_requests(spec, 1, size=(32, 32), loras=[(narrow,)]),
        make_requests(spec, 3, same_prompt=True, loras=[(wide,), (), (narrow,)]),
        make_requests(spec, 8, loras=[(wide, narrow), (), (wide,), (narrow,)]),
    ]
    torch.compiler.set_stance("default")  # as if more could be compiled
    found = [final_latents(executor, requests, monkeypatch) for requests in traffic]
    assert num_graphs() == before
    for requests, latents in zip(traffic, found, strict=True):
        expected = final_latents(eager, requests, monkeypatch)
        assert max(relative(latents[key], expected[key]) for key in expected) <= 1e-5


def test_transformers_are_not_compiled_as_a_whole(tmp_path):
    families = [family for family in FAMILIES.values() if "transformer" in family.parts]
    classes = [pkgutil.resolve_name(family.load_with).__self__ for family in families]
    assert all(issubclass(each, TransformerModel) for each in classes)  # whose __init__ rejects it
    spec = open_model(str(tiny_models.save_chroma(tmp_path / "model")))
    config = EngineConfig(dtype="float32", slots=2, threads=1, compile=True, buckets=(2,))
    with pytest.raises(ConfigError, match=r"engine\.compile does not work with Chroma.*or use engine\.compile_blocks"):
        FAMILIES["chroma"].load(spec, config, "meta")


@pytest.mark.slow  # 10 s, in which torch traces
@pytest.mark.timeout(300)
def test_the_blocks_of_a_refiner_are_compiled_before_it_serves(tmp_path, traced):
    refiner = tiny_models.save_xl_refiner(tmp_path / "refiner")
    folder = tiny_models.save_stable_diffusion_xl(tmp_path / "model")
    spec, executor = load(folder, compile_blocks=True, refiners=(str(refiner),))
    warm_up(executor, spec)
    before, blocks = num_graphs(), executor.model.refiner._denoiser._unet.modules()
    assert any(each._compiled_call_impl is not None for each in blocks)
    torch.compiler.set_stance("default")  # as if more could be compiled
    for guidance, num in ((0.0, 1), (3.5, 1), (3.5, 3)):
        fields = {"scheduler": "euler", "height": 32, "guidance_scale": guidance, "refiner": Refinement(0.5)}
        generate(executor, [make_request(k, **fields) for k in range(num)])
    assert num_graphs() == before


class BreakingLinear(torch.nn.Linear):
    """Its forward cannot be traced, such as that of some quantized layers."""

    def forward(self, inputs):
        torch._dynamo.graph_break()
        return super().forward(inputs)


@pytest.mark.slow  # 6 s, in which torch traces
def test_adapters_work_with_compiled_blocks(tmp_path, traced, monkeypatch):
    """Also where compiled code would leave a part of them out, and where calls with them were measured to be slower."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as if another thread compiled all the time
    folder = tiny_models.save_stable_diffusion(tmp_path / "model")
    (spec, executor), (_, eager) = load(folder, compile_blocks=True), load(folder)
    (wide, narrow), executor, eager = with_loras(tmp_path / "loras", executor, eager)
    next(m for m in executor.model.network.modules() if is_hooked(m)).__class__ = BreakingLinear
    compile_blocks(executor.model.network)
    norm = tmp_path / "loras" / "norm.safetensors"
    path = next(path for path, _ in executor.model.network.named_modules() if path.endswith("norm1"))
    width = len(executor.model.network.get_submodule(path).weight)
    save_file({f"unet.{path}.diff": torch.ones(width)}, norm)
    adapted = Lora("norm", 1.0, digest_of(norm))
    compiled, bare = [], final_latents(eager, make_requests(spec, 3, size=(32, 32)), monkeypatch)
    for loras in ([], [(), (wide,), (narrow,)], [(wide, narrow), (adapted,)], [], [(narrow,), ()]):
        requests = make_requests(spec, 3, size=(32, 32), loras=loras)
        ours, theirs = (final_latents(each, requests, monkeypatch) for each in (executor, eager))
        assert max(relative(ours[key], theirs[key]) for key in theirs) <= 1e-5
        assert any(relative(ours[key], bare[key]) > 1e-2 for key in ours) == bool(loras)
        compiled.append(num_graphs())
        if len(compiled) == 4:
            choice = CallChoice("", "", "sdpa", compile_blocks=True, speedup=2.0, trials=())
            executor = DiffusionExecutor(executor.model, executor.config, call_choice=choice)
    assert 0 < compiled[0] < compiled[1] == compiled[2] == compiled[3] == compiled[4]


def test_references_work_where_blocks_are_compiled(tmp_path, monkeypatch):
    """Calls with references fit no code that is compiled before a model serves."""
    monkeypatch.setattr(reference_size, "_VISION_AREA_PX", 64**2)  # instead of 1024² px
    folder = tiny_models.save_qwen_image_21(tmp_path / "model")
    spec, executor = load(folder, compile_blocks=True)
    request, frame = request_with_references(spec, 1, 2, width=64, height=96, inference_steps=3)
    torch.compiler.set_stance("eager_on_recompile")
    ours = generate(executor, [request], frames={"r1": frame})["r1", 0]
    torch.compiler.set_stance("default")
    assert difference(ours, generate(load(folder)[1], [request], frames={"r1": frame})["r1", 0]) <= 1


def test_a_call_of_an_unknown_kind_is_computed_without_compiling(tmp_path, traced, monkeypatch):
    spec, executor = load(tiny_models.save_stable_diffusion_3(tmp_path / "model"), compile_blocks=True)
    torch.compiler.set_stance("eager_on_recompile")
    assert final_latents(executor, make_requests(spec, 2, size=(32, 32)), monkeypatch)
    assert num_graphs() == 0


@pytest.mark.slow  # half a minute: a C++ compiler runs
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
def test_compiled_code_computes_what_torch_does(tmp_path, monkeypatch):
    folder = tiny_models.save_krea2(tmp_path / "model")
    (spec, executor), (_, eager) = load(folder, compile_blocks=True), load(folder)
    (wide, narrow), executor, eager = with_loras(tmp_path / "loras", executor, eager)
    warm_up(executor, spec)
    warm_up(executor, spec, with_loras=True)
    before = num_graphs()
    torch.compiler.set_stance("fail_on_recompile")
    for loras in ([(narrow,)], [(wide, narrow), (), (narrow,), (wide,)]):
        requests = make_requests(spec, 2 * len(loras), loras=loras)
        ours, theirs = (final_latents(each, requests, monkeypatch) for each in (executor, eager))
        assert max(relative(ours[key], theirs[key]) for key in theirs) <= 1e-5
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        texts = eager.model.text_encode(PROMPTS)
        for num_rows in (1, 2, 5, 8):
            rows = collate([texts[k % 4] for k in range(num_rows)])
            latents = torch.randn(num_rows, *eager.model.latent_shape(48, 32), generator=generator)
            times = torch.linspace(900.0, 100.0, num_rows)
            ours, theirs = (each.model.predict(latents, times, rows, None) for each in (executor, eager))
            assert relative(ours, theirs) <= 1e-5
            assert not torch.equal(ours, theirs)  # it is other code
    assert num_graphs() == before
