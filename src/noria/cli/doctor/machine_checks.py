"""The checks of `noria doctor`: what works, what fails, and what would be slow and why.

`machine_facts.py` gathers facts; `judge` is a pure function of them, so every verdict can be tested on any machine.
Speeds are estimates from the project's own measurements, good to a factor of two; `noria bench quick` measures.
"""

from collections.abc import Iterator

from noria import __version__
from noria.cli.doctor import encoder_checks
from noria.cli.doctor.finding import Finding, fail, ok, warn
from noria.cli.doctor.machine_facts import Facts, OpenListeners, gather
from noria.cli.doctor.memory_checks import (
    check_memory,
    check_offload,
    check_quantization,
    check_slots,
    check_weights,
)
from noria.config import Config, EngineConfig
from noria.engine.diffusion.sizing.auto_settings import FULL_SIZE_PARAMETERS, Machine, resolve_auto, resolve_device
from noria.engine.diffusion.warmup.calibration import BUDGET_S
from noria.errors import short_list
from noria.models.families import FAMILIES
from noria.observe.cgroup import usable_cores
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.text import EncoderModelSpec
from noria.scheduling.costs import CostModel
from noria.scheduling.types import BatchKey

_SLOW_IMAGE_S = 10.0
_LAUNCH_OVERHEAD_S = 0.007  # seconds to launch the 230 modules of a UNet, independent of their size (measured)
_SD15_FLOP, _SD15_PARAMETERS, _SD15_LATENTS = 0.803e12, 860e6, 64 * 64  # one row of SD 1.5's UNet
_CORE_FLOP_S = 130e9  # bfloat16 with AVX512-BF16, measured: SD 1.5's 0.803 TFLOP in 3.1 s on two cores
_GIB = 2**30


def examine(config: Config, open_listeners: OpenListeners) -> list[Finding]:
    """Check this machine for `noria serve` with `config`; `open_listeners` is the supervisor's."""
    return list(judge(gather(config, open_listeners), config))


def format_report(findings: list[Finding]) -> str:
    """The findings as a table, with a summary."""
    lines = [str(finding) for finding in findings]
    num_failed = sum(finding.verdict == "fail" for finding in findings)
    summary = f"{num_failed} to fix before `noria serve` works." if num_failed else "`noria serve` should work."
    return "\n".join([*lines, "", summary])


def judge(facts: Facts, config: Config) -> Iterator[Finding]:
    """All findings, in the order of a start-up."""
    yield from _check_installation(facts)
    if isinstance(facts.model, DiffusionModelSpec):
        yield from _check_torch(facts, config.engine)
    yield _check_cpu(facts)
    yield from (ok("file", description) for description in facts.checkpoints)
    if isinstance(facts.model, str):  # what it needs is not known, or is what it says
        yield fail("model", facts.model)
    elif isinstance(facts.model, EncoderModelSpec):
        assert facts.encoder is not None
        yield from encoder_checks.judge(facts.encoder, facts.model, config.engine)
        if not facts.encoder.error:
            yield from check_weights(facts, config.engine, facts.encoder.device)
    else:
        for name in config.engine.devices:
            yield _check_device(facts, resolve_device(name, _machine(facts)))
        yield from _check_diffusion(facts, facts.model, config.engine)
    for spec in facts.additional_models:
        what = "a text encoder" if isinstance(spec, EncoderModelSpec) else "an image model"
        yield ok("model", f"beside it {spec.name}, {what}, in {spec.folder}")
    yield from (fail("model", error) for error in facts.additional_model_errors)
    if isinstance(facts.on_demand, str):
        yield fail("on demand", facts.on_demand)
    elif facts.on_demand:
        most = config.engine.max_checkpoints_loaded
        yield ok(
            "on demand", f"{len(facts.on_demand)} checkpoints, {most} loaded at most: {short_list(facts.on_demand)}"
        )
    yield from (warn("on demand", f"not served: {reason}") for reason in facts.not_on_demand)
    yield from (fail("adapters", error) for error in facts.adapter_errors)
    yield from _check_keys(facts, config.frontend.api_keys_file)
    address = config.frontend.uds or f"{config.frontend.host}, port {config.frontend.port}"
    yield fail("port", facts.port_error) if facts.port_error else ok("port", f"{address}: free")


def _machine(facts: Facts) -> Machine:
    return Machine(num_cores=usable_cores(facts.num_cores, facts.cgroup_cpus), has_cuda=bool(facts.gpus))


def _check_diffusion(facts: Facts, spec: DiffusionModelSpec, engine: EngineConfig) -> Iterator[Finding]:
    machine = _machine(facts)
    devices = [resolve_device(name, machine) for name in engine.devices]
    requested_slots, engine = engine.slots, resolve_auto(engine, spec, devices[0], machine)
    yield ok(
        "model",
        f"{spec.name}: {facts.num_parameters / 1e6:.1f} M parameters, "
        f"{spec.default_width_px}×{spec.default_height_px} px, "
        f"{spec.default_steps} steps of {spec.default_scheduler}, in {spec.folder}"
        + ("; for inpainting: each request needs an image and a mask" if spec.needs_mask else ""),
    )
    others = [name for name in FAMILIES[spec.family].attention if name != engine.attention]
    yield ok("attention", f"{engine.attention}; this model also allows {', '.join(others) or 'no other'}")
    if facts.calls:
        yield ok("compile_blocks", facts.calls)
    if isinstance(facts.memory, str):
        yield fail("memory", facts.memory)
    elif facts.memory is not None:
        yield from check_memory(facts.memory, facts, spec, engine, devices)
        yield check_slots(facts.memory, facts, requested_slots, max(engine.buckets, default=0), devices)
        yield from check_quantization(facts, engine, devices)
        yield from check_offload(facts, spec, engine, devices)
    if "cpu" in devices:
        yield _check_precision(facts, engine)
        yield from _check_threads(facts, engine, devices.count("cpu"))
        if facts.costs is None:
            yield _check_speed(facts, spec, engine)
    yield _check_costs(facts.costs, spec, engine)


def _check_installation(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    yield Finding("ok" if facts.python >= (3, 11, 0) else "fail", "python", f"{version} (3.11 or newer is needed)")
    yield ok("noria", __version__)
    if isinstance(facts.model, str):
        return
    families = [FAMILIES[spec.family] for spec in (facts.model, *facts.additional_models)]
    installed = {package: facts.versions[package] for family in families for package in family.packages}
    for package, found in installed.items():
        if found:
            yield ok(package, found)
    if missing := [package for package, found in installed.items() if not found]:
        names = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        extras = dict.fromkeys(family.extra for family in families if not set(missing).isdisjoint(family.packages))
        yield fail("packages", f"{names}: pip install 'noria-serve[{','.join(extras)}]'")


def _check_torch(facts: Facts, engine: EngineConfig) -> Iterator[Finding]:
    if not facts.versions["torch"]:
        return  # which the packages say
    if facts.torch_error is not None:
        yield fail("torch", f"does not work: {facts.torch_error}")
    if engine.attention == "xformers" and not facts.versions["xformers"]:
        yield fail(
            "attention", "xformers is configured but not installed: pip install xformers, or use --attention sdpa"
        )
    elif engine.attention in ("auto", "sdpa") and not facts.has_sdpa:
        yield fail("attention", "this torch has no scaled_dot_product_attention: install torch 2.6 or newer")


def _check_cpu(facts: Facts) -> Finding:
    known = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
    found = [name for flag, name in known.items() if flag in facts.cpu_flags]
    if facts.cpu_architecture not in ("x86_64", "AMD64"):  # other architectures name their instruction sets differently
        return ok("cpu", f"{facts.cpu_model}, {facts.num_cores} cores, {facts.cpu_architecture}")
    text = f"{facts.cpu_model}, {facts.num_cores} cores, {', '.join(found) or 'no AVX2'}"
    return Finding(
        "ok" if found else "warn", "cpu", text + ("" if found else ": several times slower than a CPU with AVX2")
    )


def _check_device(facts: Facts, device: str) -> Finding:
    if device == "cpu":
        if facts.has_nvidia_driver and not facts.gpus:
            return warn(
                "device",
                f"cpu, although an NVIDIA driver is installed: torch {facts.versions['torch']} sees no CUDA device",
            )
        return ok("device", "cpu")
    index = int(device.partition(":")[2])
    if index >= len(facts.gpus):
        return fail(
            "device", f"{device} does not exist: torch sees {len(facts.gpus)} CUDA devices; use --devices cpu or auto"
        )
    return ok("device", f"{device}: {facts.gpus[index].name}, {facts.gpus[index].memory_bytes / _GIB:.0f} GiB")


def _check_precision(facts: Facts, engine: EngineConfig) -> Finding:
    fast_bf16 = bool({"avx512_bf16", "amx_bf16"} & facts.cpu_flags)
    match engine.dtype:
        case "float32" if fast_bf16:
            return ok(
                "dtype",
                "float32; --dtype bfloat16 generates about 1.4 times as many images here, with slightly different "
                "pixels",
            )
        case "bfloat16" if not fast_bf16:
            return warn(
                "dtype", "bfloat16 is emulated on this CPU (no AVX512-BF16, no AMX) and slower than --dtype float32"
            )
        case "float16":
            return warn(
                "dtype", "float16 is slow on a CPU: use --dtype float32" + (" or bfloat16" if fast_bf16 else "")
            )
        case _:
            return ok(
                "dtype",
                engine.dtype + ("" if fast_bf16 else "; no other dtype is faster on this CPU (no AVX512-BF16, no AMX)"),
            )


def _check_threads(facts: Facts, engine: EngineConfig, num_engines: int) -> Iterator[Finding]:
    assert isinstance(engine.threads, int)
    num_threads = engine.threads * num_engines
    usable = min(float(facts.num_cores), facts.cgroup_cpus or float("inf"))
    text = f"{engine.threads} for each of {num_engines} CPU engines, on {usable:g} cores"
    if num_threads > max(1.0, usable):
        limit = f" (the container's limit; the machine shows {facts.num_cores})" if usable < facts.num_cores else ""
        num_fitting = max(1, int(usable) // num_engines)
        yield warn("threads", f"{text}{limit}: too many, four times slower when measured; use --threads {num_fitting}")
    else:
        yield ok("threads", text)
    omp = facts.environment.get("OMP_NUM_THREADS")
    if omp is not None and omp != str(engine.threads):
        yield warn("threads", f"OMP_NUM_THREADS={omp} is ignored: engines use --threads, {engine.threads}")
    policy = facts.environment.get("OMP_WAIT_POLICY", "").lower()
    if policy in _OMP_WAIT_POLICY_PROBLEMS:
        yield warn("threads", f"OMP_WAIT_POLICY={policy}: {_OMP_WAIT_POLICY_PROBLEMS[policy]}; unset it")


_OMP_WAIT_POLICY_PROBLEMS = {
    "active": "idle threads spin and take CPU time from the front end",
    "passive": "threads sleep between operations, and a small model takes twice as long",
}


def _check_speed(facts: Facts, spec: DiffusionModelSpec, engine: EngineConfig) -> Finding:
    assert isinstance(engine.threads, int)
    num_cores = min(engine.threads, facts.num_cores, facts.cgroup_cpus or engine.threads)
    image_s = estimate_image_s(spec, engine.dtype, num_cores, facts.cpu_flags)
    text = f"about {image_s:.1f} s an image alone ({spec.default_steps} guided steps); `noria bench quick` measures it"
    if image_s <= _SLOW_IMAGE_S:
        return ok("speed", text)
    reason = (
        "a full-size model on a CPU"
        if spec.num_parameters > FULL_SIZE_PARAMETERS
        else "few or slow cores for this size"
    )
    return warn("speed", f"{text}: {reason}; a GPU is 50 to 500 times as fast")


def _check_costs(costs: CostModel | None, spec: DiffusionModelSpec, engine: EngineConfig) -> Finding:
    """Report the measured costs, for guided images of the default size: two rows each."""
    if costs is None:
        return ok("costs", f"not measured yet: the next `noria serve` measures them, in about {BUDGET_S:g} s")
    batch_key = BatchKey(spec.default_width_px, spec.default_height_px, spec.key)
    assert isinstance(engine.slots, int)
    max_images = max(costs.rows_limit(batch_key) // 2, 1)
    one_ms, all_ms = (1000 * costs.step_s(batch_key, 2 * images) for images in (1, max_images))
    image_s = spec.default_steps * costs.step_s(batch_key, 2) + costs.decode_s(batch_key)
    return Finding(
        "ok" if image_s <= _SLOW_IMAGE_S else "warn",
        "costs",
        f"measured here: a step takes {_ms(one_ms)} for one image, {_ms(all_ms)} for {max_images}, the largest useful "
        f"batch; decoding {_ms(1000 * costs.decode_s(batch_key))}; an image alone {image_s:.2f} s",
    )


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def _check_keys(facts: Facts, file: str) -> Iterator[Finding]:
    if isinstance(facts.num_keys, str):
        yield fail("keys", facts.num_keys)
    elif facts.num_keys:
        yield ok("keys", f"{facts.num_keys} in {file}")


def estimate_image_s(spec: DiffusionModelSpec, dtype: str, num_cores: float, cpu_flags: frozenset[str]) -> float:
    """Estimated seconds for one guided image on a CPU.

    A row's cost is taken as SD 1.5's, scaled by parameters times latents.
    """
    if dtype == "bfloat16" and {"avx512_bf16", "amx_bf16"} & cpu_flags:
        speed_factor = 1.0
    else:  # float32 has half the throughput of bfloat16, AVX2 half of AVX512's
        speed_factor = 0.5 if "avx512f" in cpu_flags else 0.25 if "avx2" in cpu_flags else 0.06
    num_latents = spec.default_width_px * spec.default_height_px / 64
    row_flop = _SD15_FLOP * spec.num_parameters / _SD15_PARAMETERS * num_latents / _SD15_LATENTS
    return spec.default_steps * (_LAUNCH_OVERHEAD_S + 2 * row_flop / (_CORE_FLOP_S * speed_factor * num_cores))
