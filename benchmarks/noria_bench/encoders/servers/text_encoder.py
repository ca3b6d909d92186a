"""The parts that all servers but Noria share: tokenizer, padding and counters, so that only the serving differs.

`open_encoder` adds what computes: ONNX Runtime (`onnx_encoder.py`) or torch (`torch_encoder.py`). Triton imports this
and the former in an environment of its own: they need only numpy, tokenizers and onnxruntime.
"""

import itertools
import json
import mmap
import os
import pathlib
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_COUNTERS = struct.Struct("<4q")
_file_numbers = itertools.count()


class TextEncoder(ABC):
    """Texts to vectors. Threads may share it: `threads` of them compute at once if each computes in one thread."""

    def __init__(self, job: dict[str, Any]) -> None:
        """`job` has the fields of `EncoderFiles`."""
        self._tokenizer = open_tokenizer(job)
        self._normalize = job["normalize"]
        self._counters = BatchCounters(pathlib.Path(job["counter_folder"]))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, cut to the model's maximum length."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def embed(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Compute a batch [texts, dimensions], each text padded to the longest."""
        lengths = [len(row) for row in rows]
        ids = np.zeros((len(rows), max(lengths)), np.int64)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
        vectors = self._compute(ids, mask)
        self._counters.add(len(rows), sum(lengths), ids.size)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if self._normalize else vectors

    @abstractmethod
    def _compute(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute padded texts, not normalized."""


def open_encoder(job: dict[str, Any], threads: int = 1) -> TextEncoder:
    """Load the model that `job` (the fields of `EncoderFiles`) names; `threads` compute one batch on a CPU."""
    if job["checkpoint"] is None:
        from noria_bench.encoders.servers.onnx_encoder import OnnxEncoder

        return OnnxEncoder(job, threads)
    from noria_bench.encoders.servers.torch_encoder import TorchEncoder

    return TorchEncoder(job, threads)


def open_tokenizer(job: dict[str, Any]) -> Any:
    """The tokenizer of `job`, which cuts at the model's maximum length and does not pad."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(job["tokenizer"])
    tokenizer.no_padding()
    tokenizer.enable_truncation(job["max_tokens"])
    return tokenizer


def read_triton_job(args: dict[str, str]) -> dict[str, Any]:
    """The job of a model that Triton initializes with `args`: what `targets.triton.job_parameter` has written."""
    job: dict[str, Any] = json.loads(json.loads(args["model_config"])["parameters"]["job"]["string_value"])
    return job


class BatchCounters:
    """Counts batches, texts, tokens and tokens with padding, in a file of its own that the bench reads meanwhile."""

    def __init__(self, folder: pathlib.Path) -> None:
        file = folder / f"{os.getpid()}-{next(_file_numbers)}.counters"
        file.write_bytes(bytes(_COUNTERS.size))
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _COUNTERS.size)
        self._lock, self._counts = threading.Lock(), [0, 0, 0, 0]

    def add(self, num_texts: int, num_tokens: int, num_padded_tokens: int) -> None:
        """Count one batch."""
        with self._lock:
            for index, value in enumerate((1, num_texts, num_tokens, num_padded_tokens)):
                self._counts[index] += value
            _COUNTERS.pack_into(self._map, 0, *self._counts)


def read_counters(folder: pathlib.Path) -> tuple[int, ...]:
    """Batches, texts, tokens, and tokens with padding, of all processes."""
    files = [_COUNTERS.unpack(file.read_bytes()) for file in folder.glob("*.counters")]
    return tuple(map(sum, zip(*files, strict=True))) or (0, 0, 0, 0)
