"""Parts of a run that the benches share: lines about progress, modules in processes of their own, and its end."""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from noria.config import Config
from noria.errors import ConfigError, NoriaError
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.process_signals import sigterm_interrupts
from noria.protocol.text import EncoderModelSpec

StatusLog = Callable[[str], None]
Background = Callable[[threading.Event], None]
"""A function that ends when its event is set."""


def status_log(bench: str) -> StatusLog:
    """Return a function that prints a line on stderr, after the name of the bench."""
    return lambda text: print(f"noria bench {bench}: {text}", file=sys.stderr, flush=True)


def run_to_end(measure: Callable[[], None], log_status: StatusLog, failures: list[str]) -> int:
    """Measure until the end, an interruption or a failure, which is added to `failures`; returns the exit status."""
    try:
        with sigterm_interrupts():
            measure()
    except KeyboardInterrupt:
        log_status("interrupted; the report has what was measured until now")
        return 130
    except (RuntimeError, OSError, NoriaError) as error:
        failures.append(f"stopped: {error}")
        log_status(failures[-1])
    return 1 if failures else 0


@contextlib.contextmanager
def in_background(function: Background) -> Iterator[threading.Event]:
    """Run a function in a thread meanwhile; at the end its event is set, and it is waited for."""
    ended = threading.Event()
    thread = threading.Thread(target=function, args=(ended,))
    thread.start()
    try:
        yield ended
    finally:
        ended.set()
        thread.join()


def write_json(document: Any, file: pathlib.Path) -> pathlib.Path:
    """Write what msgspec encodes as indented JSON, atomically; returns the file."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return partial.replace(file)


def make_results_folder(folder: pathlib.Path, option: str = "--out") -> None:
    """Create the folder that `option` names, unless it exists. Raises ConfigError if no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{option} {folder} cannot be written ({error}); name a folder, which need not exist."
        ) from error


def open_both_models(config: Config) -> tuple[Config, DiffusionModelSpec, EncoderModelSpec]:
    """Return the settings with one model of embeddings beside the image model, by default minilm; the specs of both.

    Raises:
        NoriaError: a model is not of its kind.

    """
    encoder, *_ = config.additional_models or ("minilm",)
    config = msgspec.structs.replace(config, additional_models=(encoder,))
    images = open_model_of(DiffusionModelSpec, config.model, config.engine)
    texts = open_model_of(EncoderModelSpec, encoder, config.engine)
    if texts.task != "embedding":
        raise ConfigError(f"{texts.name} is for {texts.task}; this bench needs one of embeddings, such as minilm.")
    return config, images, texts


def run_module(name: str, job: msgspec.Struct) -> bytes:
    """Run a module with `job` on its stdin; return its output. Raises RuntimeError if it fails; its stderr is ours."""
    command = [sys.executable, "-m", name]
    done = subprocess.run(command, input=msgspec.json.encode(job), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}; its stderr is above")
    return done.stdout
