"""LitServe over the encoder: a process for each instance of the encoder, with LitServe's batching.

A process: `python -m noria_bench.encoders.servers.litserve_app JOB`.
"""

from noria_bench.encoders.servers.job import job_argument
from noria_bench.targets.frameworks.litserve_app import serve_api
from noria_bench.targets.process_tree import kill_tree_on_sigterm


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = job_argument()
    kill_tree_on_sigterm()

    # Starts threads.
    from noria_bench.encoders.servers.litserve_api import BatchingEncoderApi, EncoderApi

    api = BatchingEncoderApi(job) if job.settings.max_batch > 1 else EncoderApi(job)
    serve_api(api, job.port, job.settings.instances)


if __name__ == "__main__":
    main()
