"""Reads the files of a model folder: JSON objects and the headers of safetensors files.

Rejects pickles without reading them.

Only regular files of bounded size are read, so that no read blocks for ever or exhausts memory. Which tensors and
settings a part needs is checked by its family; this module knows neither torch nor the parts' configurations.

A part's *stem* is the name of its weight files, without variant, shard and ".safetensors".
"""

import contextlib
import hashlib
import json
import math
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from safetensors import SafetensorError, safe_open

from noria.errors import ModelError, short_repr
from noria.errors.decode_text import rejection, value_at
from noria.models.files import gguf_file
from noria.models.files.quantized_weights import MAX_STATE_BYTES, check_metadata, is_quant_state, logical_shapes

REDOWNLOAD_HINT = "Copy or download the model again."

GGUF_PART = "transformer"
"""The only part that is read from a GGUF file, if it has no other weights."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""The suffixes of files that are never opened."""

_SAMPLED_BYTES = 65_536
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
# What newer and older versions of the library say of a file that is truncated or too long.
_WRONG_SIZE_REASONS = ("incomplete metadata, file not fully covered", "MetadataIncompleteBuffer")
_MAX_TEXT_BYTES = 2**26  # a tokenizer.json of CLIP has 2 to 4 MB, of XLM-RoBERTa 17, of Gemma 33


T = TypeVar("T")
Shapes = dict[str, tuple[int, ...]]
"""The shapes of tensors by name."""


def variant(part: pathlib.Path, stem: str) -> str | None:
    """Variant of the weights used in the folder `part`: None for full precision, "fp16" if only that exists."""
    plain, half = (any(name.exists() for name in _candidates(part, stem, kind)) for kind in (None, "fp16"))
    return "fp16" if half and not plain else None


def weight_files(folder: pathlib.Path, part_name: str, stem: str) -> list[pathlib.Path]:
    """Return the files of a part of the model in `folder`: a safetensors file or all shards, in its `variant`, or GGUF.

    `part_name` is that of the part's subfolder; empty: `folder` itself has the files.

    Raises ModelError: there are none, or only pickles, or it is not clear which are meant.
    """
    part = folder / part_name
    single, index = _candidates(part, stem, variant(part, stem))
    ggufs = sorted(part.glob(f"*{gguf_file.SUFFIX}"))
    if ggufs and part_name == GGUF_PART:
        if len(ggufs) > 1 or single.exists() or index.exists():
            others = [*ggufs[1:], *(file for file in (single, index) if file.exists())]
            raise ModelError(
                f"{ggufs[0]}: beside it is {others[0].name}. Keep the weights of one model, and no others."
            )
        return ggufs
    if single.exists() and index.exists():
        raise ModelError(
            f"{single}: beside it is {index.name}, and the libraries differ in which of the two they load. Keep the "
            "weights of one model, and no others."
        )
    if single.exists():
        return [single]
    if index.exists():
        return [part / shard for shard in sorted(set(_shards(index).values()))]
    if pickles := [file for file in part.glob("*") if file.suffix in PICKLES and not _OF_TRAINER.fullmatch(file.name)]:
        pickle = min(pickles, key=lambda file: (_PICKLED_WEIGHTS.fullmatch(file.name) is None, file.name))
        raise ModelError(
            f"{pickle}: the weights are a pickle, which can run code when loaded; only safetensors are supported. "
            + _conversion_advice(folder, pickle, single)
        )
    if ggufs:
        raise ModelError(
            f"{single}: missing, and files in the format GGUF are read only of a {GGUF_PART}. Other quantized weights "
            "are served as safetensors of torchao or bitsandbytes, as save_pretrained writes them."
        )
    missing = f"{single}: missing, so the {part_name or 'model'} has no weights"
    unread = sorted(file.name for file in part.glob("*") if file.suffix in (*_OTHER_LIBRARIES, single.suffix))
    if not unread:
        raise ModelError(f"{missing}. {REDOWNLOAD_HINT}")
    whose = _OTHER_LIBRARIES.get(pathlib.Path(unread[0]).suffix)
    what = f" of {whose}, which is not read" if whose else ""
    raise ModelError(f"{missing}; beside it is {unread[0]}{what}. Put the model's safetensors here, in this name.")


def _candidates(part: pathlib.Path, stem: str, kind: str | None) -> tuple[pathlib.Path, pathlib.Path]:
    """Return the paths of a part's single file and of its shard index, as diffusers and transformers name them."""
    infix = f".{kind}" if kind else ""
    index, older = (part / f"{stem}.safetensors{name}.json" for name in (f".index{infix}", f"{infix}.index"))
    has_older = not index.exists() and older.exists()  # as diffusers 0.29 and 0.30 named that of fp16
    return part / f"{stem}{infix}.safetensors", older if has_older else index


_PICKLED_WEIGHTS = re.compile(r"(diffusion_)?pytorch_model(-\d+-of-\d+)?(\.fp16)?(-\d+-of-\d+)?\.bin")
"""The pickles that the libraries write: group 1 is only in the names of diffusers' parts."""


_OF_TRAINER = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state.*)\.(bin|pt|pth)")
"""Files that transformers' Trainer writes beside the weights."""
_OTHER_LIBRARIES = {
    ".h5": "TensorFlow", ".msgpack": "Flax", ".onnx": "ONNX", ".ot": "Rust's tch", ".tflite": "TensorFlow Lite"
}  # fmt: skip
"""Libraries by the suffix of their weights."""


def _conversion_advice(folder: pathlib.Path, pickle: pathlib.Path, wanted: pathlib.Path) -> str:
    """Say how all of a model's pickles become safetensors, beside them, so that no other file of the model changes."""
    targets: dict[str, list[str]] = {}
    for file in sorted([*folder.glob("*.bin"), *folder.glob("*/*.bin")]):
        if match := _PICKLED_WEIGHTS.fullmatch(file.name):
            stem = "diffusion_pytorch_model" if match[1] else "model"
            target = file.with_name(f"{stem}{match[3] or ''}.safetensors")
            targets.setdefault(str(target), []).append(str(file))
    if not _PICKLED_WEIGHTS.fullmatch(pickle.name):
        return f"Convert it to {wanted.name}, whose tensors have the names of the library's class."
    code = (
        "import torch, safetensors.torch as s; [s.save_file({k: v.clone().contiguous() for f in files for d in "
        "[torch.load(f, map_location='cpu', weights_only=True)] for k, v in d.get('state_dict', d).items() "
        "if torch.is_tensor(v)}, target, {'format': 'pt'}) "
        f"for target, files in {targets}.items()]"
    )
    return f"Convert it once, beside the others, without running its code: {shell_command(code)}"


def shell_command(code: str) -> str:
    """Return the line for a shell that runs `code` in Python, where `!` is in string literals alone."""
    # An interactive shell replaces !WORD by an earlier command.
    escaped = re.sub(r'(["$`\\])', r"\\\1", code.replace("!", r"\x21"))
    return f'python -c "{escaped}"'


def read_weights(folder: pathlib.Path, part_name: str, stem: str) -> Shapes:
    """Return the shapes of all tensors of a part, named as in `weight_files`; of quantized ones those before.

    Raises ModelError: a file is missing or damaged, has tensors of a quantization that is not served, or fewer than the
    part has layers.
    """
    shapes: Shapes = {}
    states: dict[str, bytes] = {}
    metadata: list[Mapping[str, str]] = []
    for file in weight_files(folder, part_name, stem):
        if file.suffix == gguf_file.SUFFIX:
            shapes = _read_gguf(file).shapes
            break
        shapes |= read_header(file)
        states |= _read_states(file)
        with _opened(file) as opened:
            metadata.append(opened.metadata() or {})
    for file in (folder / part_name).glob(f"{stem}.safetensors.*index*.json"):
        missing = sorted(set(_shards(file)) - set(shapes))
        if missing:
            raise ModelError(f"{file}: lists {short_repr(missing[0])}, which no shard contains. {REDOWNLOAD_HINT}")
    _check_layer_counts(folder / part_name / "config.json", len(shapes))
    try:
        check_metadata(metadata)
        return logical_shapes(shapes, states)
    except ModelError as error:
        raise ModelError(f"{folder / part_name}: {error.message} {REDOWNLOAD_HINT}") from error


# Numbers of layers in the configurations of diffusers and transformers; `max_window_layers` counts none.
_LAYER_COUNT = re.compile(r"(?!max_window_).*(layers|layers_per_block|blocks)|depth")
_FEW_LAYERS = 100  # so many are built in seconds; then the libraries say which tensors are missing


def _check_layer_counts(file: pathlib.Path, num_tensors: int) -> None:
    """Check that a part has a tensor for each layer, if its configuration has more than a few, at any depth.

    Building a million layers would take hours, before the libraries find that they have no weights.
    """
    pending: list[tuple[str, object]] = list(read_object(file).items()) if file.exists() else []
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list) and _LAYER_COUNT.fullmatch(key):
            pending += ((key, each) for each in value)
        elif isinstance(value, int | float) and value > max(num_tensors, _FEW_LAYERS) and _LAYER_COUNT.fullmatch(key):
            raise ModelError(
                f"{file}: {key} is {value}, but the weights have only {num_tensors} tensors: weights and configuration "
                f"belong to two models. {REDOWNLOAD_HINT}"
            )


def _read_states(file: pathlib.Path) -> dict[str, bytes]:
    """Return the contents of the tensors that describe quantized ones."""
    with _opened(file) as opened:
        states = {}
        for name in filter(is_quant_state, opened.keys()):
            part = opened.get_slice(name)
            if part.get_dtype() != "U8" or math.prod(part.get_shape()) > MAX_STATE_BYTES:
                raise ModelError(f"{file}: {short_repr(name)} describes no quantized tensor. {REDOWNLOAD_HINT}")
            states[name] = opened.get_tensor(name).tobytes()
        return states


def weight_bytes(folder: pathlib.Path, part_name: str, stem: str, item_bytes: int) -> int:
    """Return the bytes that a part takes if its floating-point numbers of 16 bits and more are converted.

    `item_bytes` are those of one such number; quantized ones stay as they are in the file.
    """
    total = 0
    for file in weight_files(folder, part_name, stem):
        if file.suffix == gguf_file.SUFFIX:
            return sum(tensor.loaded_bytes(item_bytes) for tensor in _read_gguf(file).tensors.values())
        with _opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                stored = _STORED_BYTES.get(part.get_dtype(), 1)
                total += math.prod(part.get_shape()) * (item_bytes if part.get_dtype() in _CONVERTED else stored)
    return total


_CONVERTED = ("F64", "F32", "F16", "BF16")
_STORED_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


def _shards(index: pathlib.Path) -> dict[str, str]:
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) and _is_shard(name) for name in shards.values()):
        raise ModelError(
            f"{index}: has no weight_map from tensors to safetensors files of its folder. {REDOWNLOAD_HINT}"
        )
    return shards


def _is_shard(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII) is not None


def num_tensor_parameters(shapes: Shapes) -> int:
    """Count the parameters of tensors."""
    return sum(math.prod(shape) for shape in shapes.values())


def read_header(file: pathlib.Path) -> Shapes:
    """Return the shapes of the tensors in a safetensors file, which the library checks against the file's size.

    Raises ModelError: missing, truncated, longer than its header says, or not a safetensors file.
    """
    with _opened(file) as opened:
        names = opened.keys()
        return {name: tuple(opened.get_slice(name).get_shape()) for name in names}


def _read_gguf(file: pathlib.Path) -> gguf_file.GgufHeader:
    """Return a GGUF file's header, of a regular file only."""
    file_size_bytes(file)
    return gguf_file.read_gguf_header(file)


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    """Open a safetensors file. Raises as `read_header`."""
    try:
        size_bytes = file_size_bytes(file)
        try:
            with safe_open(file, framework="np") as opened:
                yield opened
        except SafetensorError as error:
            raise ModelError(f"{file}: {_describe_damage(file, size_bytes, error)}") from error
    except FileNotFoundError as error:
        raise ModelError(f"{file}: missing. {REDOWNLOAD_HINT}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error


def identifying_bytes(file: pathlib.Path) -> Iterator[bytes]:
    """Yield what identifies a file of weights: its size, its header, and the start and the end of the data.

    Start and end, because further training changes neither header nor size, and reading all data of a large model takes
    minutes.

    Raises ModelError: the header is longer than the library allows.
    """
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        if file.suffix == gguf_file.SUFFIX:
            header_bytes = _read_gguf(file).num_bytes
        else:
            header_bytes = int.from_bytes(opened.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise ModelError(f"{file}: not a safetensors file: its header would have {header_bytes} bytes.")
        yield size_bytes.to_bytes(8, "little")
        yield opened.read(header_bytes + _SAMPLED_BYTES)
        opened.seek(max(0, size_bytes - _SAMPLED_BYTES))
        yield opened.read(_SAMPLED_BYTES)


def short_digest(parts: Iterable[bytes], before: bytes = b"") -> str:
    """Return 12 hexadecimal digits of a SHA-256: of what is `before`, and of each part after its length."""
    digest = hashlib.sha256(before)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]


def weights_digest(folder: pathlib.Path, stem: str, described: bytes) -> str:
    """Return as `short_digest` what identifies the weights in a folder, and the configuration `described`."""
    files = weight_files(folder, "", stem)
    return short_digest((part for file in files for part in identifying_bytes(file)), described)


def _describe_damage(file: pathlib.Path, size_bytes: int, error: SafetensorError) -> str:
    """Say what is wrong with a file that the library rejected, and by how many bytes; the library names no sizes."""
    with file.open("rb") as opened:
        start = opened.read(8)
        header_end = 8 + int.from_bytes(start, "little")
        if start == b"version ":
            return "a Git LFS pointer, not the weights. Run `git lfs pull` in the model's repository."
        if size_bytes < header_end <= 8 + _MAX_HEADER_BYTES:
            return (
                f"truncated: its header alone ends at byte {header_end}, the file has {size_bytes}. {REDOWNLOAD_HINT}"
            )
        reason = str(error).removeprefix("Error while deserializing header: ")
        if reason in _WRONG_SIZE_REASONS:
            tensors: dict[str, Any] = json.loads(opened.read(header_end - 8))  # the library has parsed it without error
            tensors.pop("__metadata__", None)
            expected = header_end + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            what = "truncated" if size_bytes < expected else "too long"
            return f"{what}: expected {expected} bytes, the file has {size_bytes}. {REDOWNLOAD_HINT}"
    return f"not a safetensors file, or its header is damaged: {short_repr(reason)}. {REDOWNLOAD_HINT}"


def read_object(file: pathlib.Path, missing: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; raise ModelError, with the consequence `missing` if the file is missing."""
    return parse_object(read_text(file, missing), str(file))


def parse_object(raw: bytes, source: str) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file; raise ModelError, which names `source`."""
    try:
        tree = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source}: not JSON: {error}. {REDOWNLOAD_HINT}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{source}: contains {short_repr(tree)}; a JSON object is expected. {REDOWNLOAD_HINT}")
    return tree


def read_struct(file: pathlib.Path, kind: type[T]) -> T:
    """Read a JSON file as `kind`; raise ModelError, also if a field is missing or not valid."""
    return convert(file, read_object(file), kind)


def convert(file: pathlib.Path, tree: dict[str, Any], kind: type[T]) -> T:
    """Convert the object that was read from `file` to `kind`; raise ModelError if a field is missing or not valid."""
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        path, reason = rejection(error, kind)
        where = f"{path} is {short_repr(value_at(tree, path))}; " if path else ""
        raise ModelError(f"{file}: {where}{reason}.") from error
    except UnicodeEncodeError as error:  # an unpaired surrogate
        raise ModelError(f"{file}: {error}.") from error


def read_text(file: pathlib.Path, missing: str = "") -> bytes:
    """Return the bytes of a small file; raise ModelError, with the consequence `missing` if it is missing."""
    try:
        size_bytes = file_size_bytes(file)
        if size_bytes > _MAX_TEXT_BYTES:
            raise ModelError(
                f"{file}: has {size_bytes} bytes; at most {_MAX_TEXT_BYTES} are allowed. {REDOWNLOAD_HINT}"
            )
        return file.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{file}: missing{missing and ', so '}{missing}. {REDOWNLOAD_HINT}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error


def file_size_bytes(file: pathlib.Path) -> int:
    """Return the size of a regular file, following links; reject FIFOs and devices, which can block for ever."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{file}: cannot be read: it is a folder, a pipe or a device, not a file.")
    return status.st_size
