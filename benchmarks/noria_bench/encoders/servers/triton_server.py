"""A real Triton Inference Server with the second reference's set-up: a tokenizer, then an encoder, as an ensemble.

A process: `python -m noria_bench.encoders.servers.triton_server JOB`, in Noria's environment. It writes the model
repository and runs the server of the wheel nvidia-pytriton. Its models compute an ONNX file in an environment with an
older numpy, and a checkpoint in Noria's.
"""

import pathlib
import sys
import tempfile
from collections.abc import Mapping

import msgspec

from noria.errors import ConfigError
from noria_bench.encoders.servers.job import EncoderJob, job_argument
from noria_bench.targets.process_tree import kill_tree_on_sigterm
from noria_bench.targets.triton import Triton, find_triton, job_parameter, model_code, serve_models

# The tensors between the tokenizer and the encoder, and their names in the ensemble. By torch, a request has one text
# without padding, which needs no mask.
_ONNX_TENSORS = {"input_ids": "ids", "attention_mask": "mask"}
_TORCH_TENSORS = {"input_ids": "ids"}


def model_repository(job: EncoderJob) -> dict[str, str]:
    """The files of the model repository, by path."""
    settings, by_torch = job.settings, job.files.checkpoint is not None
    tensors, form = (_TORCH_TENSORS, "triton_torch") if by_torch else (_ONNX_TENSORS, "triton_onnx")
    parameters = msgspec.to_builtins(job.files) | {"session_threads": max(1, job.threads // settings.instances)}
    ragged = " allow_ragged_batch: true" if settings.ragged else ""
    batching = (
        f"dynamic_batching {{ max_queue_delay_microseconds: {settings.delay_us} }}\n" if settings.batching else ""
    )
    python = job_parameter(msgspec.json.encode(parameters))
    text = f'input [{{ name: "TEXT" data_type: TYPE_{"UINT8" if by_torch else "STRING"} dims: [-1] }}]'
    configs = {
        "tokenizer": f"""{python}max_batch_size: 0
{text}
output [{_integers(tensors, "-1, -1")}]
instance_group [{{ count: {settings.tokenizers} kind: KIND_CPU }}]
""",
        "encoder": f"""{python}max_batch_size: {settings.max_batch}
input [{_integers(tensors, "-1", ragged)}]
output [{{ name: "embedding" data_type: TYPE_FP32 dims: [{job.dimensions}] }}]
instance_group [{{ count: {settings.instances} kind: KIND_CPU }}]
{batching}""",
        "ensemble": f"""platform: "ensemble"
max_batch_size: 0
{text}
output [{{ name: "embedding" data_type: TYPE_FP32 dims: [-1, {job.dimensions}] }}]
ensemble_scheduling {{ step [
  {{ model_name: "tokenizer" model_version: -1 input_map {{ key: "TEXT" value: "TEXT" }} {_maps("output", tensors)} }},
  {{ model_name: "encoder" model_version: -1 {_maps("input", tensors)}
    output_map {{ key: "embedding" value: "embedding" }} }}
] }}
""",
    }
    files = {f"{name}/config.pbtxt": f'name: "{name}"\n{config}' for name, config in configs.items()}
    files["ensemble/1/none"] = ""  # a version needs a folder
    return files | {
        f"{name}/1/model.py": model_code(
            f"noria_bench.encoders.servers.{form}", name.capitalize(), isolated=not by_torch
        )
        for name in ("tokenizer", "encoder")
    }


def _integers(names: Mapping[str, str], dims: str, more: str = "") -> str:
    return ",\n  ".join(f'{{ name: "{name}" data_type: TYPE_INT64 dims: [{dims}]{more} }}' for name in names)


def _maps(direction: str, names: Mapping[str, str]) -> str:
    return " ".join(f'{direction}_map {{ key: "{name}" value: "{other}" }}' for name, other in names.items())


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = job_argument()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="noria-triton-"))
    kill_tree_on_sigterm(str(folder))
    triton = find_triton()
    python = sys.executable if job.files.checkpoint is not None else _python_for_strings(triton)
    serve_models(triton, python, model_repository(job), folder, job.port)


def _python_for_strings(triton: Triton) -> str:
    if triton.python is None:
        raise ConfigError(
            f"the Triton in {triton.packages} has no Python with numpy below 2, which models with string inputs need; "
            "name one by TRITON_PYTHON."
        )
    return triton.python


if __name__ == "__main__":
    main()
