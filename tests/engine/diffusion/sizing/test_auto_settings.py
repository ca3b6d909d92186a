"""How "auto" is resolved, and which settings contradict each other."""

import msgspec
import pytest

from noria.config import EngineConfig
from noria.engine.diffusion.loading import max_rows
from noria.engine.diffusion.sizing.auto_settings import Machine, resolve_auto, resolve_device
from noria.errors import ConfigError
from noria.models.catalog import open_model
from noria.models.families import FAMILIES
from noria.observe.cgroup import usable_cores

CPU, GPU = Machine(4, has_cuda=False), Machine(16, has_cuda=True)


@pytest.fixture(scope="module")
def spec(bundled_folder):
    return open_model(str(bundled_folder))


def test_auto_is_the_gpu_if_there_is_one():
    assert resolve_device("auto", CPU) == "cpu"
    assert resolve_device("auto", GPU) == resolve_device("cuda", GPU) == "cuda:0"
    assert resolve_device("cuda:1", GPU) == "cuda:1"


def test_every_auto_is_resolved(spec):
    cpu = resolve_auto(EngineConfig(), spec, "cpu", CPU)
    gpu = resolve_auto(EngineConfig(), spec, "cuda:0", GPU)
    assert (cpu.dtype, cpu.slots, cpu.threads, cpu.channels_last) == ("float32", 16, 4, True)
    assert (gpu.dtype, gpu.slots, gpu.channels_last) == ("float16", 32, False)
    assert resolve_auto(EngineConfig(channels_last=True), spec, "cuda:0", GPU).channels_last is True


def test_a_full_size_model_gets_two_slots_on_a_cpu(spec):
    large = msgspec.structs.replace(spec, num_parameters=860_000_000)
    assert resolve_auto(EngineConfig(), large, "cpu", CPU).slots == 2
    assert resolve_auto(EngineConfig(), large, "cuda:0", GPU).slots == 32


@pytest.mark.parametrize(
    ("quantize", "device", "compiles"),
    [("none", "cuda:0", "auto"), ("nf4", "cuda:0", "auto"), ("fp8", "cuda:0", True), ("fp8", "cpu", "auto")],
)
def test_blocks_are_compiled_where_quantized_weights_are_slow_without(spec, quantize, device, compiles):
    resolved = resolve_auto(EngineConfig(quantize=quantize, compile_blocks="auto"), spec, device, GPU)
    assert resolved.compile_blocks == compiles


def test_engines_share_the_cores(spec):
    assert resolve_auto(EngineConfig(devices=("cpu", "cpu")), spec, "cpu", CPU).threads == 2


def test_buckets_bound_the_rows_of_calls_and_not_the_slots(spec):
    assert resolve_auto(EngineConfig(buckets=(2, 8)), spec, "cpu", CPU).slots == 16
    assert resolve_auto(EngineConfig(buckets=(8,), slots=5), spec, "cpu", CPU).slots == 5
    assert max_rows(EngineConfig(buckets=(2, 8), slots=16)) == 8
    with pytest.raises(ConfigError, match="2 or more"):
        resolve_auto(EngineConfig(buckets=(1,)), spec, "cpu", CPU)


def test_compiling_needs_buckets(spec):
    with pytest.raises(ConfigError, match="buckets"):
        resolve_auto(EngineConfig(compile=True), spec, "cpu", CPU)


@pytest.mark.parametrize(
    ("settings", "device", "words"),
    [
        ({"quantize": "int8"}, "cuda:0", "needs engine.compile_blocks on a GPU.* --compile-blocks, or use 'nf4'"),
        ({"quantize": "fp8"}, "cuda:0", "needs engine.compile_blocks"),
        ({"quantize": "fp8", "compile_blocks": True, "dtype": "float16"}, "cuda:0", "is 'float16'. Use 'bfloat16'"),
        *(
            (
                {"quantize": name, "compile_blocks": True, setting: ("a",)},
                "cuda:0",
                f"engine.{setting} 'a' on a GPU.* Use 'nf4'",
            )
            for name in ("int8", "fp8")
            for setting in ("loras", "ip_adapters")
        ),
        ({"quantize": "nf4", "compile": True, "buckets": (2,)}, "cuda:0", "not work with engine.compile"),
    ],
)
def test_quantization_rejects_settings_that_contradict_it(spec, settings, device, words):
    with pytest.raises(ConfigError, match=f"engine.quantize '{settings['quantize']}' .*{words}"):
        resolve_auto(EngineConfig(**settings), spec, device, GPU)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compile": True, "buckets": (2,)}, "'blocks' does not work with engine.compile, .* engine.compile_blocks"),
        ({"quantize": "nf4"}, "'blocks' does not work with engine.quantize 'nf4', .* Use 'encoders'"),
        (
            {"offload": "encoders", "offload_resident_bytes": 5},
            "_resident_bytes is 5, but engine.offload is 'encoders'",
        ),
        ({"offload": "none", "offload_resident_bytes": 0}, "_resident_bytes is 0, but engine.offload is 'none'"),
    ],
)
def test_offloading_rejects_settings_that_contradict_it(spec, settings, words):
    with pytest.raises(ConfigError, match=f"engine.offload ?{words}"):
        resolve_auto(EngineConfig(**{"offload": "blocks"} | settings), spec, "cuda:0", GPU)


def test_calls_whose_weights_stream_are_not_captured(spec):
    captured = {
        offload: resolve_auto(EngineConfig(offload=offload), spec, "cuda:0", GPU).cuda_graphs
        for offload in ("none", "encoders", "blocks")
    }
    assert captured == {"none": True, "encoders": True, "blocks": False}
    resolve_auto(EngineConfig(offload="encoders", quantize="nf4"), spec, "cuda:0", GPU)


def test_float8_chooses_bfloat16(spec):
    config = EngineConfig(quantize="fp8", compile_blocks=True, loras=("bundled", "other=a"))
    assert resolve_auto(config, spec, "cuda:0", GPU).dtype == "bfloat16"
    assert resolve_auto(EngineConfig(quantize="int8", loras=("a",)), spec, "cpu", CPU).dtype == "float32"
    resolve_auto(EngineConfig(quantize="nf4", loras=("a",)), spec, "cuda:0", GPU)


@pytest.mark.parametrize(
    ("family", "refused", "words"),
    [
        ("stable-diffusion", "_native_math", "allowed are auto, sdpa, plain, sliced, xformers"),
        ("stable-diffusion-3", "_native_flash", "; allowed are auto, sdpa[.]"),
        ("sana", "plain", "; allowed are auto, sdpa[.]"),
        ("chroma", "flash_varlen", "allowed are auto, sdpa, _native_cudnn"),
        ("qwen-image", "flash", "because it takes no masks; allowed are .* flash_varlen"),
        ("flux-2-klein", "plain", "allowed are .* flash, "),
    ],
)
def test_attention_is_one_that_the_masks_of_a_family_allow(spec, family, refused, words):
    of_family = msgspec.structs.replace(spec, family=family)
    with pytest.raises(ConfigError, match=f"engine.attention is '{refused}', which {family} does not allow.*{words}"):
        resolve_auto(EngineConfig(attention=refused), of_family, "cpu", CPU)
    for allowed in FAMILIES[family].attention:
        assert resolve_auto(EngineConfig(attention=allowed), of_family, "cpu", CPU).attention == allowed
    assert resolve_auto(EngineConfig(), of_family, "cpu", CPU).attention == "sdpa"


@pytest.mark.parametrize(("scheduled", "cgroup", "cores"), [(4, None, 4), (4, 2.5, 2), (4, 0.5, 1), (2, 8.0, 2)])
def test_a_containers_limit_bounds_the_cores(scheduled, cgroup, cores):
    assert usable_cores(scheduled, cgroup) == cores
