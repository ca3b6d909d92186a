"""What a server of `noria bench encoders` is told, as JSON in its first argument."""

import sys
from typing import Any

import msgspec
from msgspec import Struct

from noria.protocol.process_signals import die_with_parent

# For BentoML's processes, whose command lines are BentoML's own.
JOB_VARIABLE = "NORIA_ENCODER_JOB"


class EncoderFiles(Struct, frozen=True):
    """What is computed, the same for all."""

    onnx: str
    tokenizer: str
    max_tokens: int
    inputs: tuple[str, ...]
    output: str
    normalize: bool
    counter_folder: str  # for the files of `BatchCounters`


class ServerSettings(Struct, frozen=True):
    """How it is served; each server reads those that apply to it."""

    max_batch: int = 1  # texts; 1: no batching
    delay_us: int = 0  # how long a batch that is not full waits
    instances: int = 1  # of the encoder, which share the threads
    tokenizers: int = 1  # instances, of Triton
    batching: bool = False  # dynamic, of Triton
    ragged: bool = False  # whether Triton puts texts of different lengths into one batch


class EncoderJob(Struct, frozen=True):
    """A server to run."""

    files: EncoderFiles
    port: int
    threads: int  # that compute, in all
    dimensions: int
    settings: ServerSettings = ServerSettings()
    parent_pid: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The files as `OnnxEncoder` takes them."""
        fields: dict[str, Any] = msgspec.to_builtins(self.files)
        return fields


def job_argument() -> EncoderJob:
    """Parse the first argument. From now on this process ends with its parent."""
    job = msgspec.json.decode(sys.argv[1], type=EncoderJob)
    die_with_parent(parent_pid=job.parent_pid)
    return job
