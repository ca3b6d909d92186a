"""The checks of `noria doctor` that only text encoders have: `gather` finds facts, `judge` judges them, purely."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

from noria.cli.doctor.finding import Finding, fail, ok, warn
from noria.config import EngineConfig
from noria.engine.encoder.sessions import (
    fidelity_file,
    find_device,
    num_cores,
    resolve_precision,
    resolve_sessions,
    uses_torch,
)
from noria.engine.resources.fidelity import Fidelity, read_fidelity
from noria.errors import NoriaError
from noria.folders import cache_folder
from noria.models.encoder.onnx_export import ExportRecord, find
from noria.models.encoder.tokenizers.tokenizer_files import num_vocabulary_tokens
from noria.protocol.text import EncoderModelSpec

_EXPORT_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class EncoderFacts:
    """The facts that were found; errors are facts, too."""

    device: str
    precision: str
    num_sessions: int
    threads: int  # threads of each session
    has_openvino: bool
    missing: tuple[str, ...]  # packages that exporting and torch need
    export: ExportRecord | None  # None: not exported yet
    fidelity: Fidelity | None  # None: not measured yet, or float32
    on_torch: bool
    num_words: int  # tokens of the tokenizer's vocabulary
    has_modules: bool  # whether there is a modules.json
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
    has_openvino, on_torch = importlib.util.find_spec("openvino") is not None, uses_torch(config, device)
    missing = tuple(name for name in _EXPORT_PACKAGES if importlib.util.find_spec(name) is None)
    if precision != "float32" and not (missing if on_torch else precision == "bfloat16" and not has_openvino):
        fidelity = read_fidelity(fidelity_file(spec, config, device))
    num_sessions, threads = resolve_sessions(config, spec.num_parameters, num_cores(config))
    return EncoderFacts(
        device,
        precision,
        num_sessions,
        threads,
        has_openvino,
        missing,
        export,
        fidelity,
        on_torch,
        num_vocabulary_tokens(spec.path),
        (spec.path / "modules.json").exists(),
        error,
    )


def judge(facts: EncoderFacts, spec: EncoderModelSpec, config: EngineConfig) -> Iterator[Finding]:
    """All findings: verdict, topic and text."""
    what = f"{spec.task.replace('_', ' ')}, {spec.dimensions} {'labels' if spec.labels else 'dimensions'}"
    if spec.pooling:
        what += f", {' and '.join(spec.pooling)} pooling{', normalized' if spec.normalize else ''}"
    yield ok(
        "model",
        f"{spec.name}: {spec.num_parameters / 1e6:.1f} M parameters, {what}, up to {spec.max_length} tokens, "
        f"in {spec.folder}",
    )
    if spec.unread_keys:
        yield warn("model", f"keys of its configuration that are not read here: {', '.join(spec.unread_keys)}")
    if facts.num_words < spec.vocab_size // 2:
        yield warn("tokenizer", f"has {facts.num_words} tokens, the model has embeddings of {spec.vocab_size}")
    if spec.pooling == ("mean",) and not facts.has_modules:
        yield warn(
            "pooling",
            "no modules.json: the mean of the tokens, not normalized, as sentence-transformers does without one. If "
            "the model's source has one, copy it, with the folders that it names",
        )
    if facts.error:
        yield fail("device", facts.error)
        return
    if facts.on_torch and facts.missing:
        yield fail("torch", f"{_are_missing(facts)}: pip install 'noria-serve[encoders-export]'")
        return
    if not facts.on_torch:
        yield _judge_export(facts)
    if facts.device == "cpu":
        yield ok("threads", f"{facts.num_sessions} sessions of {facts.threads} threads")
    yield _judge_precision(facts, config)


def _judge_export(facts: EncoderFacts) -> Finding:
    if facts.export is not None:
        return ok(
            "onnx",
            f"exported by {facts.export.exporter}; differs from transformers by {facts.export.max_difference:.1e}",
        )
    if facts.missing:
        return fail(
            "onnx", f"not exported yet, and {_are_missing(facts)}: pip install 'noria-serve[encoders-export]', once"
        )
    return ok("onnx", "not exported yet: the next `noria serve` or `noria embed` does, in about 20 s")


def _are_missing(facts: EncoderFacts) -> str:
    return f"{' and '.join(facts.missing)} {'is' if len(facts.missing) == 1 else 'are'} not installed"


def _judge_precision(facts: EncoderFacts, config: EngineConfig) -> Finding:
    if facts.precision == "float32":
        return ok("dtype", "float32")
    if not facts.on_torch and facts.precision == "bfloat16" and not facts.has_openvino:
        return fail("dtype", "bfloat16 on a CPU needs openvino: pip install 'noria-serve[openvino]'")
    if facts.fidelity is None:
        return ok("dtype", f"{facts.precision}; its fidelity to float32 is measured at the next start")
    text = f"{facts.precision}; fidelity to float32 {facts.fidelity}"
    if facts.fidelity.min < config.encoder_min_fidelity:
        return fail(
            "dtype",
            f"{text}: less than engine.encoder_min_fidelity, {config.encoder_min_fidelity:g}; use float32, "
            "or allow less",
        )
    return ok("dtype", text)
