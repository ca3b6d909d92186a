"""Keeps how a denoiser is called with `engine.compile_blocks` "auto": decided by measurements, once for a device.

Importing this module is cheap: torch is imported by `choose_calls`, and only where there is something to measure.
"""

import hashlib
import importlib.metadata
import logging
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from noria.config import EngineConfig
from noria.engine.diffusion.warmup.calibration import cost_key
from noria.folders import cache_folder
from noria.models.adapters.lora_folders import LoraFolders
from noria.observe.logs.log_record import fields
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.model_spec import CallChoice, CallTrial
from noria.storage.private_files import replace_private_file

if TYPE_CHECKING:
    from noria.models.diffusion.diffusion_model import DiffusionModel

_log = logging.getLogger(__name__)

MARGIN = 1.03
"""How many times as fast another way of calling must be, in the geometric mean over the measured numbers of rows."""

_ATTENTION_PACKAGES = ("flash-attn", "flash-attn-3")  # packages of kernels that `call_trials.py` tries

_MAX_LOSS = 0.99  # at no number of rows may it be slower than so many times as fast: pairs of equal calls vary by 1 %

Measure = Callable[["DiffusionModel", DiffusionModelSpec, EngineConfig], Sequence[CallTrial]]


def compare(trial: CallTrial, pairs: Mapping[int, tuple[float, float]]) -> CallTrial:
    """Return a trial with its figures, whether it is chosen, too; `pairs` are seconds before and with it, by rows."""
    ratios = [before_s / seconds for before_s, seconds in pairs.values()]
    speedup = statistics.geometric_mean(ratios)
    return msgspec.structs.replace(
        trial,
        before_s={rows: before_s for rows, (before_s, _) in pairs.items()},
        seconds={rows: seconds for rows, (_, seconds) in pairs.items()},
        speedup=speedup,
        is_chosen=speedup >= MARGIN and min(ratios) >= _MAX_LOSS,
    )


def choose_calls(
    spec: DiffusionModelSpec,
    config: EngineConfig,
    hardware: str,
    load: "Callable[[EngineConfig], DiffusionModel]",
    measure: Measure | None = None,
) -> tuple[EngineConfig, CallChoice]:
    """Return `config`, whose `compile_blocks` is "auto", with what is the fastest on this hardware, and the figures.

    They are those of an earlier start, or are measured on a model that `load` returns and that is then dropped.
    """
    file = _file(spec, config, hardware)
    choice = _read(file)
    if choice is None:
        choice = _choice(spec, config, _measure(spec, config, load, measure))
        if choice.trials:
            try:
                replace_private_file(file, msgspec.json.encode(choice))
            except OSError as error:
                _log.warning("the measured calls cannot be kept, and are measured again at the next start: %s", error)
    else:  # the same weights may have had another name
        choice = msgspec.structs.replace(choice, model=spec.name)
    _log.info(
        "%s: %s",
        spec.name,
        describe(choice),
        extra=fields(
            event="calls_chosen",
            model=spec.name,
            compile_blocks=choice.compile_blocks,
            compile_loras=choice.compile_loras,
            attention=choice.attention,
            speedup=round(choice.speedup, 3),
        ),
    )
    return apply_choice(config, choice), choice


def _measure(
    spec: DiffusionModelSpec,
    config: EngineConfig,
    load: "Callable[[EngineConfig], DiffusionModel]",
    measure: Measure | None,
) -> Sequence[CallTrial]:
    from noria.engine.diffusion.warmup.call_trials import release_memory, try_calls

    plain = msgspec.structs.replace(config, compile_blocks=False)
    model = load(plain)
    trials = (measure or try_calls)(model, spec, plain)
    device = model.device
    del model
    release_memory(device)
    return trials


def _choice(spec: DiffusionModelSpec, config: EngineConfig, trials: Sequence[CallTrial]) -> CallChoice:
    chosen = [trial for trial in trials if trial.is_chosen and not trial.with_loras]
    attention = "sdpa" if config.attention == "auto" else config.attention
    last = chosen[-1] if chosen else CallTrial(attention, compile_blocks=False)
    speedup = math.prod(trial.speedup for trial in chosen)
    loras = any(trial.is_chosen for trial in trials if trial.with_loras)
    return CallChoice(spec.name, spec.fingerprint, last.attention, last.compile_blocks, speedup, tuple(trials), loras)


def apply_choice(config: EngineConfig, choice: CallChoice) -> EngineConfig:
    """Return `config` without the "auto" of `compile_blocks`, and of `attention` if it has that."""
    attention = choice.attention if config.attention == "auto" else config.attention
    return msgspec.structs.replace(config, compile_blocks=choice.compile_blocks, attention=attention)


def known_choice(spec: DiffusionModelSpec, config: EngineConfig, hardware: str) -> CallChoice | None:
    """Return what an earlier start chose; `config` is resolved for the model. None: nothing is known."""
    return _read(_file(spec, config, hardware))


def use_known_choice(
    spec: DiffusionModelSpec, config: EngineConfig, hardware: str
) -> tuple[EngineConfig, CallChoice | None]:
    """Return `config` with what an earlier start chose if `compile_blocks` is "auto"; uncompiled if nothing is known.

    Nothing is measured, because other models serve meanwhile.
    """
    if config.compile_blocks != "auto":
        return config, None
    choice = known_choice(spec, config, hardware)
    if choice is None:
        return msgspec.structs.replace(config, compile_blocks=False), None
    return apply_choice(config, choice), choice


def describe(choice: CallChoice | None) -> str:
    """Return what was chosen, with the figures, as the log and `noria doctor` show it."""
    if choice is None:
        return "auto: measured at the next start"
    chosen = f"blocks {'' if choice.compile_blocks else 'not '}compiled, attention {choice.attention}"
    return "; ".join([chosen, *map(_describe_trial, choice.trials)])


def trial_name(trial: CallTrial) -> str:
    """Return what was tried, as the log names it."""
    if trial.compile_blocks:
        return "compiled blocks with LoRAs" if trial.with_loras else "compiled blocks"
    return f"attention {trial.attention}"


def _describe_trial(trial: CallTrial) -> str:
    name = trial_name(trial)
    if trial.error:
        return f"{name} failed: {trial.error}"
    times = ", ".join(
        f"{rows} {'row' if rows == 1 else 'rows'} {1000 * trial.before_s[rows]:.1f} → {1000 * seconds:.1f} ms"
        for rows, seconds in trial.seconds.items()
    )
    return f"{name} {trial.speedup:.2f} times as fast ({times})"


def _file(spec: DiffusionModelSpec, config: EngineConfig, hardware: str) -> pathlib.Path:
    """Return where the choice is kept: by all that the cost of a call depends on, and what could be chosen."""
    others = {package: _version(package) for package in _ATTENTION_PACKAGES}
    others["loras"] = str(LoraFolders.of(config).are_for(spec.name))
    key = sorted((cost_key(spec, config, hardware) | others).items())
    name = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]
    return cache_folder(config.cache_dir, os.environ) / "calls" / f"{name}.json"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(file: pathlib.Path) -> CallChoice | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=CallChoice)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        _log.warning("the measured calls in %s cannot be used and are measured again: %s", file, error)
        return None
