"""BentoML over the encoder. A process: `python -m noria_bench.encoders.servers.bentoml_app JOB`.

It supervises the processes of `bentoml_service`.
"""

from noria_bench.encoders.servers.job import JOB_VARIABLE, job_argument
from noria_bench.targets.frameworks.bentoml_app import serve_service


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    serve_service(JOB_VARIABLE, "noria_bench.encoders.servers.bentoml_service:Encoder", job_argument().port)


if __name__ == "__main__":
    main()
