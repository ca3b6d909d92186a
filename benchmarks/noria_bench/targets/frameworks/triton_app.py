"""Triton over diffusers' pipeline, in its Python backend with dynamic batching. A process: `python -m
noria_bench.targets.frameworks.triton_app JOB`.

Triton collects requests of one model, up to `max_images` (it counts requests, not images), for at most `timeout_s` when
the model is free; a full batch starts at once. `triton_model` generates it.
"""

import pathlib
import sys
import tempfile

import msgspec

from noria_bench.targets.pipeline_generator import TargetJob, read_job
from noria_bench.targets.process_tree import kill_tree_on_sigterm
from noria_bench.targets.triton import find_triton, job_parameter, model_code, serve_models


def model_repository(job: TargetJob) -> dict[str, str]:
    """The files of the model repository, by path."""
    settings = job.settings
    config = f"""name: "t2i"
{job_parameter(msgspec.json.encode(job))}max_batch_size: {settings.max_images}
input [{{ name: "ONE" data_type: TYPE_INT32 dims: [1] }}]
output [{{ name: "IMAGE" data_type: TYPE_UINT8 dims: [-1] }}, {{ name: "BATCH" data_type: TYPE_INT32 dims: [1] }}]
instance_group [{{ count: 1 kind: KIND_CPU }}]
dynamic_batching {{
  preferred_batch_size: [{settings.max_images}]
  max_queue_delay_microseconds: {round(settings.timeout_s * 1e6)}
}}
"""
    code = model_code("noria_bench.targets.frameworks.triton_model", isolated=False)
    return {"t2i/config.pbtxt": config, "t2i/1/model.py": code}


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="noria-triton-"))
    kill_tree_on_sigterm(str(folder))
    serve_models(find_triton(), sys.executable, model_repository(job), folder, job.port)


if __name__ == "__main__":
    main()
