"""What all servers but Noria share: the tokenizer, the ONNX file and the counters, so that only the serving differs.

Triton imports this in an environment of its own: it needs only numpy, tokenizers and onnxruntime.
"""

import itertools
import mmap
import os
import pathlib
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_COUNTERS = struct.Struct("<4q")
_file_numbers = itertools.count()


class OnnxEncoder:
    """Texts to vectors. Threads may share it: `threads` of them compute at once if the session has one thread."""

    def __init__(self, job: dict[str, Any], threads: int = 1) -> None:
        """`job` has the fields of `EncoderFiles`; `threads` are the session's."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import onnxruntime
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(job["tokenizer"])
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(job["max_tokens"])
        options = onnxruntime.SessionOptions()  # as Noria's
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        provider = ("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
        self._session = onnxruntime.InferenceSession(job["onnx"], options, providers=[provider])
        self._inputs, self._output, self._normalize = job["inputs"], job["output"], job["normalize"]
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
        tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        vectors: NDArray[np.float32] = self._session.run(
            [self._output], {name: tensors[name] for name in self._inputs}
        )[0]
        self._counters.add(len(rows), sum(lengths), ids.size)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if self._normalize else vectors


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
