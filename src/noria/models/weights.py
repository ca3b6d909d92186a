"""The files of a model folder: JSON objects, and safetensors, whose headers are read by hand; pickles are refused unread.

Every file is a regular one of bounded size, so that nothing here waits for ever or fills the memory. What a part's tensors and
settings must be is `catalog.py`'s; this module knows neither torch nor the parts' configurations.
"""

import json
import math
import pathlib
import re
import stat
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError, short_repr

WEIGHT_STEMS = {
    "text_encoder": "model",
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
REDOWNLOAD_HINT = "Copy or download the model again."

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_MAX_TEXT_BYTES = 2**24  # CLIP's tokenizer.json has 2 to 4 MB


class TensorInfo(Struct, frozen=True):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def variant(part: pathlib.Path) -> str | None:
    """Which weights of the folder `part` are used: None is the full-precision ones, "fp16" where only those are there."""
    plain, half = (any(name.exists() for name in _candidates(part, kind)) for kind in (None, "fp16"))
    return "fp16" if half and not plain else None


def weight_files(folder: pathlib.Path, part: str) -> list[pathlib.Path]:
    """The safetensors that hold `part` ("unet", "vae" or "text_encoder"): one file, or every shard of it.

    Those that `variant` names. Raises ModelError where there are none, or only pickles.
    """
    single, index = _candidates(folder / part, variant(folder / part))
    if single.exists():
        return [single]
    if index.exists():
        return [folder / part / shard for shard in sorted(set(_shards(index).values()))]
    pickles = sorted(file.name for file in (folder / part).glob("*") if file.suffix in _PICKLES)
    if pickles:
        raise ModelError(
            f"{folder / part / pickles[0]}: the weights are a pickle, which runs code when it is read; only safetensors are "
            f"served. Convert once, if you trust it: {_conversion_command(folder)}"
        )
    raise ModelError(f"{single}: missing, so the {part} has no weights. {REDOWNLOAD_HINT}")


def _candidates(part: pathlib.Path, kind: str | None) -> tuple[pathlib.Path, pathlib.Path]:
    """The file that holds all of a part, and the index of its shards, as diffusers and transformers name them."""
    infix, stem = f".{kind}" if kind else "", WEIGHT_STEMS[part.name]
    return part / f"{stem}{infix}.safetensors", part / f"{stem}.safetensors.index{infix}.json"


def _conversion_command(folder: pathlib.Path) -> str:
    """The command that rewrites a model's pickles as safetensors."""
    return (
        'python -c "from diffusers import StableDiffusionPipeline as P; '
        f"P.from_pretrained('{folder}', use_safetensors=False, safety_checker=None).save_pretrained('{folder}-safetensors')\""
    )


def read_weights(folder: pathlib.Path, part: str) -> dict[str, TensorInfo]:
    """Every tensor of a part by name; all its files are whole. Raises ModelError where one is not."""
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder, part):
        tensors |= read_header(file)
    for file in (folder / part).glob(f"{WEIGHT_STEMS[part]}.safetensors.index*.json"):
        lost = sorted(set(_shards(file)) - set(tensors))
        if lost:
            raise ModelError(f"{file}: lists {short_repr(lost[0])}, which is in none of the shards. {REDOWNLOAD_HINT}")
    return tensors


def _shards(index: pathlib.Path) -> dict[str, str]:
    """The shard of each tensor."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) and _is_shard(name) for name in shards.values()):
        raise ModelError(f"{index}: has no weight_map from tensors to safetensors files beside it. {REDOWNLOAD_HINT}")
    return shards


def _is_shard(name: str) -> bool:
    """Whether `name` is a safetensors file's, and no way out of the folder."""
    return re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII) is not None


def count_parameters(folder: pathlib.Path) -> int:
    """Parameters of all parts together, from the weights' headers."""
    return sum(num_tensor_parameters(read_weights(folder, part)) for part in WEIGHT_STEMS)


def num_tensor_parameters(tensors: dict[str, TensorInfo]) -> int:
    """Parameters of these tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def read_header(file: pathlib.Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON object, then the data it describes and not a byte else.

    Raises:
        ModelError: missing, truncated, longer than described, or no safetensors at all.

    """
    try:
        size_bytes = _size_bytes(file)
        with file.open("rb") as opened:
            start = opened.read(8)
            header_bytes = int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(
                    f"{file}: a Git LFS pointer, not the weights. Run `git lfs pull` in the model's repository."
                )
            if size_bytes < 8 + header_bytes and header_bytes <= _MAX_HEADER_BYTES:
                raise ModelError(
                    f"{file}: truncated: its header alone ends at byte {8 + header_bytes}, it has {size_bytes}. {REDOWNLOAD_HINT}"
                )
            raw = opened.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b""
    except FileNotFoundError as error:
        raise ModelError(f"{file}: missing. {REDOWNLOAD_HINT}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error
    try:
        tree = msgspec.convert(json.loads(raw), dict[str, Any])
        tree.pop("__metadata__", None)
        tensors = msgspec.convert(tree, dict[str, TensorInfo])
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{file}: its header is damaged, or it is no safetensors file: {error}. {REDOWNLOAD_HINT}"
        ) from error
    _check_offsets(file, tensors, size_bytes - 8 - header_bytes)
    return tensors


def _check_offsets(file: pathlib.Path, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        length = math.prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0)
        if tensor.dtype not in _ITEM_BYTES or tensor.data_offsets != (end, end + length):
            raise ModelError(
                f"{file}: its header is damaged at {short_repr(name)}: {short_repr(msgspec.to_builtins(tensor))}. {REDOWNLOAD_HINT}"
            )
        end += length
    if end != data_bytes:
        what = "truncated" if data_bytes < end else "too long"
        header_bytes = file.stat().st_size - data_bytes
        raise ModelError(
            f"{file}: {what}: expected {header_bytes + end} bytes, it has {header_bytes + data_bytes}. {REDOWNLOAD_HINT}"
        )


def read_object(file: pathlib.Path, missing: str = "") -> dict[str, Any]:
    """A file's JSON object; `missing` says what its absence means. Raises ModelError."""
    try:
        tree = json.loads(read_text(file, missing).decode())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}. {REDOWNLOAD_HINT}") from error
    if not isinstance(tree, dict):
        raise ModelError(f"{file}: holds {short_repr(tree)} where a JSON object is needed. {REDOWNLOAD_HINT}")
    return tree


def read_text(file: pathlib.Path, missing: str = "") -> bytes:
    """The bytes of a configuration or vocabulary; `missing` says what its absence means. Raises ModelError."""
    try:
        size_bytes = _size_bytes(file)
        if size_bytes > _MAX_TEXT_BYTES:
            raise ModelError(f"{file}: has {size_bytes} bytes; at most {_MAX_TEXT_BYTES} are read. {REDOWNLOAD_HINT}")
        return file.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{file}: missing{missing and ', so '}{missing}. {REDOWNLOAD_HINT}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error


def _size_bytes(file: pathlib.Path) -> int:
    """The size of a regular file, links followed; a FIFO or a device would be waited on for ever."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{file}: cannot be read: it is a folder, a pipe or a device, not a file.")
    return status.st_size
