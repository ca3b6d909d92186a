"""The checks of `noria doctor` that only text encoders have: `gather` finds facts, `judge` judges them, purely."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from noria.config import EngineConfig
from noria.engine.encoder.fidelity import Fidelity, read_fidelity
from noria.engine.encoder.sessions import fidelity_file, find_device, num_cores, resolve_precision, resolve_sessions
from noria.errors import NoriaError
from noria.folders import cache_folder
from noria.models.encoder.onnx_export import ExportRecord, find
from noria.protocol.text import EncoderModelSpec

Verdicts = tuple[Literal["ok", "warn", "fail"], str, str]
_EXPORT_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class EncoderFacts:
    """What was found; errors are facts, too."""

    device: str
    precision: str
    num_sessions: int
    threads: int  # of each session
    has_openvino: bool
    missing: tuple[str, ...]  # packages that exporting needs
    export: ExportRecord | None  # None: not exported yet
    fidelity: Fidelity | None  # None: not measured yet, or float32
    error: str = ""  # why the device or the cache folder cannot be used


def gather(config: EngineConfig, spec: EncoderModelSpec) -> EncoderFacts:
    """Find what an engine with this model would do on the first of the devices."""
    error = ""
    device, export, fidelity = "cpu", None, None
    try:
        device = find_device(config.devices[0])
        found = find(spec, cache_folder(config.cache_dir, os.environ))
        export = found.record if found else None
    except NoriaError as rejection:
        error = rejection.message
    precision = resolve_precision(config, device)
    has_openvino = importlib.util.find_spec("openvino") is not None
    if precision != "float32" and (device != "cpu" or precision != "bfloat16" or has_openvino):
        fidelity = read_fidelity(fidelity_file(spec, config, device))
    num_sessions, threads = resolve_sessions(config, spec.num_parameters, num_cores(config))
    missing = tuple(name for name in _EXPORT_PACKAGES if importlib.util.find_spec(name) is None)
    return EncoderFacts(device, precision, num_sessions, threads, has_openvino, missing, export, fidelity, error)


def judge(facts: EncoderFacts, spec: EncoderModelSpec, config: EngineConfig) -> Iterator[Verdicts]:
    """All findings: verdict, topic and text."""
    what = f"{spec.task.replace('_', ' ')}, {spec.dimensions} {'labels' if spec.labels else 'dimensions'}"
    if spec.pooling:
        what += f", {' and '.join(spec.pooling)} pooling{', normalized' if spec.normalize else ''}"
    yield (
        "ok",
        "model",
        f"{spec.name}: {spec.num_parameters / 1e6:.1f} M parameters, {what}, up to {spec.max_length} tokens, "
        f"in {spec.folder}",
    )
    if facts.error:
        yield "fail", "device", facts.error
        return
    if facts.device == "cpu":
        yield _judge_export(facts)
        yield "ok", "threads", f"{facts.num_sessions} sessions of {facts.threads} threads"
    yield _judge_precision(facts, config)


def _judge_export(facts: EncoderFacts) -> Verdicts:
    if facts.export is not None:
        return (
            "ok",
            "onnx",
            f"exported by {facts.export.exporter}; differs from transformers by {facts.export.max_difference:.1e}",
        )
    if facts.missing:
        return (
            "fail",
            "onnx",
            f"not exported yet, and {' and '.join(facts.missing)} are not installed: pip install "
            "'noria-serve[encoders-export]', once",
        )
    return "ok", "onnx", "not exported yet: the next `noria serve` or `noria embed` does, in about 20 s"


def _judge_precision(facts: EncoderFacts, config: EngineConfig) -> Verdicts:
    if facts.precision == "float32":
        return "ok", "dtype", "float32"
    if facts.device == "cpu" and facts.precision == "bfloat16" and not facts.has_openvino:
        return "fail", "dtype", "bfloat16 on a CPU needs openvino: pip install 'noria-serve[openvino]'"
    if facts.fidelity is None:
        return "ok", "dtype", f"{facts.precision}; its fidelity to float32 is measured at the next start"
    text = f"{facts.precision}; fidelity to float32 {facts.fidelity}"
    if facts.fidelity.min < config.encoder_min_fidelity:
        return (
            "fail",
            "dtype",
            f"{text}: less than engine.encoder_min_fidelity, {config.encoder_min_fidelity:g}; use float32, "
            "or allow less",
        )
    return "ok", "dtype", text
