"""A real Triton Inference Server with the second reference's set-up: a tokenizer, then an encoder, as an ensemble.

A process: `python -m noria_bench.encoders.servers.triton_server JOB`, in Noria's environment. It writes the model
repository and runs the server of the wheel nvidia-pytriton, which is in an environment of its own.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import msgspec

import noria_bench
from noria_bench.encoders.servers.job import EncoderJob, job_argument
from noria_bench.targets import environments
from noria_bench.targets.process_tree import kill_tree_on_sigterm

# Triton's interpreter ignores PYTHONPATH.
_CODE = "import sys\n\nsys.path.append({path!r})\nfrom noria_bench.encoders.servers.{module} import TritonPythonModel\n"


def model_repository(job: EncoderJob) -> dict[str, str]:
    """The files of the model repository, by path."""
    settings = job.settings
    parameters = msgspec.to_builtins(job.files) | {"session_threads": max(1, job.threads // settings.instances)}
    # JSON strings are escaped as protobuf's text format reads them.
    job_text = msgspec.json.encode(msgspec.json.encode(parameters).decode()).decode()
    ragged = " allow_ragged_batch: true" if settings.ragged else ""
    batching = (
        f"dynamic_batching {{ max_queue_delay_microseconds: {settings.delay_us} }}\n" if settings.batching else ""
    )
    python = f'backend: "python"\nparameters {{ key: "job" value {{ string_value: {job_text} }} }}\n'
    configs = {
        "tokenizer": f"""{python}max_batch_size: 0
input [{{ name: "TEXT" data_type: TYPE_STRING dims: [-1] }}]
output [{{ name: "input_ids" data_type: TYPE_INT64 dims: [-1, -1] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [-1, -1] }}]
instance_group [{{ count: {settings.tokenizers} kind: KIND_CPU }}]
""",
        "encoder": f"""{python}max_batch_size: {settings.max_batch}
input [{{ name: "input_ids" data_type: TYPE_INT64 dims: [-1]{ragged} }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [-1]{ragged} }}]
output [{{ name: "embedding" data_type: TYPE_FP32 dims: [{job.dimensions}] }}]
instance_group [{{ count: {settings.instances} kind: KIND_CPU }}]
{batching}""",
        "ensemble": f"""platform: "ensemble"
max_batch_size: 0
input [{{ name: "TEXT" data_type: TYPE_STRING dims: [-1] }}]
output [{{ name: "embedding" data_type: TYPE_FP32 dims: [-1, {job.dimensions}] }}]
ensemble_scheduling {{ step [
  {{ model_name: "tokenizer" model_version: -1 input_map {{ key: "TEXT" value: "TEXT" }}
    output_map {{ key: "input_ids" value: "ids" }} output_map {{ key: "attention_mask" value: "mask" }} }},
  {{ model_name: "encoder" model_version: -1
    input_map {{ key: "input_ids" value: "ids" }} input_map {{ key: "attention_mask" value: "mask" }}
    output_map {{ key: "embedding" value: "embedding" }} }}
] }}
""",
    }
    files = {f"{name}/config.pbtxt": f'name: "{name}"\n{config}' for name, config in configs.items()}
    files["ensemble/1/none"] = ""  # a version needs a folder
    path = str(pathlib.Path(noria_bench.__file__).parents[1])
    code = {name: _CODE.format(path=path, module=f"triton_{name}") for name in ("tokenizer", "encoder")}
    return files | {f"{name}/1/model.py": text for name, text in code.items()}


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = job_argument()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="noria-triton-"))
    kill_tree_on_sigterm(str(folder))
    python = environments.python_of("triton")
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    home = packages / "pytriton" / "tritonserver"
    for path, content in model_repository(job).items():
        file = folder / "models" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    backends = folder / "backends"
    shutil.copytree(home / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    command = [
        str(home / "bin" / "tritonserver"),
        *(f"--model-repository={folder / 'models'}", f"--backend-directory={backends}", "--log-info=false"),
        *("--http-address=127.0.0.1", f"--http-port={job.port}", "--reuse-http-port=true"),
        *("--allow-grpc=false", "--allow-metrics=false", "--exit-timeout-secs=1"),
    ]
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # whose packages the models' Python takes
    }
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
