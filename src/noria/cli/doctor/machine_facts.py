"""Gathers the facts that `noria doctor` reports: machine, installation, model, settings. Does not judge them."""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from noria.cli.doctor import encoder_checks
from noria.config import Config, EngineConfig, FrontendConfig
from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto, resolve_device
from noria.engine.diffusion.sizing.slot_count import max_rows
from noria.engine.diffusion.warmup.calibration import cost_cache, device_name
from noria.engine.diffusion.warmup.call_choice import apply_choice, describe, known_choice
from noria.engine.resources.fidelity import read_fidelity
from noria.errors import NoriaError
from noria.frontend.access.api_keys import read_keys
from noria.frontend.server.tls import check_certificate
from noria.models.adapters.adapter_folders import BESIDE_MODELS
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.adapters.hub_adapters import download_hub_adapters
from noria.models.adapters.upscaler_folders import UpscalerFolders
from noria.models.catalog import count_parameters, open_model
from noria.models.checkpoint_folder import list_checkpoints
from noria.models.diffusion.single_file.transformer_file import read_single_file
from noria.models.location import SINGLE_FILES
from noria.observe.cgroup import cpu_limit
from noria.observe.cpuinfo import cpu_model, read_cpuinfo
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.text import EncoderModelSpec
from noria.scheduling.costs import CostModel

if TYPE_CHECKING:
    from noria.engine.diffusion.sizing.memory_estimate import MemoryChange, MemoryEstimate

    _Changes = tuple[MemoryChange, ...]
    _Estimates = tuple[MemoryEstimate | str | None, _Changes, _Changes, _Changes]

OpenListeners = Callable[[FrontendConfig], AbstractContextManager[list[socket.socket]]]

MEMORY_SHARE = 0.9
"""Of a device's memory; kernels' workspaces and fragmentation have the rest."""

_PACKAGES = ("torch", "diffusers", "transformers", "xformers", "onnxruntime", "tokenizers")


@dataclass(frozen=True)
class Gpu:
    """A CUDA device, as torch sees it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Facts:
    """The facts that were found; `machine_checks.py` judges them."""

    python: tuple[int, int, int]
    versions: Mapping[str, str | None]  # versions of `_PACKAGES`; None is not installed
    torch_error: str | None  # why torch cannot be imported or used
    has_sdpa: bool
    gpus: tuple[Gpu, ...]
    has_nvidia_driver: bool
    cpu_model: str
    cpu_architecture: str  # as platform.machine() names it
    cpu_flags: frozenset[str]  # as /proc/cpuinfo names them
    num_cores: int  # that this process may be scheduled on
    cgroup_cpus: float | None  # the container's CPU limit, in cores; None is no limit
    memory_bytes: int  # available to a new process
    environment: Mapping[str, str]
    model: AnyModelSpec | str  # or why it cannot be served
    additional_model_errors: tuple[str, ...]  # why the server would not start with its additional models
    adapter_errors: tuple[str, ...]  # or with its LoRAs, ControlNets and refiners
    num_parameters: int  # parameters of all the model's parts
    memory: "MemoryEstimate | str | None"  # or why the libraries cannot build it; None: of no diffusion model
    changes: "tuple[MemoryChange, ...]"  # if it does not fit, what would take less memory
    costs: CostModel | None  # measured by an earlier `noria serve`; None if not measured yet
    num_keys: int | str  # in the API keys file, 0 without one; or why it cannot be used
    port_error: str | None  # why the server cannot listen, or cannot use its certificate
    encoder: encoder_checks.EncoderFacts | None = None  # if the model is one
    additional_models: tuple[AnyModelSpec, ...] = ()
    checkpoints: tuple[str, ...] = ()  # what each model in a single file is, in words
    on_demand: tuple[str, ...] | str = ()  # the files in `engine.checkpoints` that can be loaded, or why none can
    not_on_demand: tuple[str, ...] = ()  # why others there cannot
    # The weights of these and of a first model that is an encoder, estimated from the number of parameters.
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    quantizations: "tuple[MemoryChange, ...]" = ()  # what the model would take with each quantization, if it has none
    offloads: "tuple[MemoryChange, ...]" = ()  # what it would take with each engine.offload, if it has none
    quantization: str = ""  # what is known of that of the settings; empty: there is none
    quantization_error: str = ""  # why it cannot be used; empty: it can
    calls: str = ""  # what is known of them with `compile_blocks` "auto"; empty: it is not that


def gather(config: Config, open_listeners: OpenListeners) -> Facts:
    """Gather all facts. Imports torch, and downloads the model of a hub id. Does not raise: errors are facts, too."""
    torch_error, has_sdpa, gpus = _inspect_torch()
    model, num_parameters = _inspect_model(config.model, config.engine)
    additional_models, additional_model_errors = _open_additional_models(config, model)
    known = () if isinstance(model, str) or config.engine.checkpoints else (model, *additional_models)
    config, adapter_errors = _check_adapters(config, known)
    on_demand, not_on_demand = _list_checkpoints(config)
    memory_bytes = _available_bytes()
    estimates: _Estimates = (None, (), (), ())
    quantization = quantization_error = calls = ""
    costs: CostModel | None = None
    if torch_error is None and isinstance(model, DiffusionModelSpec):
        estimates = _estimate_memory(config, model, memory_bytes, gpus)
        quantization, quantization_error = _inspect_quantization(config.engine, model)
        costs, calls = _load_costs(config, model)
    memory, changes, quantizations, offloads = estimates
    return Facts(
        python=sys.version_info[:3],
        versions={package: _version(package) for package in _PACKAGES},
        torch_error=torch_error,
        has_sdpa=has_sdpa,
        gpus=gpus,
        has_nvidia_driver=pathlib.Path("/proc/driver/nvidia/version").exists(),
        cpu_model=cpu_model(),
        cpu_architecture=platform.machine(),
        cpu_flags=frozenset(read_cpuinfo().get("flags", "").split()),
        num_cores=len(os.sched_getaffinity(0)),
        cgroup_cpus=cpu_limit(),
        memory_bytes=memory_bytes,
        environment={name: value for name, value in os.environ.items() if name.startswith("OMP_")},
        model=model,
        additional_model_errors=additional_model_errors,
        adapter_errors=adapter_errors,
        num_parameters=num_parameters,
        memory=memory,
        changes=changes,
        quantizations=quantizations,
        offloads=offloads,
        quantization=quantization,
        quantization_error=quantization_error,
        costs=costs,
        calls=calls,
        num_keys=_count_keys(config.frontend.api_keys_file),
        port_error=_check_listeners(config.frontend, open_listeners),
        encoder=encoder_checks.gather(config.engine, model) if isinstance(model, EncoderModelSpec) else None,
        additional_models=additional_models,
        checkpoints=tuple(_describe_checkpoints((config.model, *config.additional_models))),
        on_demand=on_demand,
        not_on_demand=not_on_demand,
        weight_bytes={
            spec.name: _weight_bytes(spec, config.engine, bool(gpus))
            for spec in (*((model,) if isinstance(model, EncoderModelSpec) else ()), *additional_models)
        },
    )


def _available_bytes() -> int:
    """MemAvailable: the memory that a new process can use without swapping."""
    lines = pathlib.Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _inspect_torch() -> tuple[str | None, bool, tuple[Gpu, ...]]:
    try:
        import torch

        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a broken installation or driver may raise anything
        return f"{type(error).__name__}: {error}", False, ()
    gpus = tuple(Gpu(device.name, device.total_memory) for device in properties)
    return None, hasattr(torch.nn.functional, "scaled_dot_product_attention"), gpus


def _inspect_model(name: str, engine: EngineConfig) -> tuple[AnyModelSpec | str, int]:
    try:
        spec = open_model(name, engine)
    except NoriaError as error:
        return error.message, 0
    return spec, count_parameters(spec)


def _describe_checkpoints(models: Sequence[str]) -> Iterator[str]:
    """Yield what the models in files are, also of those that cannot be served because a part is missing."""
    for name in models:
        file = pathlib.Path(name).expanduser()
        if file.suffix.lower() in SINGLE_FILES and file.is_file():
            with contextlib.suppress(NoriaError):  # which opening the model says
                yield f"{name}: {read_single_file(file).describe()}"


def _list_checkpoints(config: Config) -> tuple[tuple[str, ...] | str, tuple[str, ...]]:
    """Return what can be loaded from `engine.checkpoints`, or why nothing can, and why others there cannot."""
    try:
        sources = (config.model, *config.additional_models)
        return list_checkpoints(config.engine, sources) if config.engine.checkpoints else ((), ())
    except NoriaError as error:
        return error.message, ()


def _open_additional_models(
    config: Config, first: AnyModelSpec | str
) -> tuple[tuple[AnyModelSpec, ...], tuple[str, ...]]:
    """Return those that can be served beside the first, and why others cannot."""
    errors, found = [], {} if isinstance(first, str) else {first.name: first}
    for name in config.additional_models:
        try:
            spec = open_model(name, config.engine)
        except NoriaError as error:
            errors.append(error.message)
            continue
        if spec.name in found:
            errors.append(f"two models are named {spec.name!r}: rename one in its noria.json")
        else:
            found[spec.name] = spec
    return tuple(spec for spec in found.values() if spec is not first), tuple(errors)


def _weight_bytes(spec: AnyModelSpec, engine: EngineConfig, has_gpus: bool) -> int:
    """Return the bytes of all parts, by the dtype of the settings; `auto` is 4 bytes a parameter on a CPU."""
    is_half = engine.dtype != "float32" and (engine.dtype != "auto" or (has_gpus and engine.devices[0] != "cpu"))
    return count_parameters(spec) * (2 if is_half else 4)


def _check_adapters(config: Config, models: Sequence[AnyModelSpec]) -> tuple[Config, tuple[str, ...]]:
    """Return `config` with only the adapters and what else is beside models that can be served, and why others cannot.

    Those of the hub are downloaded. Without models, whether they fit is unknown.
    """
    kinds: tuple[type[FolderEntries], ...] = (*BESIDE_MODELS, UpscalerFolders)
    errors, none = [], dict.fromkeys([kind.setting for kind in kinds], ())
    usable = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, **none))
    for kind in kinds:
        engine = msgspec.structs.replace(usable.engine, **{kind.setting: getattr(config.engine, kind.setting)})
        try:
            with_these = download_hub_adapters(msgspec.structs.replace(usable, engine=engine), os.environ)
            entries = kind.of(with_these.engine)
            if models and kind is not UpscalerFolders:
                entries.check(models)
            else:
                entries.check_folders()
            usable = with_these
        except NoriaError as error:
            errors.append(error.message)
    return usable, tuple(errors)


def available_bytes(memory_bytes: int, gpus: tuple[Gpu, ...], devices: list[str]) -> int | None:
    """Return what each engine has of its device's memory; None: the GPU is not here."""
    if devices[0] == "cpu":
        return memory_bytes // max(devices.count("cpu"), 1)
    return min((gpu.memory_bytes for gpu in gpus), default=None)


def _estimate_memory(
    config: Config, spec: DiffusionModelSpec, memory_bytes: int, gpus: tuple[Gpu, ...]
) -> "_Estimates":
    """Return the estimate, or why there is none; the changes, which take seconds each, if it does not fit.

    And what it would be with each quantization, and with each value of `engine.offload`.
    """
    from noria.engine.diffusion.sizing.memory_estimate import estimate_memory, find_changes, find_quantizations
    from noria.engine.diffusion.sizing.offload_estimate import find_offloads, with_resident_blocks

    machine = detect_machine()
    devices = [resolve_device(name, machine) for name in config.engine.devices]
    engine = resolve_auto(config.engine, spec, devices[0], machine)
    assert isinstance(engine.slots, int)
    try:
        available = available_bytes(memory_bytes, gpus, devices)
        estimate = with_resident_blocks(estimate_memory(spec, engine), spec, engine, available)
        fits = available is None or estimate.needed(engine.slots) <= MEMORY_SHARE * available
        offloads = find_offloads(spec, engine, estimate, devices[0], available)
        changes = () if fits else (*find_changes(spec, engine, devices[0]), *offloads)
        return estimate, changes, find_quantizations(spec, engine, estimate, devices[0]), offloads
    except NoriaError as error:
        return error.message, (), (), ()


def _inspect_quantization(config: EngineConfig, spec: DiffusionModelSpec) -> tuple[str, str]:
    """Return what is known of the quantization of the settings, and why it cannot be used; both empty: none is set."""
    if config.quantize == "none":
        return "", ""
    import torch

    from noria.engine.diffusion.warmup.quantized_loading import fidelity_file
    from noria.models.diffusion.block_quantization import check_device, check_quantizable

    machine = detect_machine()
    device = resolve_device(config.devices[0], machine)
    try:
        check_quantizable(spec, config.quantize)
        if device != "cpu" and not machine.has_cuda:
            return f"{config.quantize}", ""
        check_device(config, device)
    except NoriaError as error:
        return "", error.message
    resolved = resolve_auto(config, spec, device, machine)
    fidelity = read_fidelity(fidelity_file(spec, resolved, device_name(torch.device(device))))
    return f"{config.quantize}; fidelity {fidelity or 'measured at the next start'}", ""


def _load_costs(config: Config, spec: DiffusionModelSpec) -> tuple[CostModel | None, str]:
    """The costs that an earlier `noria serve` measured for this model, settings and device, if any; and `calls`."""
    import torch

    machine = detect_machine()
    device = resolve_device(config.engine.devices[0], machine)
    if device != "cpu" and not machine.has_cuda:
        return None, ""
    engine, costs, calls = resolve_auto(config.engine, spec, device, machine), CostModel(), ""
    costs.max_rows = max_rows(engine)
    if engine.compile_blocks == "auto":
        choice = known_choice(spec, engine, device_name(torch.device(device)))
        calls = describe(choice)
        engine = engine if choice is None else apply_choice(engine, choice)
    return costs if cost_cache(spec, engine, torch.device(device)).load(costs) else None, calls


def _count_keys(setting: str) -> int | str:
    try:
        return len(read_keys(setting))
    except NoriaError as error:
        return error.message


def _check_listeners(config: FrontendConfig, open_listeners: OpenListeners) -> str | None:
    try:
        check_certificate(config)
        with open_listeners(config):
            return None
    except NoriaError as error:
        return error.message
