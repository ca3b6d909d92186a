"""The ONNX form of a text encoder: exported from its checkpoint, checked against it, and kept in the cache folder.

Only what computes the same as transformers does with each text alone is used. Exporters have written graphs with the
mask of their example in them, of which every padded row is wrong by 0.1, silently. So the check has rows of different
lengths, two shapes, and ids of the second text of a pair.

An export is found again by the digest of all of the checkpoint's weights; then neither torch nor transformers is
needed.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError, NoriaError, all_codes
from noria.extras import check_installed, require
from noria.models.encoder.folders.static_folder import ARCHITECTURE, IDF_FILE
from noria.models.encoder.folders.task_folder import ADAPTER_STEM
from noria.models.encoder.tokenizers.token_rows import (
    ADAPTERS,
    FloatArray,
    Row,
    TokenRow,
    has_images,
    sample_images,
    stack,
    unpad,
)
from noria.models.families import FAMILIES
from noria.models.files.weights import weight_files
from noria.observe.idle_cores import yielding_cores
from noria.protocol.process_signals import blocking_signals, die_with_parent, leave_signals_to_supervisor
from noria.protocol.text import EncoderModelSpec
from noria.storage.private_files import make_own_folder

if TYPE_CHECKING:
    from noria.models.encoder.checkpoint import EncoderModule
    from noria.models.encoder.image_modules import ImageModule

_log = logging.getLogger(__name__)

_FORMAT = b"1"  # a new number makes all earlier exports unused
_TOLERANCE = 1e-4
"""Of the largest number of the result. Rounding in another order makes 1e-6, with 24 layers 1e-5; a wrong mask 0.1."""

_MAX_INLINE_BYTES = 1_900_000_000

_CHECKED_LENGTHS = (3, 8, 21, 64)  # tokens


class ExportRecord(msgspec.Struct, frozen=True):
    """export.json, beside the model.onnx that it describes."""

    exporter: str  # "folder": the file is the model folder's own
    max_difference: float  # from transformers, in the check
    inputs: tuple[str, ...]
    output: str
    versions: dict[str, str]  # versions of the packages that made it


class OnnxFile(NamedTuple):
    """A checked ONNX file."""

    file: pathlib.Path
    record: ExportRecord


def output_name(spec: EncoderModelSpec) -> str:
    """The name of the graph's result; torch's exporter writes unloadable files for "embedding"."""
    return "sentence_embedding" if spec.task in ("embedding", "sparse_embedding") else "logits"


def model_cache(spec: EncoderModelSpec, cache: pathlib.Path) -> pathlib.Path:
    """The folder of what is derived from these weights, named by a digest of their content. It may not exist."""
    digest = hashlib.sha256(_FORMAT)
    digest.update(msgspec.json.encode((spec.architecture, spec.pooling, spec.inputs)))
    for head in (spec.head, spec.splade):
        if head is not None:
            digest.update(msgspec.json.encode(head))
    if spec.fill_id is not None:
        digest.update(msgspec.json.encode((spec.fill_id, spec.max_length)))
    if has_images(spec.inputs):
        digest.update(msgspec.json.encode(spec.image_input))
    if spec.late_interaction is not None:
        digest.update(b"tokens normalized" if spec.normalize else b"tokens")
    files = [spec.path / "config.json", *weight_files(spec.path, "", FAMILIES[spec.family].weight_stems[""])]
    if spec.architecture == ARCHITECTURE and spec.task == "sparse_embedding":
        files += [spec.path / IDF_FILE, spec.path / "tokenizer.json"]
    for layer in spec.dense:
        digest.update(msgspec.json.encode(layer))
        files += weight_files(spec.path, layer.path, layer.stem)
    for adapter in spec.adapters:
        digest.update(msgspec.json.encode(adapter))
        files += weight_files(spec.path, adapter.path, ADAPTER_STEM) if adapter.path else []
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return cache / "encoders" / digest.hexdigest()[:32]


def find_or_export(spec: EncoderModelSpec, cache: pathlib.Path, *, yields_cores: bool = False) -> OnnxFile:
    """Return the ONNX form of a model; exports it in a process of its own if it is not in the cache folder.

    With `yields_cores` that process leaves the cores to others, and takes a minute or two if these are busy.

    Raises:
        ConfigError: the cache folder cannot be written.
        MissingExtra: it has to be exported, and torch or transformers is not installed.
        ModelError: no exporter's graph computes what the checkpoint does.

    """
    if (found := find(spec, cache)) is not None:
        return found
    check_installed(("torch", "transformers"), "encoders-export", f"exporting {spec.name} to ONNX, which is done once,")
    _log.info("exporting %s to ONNX, which is done once", spec.name)
    # A process of its own: torch and the checkpoint would stay in the memory of this one.
    command = [sys.executable, "-m", "noria.models.encoder.onnx_export"]
    task = msgspec.json.encode((spec, str(cache), yields_cores))
    with blocking_signals():
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        try:
            output, _ = child.communicate(task)
        finally:
            child.kill()  # it ignores Ctrl-C
    if child.returncode == 0 and (made := find(spec, cache)) is not None:
        return made
    try:
        code, message = msgspec.json.decode(output, type=tuple[str, str])
    except msgspec.DecodeError:
        raise ModelError(
            f"the process that exported {spec.name} to ONNX ended with status {child.returncode}; -9 is mostly too "
            "little memory."
        ) from None
    raise all_codes()[code](message)


def main() -> int:
    """Export what standard input names, in a process of its own; an error goes to standard output."""
    spec, cache, yields_cores = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[EncoderModelSpec, str, bool])
    leave_signals_to_supervisor()
    die_with_parent(signal.SIGKILL)
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is for the log
    try:
        with yielding_cores() if yields_cores else contextlib.nullcontext():
            export(spec, pathlib.Path(cache))
    except NoriaError as error:
        os.write(output, msgspec.json.encode((error.code, error.message)))
        return 1
    return 0


def export(spec: EncoderModelSpec, cache: pathlib.Path) -> OnnxFile:
    """Export a checkpoint to the cache folder, and check the graph. Raises as `find_or_export` does."""
    from noria.models.encoder import checkpoint

    # In ONNX Runtime, the graph of plain attention is 5 % quicker than that of torch's fused one.
    module = checkpoint.load(spec, EngineConfig(dtype="float32"), "cpu", "eager")
    rows = _sample_rows(spec, module)
    expected = _compute_alone(module, spec, rows)
    folder, rejected = model_cache(spec, cache), list[str]()
    with _temporary_folder(folder) as temporary:
        file = temporary / "model.onnx"
        for exporter, write in _exporters(spec, module):
            try:
                write(file)
                difference = _difference(file, spec, rows, expected)
            except Exception as error:  # exporters and ONNX Runtime raise many kinds, also for what they do not support
                rejected.append(f"{exporter}: {str(error).strip().partition(chr(10))[0][:200] or type(error).__name__}")
                continue
            if difference <= _TOLERANCE:
                packages = ("torch", "transformers", "onnxruntime")
                record = ExportRecord(exporter, difference, _input_names(file), output_name(spec),
                                      {name: importlib.metadata.version(name) for name in packages})  # fmt: skip
                (temporary / "export.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)))
                _move(temporary, folder)
                _log.info("exported %s to %s by %s: differs by %.1e", spec.name, folder, exporter, difference)
                return OnnxFile(folder / "model.onnx", record)
            rejected.append(f"{exporter}: differs from the checkpoint by {difference:.1e}")
    raise ModelError(
        f"{spec.name} in {spec.folder} cannot be exported to ONNX so that it computes what transformers does with each "
        f"text alone, within {_TOLERANCE:g} of the largest number. {'; '.join(rejected)}."
    )


def find(spec: EncoderModelSpec, cache: pathlib.Path) -> OnnxFile | None:
    """Return an earlier export; None if there is none. Raises ConfigError if other users can change it."""
    folder = model_cache(spec, cache)
    try:
        record = msgspec.json.decode((folder / "export.json").read_bytes(), type=ExportRecord)
        file = folder / "model.onnx"
        make_own_folder(folder)  # which is there: checks that nobody else can change it
        return OnnxFile(file, record) if file.stat().st_size else None
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"the export in {folder} cannot be used: {error}. Remove the folder, or set engine.cache_dir to another."
        ) from error


@contextlib.contextmanager
def _temporary_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside `folder`, which is removed at the end unless it was moved."""
    try:
        make_own_folder(folder.parent)
        temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"an ONNX file cannot be kept: {error}. Set engine.cache_dir to another folder.") from error
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(temporary: pathlib.Path, folder: pathlib.Path) -> None:
    """Rename a folder, atomically; does nothing if another engine was faster."""
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / "export.json").exists():
            raise


def _exporters(
    spec: EncoderModelSpec, module: "EncoderModule | ImageModule"
) -> Iterator[tuple[str, Callable[[pathlib.Path], object]]]:
    """Yield what may write the file, by name: the folder's own file first, then the quicker of torch's exporters."""
    own = spec.path / "onnx" / "model.onnx"
    if own.is_file() and not has_images(spec.inputs):
        yield "folder", lambda file: shutil.copyfile(own, file)
    yield "torchscript", lambda file: _export(spec, module, file, dynamo=False)
    if importlib.util.find_spec("onnxscript") is not None:
        yield "dynamo", lambda file: _export(spec, module, file, dynamo=True)


def _export(spec: EncoderModelSpec, module: "EncoderModule | ImageModule", file: pathlib.Path, *, dynamo: bool) -> None:
    import torch

    # With padding and two rows: what is 1 or without padding in an example may become a constant of the graph.
    example = stack(_sample_rows(spec, module)[:2], spec.inputs)
    sizes = {0: "batch"} if has_images(spec.inputs) else {0: "batch", 1: "tokens"}
    axes = dict.fromkeys(spec.inputs, sizes)
    if ADAPTERS in axes:
        axes[ADAPTERS] = {0: "batch"}
    options: dict[str, Any] = (
        {"dynamic_shapes": axes, "opset_version": 20, "external_data": _is_large(spec), "verbose": False}
        if dynamo
        else {"dynamic_axes": axes | {output_name(spec): {0: "batch"}}, "opset_version": 17}
    )
    with warnings.catch_warnings(), torch.inference_mode(mode=False), torch.no_grad():
        warnings.simplefilter("ignore")  # what cannot be exported is seen by the check
        torch.onnx.export(
            module,
            tuple(torch.from_numpy(example[name]) for name in spec.inputs),
            str(file),
            input_names=list(spec.inputs),
            output_names=[output_name(spec)],
            dynamo=dynamo,
            **options,
        )


def _is_large(spec: EncoderModelSpec) -> bool:
    """Whether the graph needs a second file for its weights: one file of protobuf has at most 2 GiB."""
    return spec.num_parameters * 4 > _MAX_INLINE_BYTES


def _sample_rows(spec: EncoderModelSpec, module: "EncoderModule | ImageModule") -> list[Row]:
    """Random tokens of several lengths; if the model tells pairs apart, the second half is of the second text."""
    if has_images(spec.inputs):
        return [*sample_images(spec, len(_CHECKED_LENGTHS))]
    rng, of_texts = np.random.default_rng(0), cast("EncoderModule", module)
    pad_token_id, end_token_id = of_texts.pad_token_id, of_texts.end_token_id
    rows: list[Row] = []
    lengths = sorted({min(length, spec.max_length) for length in _CHECKED_LENGTHS})
    for place in range(max(len(lengths), len(spec.adapters) + 1)):
        length = lengths[place % len(lengths)]
        ids = rng.integers(0, spec.vocab_size - 1, length)
        ids += ids >= pad_token_id  # which is no token of a text
        if end_token_id is not None:
            ids[-1] = end_token_id
        types = np.arange(length) * 2 // length if "token_type_ids" in spec.inputs else None
        rows.append(TokenRow(ids, types, adapter=place % (len(spec.adapters) + 1)))
    return rows


def _compute_alone(module: "EncoderModule | ImageModule", spec: EncoderModelSpec, rows: list[Row]) -> list[FloatArray]:
    """Compute each row without padding, by the checkpoint."""
    import torch

    results = []
    with torch.inference_mode():
        for row in rows:
            inputs = stack([row], spec.inputs)
            results.append(module(*(torch.from_numpy(inputs[name]) for name in spec.inputs))[0].numpy())
    return results


def _difference(file: pathlib.Path, spec: EncoderModelSpec, rows: list[Row], expected: list[FloatArray]) -> float:
    """Return the largest difference from `expected`, relative to its maximum; NaN counts as infinite.

    Batches have all rows, and the first two.
    """
    session, names = _open(file), _input_names(file)
    worst = 0.0
    for num_rows in (len(rows), 2):
        (got,) = session.run([output_name(spec)], stack(rows[:num_rows], names))
        for own, right in zip(unpad(got, rows[:num_rows]), expected, strict=False):
            if own.shape != right.shape:
                raise ValueError(f"its result has the shape {own.shape}, not {right.shape}")
            difference = float(np.abs(own - right).max() / max(1.0, np.abs(right).max()))
            worst = max(worst, difference if np.isfinite(difference) else np.inf)
    return worst


def _input_names(file: pathlib.Path) -> tuple[str, ...]:
    return tuple(each.name for each in _open(file).get_inputs())


def _open(file: pathlib.Path) -> Any:
    onnxruntime = require("onnxruntime", "encoders", "a text encoder on a CPU")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = min(4, os.cpu_count() or 1)
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    sys.exit(main())
