"""LitServe over diffusers' pipeline, with its dynamic batching.

A process: `python -m noria_bench.targets.frameworks.litserve_app JOB`.
"""

from typing import Any

from noria_bench.targets.pipeline_generator import read_job
from noria_bench.targets.process_tree import kill_tree_on_sigterm


def serve_api(api: Any, port: int, num_workers: int = 1) -> None:
    """Serve a LitServe API until SIGTERM."""
    import litserve

    server = litserve.LitServer(
        api,
        # LitServe only passes it to `setup`.
        accelerator="cpu",
        devices=1,
        workers_per_device=num_workers,
        # Nothing is rejected.
        timeout=False,
        healthcheck_path="/readyz",
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
        # Options of uvicorn.
        access_log=False,
        loop="uvloop",
        http="httptools",
    )


def main() -> None:
    """Read the job from the command line and serve until SIGTERM."""
    job = read_job()
    kill_tree_on_sigterm()

    # Starts threads.
    from noria_bench.targets.frameworks.litserve_api import LitServeApi

    serve_api(LitServeApi(job), job.port)


if __name__ == "__main__":
    main()
