"""The job of a server of `noria bench encoders`, which it gets as JSON in its first argument."""

import sys
from typing import Any, Literal

import msgspec
from msgspec import Struct

from noria.protocol.process_signals import die_with_parent
from noria.protocol.text import EncoderModelSpec

# For BentoML's processes, whose command lines are BentoML's own.
JOB_VARIABLE = "NORIA_ENCODER_JOB"


Precision = Literal["float32", "bfloat16"]


class Checkpoint(Struct, frozen=True):
    """The model that torch computes."""

    spec: EncoderModelSpec
    device: str  # "cpu" or "cuda:N"
    precision: Precision


class EncoderFiles(Struct, frozen=True):
    """The model to compute, the same for all: a checkpoint, or an ONNX file on a CPU."""

    tokenizer: str
    max_tokens: int
    normalize: bool
    counter_folder: str  # for the files of `BatchCounters`
    checkpoint: Checkpoint | None = None
    onnx: str = ""
    inputs: tuple[str, ...] = ()  # names of the ONNX file's inputs
    output: str = ""


class ServerSettings(Struct, frozen=True):
    """How it is served; each server reads those that apply to it."""

    max_batch: int = 1  # texts; 1: no batching
    delay_us: int = 0  # how long a batch that is not full waits
    instances: int = 1  # copies of the encoder, which share the threads
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
        """The files as `open_encoder` takes them."""
        fields: dict[str, Any] = msgspec.to_builtins(self.files)
        return fields


def job_argument() -> EncoderJob:
    """Parse the first argument. From now on this process ends with its parent."""
    job = msgspec.json.decode(sys.argv[1], type=EncoderJob)
    die_with_parent(parent_pid=job.parent_pid)
    return job
