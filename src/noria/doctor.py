"""`noria doctor`: what is here, whether it works, and what would be slow and why.

`examine` looks (`gather`) and judges (`judge`); judging is a function of what was seen, so that every verdict can be tested on any
machine. Speeds are estimates from the project's own measurements, good to a factor of two; `noria bench quick` measures.
"""

import importlib.metadata
import os
import pathlib
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from noria import __version__
from noria.config import Config, EngineConfig
from noria.engine.calibration import BUDGET_S
from noria.engine.loading import cgroup_cpus, cost_file, look_at_machine, most_rows
from noria.engine.resources import FULL_SIZE_PARAMETERS, Machine, resolve, resolve_device, usable_cores
from noria.errors import NoriaError
from noria.keys import read_keys
from noria.models.catalog import open_model
from noria.models.weights import count_parameters
from noria.scheduling.costs import CostModel
from noria.scheduling.plans import ShapeClass
from noria.spec import ModelSpec

Listen = Callable[[str, int], socket.socket]
Verdict = Literal["ok", "warn", "fail"]

_PACKAGES = ("torch", "diffusers", "transformers", "xformers")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SLOW_IMAGE_S = 10.0
_CALL_S = 0.007  # of launching a UNet's 230 modules, whatever their size (measured)
_SD15_FLOP, _SD15_PARAMETERS, _SD15_LATENTS = 0.803e12, 860e6, 64 * 64  # one row of SD 1.5's UNet
_CORE_FLOP_S = 130e9  # bfloat16 with AVX512-BF16, measured: SD 1.5's 0.803 TFLOP in 3.1 s on two cores
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    topic: str
    text: str


@dataclass(frozen=True)
class Gpu:
    """One CUDA device, as torch sees it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Facts:
    """What was seen; gathered at once, judged afterwards."""

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]  # of `_PACKAGES`; None is not installed
    torch_error: str | None  # why torch cannot be imported or asked
    has_sdpa: bool
    gpus: tuple[Gpu, ...]
    has_nvidia_driver: bool
    cpu_model: str
    cpu_architecture: str  # as platform.machine() names it
    cpu_flags: frozenset[str]  # as /proc/cpuinfo names them
    num_cores: int  # that this process may be scheduled on
    cgroup_cpus: float | None  # CPU time a second that the container may use; None is no limit
    memory_bytes: int  # available to a new process
    environment: Mapping[str, str]
    model: ModelSpec | str  # or why it cannot be served
    more_model_errors: tuple[str, ...]  # why the server would not start with its further models
    num_parameters: int  # of all the model's parts
    costs: CostModel | None  # as `noria serve` has measured and kept them; None is not yet
    num_keys: int | str  # in the file of API keys, 0 without one; or why it cannot be used
    port_error: str | None


def examine(config: Config, listen: Listen) -> list[Finding]:
    """Look at this machine with the eyes of `noria serve` under `config`; `listen` is the supervisor's."""
    return list(judge(gather(config, listen), config))


def report(findings: list[Finding]) -> str:
    """The findings as a table, and what to conclude."""
    lines = [f"{finding.verdict:<5} {finding.topic:<9} {finding.text}" for finding in findings]
    num_failed = sum(finding.verdict == "fail" for finding in findings)
    conclusion = f"{num_failed} to mend before `noria serve` works." if num_failed else "`noria serve` should work."
    return "\n".join([*lines, "", conclusion])


# ── Judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(facts: Facts, config: Config) -> Iterator[Finding]:
    """Every finding, in the order of a start-up."""
    yield from _installation(facts, config.engine)
    yield _processor(facts)
    machine = Machine(num_cores=usable_cores(facts.num_cores, facts.cgroup_cpus), has_cuda=bool(facts.gpus))
    devices = [resolve_device(name, machine) for name in config.engine.devices]
    for device in devices:
        yield _device(facts, device)
    if isinstance(facts.model, str):
        yield Finding("fail", "model", facts.model)
    else:
        spec = facts.model
        engine = resolve(config.engine, spec, devices[0], machine)
        yield Finding(
            "ok",
            "model",
            f"{spec.name}: {facts.num_parameters / 1e6:.1f} M parameters, {spec.default_width_px}×{spec.default_height_px} px, "
            f"{spec.default_steps} steps of {spec.default_scheduler}, in {spec.folder}",
        )
        if devices[0] == "cpu" or facts.gpus:
            yield _memory(facts, engine, devices)
        if "cpu" in devices:
            yield _precision(facts, engine)
            yield from _threads(facts, engine, devices.count("cpu"))
            yield _speed(facts, spec, engine)
        yield _costs(facts.costs, spec, engine)
    yield from (Finding("fail", "model", error) for error in facts.more_model_errors)
    yield from _keys(facts, config.frontend.keys_file)
    address = f"{config.frontend.host}, port {config.frontend.port}"
    yield Finding("fail", "port", facts.port_error) if facts.port_error else Finding("ok", "port", f"{address}: free")


def _installation(facts: Facts, engine: EngineConfig) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    yield Finding("ok" if facts.python >= (3, 11, 0) else "fail", "python", f"{version} (3.11 or newer is needed)")
    yield Finding("ok", "noria", __version__)
    for package in ("torch", "diffusers", "transformers"):
        found = facts.versions[package]
        yield (
            Finding("ok", package, found)
            if found
            else Finding("fail", package, f"not installed: pip install {package}")
        )
    if facts.torch_error is not None:
        yield Finding("fail", "torch", f"does not work: {facts.torch_error}")
    if engine.attention == "xformers" and not facts.versions["xformers"]:
        yield Finding(
            "fail",
            "attention",
            "xformers is asked for and not installed: pip install xformers, or use --attention sdpa",
        )
    elif engine.attention == "sdpa" and not facts.has_sdpa:
        yield Finding("fail", "attention", "this torch has no scaled_dot_product_attention: install torch 2.6 or newer")
    else:
        yield Finding(
            "ok", "attention", f"{engine.attention}; xformers is {facts.versions['xformers'] or 'not installed'}"
        )


def _processor(facts: Facts) -> Finding:
    known = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
    has = [name for flag, name in known.items() if flag in facts.cpu_flags]
    if facts.cpu_architecture not in ("x86_64", "AMD64"):  # whose instruction sets have other names
        return Finding("ok", "cpu", f"{facts.cpu_model}, {facts.num_cores} cores, {facts.cpu_architecture}")
    text = f"{facts.cpu_model}, {facts.num_cores} cores, {', '.join(has) or 'no AVX2'}"
    return Finding("ok" if has else "warn", "cpu", text + ("" if has else ": several times slower than a CPU with it"))


def _device(facts: Facts, device: str) -> Finding:
    if device == "cpu":
        if facts.has_nvidia_driver and not facts.gpus:
            return Finding(
                "warn",
                "device",
                f"cpu, though there is an NVIDIA driver: torch {facts.versions['torch']} sees no CUDA device",
            )
        return Finding("ok", "device", "cpu")
    index = int(device.partition(":")[2])
    if index >= len(facts.gpus):
        return Finding(
            "fail",
            "device",
            f"{device} is not here: torch sees {len(facts.gpus)} CUDA devices; use --devices cpu or auto",
        )
    return Finding(
        "ok", "device", f"{device}: {facts.gpus[index].name}, {facts.gpus[index].memory_bytes / _GIB:.0f} GiB"
    )


def _memory(facts: Facts, engine: EngineConfig, devices: list[str]) -> Finding:
    """The weights alone against the memory there is; activations come on top and depend on the batch."""
    weights_bytes = facts.num_parameters * _ITEM_BYTES[engine.dtype]
    if devices[0] == "cpu":
        needed, there, where = weights_bytes * devices.count("cpu"), facts.memory_bytes, "free memory"
    else:
        needed, there, where = weights_bytes, min(gpu.memory_bytes for gpu in facts.gpus), "GPU memory"
    text = f"weights take {needed / _GIB:.2f} GiB in {engine.dtype}, of {there / _GIB:.1f} GiB {where}"
    if needed > there:
        return Finding("fail", "memory", f"{text}: too little")
    return (
        Finding("warn", "memory", f"{text}: tight; use few --slots")
        if needed > 0.6 * there
        else Finding("ok", "memory", text)
    )


def _precision(facts: Facts, engine: EngineConfig) -> Finding:
    fast_bf16 = bool({"avx512_bf16", "amx_bf16"} & facts.cpu_flags)
    match engine.dtype:
        case "float32" if fast_bf16:
            return Finding(
                "ok",
                "dtype",
                "float32; --dtype bfloat16 draws about 1.4 times as many images here, slightly different ones",
            )
        case "bfloat16" if not fast_bf16:
            return Finding(
                "warn",
                "dtype",
                "bfloat16 is emulated on this CPU (no AVX512-BF16, no AMX) and slower than --dtype float32",
            )
        case "float16":
            return Finding(
                "warn", "dtype", "float16 is slow on a CPU: use --dtype float32" + (" or bfloat16" if fast_bf16 else "")
            )
        case _:
            return Finding(
                "ok",
                "dtype",
                engine.dtype + ("" if fast_bf16 else "; this CPU computes nothing faster (no AVX512-BF16, no AMX)"),
            )


def _threads(facts: Facts, engine: EngineConfig, num_engines: int) -> Iterator[Finding]:
    assert isinstance(engine.threads, int)
    num_threads = engine.threads * num_engines
    usable = min(float(facts.num_cores), facts.cgroup_cpus or float("inf"))
    text = f"{engine.threads} a CPU engine, {num_engines} of them, on {usable:g} cores"
    if num_threads > max(1.0, usable):
        limit = f" (the container's limit; the machine shows {facts.num_cores})" if usable < facts.num_cores else ""
        fitting = max(1, int(usable) // num_engines)
        yield Finding(
            "warn", "threads", f"{text}{limit}: too many, four times slower when measured; use --threads {fitting}"
        )
    else:
        yield Finding("ok", "threads", text)
    omp = facts.environment.get("OMP_NUM_THREADS")
    if omp is not None and omp != str(engine.threads):
        yield Finding(
            "warn", "threads", f"OMP_NUM_THREADS={omp} does not decide here: engines use --threads, {engine.threads}"
        )
    policy = facts.environment.get("OMP_WAIT_POLICY", "").lower()
    if policy in _WAITING:
        yield Finding("warn", "threads", f"OMP_WAIT_POLICY={policy}: {_WAITING[policy]}; unset it")


_WAITING = {
    "active": "idle threads spin and take the cores from the front end",
    "passive": "threads sleep between operations, and a small model takes twice as long (docs/adr/0005)",
}


def _speed(facts: Facts, spec: ModelSpec, engine: EngineConfig) -> Finding:
    assert isinstance(engine.threads, int)
    num_cores = min(engine.threads, facts.num_cores, facts.cgroup_cpus or engine.threads)
    seconds = image_seconds(spec, engine.dtype, num_cores, facts.cpu_flags)
    text = f"about {seconds:.1f} s an image alone ({spec.default_steps} guided steps); `noria bench quick` measures it"
    if seconds <= _SLOW_IMAGE_S:
        return Finding("ok", "speed", text)
    why = (
        "a full-size model on a CPU"
        if spec.num_parameters > FULL_SIZE_PARAMETERS
        else "few or slow cores for this size"
    )
    return Finding("warn", "speed", f"{text}: {why}; a GPU is 50 to 500 times as fast")


def _costs(costs: CostModel | None, spec: ModelSpec, engine: EngineConfig) -> Finding:
    """What the engine plans with, in guided images of the default size: two rows each."""
    if costs is None:
        return Finding("ok", "costs", f"not measured yet: the next `noria serve` does, in about {BUDGET_S:g} s")
    shape = ShapeClass(spec.default_width_px, spec.default_height_px, spec.name)
    assert isinstance(engine.slots, int)
    together = max(costs.rows_limit(shape) // 2, 1)
    one_ms, all_ms = (1000 * costs.step_s(shape, 2 * images) for images in (1, together))
    image_s = spec.default_steps * costs.step_s(shape, 2) + costs.decode_s(shape)
    return Finding(
        "ok",
        "costs",
        f"measured here: a step takes {one_ms:.3g} ms for one image, {all_ms:.3g} ms for {together}, and more do not pay or "
        f"fit; decoding {1000 * costs.decode_s(shape):.3g} ms; an image alone {image_s:.2f} s",
    )


def _keys(facts: Facts, file: str) -> Iterator[Finding]:
    if isinstance(facts.num_keys, str):
        yield Finding("fail", "keys", facts.num_keys)
    elif facts.num_keys:
        yield Finding("ok", "keys", f"{facts.num_keys} in {file}")


def image_seconds(spec: ModelSpec, dtype: str, num_cores: float, cpu_flags: frozenset[str]) -> float:
    """An estimate for one guided image on a CPU: a row's cost grows with parameters times latents, and SD 1.5's is known."""
    if dtype == "bfloat16" and {"avx512_bf16", "amx_bf16"} & cpu_flags:
        share = 1.0
    else:  # float32 has half of bfloat16's width, AVX2 half of AVX512's
        share = 0.5 if "avx512f" in cpu_flags else 0.25 if "avx2" in cpu_flags else 0.06
    num_latents = spec.default_width_px * spec.default_height_px / 64
    row_flop = _SD15_FLOP * spec.num_parameters / _SD15_PARAMETERS * num_latents / _SD15_LATENTS
    return spec.default_steps * (_CALL_S + 2 * row_flop / (_CORE_FLOP_S * share * num_cores))


# ── Looking ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def gather(config: Config, listen: Listen) -> Facts:
    """Look; imports torch, and for a hub id fetches the model. Raises nothing: what does not work is a fact too."""
    torch_error, has_sdpa, gpus = _look_at_torch()
    model, num_parameters = _look_at_model(config.model)
    cpuinfo = _cpuinfo()
    return Facts(
        python=sys.version_info[:3],
        versions={package: _version(package) for package in _PACKAGES},
        torch_error=torch_error,
        has_sdpa=has_sdpa,
        gpus=gpus,
        has_nvidia_driver=pathlib.Path("/proc/driver/nvidia/version").exists(),
        cpu_model=cpuinfo.get("model name", platform.machine()),
        cpu_architecture=platform.machine(),
        cpu_flags=frozenset(cpuinfo.get("flags", "").split()),
        num_cores=len(os.sched_getaffinity(0)),
        cgroup_cpus=cgroup_cpus(pathlib.Path("/sys/fs/cgroup")),
        memory_bytes=_available_bytes(),
        environment={name: value for name, value in os.environ.items() if name.startswith("OMP_")},
        model=model,
        more_model_errors=_look_at_more_models(config, model),
        num_parameters=num_parameters,
        costs=None if torch_error is not None or isinstance(model, str) else _look_at_costs(config, model),
        num_keys=_look_at_keys(config.frontend.keys_file),
        port_error=_look_at_port(config.frontend.host, config.frontend.port, listen),
    )


def _available_bytes() -> int:
    """MemAvailable: what a new process can have without swapping."""
    lines = pathlib.Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at_torch() -> tuple[str | None, bool, tuple[Gpu, ...]]:
    try:
        import torch

        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a broken installation or driver may raise anything, and each is a finding
        return f"{type(error).__name__}: {error}", False, ()
    gpus = tuple(Gpu(device.name, device.total_memory) for device in properties)
    return None, hasattr(torch.nn.functional, "scaled_dot_product_attention"), gpus


def _look_at_model(name: str) -> tuple[ModelSpec | str, int]:
    try:
        spec = open_model(name)
    except NoriaError as error:
        return error.message, 0
    return spec, count_parameters(spec.path)


def _look_at_more_models(config: Config, first: ModelSpec | str) -> tuple[str, ...]:
    errors, names = [], {first.name} if isinstance(first, ModelSpec) else set()
    for name in config.more_models:
        spec, _ = _look_at_model(name)
        if isinstance(spec, str):
            errors.append(spec)
        elif spec.name in names:
            errors.append(f"two models are called {spec.name!r}: give one another name in its noria.json")
        else:
            names.add(spec.name)
    return tuple(errors)


def _look_at_costs(config: Config, spec: ModelSpec) -> CostModel | None:
    """What an earlier `noria serve` has kept of this model with these settings on this device."""
    import torch

    machine = look_at_machine()
    device = resolve_device(config.engine.devices[0], machine)
    if device != "cpu" and not machine.has_cuda:
        return None
    engine, costs = resolve(config.engine, spec, device, machine), CostModel()
    costs.most_rows = most_rows(engine)
    return costs if cost_file(spec, engine, torch.device(device)).load(costs) else None


def _look_at_keys(setting: str) -> int | str:
    try:
        return len(read_keys(setting))
    except NoriaError as error:
        return error.message


def _look_at_port(host: str, port: int, listen: Listen) -> str | None:
    try:
        listen(host, port).close()
    except NoriaError as error:
        return error.message
    return None
