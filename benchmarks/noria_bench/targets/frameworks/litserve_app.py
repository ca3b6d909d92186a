"""LitServe over diffusers' pipeline, with its dynamic batching.

A process: `python -m noria_bench.targets.frameworks.litserve_app JOB`.
"""

from noria_bench.targets.pipeline_generator import read_job
from noria_bench.targets.process_tree import kill_tree_on_sigterm


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    kill_tree_on_sigterm()

    # Starts threads.
    import litserve

    from noria_bench.targets.frameworks.litserve_api import LitServeApi

    server = litserve.LitServer(
        LitServeApi(job),
        # LitServe only passes it to `setup`.
        accelerator="cpu",
        devices=1,
        workers_per_device=1,
        # Nothing is rejected.
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
        # Options of uvicorn.
        access_log=False,
        loop="uvloop",
        http="httptools",
    )


if __name__ == "__main__":
    main()
