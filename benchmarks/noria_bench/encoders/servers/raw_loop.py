"""The bound: one process without a server; and the vectors that all answers are compared with.

`python -m noria_bench.encoders.servers.raw_loop < job.json` tokenizes and computes texts for some seconds, in batches
of similar length, and prints a `RawResult`: an ONNX file by Noria's sessions, with a thread for each, a checkpoint as
the other servers compute it. With `vectors` it instead writes what the checkpoint gives in torch, each text alone.
"""

import functools
import itertools
import pathlib
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from noria.config import EngineConfig
from noria.engine.encoder.sessions import load_sessions
from noria.models.encoder.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from noria.models.encoder.tokenizers.token_rows import Session, TokenRow, pad
from noria.protocol.process_signals import die_with_parent
from noria.protocol.text import EncoderModelSpec
from noria_bench.encoders.servers.job import EncoderFiles
from noria_bench.encoders.servers.text_encoder import open_encoder

_Call = Callable[[list[str]], list[int]]
"""Computes a batch of texts; returns the tokens of each."""

_WARM_UP_BATCHES = 8


class RawJob(Struct, frozen=True):
    """The model and the texts to compute."""

    spec: EncoderModelSpec
    config: EngineConfig
    texts: tuple[str, ...]
    seconds: float = 0.0
    seed: int = 1
    vectors: str | None = None  # a file to write, of numpy's
    device: str = "cpu"  # device that computes the vectors
    files: EncoderFiles | None = None  # files of a checkpoint
    threads: int = 1  # that compute a checkpoint
    batch: int = 8


class RawResult(Struct, frozen=True):
    """The work that the loop did in its time."""

    seconds: float
    num_texts: int
    num_batches: int
    cpu_s: float
    num_tokens: int
    num_padded_tokens: int


def run_loop(job: RawJob) -> RawResult:
    """Load the model and compute batches in random order until the time is over."""
    calls, tokenizer = _open_calls(job), HuggingFaceTokenizer(job.spec)
    by_length = sorted(job.texts, key=lambda text: tokenizer.encode([text])[0].num_tokens)
    batches = [by_length[start : start + job.batch] for start in range(0, len(by_length), job.batch)]
    random.Random(job.seed).shuffle(batches)
    lock, remaining, counts = threading.Lock(), itertools.cycle(batches), [0, 0, 0, 0]

    def compute(call: _Call, end_s: float, max_batches: int | None = None) -> None:
        for _ in itertools.count() if max_batches is None else range(max_batches):
            if time.perf_counter() >= end_s:
                return
            with lock:
                texts = next(remaining)
            lengths = call(texts)
            with lock:
                for index, number in enumerate((1, len(lengths), sum(lengths), len(lengths) * max(lengths))):
                    counts[index] += number

    def run_threads(seconds: float, max_batches: int | None = None) -> float:
        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(calls)) as executor:
            for each in [executor.submit(compute, call, started_s + seconds, max_batches) for call in calls]:
                each.result()
        return time.perf_counter() - started_s

    run_threads(job.seconds, _WARM_UP_BATCHES)
    counts[:] = [0, 0, 0, 0]
    cpu_s = time.process_time()
    seconds = run_threads(job.seconds)
    return RawResult(seconds, counts[1], counts[0], time.process_time() - cpu_s, counts[2], counts[3])


def _open_calls(job: RawJob) -> list[_Call]:
    """A call for each thread."""
    if job.files is not None:
        encoder = open_encoder(msgspec.to_builtins(job.files))

        def call_encoder(texts: list[str]) -> list[int]:
            rows = encoder.tokenize(texts)
            encoder.embed(rows)
            return list(map(len, rows))

        return [call_encoder] * job.threads
    tokenizer = HuggingFaceTokenizer(job.spec)

    def call_session(session: Session, texts: list[str]) -> list[int]:
        rows = [TokenRow.of(each) for each in tokenizer.encode(texts)]
        session.run(rows)
        return [len(row.ids) for row in rows]

    return [functools.partial(call_session, session) for session in load_sessions(job.spec, job.config, "cpu")]


def checkpoint_vectors(spec: EncoderModelSpec, texts: Sequence[str], device: str = "cpu") -> NDArray[np.float32]:
    """Return the checkpoint's vectors of each text alone, by torch in float32 [texts, dimensions]."""
    import torch

    from noria.models.encoder import checkpoint

    torch.set_num_threads(1)  # more would wait for each other with texts this short
    module = checkpoint.load(spec, EngineConfig(dtype="float32"), device)
    vectors = list[Any]()
    with torch.inference_mode():
        for text in HuggingFaceTokenizer(spec).encode(texts):
            inputs = pad([TokenRow.of(text)])
            tensors = [torch.from_numpy(inputs[name]).to(device) for name in spec.inputs]
            vectors.append(module(*tensors)[0].cpu().numpy())
    found: NDArray[np.float32] = np.stack(vectors)
    return found / np.linalg.norm(found, axis=1, keepdims=True) if spec.normalize else found


def main() -> None:
    """Read the job from stdin, compute, print the result. The process ends with its parent."""
    die_with_parent()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=RawJob)
    if job.vectors is not None:
        np.save(pathlib.Path(job.vectors), checkpoint_vectors(job.spec, job.texts, job.device))
    else:
        sys.stdout.buffer.write(msgspec.json.encode(run_loop(job)))


if __name__ == "__main__":
    main()
