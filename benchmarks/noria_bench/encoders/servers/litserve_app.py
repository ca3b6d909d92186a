"""LitServe over the encoder: a process for each instance of the encoder, with LitServe's batching.

A process: `python -m noria_bench.encoders.servers.litserve_app JOB`.
"""

from noria_bench.encoders.servers.job import job_argument
from noria_bench.targets.process_tree import kill_tree_on_sigterm


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = job_argument()
    kill_tree_on_sigterm()

    # Starts threads.
    import litserve

    from noria_bench.encoders.servers.litserve_api import BatchingEncoderApi, EncoderApi

    server = litserve.LitServer(
        BatchingEncoderApi(job) if job.settings.max_batch > 1 else EncoderApi(job),
        accelerator="cpu",
        devices=1,
        workers_per_device=job.settings.instances,
        timeout=False,
        healthcheck_path="/readyz",
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=job.port,
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
        loop="uvloop",
        http="httptools",
    )


if __name__ == "__main__":
    main()
