"""Loads the sessions of a text encoder on a device, in the form that the settings choose, and checks what it costs.

On a CPU, ONNX Runtime computes in float32 and int8, OpenVINO in bfloat16 (`graph_sessions.py`); on a GPU, or if
`engine.encoder_backend` says so, torch does (`torch_session.py`). Every form but float32 is compared with float32, and
rejected if it differs too much.
"""

import importlib.metadata
import logging
import os
import pathlib
from collections.abc import Sequence

import msgspec

from noria.config import EngineConfig
from noria.engine.encoder.fidelity import check_fidelity
from noria.engine.encoder.graph_sessions import load_int8, load_onnx, load_openvino
from noria.engine.encoder.packing_choice import PACKED_MIN_FIDELITY, choose_packing
from noria.engine.resources.fidelity import read_fidelity
from noria.errors import ConfigError
from noria.extras import require
from noria.folders import cache_folder
from noria.models.encoder.onnx_export import find_or_export, model_cache
from noria.models.encoder.tokenizers.token_rows import FloatArray, ImageRow, Row, Session, has_images, image_part
from noria.observe.cgroup import cpu_limit, usable_cores
from noria.observe.cpuinfo import cpu_model
from noria.observe.logs.log_record import fields
from noria.protocol.messages import ModelPrecision
from noria.protocol.text import EncoderModelSpec

_log = logging.getLogger(__name__)

_SMALL_PARAMETERS = 60_000_000
"""Up to this, a core computes a text in some milliseconds (MiniLM has 23 M), and threads of one text would wait for
each other more than they compute. Larger models get more cores for each text."""

_CPU_FORMS = {
    "float32": (load_onnx, "onnxruntime"),
    "int8": (load_int8, "onnxruntime"),
    "bfloat16": (load_openvino, "openvino"),
}


def load_sessions(spec: EncoderModelSpec, config: EngineConfig, device: str) -> list[Session]:
    """Load a model on `device` ("auto", "cpu", "cuda" or "cuda:N"): one session on a GPU, several on a CPU.

    Raises:
        ConfigError: the device does not exist, or cannot compute in `config.encoder_precision`.
        MissingExtra: a package is not installed.
        ModelError: the model cannot be exported or loaded, or its precision costs too much fidelity.
    """
    if spec.unread_keys:
        _log.warning(
            "the configuration of %s has keys that are not read here: %s. If they change what the model computes, its "
            "results differ",
            spec.name,
            ", ".join(spec.unread_keys),
            extra=fields(event="unread_keys", model=spec.name),
        )
    device = find_device(device)
    if config.encoder_packing == "on" and not uses_torch(config, device):
        raise ConfigError(
            "engine.encoder_packing is 'on', and ONNX Runtime or OpenVINO computes text encoders, which pad. Use auto, "
            "a GPU, or engine.encoder_backend torch."
        )
    sessions = _load_checked(spec, config, device)
    if spec.image_input is None:
        return sessions
    images = _load_checked(image_part(spec), config, device)
    return [TwoTowerSession(*towers) for towers in zip(sessions, images, strict=True)]


class TwoTowerSession:
    """A `Session` of texts and images, each by the session of its tower."""

    def __init__(self, texts: Session, images: Session) -> None:
        self._texts, self._images = texts, images
        self.is_faster_alone = texts.is_faster_alone and images.is_faster_alone
        self.is_packed = texts.is_packed

    def run(self, rows: Sequence[Row], is_alone: bool = False) -> list[FloatArray]:
        """Compute texts and images; see `Session.run`."""
        results: dict[int, FloatArray] = {}
        for session, is_image in ((self._texts, False), (self._images, True)):
            places = [place for place, row in enumerate(rows) if isinstance(row, ImageRow) is is_image]
            if places:
                results.update(zip(places, session.run([rows[place] for place in places], is_alone), strict=True))
        return [results[place] for place in range(len(rows))]


def _load_checked(spec: EncoderModelSpec, config: EngineConfig, device: str) -> list[Session]:
    """Load a model, or a tower of one, and compare a faster form with float32."""
    precision, cache = resolve_precision(config, device), cache_folder(config.cache_dir, os.environ)
    sessions = _load(spec, config, device, precision, cache)
    _choose_packing(spec, config, device, precision, sessions[0])
    if precision != "float32":
        check_fidelity(
            spec,
            sessions[0],
            lambda: _load(spec, config, device, "float32", cache)[0],
            config.encoder_min_fidelity,
            fidelity_file(spec, config, device),
        )
    return sessions


def _choose_packing(
    spec: EncoderModelSpec, config: EngineConfig, device: str, precision: str, session: Session
) -> None:
    mode = config.encoder_packing
    if mode == "off" or has_images(spec.inputs) or (mode == "auto" and device == "cpu"):
        return
    from noria.engine.encoder.torch_session import TorchSession

    assert isinstance(session, TorchSession)
    min_fidelity = PACKED_MIN_FIDELITY if precision == "float32" else config.encoder_min_fidelity
    choose_packing(spec, session, mode, min_fidelity)


def precision_of(spec: EncoderModelSpec, config: EngineConfig, device: str) -> ModelPrecision:
    """Return in which form `load_sessions` has loaded a model."""
    precision, fidelity = resolve_precision(config, device), None
    if precision == "float32":
        fidelity = 1.0
    else:
        towers = [spec] if spec.image_input is None else [spec, image_part(spec)]
        measured = [read_fidelity(fidelity_file(tower, config, device)) for tower in towers]
        fidelity = min((each.min for each in measured if each is not None), default=None)
    return ModelPrecision(spec.name, spec.fingerprint, precision, fidelity)


def fidelity_file(spec: EncoderModelSpec, config: EngineConfig, device: str) -> pathlib.Path:
    """Where the fidelity of a model is kept: by the digest of its weights, and all that it depends on besides them."""
    precision = resolve_precision(config, device)
    package = "torch" if uses_torch(config, device) else _CPU_FORMS[precision][1]
    if device == "cpu":
        hardware = cpu_model()
    else:
        import torch

        hardware = torch.cuda.get_device_name(device)
    parts = (precision, package, importlib.metadata.version(package), *hardware.split())
    name = "".join(letter if letter.isalnum() or letter == "." else "-" for letter in "-".join(parts))
    return model_cache(spec, cache_folder(config.cache_dir, os.environ)) / f"fidelity-{name}.json"


def find_device(name: str) -> str:
    """Return "cpu" or "cuda:N". "auto" is a GPU if there is one and torch is installed.

    Without a driver, torch is not imported.

    Raises:
        ConfigError: there is no such device.
        MissingExtra: a GPU is named, and torch is not installed.
    """
    if name == "cpu" or (name == "auto" and not _has_gpu()):
        return "cpu"
    torch = require("torch", "encoders-export", f"device {name!r}")
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} does not exist: torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use --devices cpu or auto."
        )
    return f"cuda:{index}"


def _has_gpu() -> bool:
    if not pathlib.Path("/proc/driver/nvidia/version").exists():
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def uses_torch(config: EngineConfig, device: str) -> bool:
    """Whether torch computes on `device`, "cpu" or "cuda:N"."""
    return device != "cpu" or config.encoder_backend == "torch"


def resolve_precision(config: EngineConfig, device: str) -> str:
    """Return the precision that `config` means on `device`: by default float32 on a CPU and bfloat16 on a GPU."""
    if config.encoder_precision == "auto":
        return "float32" if device == "cpu" else "bfloat16"
    return config.encoder_precision


def num_cores(config: EngineConfig) -> int:
    """The cores that each engine may use: those of the process, at most `config.encoder_cores`, over the engines."""
    cores = usable_cores(len(os.sched_getaffinity(0)), cpu_limit())
    if isinstance(config.encoder_cores, int):
        cores = min(cores, config.encoder_cores)
    return max(1, cores // len(config.devices))


def resolve_sessions(config: EngineConfig, num_parameters: int, cores: int) -> tuple[int, int]:
    """Return the number of sessions on a CPU, of which `cores` are this engine's, and the threads of each."""
    small = num_parameters <= _SMALL_PARAMETERS
    num_sessions = (cores if small else min(2, cores)) if config.encoder_sessions == "auto" else config.encoder_sessions
    return num_sessions, max(1, cores // num_sessions) if config.threads == "auto" else config.threads


def _load(
    spec: EncoderModelSpec, config: EngineConfig, device: str, precision: str, cache: pathlib.Path
) -> list[Session]:
    num_sessions, threads = resolve_sessions(config, spec.num_parameters, num_cores(config))
    if not uses_torch(config, device):
        return [*_CPU_FORMS[precision][0](find_or_export(spec, cache), num_sessions, threads)]
    if precision == "int8":
        raise ConfigError("engine.encoder_precision is 'int8', which torch does not compute. Use bfloat16.")
    torch = require("torch", "encoders-export", f"a text encoder on {device!r} by torch")
    from noria.engine.encoder.torch_session import TorchSession

    session = TorchSession(spec, msgspec.structs.replace(config, dtype=precision), device)
    if device != "cpu":
        return [session]
    torch.set_num_threads(threads)  # the number for each thread that calls it
    return [session] * num_sessions
